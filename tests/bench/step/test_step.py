"""What a layer keeps for its backward pass, what a checkpoint takes, and that every model is measured."""

import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from octile.bench import step
from octile.bench.rows import Row, compare
from octile.bench.step import goals
from octile.bench.step.memory import checkpoint_bytes, kept_for_backward, of_a_parameter
from octile.bench.step.models import RankDispatcher, Sizes, decoder, rank_slice
from octile.models.config import ModelConfig
from octile.nn import Linear
from octile.optim import AdamW

SIZES = Sizes(layers=2, hidden=256, intermediate=384, heads=2, batch=2, sequence=64)
RANKS = 4


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    monkeypatch.setattr(step, "compiled", lambda work: work)  # minutes, on a CPU
    monkeypatch.setattr(step, "ROUNDS", 1)


def test_an_ordinary_layer_keeps_its_input():
    model, x = nn.Linear(128, 64), torch.randn(32, 128)
    assert kept_for_backward(model, lambda: model(x)) == x.nbytes


def test_a_converted_layer_keeps_its_input_in_8_bits_and_a_scale_a_tile():
    model, x = Linear(128, 64), torch.randn(32, 128)
    assert kept_for_backward(model, lambda: model(x)) == 32 * 128 + 32 * 4


def test_a_stack_of_layers_keeps_at_most_0_55_of_what_bf16_keeps():
    assert all(row.against.ratio <= 0.55 for row in step._kept_bytes())


def test_a_quantised_parameter_takes_at_most_1_05_bytes_on_disk():
    assert checkpoint_bytes().value <= 1.05


def test_models_of_the_dense_decoder_are_measured_beside_one_another():
    rows = list(step.dense(SIZES, "cpu", time.monotonic()))
    beside = {(row.what, row.against.peer) for row in rows if row.against}
    assert {(goals.STEP, goals.BF16), (goals.OPTIMIZED, goals.BF16)} <= beside
    assert {(goals.SAVED, goals.BF16), (goals.SAVED_LESS, goals.BF16)} <= beside


def test_models_of_the_rank_slice_are_measured_beside_one_another():
    rows = list(step.mixture(ModelConfig.tiny(), RANKS, 64, "cpu", time.monotonic()))
    assert (goals.STEP, goals.EAGER) in {(row.what, row.against.peer) for row in rows if row.against}


def test_a_model_that_does_not_run_is_left_out_and_said(capsys):
    def broken():
        raise ImportError("no such library")

    works = step._prepare("case", {"works": lambda: decoder(SIZES, "cpu"), "broken": broken}, time.monotonic())
    assert list(works) == ["works"]
    assert "case: left out: broken: ImportError: no such library" in capsys.readouterr().err


def test_no_model_is_prepared_when_the_time_is_over(capsys):
    assert step._prepare("case", {"late": lambda: decoder(SIZES, "cpu")}, time.monotonic() - step.TIME - 1) == {}
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
    assert sum(of_a_parameter(work).values()) == 12


# Goals


def verdicts(*rows: Row) -> list[str]:
    return goals.in_words(rows).splitlines()


def speeds(*ratios: float) -> list[Row]:
    peers = zip(goals.AO, ratios, strict=False)
    return [compare(goals.DENSE, goals.STEP, ratio, "tokens/s", peer, 1.0) for peer, ratio in peers]


def test_the_fastest_peer_decides():
    blockwise, every = verdicts(*speeds(0.9, 1.1, 1.2))
    assert blockwise.endswith("1.100: floor ≥ 1 met")
    assert every.endswith("0.900 (torchao tensorwise): aim ≥ 1 MISSED")


def test_a_peer_that_was_not_measured_misses_the_bound():
    assert verdicts(*speeds(1.3, 1.3))[-1].endswith("aim ≥ 1 MISSED")


def test_of_bytes_less_is_better():
    kept = compare(goals.DENSE, goals.SAVED, 0.52, "bytes", goals.BF16, 1.0)
    assert verdicts(kept) == ["dense, bytes kept beside compiled BF16: 0.520: floor ≤ 0.56 met, aim ≤ 0.5 MISSED"]


def test_a_share_is_judged_by_itself():
    share = Row(goals.SLICE, goals.OUTSIDE, 30.0, "% of a step")
    assert verdicts(share)[0].endswith("30.000: floor ≤ 35 met, aim ≤ 25 MISSED")
    assert verdicts(replace(share, value=36.0))[0].endswith("floor ≤ 35 MISSED, aim ≤ 25 MISSED")
