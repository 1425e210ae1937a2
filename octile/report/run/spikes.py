"""Loss spikes: steps whose loss stands far above what the steps before it had.

    usual      the median of the last WINDOW losses; steps inside a spike do not count among them
    scatter    1.4826 · the median distance from it, which is the standard deviation where noise is normal
    spike      loss > usual + max(DEVIATIONS · scatter, LEAST), until a loss is below that again

Medians, since the mean and the standard deviation of a series with a spike in it are the spike's.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

WINDOW = 64  # losses that make what is usual
ENOUGH = 32  # of them, before any is judged
DEVIATIONS = 8.0
LEAST = 0.1  # nats: a loss that hardly moves any more has next to no scatter


@dataclass(frozen=True)
class Spike:
    """A spike; the losses are in nats a token.

    Attributes:
        step: its first.
        loss: of that step.
        usual, scatter: of the losses before it.
        over_at: the first step whose loss was back; None while there is none.
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


class Spikes:
    """Finds spikes in a series of losses that is shown to it one by one."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._now: Spike | None = None

    def look(self, step: int, loss: float) -> Spike | None:
        """The spike that begins with this step, or the one that is over with it; losses that are no number are none."""
        if not math.isfinite(loss):
            return None
        if self._now is not None:
            if loss > _bound(self._now.usual, self._now.scatter):
                return None
            over, self._now = replace(self._now, over_at=step), None
            self._losses.append(loss)
            return over
        if len(self._losses) >= ENOUGH:
            usual = statistics.median(self._losses)
            scatter = 1.4826 * statistics.median(abs(x - usual) for x in self._losses)
            if loss > _bound(usual, scatter):
                self._now = Spike(step, loss, usual, scatter)
                return self._now
        self._losses.append(loss)
        return None


def find_spikes(losses: Iterable[tuple[int, float]]) -> list[Spike]:
    """The spikes of a series of (step, loss), in order."""
    spikes, found = Spikes(), {}
    for step, loss in losses:
        if spike := spikes.look(step, loss):
            found[spike.step] = spike
    return list(found.values())


def _bound(usual: float, scatter: float) -> float:
    return usual + max(DEVIATIONS * scatter, LEAST)
