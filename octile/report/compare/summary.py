"""Sentences of a comparison: its outcome, what its seeds can prove, and whether its speeds can be compared."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from octile.report.compare.intervals import MIN_BOOTSTRAP_SAMPLES, Interval
from octile.report.compare.power import MAX_PAIRS, POWER, largest_deviation, pairs_needed
from octile.report.compare.result import MIN_STEPS, CompareResult, Curve, Outcome
from octile.text import format_count, format_duration, format_percent

FEW_SEEDS = 2  # a confidence interval of so few seeds proves hardly anything
MAX_SPEED_SPREAD = 2.0  # upper over lower quartile of the steps' speeds within a run
MAX_REFERENCE_RATIO = 1.5  # longest over shortest reference time of the runs


def verdict_sentence(result: CompareResult) -> str:
    """The outcome of every recipe, compared with the noise band."""
    if math.isnan(result.noise_band):
        noise = "The noise band between BF16 runs with different seeds was not measured."
    elif result.nudge:
        noise = f"BF16 whose weights were rounded once at the start ends {result.noise_band:.2%} from BF16."
    elif len(result.baselines) == 2:
        noise = f"Two BF16 runs that differ only in their seed end {result.noise_band:.2%} apart."
    else:
        pairs = f"the mean over all pairs of {len(result.baselines)} seeds"
        noise = f"Two BF16 runs that differ only in their seed end {result.noise_band:.2%} apart, {pairs}."
    if not result.names:
        return noise
    outcomes = [result.outcome(name) for name in result.names]
    measured = [outcome for outcome in outcomes if not outcome.diverged and not math.isnan(outcome.gap)]
    sentences = [f"{o.recipe}: {o.verdict}." for o in outcomes if o not in measured]
    if measured:
        first, *others = measured
        after = f" after {format_count(result.last_step, 'step')}"
        ends = [_end(first, after), *(_end(outcome, "") for outcome in others)]
        sentences.insert(0, f"On held-out text {'; '.join(ends)}.{_few_pairs(measured)}")
    return " ".join((*sentences, noise))


def _few_pairs(measured: Sequence[Outcome]) -> str:
    """What the number of pairs does not decide."""
    counts = {len(outcome.gaps) for outcome in measured}
    one = f" One pair of runs gives no verdict on the bar of {measured[0].bar:.2%}." if 1 in counts else ""
    return one + (" Two seeds can hardly prove anything." if FEW_SEEDS in counts else "")


def _end(outcome: Outcome, after: str) -> str:
    gap = format_percent(outcome.gap)
    side = {"+": "above", "−": "below"}.get(gap[0])
    where = f"{gap[1:]} {side} BF16" if side else "at BF16's loss"
    mean = f", the mean of {len(outcome.gaps)} seeds" if len(outcome.gaps) > 1 else ""
    at_the_bar = "" if outcome.is_significant is None else f", {_at_the_bar(outcome)}"
    return f"{outcome.recipe} ends {where}{after}{mean}{at_the_bar}"


def _at_the_bar(outcome: Outcome) -> str:
    if outcome.within_bar:
        text = f"within the bar of {outcome.bar:.2%}"
    else:
        text = f"which misses the bar of {outcome.bar:.2%} by {(abs(outcome.gap) - outcome.bar) * 100:.2f} points"
    interval = f"the 95% interval is {span(outcome.over_seeds)}"
    if len(outcome.gaps) <= FEW_SEEDS:
        return f"{text}, and {interval}"
    return f"{text}, {'and' if outcome.is_significant else 'but not'} significantly: {interval}"


def span(interval: Interval | None) -> str:
    """An interval as "−0.10 … +0.25%", or a dash if there is none."""
    return f"{format_percent(interval.low).removesuffix('%')} … {format_percent(interval.high)}" if interval else "–"


def seeds_note(result: CompareResult) -> str:
    """What the number of seeds can prove, and what it cannot."""
    n = max((len(result.runs(name)) for name in result.names), default=0)
    if n == 1:
        more = f"; {planned_pairs(5, result.bar)}" if result.last_step >= MIN_STEPS else ""
        return (
            "Each recipe was trained with one seed: the gap holds for that seed, and there is no interval over seeds."
            f" The noise band, from {'nudges' if result.nudge else 'one pair'} of BF16 runs, estimates the size of"
            f" chance. For more seeds: --seeds 5{more}."
        )
    if n == FEW_SEEDS:
        return (
            "With two seeds the interval reaches 12.7 standard errors to either side, and the standard error itself is"
            " a rough estimate: it can hardly prove anything. Use --seeds 5 or more."
        )
    student = "The interval over seeds is Student's, of the paired gaps; it assumes that they are normally distributed."
    if n < MIN_BOOTSTRAP_SAMPLES:
        return f"{student} A bootstrap interval, which does not assume this, needs six seeds."
    return f"{student} The bootstrap interval does not assume this."


def planned_pairs(pairs: int, bar: float) -> str:
    """What so many pairs can show, before any of them has run."""
    if pairs == 1:
        return f"one pair of runs gives no verdict on the bar of {bar:.2%}; {planned_pairs(5, bar)}"
    return (
        f"{pairs} pairs of runs show that a recipe without a gap stays within {bar:.2%} of BF16, with a probability of "
        f"{POWER:.0%}, where the gaps of pairs have a standard deviation of at most {largest_deviation(pairs, bar):.2%}"
    )


def pairs_notes(result: CompareResult) -> list[str]:
    """Of each recipe that is neither shown within the bar nor beyond, how many pairs would decide, and their time.

    The pairs that were measured say how much their gaps deviate. A comparison that stops as soon as it shows something
    shows it too often by chance, so the pairs are to be new ones.
    """
    notes = []
    for outcome in map(result.outcome, result.names):
        if outcome.is_significant is not False or outcome.diverged or result.last_step < MIN_STEPS:
            continue
        deviation = statistics.stdev(outcome.gaps)
        needed = pairs_needed(deviation, outcome.bar)
        found = f"The {len(outcome.gaps)} gaps of {outcome.recipe} have a standard deviation of {deviation:.2%}: "
        if needed is None:
            notes.append(f"{found}more than {MAX_PAIRS} pairs would be needed to decide about {outcome.bar:.2%}.")
            continue
        seconds = needed * sum(_seconds(curve, result) for curve in (result.bf16, *result.runs(outcome.recipe)[:1]))
        time = f", {format_duration(seconds)} of training like this" if 0 < seconds < math.inf else ""
        notes.append(
            f"{found}if it has no gap, {needed} new pairs show that with a probability of {POWER:.0%}{time} "
            f"(--seed {1 + max(curve.seed for curve in result.curves)} --seeds {needed})."
        )
    return notes


def _seconds(curve: Curve, result: CompareResult) -> float:
    """The seconds of a run's steps; NaN if its speed or its size is not known."""
    sizes = (result.config.get(name, math.nan) for name in ("steps", "batch_size", "sequence_length"))
    return math.prod(sizes) / curve.tokens_per_s


def notes(result: CompareResult) -> list[str]:
    """What the comparison cannot show: for lack of pairs or steps, or of speeds on a machine that others used too."""
    few = [
        f"The runs have {format_count(result.last_step, 'step')}: gaps and noise after fewer than {MIN_STEPS} steps say"
        " nothing about a longer run."
    ]
    return (few if result.last_step < MIN_STEPS else []) + pairs_notes(result) + speed_notes(result)


def speed_notes(result: CompareResult) -> list[str]:
    """Warnings if the speeds of the runs cannot be compared, because other programs used the machine meanwhile."""
    notes = []
    spreads = [(_speed_spread(curve), curve) for curve in result.curves]
    worst, curve = max(spreads, key=lambda pair: pair[0])
    if worst > MAX_SPEED_SPREAD:
        notes.append(
            f"The speed within a run varied (upper over lower quartile of the steps: {worst:.1f}× in {_name(curve)}):"
            " other programs used the machine, so do not compare the tokens per second."
        )
    timed = [curve for curve in result.curves if curve.yardstick_s]
    if timed:
        slow, fast = max(timed, key=lambda c: c.yardstick_s or 0), min(timed, key=lambda c: c.yardstick_s or 0)
        ratio = (slow.yardstick_s or 0) / (fast.yardstick_s or 1)
        if ratio > MAX_REFERENCE_RATIO:
            notes.append(
                f"The same reference GEMM took {ratio:.1f} times as long during {_name(slow)} as during {_name(fast)}:"
                " other programs used the machine, so do not compare the tokens per second."
            )
    return notes


def _speed_spread(curve: Curve) -> float:
    if curve.speed_quartiles is None or curve.speed_quartiles[0] <= 0:
        return 1.0
    return curve.speed_quartiles[1] / curve.speed_quartiles[0]


def _name(curve: Curve) -> str:
    return f"{curve.recipe}, seed {curve.seed}"
