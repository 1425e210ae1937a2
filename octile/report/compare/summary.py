"""The outcome of a comparison in plain words."""

from __future__ import annotations

import math

from octile.report.compare.intervals import Interval
from octile.report.compare.result import CompareResult, Outcome
from octile.report.page import format_percent

FEW_SEEDS = 2  # whose interval can hardly prove anything


def verdict_sentence(result: CompareResult) -> str:
    """The outcome of the first recipe, beside the noise."""
    if math.isnan(result.noise_band):
        noise = "How far two BF16 runs with different seeds end apart was not measured."
    elif result.nudge:
        noise = f"BF16 whose weights were rounded once at the start ends {result.noise_band:.2%} from BF16."
    elif len(result.baselines) == 2:
        noise = f"Two BF16 runs that differ only in their seed end {result.noise_band:.2%} apart."
    else:
        pairs = f"the mean over all pairs of {len(result.baselines)} seeds"
        noise = f"Two BF16 runs that differ only in their seed end {result.noise_band:.2%} apart, {pairs}."
    if not result.names:
        return noise
    outcome = result.outcome(result.names[0])
    if outcome.diverged or math.isnan(outcome.gap):
        return f"{outcome.recipe}: {outcome.verdict}. {noise}"
    steps = result.bf16.val_steps[-1]
    side = "above" if outcome.gap > 0 else "below"
    end = f"{abs(outcome.gap):.2%} {side} BF16 after {steps:,} step{'s' if steps > 1 else ''}"
    if len(outcome.gaps) > 1:
        end += f", the mean of {len(outcome.gaps)} seeds"
    return f"On held-out text {outcome.recipe} ends {end}, {_at_the_bar(outcome)}. {noise}"


def _at_the_bar(outcome: Outcome) -> str:
    if outcome.within_bar:
        said = f"within the bar of {outcome.bar:.2%}"
    else:
        said = f"which misses the bar of {outcome.bar:.2%} by {(abs(outcome.gap) - outcome.bar) * 100:.2f} points"
    if outcome.sure is None:
        return said
    interval = f"the 95% interval is {span(outcome.over_seeds)}"
    if len(outcome.gaps) <= FEW_SEEDS:
        return f"{said}; {interval}, of so few seeds that it can hardly prove anything"
    return f"{said}, {'and' if outcome.sure else 'but not'} surely: {interval}"


def span(interval: Interval | None) -> str:
    """−0.10 … +0.25%, or a dash."""
    return f"{format_percent(interval.low).removesuffix('%')} … {format_percent(interval.high)}" if interval else "–"


def seeds_note(result: CompareResult) -> str:
    """What so many seeds can tell, and what they cannot."""
    n = max((len(result.runs(name)) for name in result.names), default=0)
    if n == 1:
        return (
            "Each recipe was trained with one seed: the gap holds for that seed, and no interval can say how another"
            " seed would end. The noise band, from"
            f" {'nudges' if result.nudge else 'one pair'} of BF16 runs, tells the size of chance, not its exact"
            " value. More seeds: --seeds 5."
        )
    if n == FEW_SEEDS:
        return (
            "Two seeds give an interval 12.7 standard errors wide to either side, and a standard error that is itself"
            " a guess: it can hardly prove anything. Take --seeds 5 or more."
        )
    student = "The interval over seeds is Student's, of the paired gaps; it takes them as normally distributed."
    if n < 6:
        return f"{student} A bootstrap, which does not, needs six seeds: it never leaves the range of the gaps."
    return f"{student} The bootstrap's, beside it, does not."
