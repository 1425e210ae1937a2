"""Decode steps of few rows compute what other steps do, with operators that take several of theirs together."""

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from octile.models.config import ModelConfig
from octile.scaled import ScaledTensor
from octile.serve.model import small_batch
from octile.serve.model.attention import Attention
from octile.serve.model.gemms import Gemms
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.runner.step import Step
from octile.serve.weights.weights import ServedWeights
from tests.serve.models import CONFIG, Texts, new_model, text

# queries whose rows are whole blocks, so that the projections of a block's input are one matrix
DIRECT = replace(CONFIG, q_lora_rank=None, num_attention_heads=8)
COMPRESSED = replace(CONFIG, q_lora_rank=128)
# experts of whole blocks, so that gate and up are one matrix
BLOCKS = replace(DIRECT, moe_intermediate_size=128)
CONFIGS = pytest.mark.parametrize("config", [DIRECT, COMPRESSED, BLOCKS], ids=["direct", "compressed", "blocks"])


def decode(config: ModelConfig, fp8: bool) -> list[Tensor]:
    """Read two prompts, and then single tokens of both."""
    texts = Texts(ModelRunner(new_model(fp8, config=config), 8), [text(70), text(20, 1)]).run(60, 12)
    for _ in range(6):
        texts.run(1, 1)
    return texts.logits


@CONFIGS
@pytest.mark.parametrize("fp8", [False, True])
def test_logits_are_those_of_other_steps(config: ModelConfig, fp8: bool, monkeypatch: pytest.MonkeyPatch):
    expected, steps = decode(config, fp8), []

    def is_step_of_few_rows(_: Attention, step: Step) -> bool:
        steps.append(len(step.tokens))
        return not step.prefills and len(step.tokens) == len(step.lengths)

    monkeypatch.setattr(small_batch, "is_step_of_few_rows", is_step_of_few_rows)
    for found, of_text in zip(decode(config, fp8), expected, strict=True):
        torch.testing.assert_close(found, of_text, rtol=1e-4, atol=1e-4)
    assert steps


@CONFIGS
@pytest.mark.parametrize("fp8", [False, True])
def test_projections_that_are_one_matrix(config: ModelConfig, fp8: bool):
    of_layers = [block.attention for block in ServedWeights.of_model(new_model(fp8, config=config)).blocks]
    assert all(small_batch.has_products_of_few_rows(of) for of in of_layers)


def test_projections_that_are_not():
    attention = ServedWeights.of_model(new_model(True)).blocks[0].attention
    assert not small_batch.has_products_of_few_rows(attention)
    joined = ServedWeights.of_model(new_model(True, config=DIRECT)).blocks[0].attention
    assert isinstance(joined.o, ScaledTensor)
    assert not small_batch.has_products_of_few_rows(replace(joined, o=joined.o.dequantize()))


def test_feed_forwards_whose_matrices_are_fp8_and_joined():
    forward = ModelRunner(new_model(True, config=BLOCKS), 1).forward
    mlps = [block.mlp for block in forward.weights.blocks]
    assert all(small_batch.has_feed_forward_of_few_rows(forward.feed_forward, mlp) for mlp in mlps)


@pytest.mark.parametrize(("fp8", "config"), [(True, DIRECT), (False, BLOCKS)], ids=["not joined", "not FP8"])
def test_mixtures_that_are_not(fp8: bool, config: ModelConfig):
    forward = ModelRunner(new_model(fp8, config=config), 1).forward
    assert not small_batch.has_feed_forward_of_few_rows(forward.feed_forward, forward.weights.blocks[-1].mlp)


def test_experts_are_counted(monkeypatch: pytest.MonkeyPatch):
    def tokens_of_experts() -> Mapping[int, tuple[int, ...]]:
        runner = ModelRunner(new_model(True, config=BLOCKS), 8, expert_window=8)
        texts = Texts(runner, [text(20)])
        texts.run(12)
        for _ in range(8):
            texts.run(1)
        assert runner.forward.feed_forward.expert_load is not None
        return runner.forward.feed_forward.expert_load.in_window

    expected = tokens_of_experts()
    monkeypatch.setattr(small_batch, "is_step_of_few_rows", lambda _, step: not step.prefills)
    assert tokens_of_experts() == expected
    assert any(any(of_layer) for of_layer in expected.values())


def step(rows: int, attending: int, *prefills: Any, device: str = "cuda") -> Step:
    with FakeTensorMode():
        numbers = torch.zeros(rows, dtype=torch.int64, device=device)
    pages, lengths = torch.zeros(attending, 1, dtype=torch.int32), torch.ones(attending, dtype=torch.int32)
    return Step(numbers, numbers, numbers, pages, lengths, None, prefills)


GEMMS = Gemms(torch.bfloat16, power_of_2=False, batch_invariant=False)


def attention(**changed: object) -> Any:
    return SimpleNamespace(**{"gemms": GEMMS, "index": None, "tp": SimpleNamespace(size=1)} | changed)


def test_steps_of_up_to_eight_decode_rows_have_few_rows():
    assert [small_batch.is_step_of_few_rows(attention(), step(n, n)) for n in (0, 1, 8, 9)] == [
        False,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("changed", "of_step"),
    [
        ({}, step(8, 8, object())),  # a prompt's rows: decode rows are padded to all rows of the step
        ({}, step(8, 4)),
        ({}, step(1, 1, device="cpu")),
        ({"gemms": replace(GEMMS, batch_invariant=True)}, step(1, 1)),
        ({"gemms": replace(GEMMS, dtype=torch.float32)}, step(1, 1)),
        ({"index": object()}, step(1, 1)),
        ({"tp": SimpleNamespace(size=2)}, step(1, 1)),
    ],
)
def test_other_steps_do_not(changed: dict[str, object], of_step: Any):
    assert not small_batch.is_step_of_few_rows(attention(**changed), of_step)
