"""Tests of the statistics of `octile eval`, and of its table."""

import json
import math

import numpy as np
import pytest

from octile.report.compare.intervals import TEXT_BLOCKS
from octile.report.evaluation import (
    EvaluatedModel,
    EvaluatedText,
    Evaluation,
    evaluation_table,
    explanations,
    write_evaluations,
)

BF16 = EvaluatedModel("bf16", 1_000_000, 500_000, {"BF16": 0.9999, "FP32": 0.0001})
FP8 = EvaluatedModel("fp8", 1_000_000, 500_000, {"FP8": 0.9, "BF16": 0.1})
TEXT = EvaluatedText("my.txt", 4_000, 101, 40, 40, 10_000)


def evaluation(losses, labels=100, model=BF16, recipe="bf16") -> Evaluation:
    """Make an evaluation with the mean loss of each sequence."""
    labels_N = np.broadcast_to(np.array(labels), (len(losses),))
    return Evaluation(model, recipe, False, np.array(losses) * labels_N, labels_N)


def drawn(n: int, mean: float = 3.0, seed: int = 0) -> np.ndarray:
    return mean + np.random.default_rng(seed).normal(size=n)


def test_the_standard_error_is_that_of_a_mean_of_sequences():
    losses = drawn(TEXT_BLOCKS)
    assert evaluation(losses).standard_error == pytest.approx(losses.std(ddof=1) / math.sqrt(TEXT_BLOCKS))


def test_the_standard_error_counts_neighboring_sequences_as_one_block():
    blocks = drawn(TEXT_BLOCKS)
    expected = evaluation(blocks).standard_error
    assert evaluation(np.repeat(blocks, 5)).standard_error == pytest.approx(expected)


def test_a_predicted_token_has_the_same_weight_in_every_sequence():
    assert evaluation([2.0, 4.0], labels=[30, 10]).loss == pytest.approx(2.5)


def test_sequences_of_different_lengths_with_the_same_loss_have_no_error():
    assert evaluation([3.0] * 8, labels=[10, 20, 5, 7, 9, 80, 3, 1]).standard_error == pytest.approx(0)


def test_a_single_sequence_has_no_standard_error():
    assert evaluation([3.0]).standard_error is None


def test_the_difference_is_a_share_of_the_other_loss():
    losses = drawn(50)
    found = evaluation(losses + 0.03).difference_from(evaluation(losses))
    assert found.fraction == pytest.approx(0.03 / losses.mean())
    assert found.interval.low < found.fraction < found.interval.high


def test_the_interval_is_of_paired_losses_and_of_their_ratio():
    losses = drawn(50)
    found = evaluation(losses * 1.01).difference_from(evaluation(losses))
    assert [found.interval.low, found.fraction, found.interval.high] == pytest.approx([0.01] * 3)


def test_five_sequences_are_too_few_for_an_interval():
    pair = evaluation(drawn(5), recipe="deepseek_v3"), evaluation(drawn(5, seed=1))
    assert pair[0].difference_from(pair[1]).interval is None
    assert "95% interval: left out, since it needs 6 sequences, not 5" in explanations(pair, pair[1])


def test_perplexity_and_bits_per_byte_follow_from_the_loss():
    found = evaluation([math.log(8)])
    assert found.perplexity == pytest.approx(8)
    assert found.bits_per_byte(TEXT) == pytest.approx(3 / 2.5)


@pytest.mark.parametrize("loss", [20.0, 1e4])
def test_a_loss_far_above_that_of_a_guess_has_no_perplexity(tmp_path, loss):
    found = evaluation([loss] * 8)
    table = evaluation_table([found], TEXT, None)
    assert table.rows[0][table.columns.index("perplexity")] == "–"
    write_evaluations(tmp_path / "eval.json", [found], TEXT, None, {})
    assert json.loads((tmp_path / "eval.json").read_text())["results"][0]["perplexity"] is None


def test_bits_per_byte_are_left_out_where_bytes_are_not_known():
    packed = EvaluatedText("the held-out examples of run/data", 4_000, 101, 40, 40, None)
    assert "bits per byte" not in evaluation_table([evaluation(drawn(8))], packed, None).columns


def test_the_table_shows_signed_differences_and_none_of_the_baseline():
    losses = drawn(8)
    pair = evaluation(losses * 1.003, model=FP8, recipe="deepseek_v3"), evaluation(losses)
    table = evaluation_table(pair, TEXT, pair[1])
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [row["folder"] for row in rows] == ["fp8", "bf16"]
    assert [row["difference"] for row in rows] == ["+0.300%", ""]
    assert rows[0]["95% interval"] == "+0.300 … +0.300%"


def test_a_difference_without_the_rounding_of_weights_is_named():
    pair = evaluation(drawn(8), model=FP8, recipe="deepseek_v3"), evaluation(drawn(8), model=FP8)
    assert any("leaves out what rounding the weights costs" in line for line in explanations(pair, pair[1]))


def test_a_difference_with_the_rounding_of_weights_has_no_such_line():
    pair = evaluation(drawn(8), model=FP8, recipe="deepseek_v3"), evaluation(drawn(8))
    assert not any("leaves out" in line for line in explanations(pair, pair[1]))


def test_formats_of_a_thousandth_of_the_values_are_not_named():
    assert str(BF16) == "model: bf16, 1.00M parameters, 500k active per token; stored in BF16"
    assert str(FP8).endswith("stored in 90.0% FP8, 10.0% BF16")


def test_a_line_says_how_much_of_a_text_is_evaluated():
    some = EvaluatedText("my.txt", 4_000, 101, 10, 40, 10_000)
    assert str(TEXT) == "text: my.txt, 10 kB, 4,000 tokens; 40 sequences of 101 tokens"
    assert str(some).endswith("; 10 of 40 sequences of 101 tokens, evenly spaced")


def test_the_file_has_the_numbers_of_the_table(tmp_path):
    pair = evaluation(drawn(8), model=FP8, recipe="deepseek_v3"), evaluation(drawn(8, seed=1))
    write_evaluations(tmp_path / "new" / "eval.json", pair, TEXT, pair[1], {"gpu": None})
    written = json.loads((tmp_path / "new" / "eval.json").read_text())
    difference = pair[0].difference_from(pair[1])
    assert written["machine"] == {"gpu": None}
    assert written["text"]["bytes_per_token"] == 2.5
    assert written["results"][0]["loss"] == pair[0].loss
    assert written["results"][0]["compared_with"] == {
        "folder": "bf16",
        "recipe": "bf16",
        "difference": difference.fraction,
        "interval_over_text": [difference.interval.low, difference.interval.high],
    }
    assert written["results"][1]["compared_with"] is None
