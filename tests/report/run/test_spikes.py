"""Tests of loss spikes: which losses are spikes and which are noise."""

import math
import random

import pytest

from octile.report.run.page import write_run_report
from octile.report.run.spikes import MIN_LOSSES, Spike, find_spikes
from tests.report.conftest import training, write_run


def noisy(n: int, seed: int = 0) -> list[float]:
    """Make losses that fall from 8 to 3, with the noise of small batches."""
    noise = random.Random(seed)
    return [3 + 5 * math.exp(-step / 30) + noise.gauss(0, 0.15) for step in range(n)]


def numbered(losses: list[float]) -> list[tuple[int, float]]:
    return list(enumerate(losses, 1))


@pytest.mark.parametrize("seed", range(20))
def test_noise_and_a_falling_loss_are_no_spikes(seed):
    assert find_spikes(numbered(noisy(500, seed))) == []


def test_a_spike_is_found_with_its_usual_loss_and_its_end():
    losses = noisy(200)
    losses[149:152] = [7.0, 6.0, 5.0]
    (spike,) = find_spikes(numbered(losses))
    assert (spike.step, spike.loss, spike.over_at) == (150, 7.0, 153)
    assert spike.usual == pytest.approx(3.0, abs=0.2)
    assert spike.scatter == pytest.approx(0.15, rel=0.4)


def test_a_loss_that_stays_high_is_one_spike_without_an_end():
    (spike,) = find_spikes(numbered([*noisy(200), *[7.0] * 200]))
    assert (spike.step, spike.over_at) == (201, None)


def test_two_spikes_are_counted_separately():
    losses = noisy(300)
    losses[149] = losses[249] = 7.0
    assert [(spike.step, spike.over_at) for spike in find_spikes(numbered(losses))] == [(150, 151), (250, 251)]


def test_a_spike_has_a_minimum_height():
    flat = [2.0] * 100
    assert find_spikes(numbered([*flat, 2.09])) == []
    assert [spike.step for spike in find_spikes(numbered([*flat, 2.11]))] == [101]


def test_no_spike_is_found_among_too_few_losses():
    assert find_spikes(numbered([*[2.0] * (MIN_LOSSES - 1), 9.0])) == []
    assert len(find_spikes(numbered([*[2.0] * MIN_LOSSES, 9.0]))) == 1


def test_non_finite_losses_are_skipped():
    assert find_spikes(numbered([*[2.0] * 50, math.nan, math.inf, 2.0])) == []


def test_the_description_of_a_spike():
    spike = Spike(1204, 5.31, 3.2, 0.1)
    assert str(spike) == "the loss jumped at step 1,204 to 5.310, where 3.200 was usual"
    assert str(Spike(1204, 5.31, 3.2, 0.1, 1207)).endswith("was usual, and was back after 3 steps")


@pytest.mark.slow
def test_the_report_of_a_run_names_spikes(tmp_path):
    lines = [training(step, main_loss=3.0 if step not in (50, 60) else 9.0) for step in range(1, 70)]
    page = write_run_report(write_run(tmp_path / "run", lines)).read_text()
    sentence = "The loss jumped at step 50 to 9.000, where 3.000 was usual, and was back after 1 step, and 1 more time."
    assert sentence in page


@pytest.mark.slow
def test_the_report_counts_skipped_steps(tmp_path):
    lines = [training(step, **({"skipped_for": "a gradient"} if step in (3, 4) else {})) for step in range(1, 9)]
    page = write_run_report(write_run(tmp_path / "run", lines)).read_text()
    assert "2 steps were skipped because a gradient was not finite; the first was step 3." in page
