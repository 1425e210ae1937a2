"""The steps that the host has launched and not collected: what it knows of them, their results and their times."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octile.train.step.clock import StepClock
from octile.train.step.results import StepResults

COLLECT_EVERY = 10  # steps that are collected at a time; as many more are in flight meanwhile


class Launched(NamedTuple):
    """What the host knows of a step that it has launched and not collected.

    Attributes:
        number: the number of the step, counted from 1.
        learning_rate: the learning rate of the step.
        tokens: the tokens of its batch.
        tokens_so_far: the tokens of all steps up to this one.
        scheduled: the values that the configuration changes during the run.
        overflowed: the loss scale under which the gradients overflowed, or None.
    """

    number: int
    learning_rate: float
    tokens: int
    tokens_so_far: int
    scheduled: dict[str, Any]
    overflowed: float | None


class LaunchedSteps:
    """At most 2 · COLLECT_EVERY steps, the oldest first.

    Args:
        width: the numbers of a step's result.
        device: the device of the run.
        timeout: seconds after which the host waits no longer for a GPU.

    Attributes:
        clock: the time of the steps; it has a mark at the begin of each of them.
    """

    def __init__(self, width: int, device: torch.device, timeout: float = math.inf):
        self._steps: deque[Launched] = deque()
        self._results = StepResults(2 * COLLECT_EVERY, width, device, timeout)
        self.clock = StepClock(device, timeout)

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_full(self) -> bool:
        """Whether no step can be launched before some are collected."""
        return len(self) == 2 * COLLECT_EVERY

    @property
    def oldest(self) -> Launched:
        """The step that is collected next."""
        return self._steps[0]

    def check_none(self, what: str) -> None:
        """Refuse something that needs the results of all launched steps.

        Raises:
            RuntimeError: steps were launched and not collected.
        """
        if self:
            raise RuntimeError(f"{what} needs every launched step collected, but {len(self)} are not: call collect()")

    def begin(self) -> None:
        """Mark the begin of the next step.

        Raises:
            RuntimeError: 2 · COLLECT_EVERY steps are not collected yet.
        """
        if self.is_full:
            raise RuntimeError(f"{len(self)} steps were launched and not collected: call collect()")
        if not self:
            self.clock.reset()
        self.clock.mark()

    def append(self, step: Launched, values: Tensor) -> None:
        """Add a step whose kernels are launched, with its result on the device, float32 [width]."""
        self._results.append(values)
        self._steps.append(step)

    def collect(self, n: int) -> list[tuple[Launched, list[float]]]:
        """Wait for the n oldest steps, remove them, and return them with their results.

        Raises:
            TimeoutError: the device did not finish them in time.
        """
        steps = [self._steps.popleft() for _ in range(n)]
        return [(step, self._results.pop()) for step in steps]

    def discard(self) -> None:
        """Remove all steps."""
        self._steps.clear()
        self._results.clear()
