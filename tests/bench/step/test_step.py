"""Bytes saved for backward, bytes of a checkpoint, and that every model is measured."""

import gc
import time

import pytest
import torch
from torch import nn

from octile.bench import goals, step
from octile.bench.step.memory import bytes_per_parameter, bytes_saved_for_backward, checkpoint_bytes
from octile.bench.step.models import RankDispatcher, Sizes, decoder, rank_slice
from octile.models.config import ModelConfig
from octile.nn import Linear
from octile.optim import AdamW

# Small: torchao, where it is installed, multiplies with tensorwise scales on a CPU at 50 ns a product of two values.
SIZES = Sizes(layers=1, hidden=128, intermediate=256, heads=1, batch=1, sequence=32)
RANKS = 4


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setattr(step, "compiled", lambda work: work)  # minutes, on a CPU
    monkeypatch.setattr(step, "ROUNDS", 1)


def test_an_ordinary_layer_saves_its_input():
    model, x = nn.Linear(128, 64), torch.randn(32, 128)
    assert bytes_saved_for_backward(model, lambda: model(x)) == x.nbytes


def test_a_converted_layer_saves_its_input_in_fp8_and_a_scale_per_tile():
    model, x = Linear(128, 64), torch.randn(32, 128)
    assert bytes_saved_for_backward(model, lambda: model(x)) == 32 * 128 + 32 * 4


def test_counting_leaves_no_results_of_autograd_behind():
    """They would hold the parameters' AccumulateGrad nodes, whose stream a later capture may not wait for."""
    gc.collect()
    before = {id(t) for t in gc.get_objects() if isinstance(t, torch.Tensor)}
    work = decoder(SIZES, "cpu")
    bytes_saved_for_backward(work.model, work.forward)
    gc.collect()
    tensors = (t for t in gc.get_objects() if isinstance(t, torch.Tensor) and id(t) not in before)
    assert [t.grad_fn.name() for t in tensors if t.grad_fn is not None] == []


def test_a_stack_of_layers_saves_at_most_0_55_of_what_bf16_saves(monkeypatch):
    monkeypatch.setattr(step, "STACK_SIZES", (512, 256, 8))
    assert all(row.against.ratio <= 0.55 for row in step._saved_bytes())


def test_a_quantized_parameter_takes_at_most_1_05_bytes_on_disk():
    assert checkpoint_bytes().value <= 1.05


@pytest.mark.slow
def test_models_of_the_dense_decoder_are_compared():
    rows = list(step.dense(SIZES, "cpu", time.monotonic()))
    compared = {(row.what, row.against.peer) for row in rows if row.against}
    assert {(goals.STEP, goals.BF16), (goals.OPTIMIZED, goals.BF16)} <= compared
    assert {(goals.SAVED, goals.BF16), (goals.SAVED_LESS, goals.BF16)} <= compared


@pytest.mark.slow
def test_models_of_the_rank_slice_are_compared():
    rows = list(step.mixture(ModelConfig.tiny(), RANKS, 64, "cpu", time.monotonic()))
    assert (goals.STEP, goals.EAGER) in {(row.what, row.against.peer) for row in rows if row.against}


def test_a_model_that_does_not_run_is_left_out_and_reported(capsys):
    def broken():
        raise ImportError("no such library")

    works = step._prepare("case", {"works": lambda: decoder(SIZES, "cpu"), "broken": broken}, time.monotonic())
    assert list(works) == ["works"]
    assert "case: left out: broken: ImportError: no such library" in capsys.readouterr().err


def test_no_model_is_prepared_when_the_time_is_over(capsys):
    assert step._prepare("case", {"late": lambda: decoder(SIZES, "cpu")}, time.monotonic() - step.MAX_SECONDS - 1) == {}
    assert "left out: late: 300 s are over" in capsys.readouterr().err


def test_a_rank_gets_as_many_rows_as_its_tokens_choose():
    plan = RankDispatcher(2).plan(torch.tensor([[0, 3], [5, 2], [7, 4]]), torch.ones(8, dtype=torch.int64))
    assert plan.offs_E.tolist() == [4, 8]
    experts_R = torch.tensor([0, 1, 1, 0, 1, 0])[plan.order_R.long()]
    assert experts_R.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_rank_has_its_share_of_the_experts_and_all_of_the_gate():
    block = rank_slice(ModelConfig.tiny(), RANKS, 64, "cpu").model
    assert (len(block.mlp.experts.down), len(block.mlp.gate.weight)) == (4, 16)


def test_a_trained_parameter_takes_12_bytes():
    work = decoder(SIZES, "cpu", torch.float32)
    work.optimizer = AdamW(work.model.parameters(), lr=0.0)
    work.step()
    assert sum(bytes_per_parameter(work).values()) == 12
