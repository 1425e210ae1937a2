"""The measurements of a comparison and the numbers that follow from them: gap, noise band, bar, verdict.

BF16 is trained with two seeds or more; the difference between their held-out losses is the noise band. A recipe with
seed s starts from the weights of BF16 with seed s and sees the same batches, so the two runs are a pair. With L the
held-out loss:

    gap          (L − L_s) / L_s at the end, where L_s is BF16's with the same seed; the mean over several seeds
    noise band   |L_b − L_a| / L_first, the mean over all pairs of BF16 runs; if all runs continue from one trained
                 model, the difference that a nudge of BF16's weights makes, if it was measured
    bar          0.25% in magnitude (DeepSeek-V3, arXiv 2412.19437, §3.3.1 and appendix B.1)

A gap is uncertain in two ways. Other seeds would give other gaps, which only several seeds show. Other held-out text
would give other gaps too, which a bootstrap over blocks of its windows shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from octile.report.compare.gradients import GradientCheck
from octile.report.compare.intervals import Interval, block_means, bootstrap_interval, student_interval
from octile.report.compare.token_differences import TokenDifferences
from octile.report.run.metrics import Floats

BAR = 0.0025  # the largest gap in magnitude that is accepted
MIN_STEPS = 100  # shorter runs say nothing about longer ones, however small their gap
MIN_MEASUREMENTS_OUTSIDE = 2  # consecutive measurements after which a recipe has left the band for good


@dataclass(frozen=True)
class Curve:
    """One training run of the comparison. Losses are in nats per token.

    Attributes:
        recipe, seed: recipe and seed of the run.
        steps, train_loss: each step and the main head's loss, not smoothed.
        val_steps, val_loss: the steps of validations and their held-out losses.
        tokens_per_s: the median over the steps; NaN if the speed is meaningless.
        state_bytes: bytes of weights and optimizer state.
        diverged_at: the step at which the run diverged, or None.
        window_loss: the mean loss of each held-out window at the end.
        speed_quartiles: the lower and the upper quartile of the steps' tokens per second.
        yardstick_s: the seconds that a reference GEMM took during the run.
    """

    recipe: str
    seed: int
    steps: tuple[int, ...]
    train_loss: tuple[float, ...]
    val_steps: tuple[int, ...]
    val_loss: tuple[float, ...]
    tokens_per_s: float
    state_bytes: int | None = None
    diverged_at: int | None = None
    window_loss: tuple[float, ...] = ()
    speed_quartiles: tuple[float, float] | None = None
    yardstick_s: float | None = None

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.train_loss) or len(self.val_steps) != len(self.val_loss):
            raise ValueError(
                f"each loss of {self.recipe} needs its step, not {len(self.train_loss)} training losses at"
                f" {len(self.steps)} steps and {len(self.val_loss)} held-out losses at {len(self.val_steps)} steps"
            )

    @property
    def final_val_loss(self) -> float:
        """The last held-out loss, NaN if there is none."""
        return self.val_loss[-1] if self.val_loss else math.nan


@dataclass(frozen=True)
class CompareResult:
    """The result of `octile compare`: BF16 with two or more seeds, and each recipe with the requested seeds.

    Attributes:
        preset: preset of all runs.
        bf16, bf16_other_seed, bf16_more_seeds: the runs of BF16.
        recipes: the runs of the recipes.
        bar: the largest gap in magnitude that is accepted, a fraction.
        machine: where the runs were made.
        config: the configuration of the runs.
        tokens, gradients: per-token differences and gradient comparisons, of the recipes for which they were measured.
        recipe_files: the contents of recipe files by the recipe's name.
        nudge: steps and fractions: how much BF16's held-out loss differs there if its weights are rounded once at the
            start. Runs that continue from one trained model are not separated by their seeds; if `nudge` is given, it
            is the noise.
    """

    preset: str
    bf16: Curve
    bf16_other_seed: Curve
    recipes: tuple[Curve, ...]
    bar: float = BAR
    machine: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    bf16_more_seeds: tuple[Curve, ...] = ()
    tokens: tuple[TokenDifferences, ...] = ()
    gradients: tuple[GradientCheck, ...] = ()
    recipe_files: Mapping[str, str] = field(default_factory=dict)
    nudge: tuple[tuple[int, float], ...] = ()

    @property
    def baselines(self) -> tuple[Curve, ...]:
        """All BF16 runs."""
        return (self.bf16, self.bf16_other_seed, *self.bf16_more_seeds)

    @property
    def curves(self) -> tuple[Curve, ...]:
        """All runs."""
        return (*self.baselines, *self.recipes)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the recipes, each once."""
        return tuple(dict.fromkeys(curve.recipe for curve in self.recipes))

    def runs(self, name: str) -> tuple[Curve, ...]:
        """The runs of a recipe, one for each seed."""
        return tuple(curve for curve in self.recipes if curve.recipe == name)

    @property
    def last_step(self) -> int:
        """The step of BF16's last validation; 0 without one."""
        return self.bf16.val_steps[-1] if self.bf16.val_steps else 0

    def partner(self, curve: Curve) -> Curve:
        """The BF16 run that a run is compared with: the one of the same seed for a recipe, the first one for BF16."""
        same_seed = (b for b in self.baselines if b.seed == curve.seed and curve not in self.baselines)
        return next(same_seed, self.bf16)

    def gaps(self, curve: Curve) -> tuple[Floats, Floats]:
        """Steps and relative gaps [n] float64, where both `curve` and its partner have a held-out loss."""
        partner = self.partner(curve)
        base = dict(zip(partner.val_steps, partner.val_loss, strict=True))
        both = [(s, loss / base[s] - 1) for s, loss in zip(curve.val_steps, curve.val_loss, strict=True) if s in base]
        return np.array([s for s, _ in both], dtype=np.float64), np.array([gap for _, gap in both])

    def gap(self, curve: Curve) -> float:
        """(L − L_s) / L_s at BF16's last validation, a fraction; NaN if the curve has none at that step."""
        steps, gaps = self.gaps(curve)
        return float(gaps[-1]) if len(gaps) and steps[-1] == self.bf16.val_steps[-1] else math.nan

    def smoothed_gap(self, curve: Curve) -> float:
        """The mean gap over the last quarter of BF16's validations, a fraction; NaN if the curve misses one."""
        recent = self.bf16.val_steps[-max(1, len(self.bf16.val_steps) // 4) :]
        gaps = dict(zip(*self.gaps(curve), strict=True))
        return sum(float(gaps.get(step, math.nan)) for step in recent) / len(recent) if recent else math.nan

    @property
    def noise_band(self) -> float:
        """The final difference between two BF16 runs, |L_b − L_a| / L_first, the mean over all pairs; or the nudge."""
        if self.nudge:
            return self.nudge[-1][1]
        ends = [b.final_val_loss if b.val_steps == self.bf16.val_steps else math.nan for b in self.baselines]
        return _mean([abs(b - a) for a, b in combinations(ends, 2)]) / ends[0] if ends[0] else math.nan

    def band(self) -> tuple[Floats, Floats]:
        """Steps and the noise band at each [n]: the maximum of a measurement and its two neighbors.

        Two curves that differ by chance cross now and then. There the difference is zero, but the noise is not.
        """
        found = self.nudge or self._between_seeds()
        steps, apart = (np.array([pair[i] for pair in found], dtype=np.float64) for i in (0, 1))
        padded = np.pad(apart, 1, mode="edge") if len(apart) else np.zeros(2)
        return steps, np.maximum(np.maximum(padded[:-2], apart), padded[2:])

    def _between_seeds(self) -> tuple[tuple[int, float], ...]:
        """Steps, and the difference between BF16's runs at each, the mean over all pairs."""
        losses = [dict(zip(b.val_steps, b.val_loss, strict=True)) for b in self.baselines]
        steps = [step for step in losses[0] if all(step in known for known in losses)]
        return tuple((s, _mean([abs(b[s] - a[s]) for a, b in combinations(losses, 2)]) / losses[0][s]) for s in steps)

    def mean_gaps(self, name: str) -> tuple[Floats, Floats]:
        """Steps and a recipe's gaps there [n], the mean over its seeds, where every seed was measured."""
        runs = [dict(zip(*self.gaps(curve), strict=True)) for curve in self.runs(name)]
        steps = [step for step in runs[0] if all(step in run for run in runs)]
        return np.array(steps, dtype=np.float64), np.array([_mean([run[step] for run in runs]) for step in steps])

    def leaves_band_at(self, name: str) -> int | None:
        """The step from which a recipe's mean gap stays outside the band, on one side.

        None if it does not leave for good. The last measurement alone does not count, because the gap may come back.
        """
        noise = dict(zip(*self.band(), strict=True))
        steps, gaps = self.mean_gaps(name)
        left: list[float] = []
        for step, gap in zip(reversed(steps), reversed(gaps), strict=True):
            if step not in noise or not abs(gap) > noise[step] or gap * gaps[-1] < 0:
                break
            left.append(step)
        return int(left[-1]) if len(left) >= MIN_MEASUREMENTS_OUTSIDE else None

    def outcome(self, name: str) -> Outcome:
        """The outcome of one recipe."""
        runs = self.runs(name)
        gaps = np.array([self.gap(curve) for curve in runs])
        known = gaps[np.isfinite(gaps)]
        broke = [curve.diverged_at for curve in runs if curve.diverged_at is not None]
        return Outcome(
            recipe=name,
            gaps=tuple(gaps.tolist()),
            smoothed=_mean([self.smoothed_gap(curve) for curve in runs]),
            over_seeds=student_interval(known) if len(known) == len(gaps) else None,
            over_seeds_bootstrap=bootstrap_interval(known) if len(known) == len(gaps) else None,
            over_text=None if broke else self._over_text(name),
            leaves_band_at=self.leaves_band_at(name),
            diverged_at=min(broke, default=None),
            diverged=len(broke),
            bar=self.bar,
            noise_band=self.noise_band,
            steps=self.last_step,
        )

    def _over_text(self, name: str) -> Interval | None:
        """The bootstrap interval of the mean gap over blocks of held-out windows, the same for both runs of a pair."""
        pairs = [(np.array(c.window_loss), np.array(self.partner(c).window_loss)) for c in self.runs(name)]
        if any(a.size == 0 or a.shape != b.shape for a, b in pairs):
            return None
        gap_W = np.mean([(a - b) / b.mean() for a, b in pairs], axis=0)
        return bootstrap_interval(block_means(gap_W)) if np.isfinite(gap_W).all() else None


@dataclass(frozen=True)
class Outcome:
    """The outcome of a recipe; gaps, bar and noise band are fractions.

    Attributes:
        gaps: the final gap of each seed.
        smoothed: the mean gap over the last quarter of the validations.
        over_seeds, over_seeds_bootstrap: Student's and the bootstrap's interval of the mean gap over the seeds.
        over_text: the bootstrap's interval over blocks of consecutive held-out windows.
        leaves_band_at: the step from which the gap stays outside the noise band; None if it does not.
        diverged_at, diverged: the first step at which a seed diverged, and how many seeds did.
        steps: the step of the final gap.
    """

    recipe: str
    gaps: tuple[float, ...]
    smoothed: float
    over_seeds: Interval | None
    over_seeds_bootstrap: Interval | None
    over_text: Interval | None
    leaves_band_at: int | None
    diverged_at: int | None
    diverged: int
    bar: float
    noise_band: float
    steps: int

    @property
    def gap(self) -> float:
        """The mean gap of the seeds."""
        return _mean(list(self.gaps))

    @property
    def within_bar(self) -> bool:
        """Whether no seed diverged and the mean gap is at most `bar` in magnitude."""
        return not self.diverged and abs(self.gap) <= self.bar

    @property
    def is_significant(self) -> bool | None:
        """Whether the whole interval over the seeds lies on the mean's side of the bar; None without an interval."""
        if self.over_seeds is None:
            return None
        low, high = self.over_seeds.low, self.over_seeds.high
        return max(-low, high) <= self.bar if self.within_bar else low > self.bar or high < -self.bar

    @property
    def is_shown(self) -> bool:
        """Whether the measurement shows that the recipe stays within the bar.

        The 95% interval over the seeds must lie within the bar as a whole, and the runs must have MIN_STEPS steps.
        """
        return self.within_bar and self.is_significant is True and self.steps >= MIN_STEPS

    @property
    def verdict(self) -> str:
        """The outcome in a few words. One pair decides nothing about the bar."""
        if self.diverged:
            some = f" ({self.diverged} of {len(self.gaps)} seeds)" if len(self.gaps) > 1 else ""
            return f"diverged at step {self.diverged_at:,}{some}"
        if math.isnan(self.gap):
            return "not measured"
        if self.is_significant is None:
            return f"one pair, {'within' if abs(self.gap) <= self.noise_band else 'beyond'} the noise"
        if not self.within_bar:
            verdict = f"misses by {(abs(self.gap) - self.bar) * 100:.2f} points"
        else:
            verdict = "within bar and noise" if abs(self.gap) <= self.noise_band else "within the bar"
        return verdict + (", unsure" if self.is_significant is False else "")


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan
