"""Tests of loss differences in groups of tokens, compared with loops over single tokens."""

import statistics
from collections import defaultdict

import numpy as np
import pytest

from octile.report.compare.token_differences import MIN_OCCURRENCES, PASSAGE, token_differences
from octile.report.compare.token_figures import caption_counts

V, N, S = 12, 15, 40


@pytest.fixture(scope="module")
def measured():
    draw = np.random.default_rng(5)
    tokens = np.minimum(draw.geometric(0.3, (N, S)) - 1, V - 1)
    bf16, other = draw.normal(3, 1, (2, N, S))
    first, second = bf16 + 0.05 * tokens + draw.normal(0, 0.1, (2, N, S))
    frequency = np.array([10.0 ** (5 - t) for t in range(V)])
    found = token_differences(
        "a", tokens, [(first, bf16), (second, other)], (other, bf16), frequency, "t{}".format, str
    )
    return found, tokens, (first - bf16 + second - other) / 2, other - bf16


def with_loops(keys, differences) -> dict[str, tuple[int, float, float]]:
    groups = defaultdict(list)
    for key, difference in zip(keys, differences.flat, strict=True):
        groups[key].append(float(difference))
    return {
        k: (len(v), statistics.fmean(v), statistics.stdev(v) / len(v) ** 0.5) for k, v in groups.items() if len(v) > 1
    }


def check(groups, keys, differences, control):
    ours, theirs = with_loops(keys, differences), with_loops(keys, control)
    for group in groups:
        assert (group.count, group.mean, group.error) == pytest.approx(ours[group.name])
        assert (group.control_mean, group.control_error) == pytest.approx(theirs[group.name][1:])


def test_tokens_have_counts_means_and_standard_errors(measured):
    found, tokens, differences, control = measured
    check((*found.worst, *found.best), [f"t{t}" for t in tokens.flat], differences, control)


def test_positions_are_grouped_by_the_length_of_their_context(measured):
    found, _, differences, control = measured
    keys = [str(2 ** ((p + 1).bit_length() - 1)) for _ in range(N) for p in range(S)]
    check(found.positions, keys, differences, control)
    assert [group.name for group in found.positions] == ["1", "2", "4", "8", "16", "32"]


def test_frequencies_rise(measured):
    found, tokens, _, _ = measured
    assert [g.name for g in found.frequencies][-3:] == ["1,000", "10,000", "100,000"]
    assert sum(g.count for g in found.frequencies) == N * S
    assert found.frequencies[-1].count == (tokens == 0).sum()


def test_the_worst_token_has_the_largest_significant_difference(measured):
    found, tokens, differences, _ = measured
    slow = with_loops(tokens.flat, differences)
    often = {t: mean - 2 * error for t, (count, mean, error) in slow.items() if count >= MIN_OCCURRENCES}
    assert found.worst[0].name == f"t{max(often, key=often.get)}"
    assert found.tokens == len(often)
    assert found.worse == sum(low > 0 for low in often.values())


def test_random_differences_give_as_many_tokens_above_as_below():
    draw = np.random.default_rng(1)
    tokens = draw.integers(0, 1000, (400, 100))
    a, b, c = draw.normal(size=(3, 400, 100))
    found = token_differences("a", tokens, [(a, b)], (c, b), np.ones(1000), str, str)
    assert found.worse / found.tokens == pytest.approx(0.027, abs=0.016)
    assert found.better / found.tokens == pytest.approx(0.027, abs=0.016)


def test_the_passage_has_the_largest_mean_difference():
    losses = np.zeros((3, 2 * PASSAGE))
    losses[1, PASSAGE:] = 0.5
    losses[2, 7] = 9.0
    tokens = np.arange(losses.size).reshape(losses.shape)
    found = token_differences("a", tokens, [(losses, 0 * losses)], (losses, losses), np.ones(losses.size), str, str)
    assert found.passage == tuple((str(tokens[1, PASSAGE + i]), 0.5) for i in range(PASSAGE))


def test_a_text_without_frequent_tokens_is_reported():
    tokens = np.arange(20).reshape(2, 10)
    losses = np.zeros((2, 10))
    found = token_differences("a", tokens, [(losses, losses)], (losses, losses), np.zeros(20), str, str)
    assert "No token occurs often enough" in caption_counts(found)
