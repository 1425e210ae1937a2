"""Dynamic loss scaling, which prevents the gradients of FP16 GEMMs from underflowing.

The smallest FP16 number is 6e-8, and many gradients are smaller. Multiplying the loss by a large power of two
multiplies every gradient by it exactly, and dividing the gradients before the step undoes it. The factor is found by
trial: it is doubled after a number of good steps; after an overflow it is halved and the step is skipped.
Source: "Mixed precision training" (arXiv 1710.03740) §3.2.

`torch.amp.GradScaler` reads only `.grad`, so that it does not find gradients in main_grad buffers or in FP8. It also
allows a scale below 1, which would move gradients towards zero.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from octile.optim.gradient import Gradient, gradients_of, multiply_
from octile.optim.storage import Scaled

GROWTH_INTERVAL = 2000  # good steps before the scale is doubled
MAX_SCALE = 2.0**64  # if GEMMs saturate, nothing overflows, and the scale would grow without limit


class DynamicLossScale:
    """The loss scale, a power of two from 1 to 2⁶⁴.

        scale.scale(loss).backward()
        if scale.unscale_(params):
            optimizer.step()
        scale.update()

    Attributes:
        value: the loss scale.
        good_steps: steps without an overflow since the scale last changed.
    """

    def __init__(self) -> None:
        self.value = 2.0**16
        self.good_steps = 0
        self._finite: bool | None = None  # whether the current step's gradients are finite, once they are unscaled

    def scale(self, loss: Tensor) -> Tensor:
        """The scaled loss, on which `backward` is to be called."""
        return loss * self.value

    def unscale_(self, params: Iterable[Tensor], agree: Callable[[bool], bool] = bool) -> bool:
        """Divide the gradients by the scale in place; return whether all are finite, which waits for the device.

        Args:
            params: the parameters.
            agree: given whether the gradients here are finite, returns whether those of all ranks are.

        Raises:
            RuntimeError: they have been unscaled already since the last `update`.
        """
        if self._finite is not None:
            raise RuntimeError("gradients were unscaled already: call update() before the next unscale_()")
        gradients = gradients_of(params)
        multiply_(gradients, 1 / self.value)
        self._finite = agree(_all_finite(gradients))
        return self._finite

    def update(self) -> None:
        """End a step: halve the scale after an overflow, double it after enough good steps.

        Raises:
            RuntimeError: `unscale_` was not called in this step.
        """
        if self._finite is None:
            raise RuntimeError("update() needs the gradients of a step: call unscale_() before it")
        self.good_steps = self.good_steps + 1 if self._finite else 0
        if not self._finite:
            self.value = max(self.value / 2, 1.0)
        elif self.good_steps == GROWTH_INTERVAL:
            self.value = min(self.value * 2, MAX_SCALE)
            self.good_steps = 0
        self._finite = None

    def state_dict(self) -> dict[str, float]:
        """The state for a checkpoint, to be taken between `update` and the next `unscale_`."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the result of `state_dict`.

        Raises:
            ValueError: the value is not a power of two from 1 to 2⁶⁴, or a key is missing or out of range.
        """
        if state.keys() != {"value", "good_steps"}:
            raise ValueError(f"state must have value and good_steps, not {sorted(state)}")
        value, good_steps = float(state["value"]), int(state["good_steps"])
        if not (1 <= value <= MAX_SCALE and math.frexp(value)[0] == 0.5):
            raise ValueError(f"value must be a power of two from 1 to 2**64, not {value}")
        if not 0 <= good_steps < GROWTH_INTERVAL:
            raise ValueError(f"good_steps must be from 0 to {GROWTH_INTERVAL - 1}, not {good_steps}")
        self.value, self.good_steps, self._finite = value, good_steps, None


def _all_finite(gradients: list[Gradient]) -> bool:
    """Whether all gradients are finite. An Inf or NaN in a scaled gradient makes its scale NaN."""
    if not gradients:
        return True
    unscaled = [g for g in gradients if not isinstance(g, Scaled)]
    largest = [*torch._foreach_norm(unscaled, torch.inf)] if unscaled else []
    largest += [g.scale for g in gradients if isinstance(g, Scaled)]
    return bool(torch.stack([x.float() for x in largest]).isfinite().all())
