"""The learning rate and the batch size as functions of the step, without any state.

DeepSeek-V3 (arXiv 2412.19437 §4.2) warms up over 2,000 steps to 2.2e-4, stays there for two thirds of the training,
follows a cosine down to a tenth, stays there for 333B tokens, and ends with 167B tokens at 7.3e-6:

    peak            ┌───────────┐
                   ╱             ╲
    floor         ╱               ╲______
    last         ╱                       ╲___
                  warmup constant decay floor last

Its batch grows from 3,072 to 15,360 sequences over the first 469B tokens.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class WarmupConstantCosine:
    """A learning rate schedule of warm-up, constant, cosine and floor. Any phase may have 0 steps.

    Attributes:
        peak: the highest learning rate.
        warmup_steps: steps of a linear rise from peak / warmup_steps in step 0 to peak in the last of them.
        constant_steps: steps at the peak.
        decay_steps: steps of half a cosine from peak to floor; the first of them is still at the peak.
        floor: the learning rate of the steps after the cosine, at most peak.
        floor_steps: the number of these steps; None: all later ones.
        last: the learning rate after them, at most floor.

    Raises:
        ValueError: a number of steps is negative, or 0 <= last <= floor <= peak does not hold.
    """

    peak: float
    warmup_steps: int
    constant_steps: int
    decay_steps: int
    floor: float
    floor_steps: int | None = None
    last: float = 0.0

    def __post_init__(self) -> None:
        for name in ("warmup_steps", "constant_steps", "decay_steps", "floor_steps"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")
        if not 0 <= self.floor <= self.peak < math.inf:
            raise ValueError(f"floor and peak must satisfy 0 <= floor <= peak, not floor={self.floor} peak={self.peak}")
        if not 0 <= self.last <= self.floor:
            raise ValueError(f"last must satisfy 0 <= last <= floor, not last={self.last} floor={self.floor}")

    def __call__(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        if step < 0:
            raise ValueError(f"step must be at least 0, not {step}")
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        decayed = step - self.warmup_steps - self.constant_steps
        if decayed < 0:
            return self.peak
        if decayed >= self.decay_steps:
            at_floor = self.floor_steps is None or decayed < self.decay_steps + self.floor_steps
            return self.floor if at_floor else self.last
        cosine = (1 + math.cos(math.pi * decayed / self.decay_steps)) / 2
        return self.floor + (self.peak - self.floor) * cosine


@dataclass(frozen=True)
class BatchRamp:
    """A batch size that grows linearly and then stays.

    Attributes:
        initial: sequences of the first step.
        final: sequences of all steps after the ramp.
        steps: steps of the ramp; 0 for a constant batch of `final` sequences.

    Raises:
        ValueError: 1 <= initial <= final does not hold, or steps is negative.
    """

    initial: int
    final: int
    steps: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.initial <= self.final:
            raise ValueError(f"1 <= initial <= final must hold, not initial={self.initial} final={self.final}")
        if self.steps < 0:
            raise ValueError(f"steps must be at least 0, not {self.steps}")

    def size(self, step: int) -> int:
        """The sequences of a step, counted from 0."""
        if step >= self.steps:
            return self.final
        return self.initial + (self.final - self.initial) * step // self.steps

    def before(self, step: int) -> int:
        """The sequences of all steps before a step."""
        ramp = min(step, self.steps)
        grown = _floor_sum(ramp, self.final - self.initial, self.steps) if ramp else 0
        return self.initial * ramp + grown + self.final * (step - ramp)


def _floor_sum(n: int, a: int, m: int) -> int:
    """The sum of a·i // m over i from 0 to n − 1, in O(log(a + m)) steps like Euclid's algorithm.

    Source: Graham, Knuth and Patashnik, "Concrete Mathematics" (2nd ed.), §3.5.
    """
    total, b = 0, 0
    while True:
        total += n * (n - 1) // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        points, rest = divmod(a * n + b, m)
        if points == 0:
            return total
        n, b, a, m = points, rest, m, a
