"""Which steps are skipped, and when a run must stop: decided on the device, and once more on the host, later.

The device skips an update if the gradient is not finite. If the loss is not finite, or too many steps in a row were
skipped, it also skips every later update. So when the host collects that, the weights are still those before the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from octile.train.step.launched import Launched


class Skips:
    """Counts skipped steps on the device and on the host.

    Args:
        limit: steps that may be skipped in a row.
        parameters: the names of the parameters, for messages.
        device: the device of the run.

    Attributes:
        total: the steps without an update, because a gradient was not finite.
        in_a_row: those since the last update; steps that overflowed because of the loss scale do not count.
    """

    def __init__(self, limit: int, parameters: Sequence[str], device: torch.device):
        self._limit, self._parameters = limit, parameters
        self.total, self.in_a_row = 0, 0
        self._device_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self._halted = torch.zeros((), dtype=torch.bool, device=device)  # whether all updates are skipped

    @torch.no_grad()
    def decide(self, loss: Tensor, norm: Tensor, overflowed: bool, too_many_rows: Tensor) -> Tensor:
        """Decide on the device whether to skip the update, bool [], and whether to skip all updates from now on.

        `check` draws the same conclusions on the host, later.

        Args:
            loss: the loss of the step, of all ranks.
            norm: the norm of its gradient.
            overflowed: whether the gradients overflowed because of the loss scale.
            too_many_rows: on how many ranks the experts had more rows than capacity.
        """
        broken = ~norm.isfinite()
        if not overflowed:
            self._device_in_a_row.copy_(torch.where(broken, self._device_in_a_row + 1, 0))
        self._halted |= ~loss.isfinite() | (self._device_in_a_row > self._limit) | (too_many_rows > 0)
        return self._halted | broken

    def check(self, step: Launched, grad_norm: float, last_broken: int) -> str | None:
        """Return the reason for which a step was skipped, or None.

        Steps that overflow only because of the loss scale do not count, because the scale is reduced after them.

        Args:
            step: the oldest step that is not checked; its loss is finite.
            grad_norm: the norm of its gradient.
            last_broken: the index of the last parameter whose gradient is not finite, or −1.

        Raises:
            FloatingPointError: too many steps in a row were skipped.
        """
        if math.isfinite(grad_norm):
            self.in_a_row = 0
            return None
        self.total += 1
        if step.overflowed is not None:
            return f"the gradients overflowed under a loss scale of {step.overflowed:,.0f}"
        self.in_a_row += 1
        # a backward pass carries it from the last parameter to the first
        where = self._parameters[last_broken] if last_broken >= 0 else "their norm"
        if self.in_a_row > self._limit:
            before = f", after {self._limit} in a row that were skipped" if self._limit else ""
            raise FloatingPointError(
                f"a gradient is not finite at step {step.number}; the nearest to the loss is {where}{before}"
            )
        return f"a gradient is not finite; the nearest to the loss is {where}"

    def reset_device(self) -> None:
        """Let the device count skipped steps from what the host knows."""
        self._device_in_a_row.fill_(self.in_a_row)
        self._halted.fill_(False)
