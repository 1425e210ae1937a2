"""Tests of the advice for a run that needs more memory than there is."""

from dataclasses import replace
from pathlib import Path

import pytest

from octile.train.memory.advice import MemoryNeed, advice
from tests.train.conftest import MICRO, micro


@pytest.mark.parametrize(
    ("micro_batches", "available", "message"),
    [
        (1, 230, "use --micro-batches 2 (now 1), 4 at a time instead of 8; to continue: octile train --resume"),
        (1, 150, "use --micro-batches 4 (now 1), 2 at a time instead of 8"),
        (2, 10_000, "use --micro-batches 4 (now 2), 2 at a time instead of 4"),  # the estimate was too low: the next
        (8, 10_000, "use --sequence-length 16 (now 32) in a new run"),
        (1, 72, "use --sequence-length 12 (now 32) and --micro-batches 8 in a new run"),
        (1, 60, "use --sequence-length 3 (now 32) and --micro-batches 8 in a new run"),  # the shortest that is accepted
        (1, 59, "leave too little memory for a sequence"),  # 2 tokens would fit
        (1, 58, "leave too little memory for a sequence"),  # 1
        (1, 56, "leave too little memory for a sequence"),  # 0
        (1, 55, "leave too little memory for a sequence"),  # not even the weights fit
    ],
)
def test_the_advice_is_the_largest_micro_batch_that_fits(micro_batches, available, message):
    config = micro(batch_size=8, micro_batches=micro_batches, out=Path("runs/x"))
    assert message in advice(config, need_on_device(available))


def need_on_device(available: int) -> MemoryNeed:
    return MemoryNeed(fixed=50 * 10**9, sequence=38 * 10**9, available=available * 10**9)


def test_smaller_micro_batches_are_not_advised_where_the_update_does_not_fit():
    need = replace(need_on_device(230), update=160 * 10**9)
    expected = "an update by the optimizer takes 160.00 GB in addition to 50.00 GB for weights"
    assert advice(micro(batch_size=8), need).startswith(expected)


@pytest.mark.parametrize(
    ("available", "message"),
    [(59, "use --sequence-length 2 (now 32)"), (58, "leave too little memory for a sequence")],
)
def test_without_multi_token_prediction_two_tokens_are_advised_and_no_fewer(available, message):
    config = micro(model=replace(MICRO, num_nextn_predict_layers=0))
    assert message in advice(config, need_on_device(available))


def test_where_nothing_fits_fp8_lm_is_advised():
    assert "or --recipe fp8_lm, which needs half" in advice(micro(recipe="deepseek_v3"), None)


@pytest.mark.parametrize(
    "recipe",
    [{"recipe": "fp8_lm"}, {"recipe": "mine.toml", "recipe_text": 'recipe = "fp8_lm"'}],
    ids=["by name", "in a file"],
)
def test_fp8_lm_is_not_advised_to_a_run_that_uses_it(recipe):
    assert advice(micro(**recipe), None).endswith("choose a smaller model or a device with more memory")


@pytest.mark.parametrize(
    ("half", "budget", "share"), [(None, 25, 0.25), (25, 25, 0.5), (5, 25, 0.5), (5, 0, 0), (5, -9, 0)]
)
def test_the_share_of_a_sequence_within_a_budget(half, budget, share):
    assert MemoryNeed(0, 100, 100, half).share_within(budget) == pytest.approx(share)
