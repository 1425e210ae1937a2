"""Tests of comparisons with several seeds: pairs, noise bands, intervals, and the step of leaving the band."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from octile.report import CompareResult, Curve, verdict_sentence
from octile.report.compare.curves_figure import caption_compare, draw_compare
from octile.report.compare.outcome_figure import draw_outcomes
from octile.report.compare.power import pairs_needed
from octile.report.compare.summary import notes, pairs_notes, seeds_note
from octile.report.compare.tables import detail_rows, outcome_rows
from octile.report.style import WIDE, drawing
from octile.text import format_duration

STEPS = tuple(range(10, 101, 10))


def curve(recipe: str, seed: int, *losses: float, windows: tuple[float, ...] = ()) -> Curve:
    return Curve(recipe, seed, (), (), STEPS[-len(losses) :], losses, 100.0, window_loss=windows)


def seeds(recipe: str, *finals: float) -> list[Curve]:
    return [curve(recipe, seed, final) for seed, final in enumerate(finals)]


def compared(bf16: list[Curve], *recipes: Curve) -> CompareResult:
    first, other, *more = bf16
    return CompareResult("tiny", first, other, recipes, bf16_more_seeds=tuple(more))


def test_a_recipe_is_compared_with_bf16_of_its_seed():
    result = compared(seeds("bf16", 2.0, 4.0, 8.0), *seeds("a", 2.02, 4.04, 8.16))
    assert result.outcome("a").gaps == pytest.approx((0.01, 0.01, 0.02))
    assert result.outcome("a").gap == pytest.approx(0.04 / 3)


def test_the_noise_band_is_the_mean_over_all_pairs_of_seeds():
    finals = (4.0, 4.1, 3.8, 4.4)
    expected = [abs(a - b) / 4.0 for a, b in combinations(finals, 2)]
    assert compared(seeds("bf16", *finals)).noise_band == pytest.approx(sum(expected) / 6)


def test_pairing_by_seed_removes_the_variance_between_seeds():
    result = compared(seeds("bf16", 2.0, 2.5, 1.5), *seeds("a", 2.004, 2.505, 1.503))
    interval = result.outcome("a").over_seeds
    assert (interval.low, interval.high) == pytest.approx((0.002, 0.002))


@pytest.mark.parametrize(
    ("gaps", "verdict"),
    [
        ((0.001, 0.0011, 0.0009), "within the bar"),
        ((0.001, 0.004, -0.002), "within the bar, unsure"),
        ((0.010, 0.0101, 0.0099), "misses by 0.75 points"),
        ((0.010, 0.020, -0.006), "misses by 0.55 points, unsure"),
    ],
)
def test_the_verdict_is_unsure_where_the_interval_crosses_the_bar(gaps, verdict):
    result = compared(seeds("bf16", 2.0, 2.0, 2.0), *seeds("a", *(2 * (1 + gap) for gap in gaps)))
    assert result.outcome("a").verdict == verdict


@pytest.mark.parametrize(
    ("gaps", "steps", "is_green"),
    [
        ((0.001, 0.0011, 0.0009), 100, True),
        ((0.001, 0.0011, 0.0009), 3, False),
        ((0.001, 0.004, -0.002), 100, False),
        ((0.001,), 100, False),
        ((0.010, 0.0101, 0.0099), 100, False),
    ],
    ids=["shown", "three steps", "interval over the bar", "one seed", "beyond the bar"],
)
def test_only_a_shown_outcome_is_green(gaps, steps, is_green):
    bf16 = seeds("bf16", 2.0, 2.0, 2.0)
    recipes = seeds("a", *(2 * (1 + gap) for gap in gaps))
    result = compared([with_steps(c, steps) for c in bf16], *(with_steps(c, steps) for c in recipes))
    (mood,) = (row["mood"] for row in outcome_rows(result) if row["name"].startswith("a"))
    assert (mood == "good") == is_green


def with_steps(of, steps):
    """The same curve, with its validations spread over so many steps."""
    return replace(of, val_steps=tuple(steps * (i + 1) // len(of.val_steps) for i in range(len(of.val_steps))))


@pytest.mark.parametrize(("steps", "is_short"), [(3, True), (100, False)])
def test_short_runs_are_noted(steps, is_short):
    result = compared([with_steps(c, steps) for c in seeds("bf16", 2.0, 2.0)])
    assert any("say nothing about a longer run" in note for note in notes(result)) == is_short


def test_one_seed_gives_no_interval_and_the_note_says_so():
    result = compared(seeds("bf16", 2.0, 2.1), curve("a", 0, 2.0))
    assert result.outcome("a").over_seeds is None
    assert "there is no interval over seeds" in seeds_note(result)


def test_the_note_of_two_seeds_says_that_they_prove_little():
    assert "can hardly prove anything" in seeds_note(compared(seeds("bf16", 2.0, 2.1), *seeds("a", 2.0, 2.1)))


def test_a_recipe_diverged_if_one_seed_did():
    broken = replace(curve("a", 1, 9.0), diverged_at=7)
    result = compared(seeds("bf16", 2.0, 2.1), curve("a", 0, 2.0), broken)
    assert result.outcome("a").verdict == "diverged at step 7 (1 of 2 seeds)"


def test_the_sentence_contains_the_seeds_and_the_interval():
    result = compared(seeds("bf16", 2.0, 2.0, 2.0), *seeds("a", 2.002, 2.0022, 2.0018))
    sentence = verdict_sentence(result)
    assert "after 100 steps, the mean of 3 seeds, within the bar of 0.25%, and significantly: " in sentence
    assert "significantly: the 95% interval is +0.08 …" in sentence


def test_the_sentence_says_by_how_much_several_seeds_miss_the_bar():
    sentence = verdict_sentence(compared(seeds("bf16", 2.0, 2.0, 2.0), *seeds("a", 2.008, 2.0082, 2.0078)))
    assert "which misses the bar of 0.25% by 0.15 points, and significantly: " in sentence


def test_pairs_that_show_nothing_say_how_many_would():
    result = compared(seeds("bf16", 2.0, 2.0, 2.0), *seeds("a", 2.002, 2.008, 1.996))
    config = {"steps": 100, "batch_size": 10, "sequence_length": 36}
    needed = pairs_needed(0.003, 0.0025)
    (note,) = pairs_notes(replace(result, config=config))
    assert note == (
        f"The 3 gaps of a have a standard deviation of 0.30%: if it has no gap, {needed} new pairs show that with a "
        f"probability of 80%, {format_duration(needed * 2 * 36_000 / result.bf16.tokens_per_s)} of training like this "
        f"(--seed 3 --seeds {needed})."
    )


@pytest.mark.parametrize("finals", [(2.002, 2.0022, 2.0018), (2.2, 2.201, 2.199)], ids=["within", "beyond"])
def test_what_is_shown_needs_no_further_pairs(finals):
    assert pairs_notes(compared(seeds("bf16", 2.0, 2.0, 2.0), *seeds("a", *finals))) == []


def test_a_deviation_that_no_number_of_pairs_averages_out_is_said():
    (note,) = pairs_notes(compared(seeds("bf16", 2.0, 2.0), *seeds("a", 2.2, 1.8)))
    assert note == (
        "The 2 gaps of a have a standard deviation of 14.14%: more than 200 pairs would be needed to decide about "
        "0.25%."
    )


def with_gaps(*gaps_in_bands: float) -> CompareResult:
    """Make a result whose recipe has these gaps, in noise bands of 1%, at each measurement."""
    n = len(gaps_in_bands)
    recipe = curve("a", 0, *(1 + 0.01 * gap for gap in gaps_in_bands))
    return compared([curve("bf16", 0, *[1.0] * n), curve("bf16", 1, *[1.01] * n)], recipe)


@pytest.mark.parametrize(
    ("gaps", "step"),
    [
        ((0.0, 0.5, 2.0, 2.0, 2.0), 80),
        ((2.0, 2.0, 2.0, 2.0), 70),
        ((0.0, -2.0, -3.0), 90),
        ((0.0, 2.0, 0.5), None),
        ((0.5, 0.5, 2.0), None),
        ((-2.0, -2.0, 2.0, 2.0), 90),
        ((0.9, 0.9, 0.9), None),
    ],
    ids=["leaves", "was never inside", "below", "comes back", "only the last", "changes sides", "inside"],
)
def test_a_recipe_leaves_the_band_at_the_step_after_which_it_stays_outside(gaps, step):
    assert with_gaps(*gaps).leaves_band_at("a") == step


@pytest.mark.parametrize(
    ("gaps", "says"), [((2.0,), "not measured"), ((0.5, 2.0), "never"), ((2.0, 2.0), "step 90")], ids=str
)
def test_one_measurement_cannot_show_whether_a_recipe_leaves_the_noise(gaps, says):
    assert [row["leaves"] for row in detail_rows(with_gaps(*gaps))] == [says]


@pytest.mark.parametrize(("gaps", "is_drawn"), [((0.5,), False), ((0.5, 0.5), True)], ids=["one", "two"])
def test_the_caption_describes_the_noise_band_where_it_is_drawn(gaps, is_drawn):
    assert ("gray noise band" in caption_compare(with_gaps(*gaps))) is is_drawn


def test_where_two_seeds_cross_the_band_is_that_of_neighboring_steps():
    a, b = curve("bf16", 0, 1.0, 1.0, 1.0), curve("bf16", 1, 1.02, 1.0, 0.99)
    assert compared([a, b]).band()[1] == pytest.approx([0.02, 0.02, 0.01])


def test_a_diverged_run_may_have_left_the_band_before():
    result = with_gaps(0.0, 2.0, 3.0, 4.0)
    broken = replace(result.recipes[0], val_steps=STEPS[-4:-1], val_loss=result.recipes[0].val_loss[:3], diverged_at=95)
    assert replace(result, recipes=(broken,)).leaves_band_at("a") == 80


def test_the_interval_over_text_is_the_bootstrap_over_windows():
    draw = np.random.default_rng(0)
    bf16, recipe = draw.normal(4, 1, 50), draw.normal(4.01, 1, 50)
    first = curve("bf16", 0, float(bf16.mean()), windows=tuple(bf16))
    result = compared([first, curve("bf16", 1, 4.0)], curve("a", 0, float(recipe.mean()), windows=tuple(recipe)))
    expected = []
    for _ in range(4000):  # the windows are the same for both models
        drawn = [int(draw.integers(50)) for _ in range(50)]
        expected.append(sum(recipe[w] for w in drawn) / sum(bf16[w] for w in drawn) - 1)
    interval = result.outcome("a").over_text
    assert (interval.low, interval.high) == pytest.approx(tuple(np.quantile(expected, [0.022, 0.978])), abs=0.01)


def test_without_losses_of_windows_there_is_no_interval_over_text():
    assert compared(seeds("bf16", 2.0, 2.1), curve("a", 0, 2.0)).outcome("a").over_text is None


# runs that continue from one checkpoint


def nudged() -> CompareResult:
    """Make a result whose seeds differ by 5%; a nudge changes the loss by 0.1%, then 0.02%."""
    bf16 = [curve("bf16", 0, 2.0, 2.0, 2.0), curve("bf16", 1, 2.1, 2.1, 2.1)]
    recipes = (curve("a", 0, 2.01, 2.001, 2.001), curve("a", 1, 2.11, 2.101, 2.101), curve("broken", 0, 3.0, 3.0, 3.0))
    return replace(compared(bf16, *recipes), nudge=((80, 0.001), (90, 0.001), (100, 0.0002)))


def test_the_noise_band_of_continued_runs_is_the_effect_of_a_nudge():
    result = nudged()
    assert result.noise_band == 0.0002
    assert result.band()[0].tolist() == [80, 90, 100]
    assert result.band()[1] == pytest.approx([0.001, 0.001, 0.001])
    assert result.outcome("a").verdict.startswith("within the bar")
    assert "rounded once at the start ends 0.02% from BF16" in verdict_sentence(result)
    assert "rounded once at the start" in caption_compare(result)


def test_all_seeds_of_continued_runs_are_baselines():
    assert [row["outcome"] for row in outcome_rows(nudged())[:2]] == ["baseline", "baseline"]


def test_a_recipe_far_away_does_not_stretch_the_axis():
    for draw in (draw_compare, draw_outcomes):
        with drawing(WIDE, 560) as figure:
            draw(figure, nudged())
        axes = figure.axes[-1]
        limits = axes.get_ylim() if draw is draw_compare else axes.get_xlim()
        assert max(limits) < 0.7  # percent; the bar is 0.25


def test_the_sentence_of_two_seeds_says_once_that_they_prove_little():
    recipes = (*seeds("a", 2.0, 2.1), *seeds("b", 2.0, 2.1))
    sentence = verdict_sentence(compared(seeds("bf16", 2.0, 2.1), *recipes))
    assert sentence.count("wo seeds can hardly prove anything") == 1
    assert sentence.count("the 95% interval is ") == 2
