"""The learning rate as a function of the step, without any state.

DeepSeek-V3 (arXiv 2412.19437 §4.2) warms up over 2,000 steps to 2.2e-4, stays there for two thirds of the training and
then follows a cosine down to a tenth, where it stays:

    peak            ┌───────────┐
                   ╱             ╲
    floor         ╱               ╲______
                  warmup constant decay
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
        floor: the learning rate of all later steps, at most peak.

    Raises:
        ValueError: a number of steps is negative, or 0 <= floor <= peak does not hold.
    """

    peak: float
    warmup_steps: int
    constant_steps: int
    decay_steps: int
    floor: float

    def __post_init__(self) -> None:
        for name in ("warmup_steps", "constant_steps", "decay_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, not {getattr(self, name)}")
        if not 0 <= self.floor <= self.peak < math.inf:
            raise ValueError(f"floor and peak must satisfy 0 <= floor <= peak, not floor={self.floor} peak={self.peak}")

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
            return self.floor
        cosine = (1 + math.cos(math.pi * decayed / self.decay_steps)) / 2
        return self.floor + (self.peak - self.floor) * cosine
