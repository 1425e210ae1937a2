"""Tests of confidence intervals: compared with tables and with all resamples, and how often they contain the mean."""

from itertools import product

import numpy as np
import pytest

from octile.report.compare.intervals import block_means, bootstrap_interval, student_interval, student_quantile


@pytest.mark.parametrize(("freedom", "table"), [(1, 12.706), (2, 4.303), (4, 2.776), (9, 2.262), (99, 1.984)])
def test_students_quantile_equals_published_tables(freedom, table):
    assert student_quantile(freedom) == pytest.approx(table, abs=6e-4)


def test_two_samples_give_an_interval_of_12_7_standard_errors():
    interval = student_interval(np.array([0.0, 2.0]))
    assert (interval.low, interval.high) == pytest.approx((1 - 12.706, 1 + 12.706), abs=1e-3)


def test_one_sample_gives_no_interval():
    assert student_interval(np.array([1.0])) is None


@pytest.mark.parametrize("n", [1, 2, 5])
def test_too_few_samples_give_no_bootstrap_interval(n):
    assert bootstrap_interval(np.arange(float(n))) is None


def test_the_bootstrap_equals_the_quantiles_of_all_resamples():
    samples = np.array([0.3, -1.2, 0.9, 2.2, 0.1, -0.4])
    every = np.array([sum(chosen) / 6 for chosen in product(samples.tolist(), repeat=6)])
    interval = bootstrap_interval(samples)
    for beyond in (every - interval.high, interval.low - every):
        assert (beyond > 1e-9).mean() <= 0.0029  # Φ(−√(6/5) · 2.5706) = 0.00243 of all lie further out
        assert (beyond > -1e-9).mean() >= 0.0020


def test_the_same_samples_give_the_same_bootstrap():
    samples = np.random.default_rng(3).normal(size=20)
    assert bootstrap_interval(samples) == bootstrap_interval(samples)


def coverage(interval, draw, n: int, repetitions: int) -> float:
    """Return how often an interval of n samples with mean 0 contains 0."""
    found = (interval(draw(n)) for _ in range(repetitions))
    return sum(each.low <= 0 <= each.high for each in found) / repetitions


@pytest.mark.parametrize("n", [2, 3, 6])
def test_students_interval_contains_the_mean_in_95_percent_of_repetitions(n):
    draw = np.random.default_rng(n)
    share = coverage(student_interval, lambda n: draw.normal(size=n), n, 4000)
    assert share == pytest.approx(0.95, abs=0.012)  # 3.5 standard errors of the simulation


@pytest.mark.slow
@pytest.mark.parametrize("n", [6, pytest.param(128, marks=pytest.mark.exhaustive)])
def test_the_bootstrap_contains_the_mean_in_about_95_percent_of_repetitions(n):
    draw = np.random.default_rng(n)
    assert coverage(bootstrap_interval, lambda n: draw.normal(size=n), n, 200) == pytest.approx(0.95, abs=0.04)


@pytest.mark.slow
def test_the_bootstrap_contains_the_mean_of_skewed_samples():
    draw = np.random.default_rng(0)
    share = coverage(bootstrap_interval, lambda n: draw.exponential(size=n) - 1, 128, 200)
    assert share == pytest.approx(0.95, abs=0.04)


def test_blocks_of_text_widen_the_interval_where_neighbors_are_alike():
    draw = np.random.default_rng(0)
    documents = np.repeat(draw.normal(size=64), 24)
    alone, in_blocks = (bootstrap_interval(x) for x in (documents, block_means(documents)))
    assert in_blocks.high - in_blocks.low > 3 * (alone.high - alone.low)


def test_blocks_hardly_change_the_interval_of_independent_windows():
    windows = np.random.default_rng(0).normal(size=1536)
    alone, in_blocks = (bootstrap_interval(x) for x in (windows, block_means(windows)))
    assert in_blocks.high - in_blocks.low == pytest.approx(alone.high - alone.low, rel=0.25)


def test_blocks_have_the_mean_of_their_windows():
    windows = np.random.default_rng(0).normal(size=128)
    assert block_means(windows).mean() == pytest.approx(windows.mean())
    assert len(block_means(windows)) == 32
    assert len(block_means(windows[:40])) == 40
