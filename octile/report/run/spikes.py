"""Detection of loss spikes: steps whose loss is far above the losses of the preceding steps.

    usual      the median of the last WINDOW losses, without those inside a spike
    scatter    1.4826 · the median absolute deviation, which equals the standard deviation if the noise is normal
    spike      begins with a loss > usual + max(DEVIATIONS · scatter, MIN_JUMP) and ends with the first loss below that

A spike would dominate the mean and the standard deviation of a series; it hardly changes the medians.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

WINDOW = 64  # losses of which the median is taken
MIN_LOSSES = 32  # losses that are needed before a spike can be detected
DEVIATIONS = 8.0
MIN_JUMP = 0.1  # nats, for a loss that hardly changes any more and so has almost no scatter


@dataclass(frozen=True)
class Spike:
    """A loss spike. Losses are in nats per token.

    Attributes:
        step: the first step of the spike.
        loss: the loss of that step.
        usual, scatter: the median of the losses before it, and their scatter.
        over_at: the first step whose loss was back to normal; None while the spike lasts.
    """

    step: int
    loss: float
    usual: float
    scatter: float
    over_at: int | None = None

    def __str__(self) -> str:
        text = f"the loss jumped at step {self.step:,} to {self.loss:.3f}, where {self.usual:.3f} was usual"
        if self.over_at is None:
            return text
        steps = self.over_at - self.step
        return f"{text}, and was back after {steps:,} step{'s' * (steps != 1)}"


class SpikeState(NamedTuple):
    """What a detector has seen.

    Attributes:
        losses: the last WINDOW, without those inside a spike.
        current: the spike that lasts.
    """

    losses: tuple[float, ...]
    current: Spike | None


class SpikeDetector:
    """Detects spikes in a series of losses that arrive one by one.

    Args:
        state: state of a detector whose series this one continues; None: it begins.
    """

    def __init__(self, state: SpikeState | None = None):
        self._losses = deque(state.losses if state else (), maxlen=WINDOW)
        self._current = state.current if state else None

    @property
    def state(self) -> SpikeState:
        """What it has seen."""
        return SpikeState(tuple(self._losses), self._current)

    def update(self, step: int, loss: float) -> Spike | None:
        """Add a loss; return the spike that begins with this step or ends with it. NaN and infinity are ignored."""
        if not math.isfinite(loss):
            return None
        if self._current is not None:
            if loss > _bound(self._current.usual, self._current.scatter):
                return None
            over, self._current = replace(self._current, over_at=step), None
            self._losses.append(loss)
            return over
        if len(self._losses) >= MIN_LOSSES:
            usual = statistics.median(self._losses)
            scatter = 1.4826 * statistics.median(abs(x - usual) for x in self._losses)
            if loss > _bound(usual, scatter):
                self._current = Spike(step, loss, usual, scatter)
                return self._current
        self._losses.append(loss)
        return None


def find_spikes(losses: Iterable[tuple[int, float]]) -> list[Spike]:
    """The spikes of a series of (step, loss), in order of their steps."""
    detector, found = SpikeDetector(), {}
    for step, loss in losses:
        if spike := detector.update(step, loss):
            found[spike.step] = spike
    return list(found.values())


def _bound(usual: float, scatter: float) -> float:
    return usual + max(DEVIATIONS * scatter, MIN_JUMP)
