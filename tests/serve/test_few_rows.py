"""Decode steps of few rows compute what other steps do, with operators that take several of theirs together."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octile.models.config import ModelConfig
from octile.serve import few_rows
from octile.serve.forward import Forward, Step
from octile.serve.model_runner import ModelRunner
from octile.serve.weights import ServedWeights
from tests.serve.models import CONFIG, Texts, new_model, text

# queries whose rows are whole blocks, so that the projections of a block's input are one matrix
DIRECT = replace(CONFIG, q_lora_rank=None, num_attention_heads=8)
COMPRESSED = replace(CONFIG, q_lora_rank=128)
CONFIGS = pytest.mark.parametrize("config", [DIRECT, COMPRESSED], ids=["direct", "compressed"])


def decode(config: ModelConfig) -> list[Tensor]:
    """Read two prompts, and then single tokens of both."""
    texts = Texts(ModelRunner(new_model(True, config=config), 8), [text(70), text(20, 1)]).run(60, 12)
    for _ in range(6):
        texts.run(1, 1)
    return texts.logits


@CONFIGS
def test_logits_are_those_of_other_steps(config: ModelConfig, monkeypatch: pytest.MonkeyPatch):
    expected, steps = decode(config), []

    def is_step_of_few_rows(forward: Forward, step: Step) -> bool:
        steps.append(len(step.tokens))
        return not step.prefills and len(step.tokens) == len(step.lengths)

    monkeypatch.setattr(few_rows, "is_step_of_few_rows", is_step_of_few_rows)
    for found, of_text in zip(decode(config), expected, strict=True):
        torch.testing.assert_close(found, of_text, rtol=1e-4, atol=1e-4)
    assert steps


@CONFIGS
def test_projections_that_are_one_fp8_matrix(config: ModelConfig):
    of_layers = [block.attention for block in ServedWeights.of_model(new_model(True, config=config)).blocks]
    assert all(few_rows.has_products_of_few_rows(of) for of in of_layers)


def test_projections_that_are_not():
    for model in (new_model(True), new_model(False, config=DIRECT)):
        of_layers = [block.attention for block in ServedWeights.of_model(model).blocks]
        assert not any(few_rows.has_products_of_few_rows(of) for of in of_layers)
