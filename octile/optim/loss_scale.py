"""Dynamic loss scaling: the gradients of FP16 products are lifted away from zero.

FP16 ends at 6e-8, and many gradients are smaller. Multiplying the loss by a large power of two multiplies every
gradient by it, exactly, and dividing before the step takes it back. How large is found by trying: double after a while
of good steps, halve and skip the step when something overflowed.  Source: "Mixed precision training" (arXiv 1710.03740)
§3.2.

`torch.amp.GradScaler` does this too, but sees only `.grad`: with main-gradient buffers or 8-bit gradients it finds
nothing to unscale. It also lets the scale fall below 1, where it would push gradients towards zero.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from octile.optim.gradient import Gradient, gradients_of, multiply_
from octile.optim.storage import Scaled

GROWTH_INTERVAL = 2000  # good steps before the scale is doubled
LARGEST = 2.0**64  # far above use: where products saturate, nothing ever overflows and the scale would grow for ever


class DynamicLossScale:
    """The loss's multiplier, a power of two from 1 to 2⁶⁴.

        scale.scale(loss).backward()
        if scale.unscale_(params):
            optimizer.step()
        scale.update()

    Attributes:
        value: the multiplier.
        good_steps: without an overflow since it last changed.
    """

    def __init__(self) -> None:
        self.value = 2.0**16
        self.good_steps = 0
        self._finite: bool | None = None  # of the step under way, once its gradients were unscaled

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call `backward` on."""
        return loss * self.value

    def unscale_(self, params: Iterable[Tensor]) -> bool:
        """Divides the gradients by the scale, in place, and says whether all of them are finite (waits for the device).

        Raises:
            RuntimeError: they were unscaled already since the last `update`.
        """
        if self._finite is not None:
            raise RuntimeError("gradients were unscaled already: call update() before the next unscale_()")
        gradients = gradients_of(params)
        multiply_(gradients, 1 / self.value)
        self._finite = _all_finite(gradients)
        return self._finite

    def update(self) -> None:
        """At the end of a step: halves the scale after an overflow, doubles it after enough good steps.

        Raises:
            RuntimeError: `unscale_` was not called in this step.
        """
        if self._finite is None:
            raise RuntimeError("update() needs the gradients of a step: call unscale_() before it")
        self.good_steps = self.good_steps + 1 if self._finite else 0
        if not self._finite:
            self.value = max(self.value / 2, 1.0)
        elif self.good_steps == GROWTH_INTERVAL:
            self.value = min(self.value * 2, LARGEST)
            self.good_steps = 0
        self._finite = None

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps, taken between `update` and the next `unscale_`."""
        return {"value": self.value, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continues from `state_dict`'s result.

        Raises:
            ValueError: the value is no power of two from 1 to 2⁶⁴, or a count is missing or out of range.
        """
        if state.keys() != {"value", "good_steps"}:
            raise ValueError(f"state must have value and good_steps, not {sorted(state)}")
        value, good_steps = float(state["value"]), int(state["good_steps"])
        if not (1 <= value <= LARGEST and math.frexp(value)[0] == 0.5):
            raise ValueError(f"value must be a power of two from 1 to 2**64, not {value}")
        if not 0 <= good_steps < GROWTH_INTERVAL:
            raise ValueError(f"good_steps must be from 0 to {GROWTH_INTERVAL - 1}, not {good_steps}")
        self.value, self.good_steps, self._finite = value, good_steps, None


def _all_finite(gradients: list[Gradient]) -> bool:
    """Of scaled gradients the scale tells: an Inf or NaN anywhere makes it NaN."""
    if not gradients:
        return True
    plain = [g for g in gradients if not isinstance(g, Scaled)]
    largest = [*torch._foreach_norm(plain, torch.inf)] if plain else []
    largest += [g.scale for g in gradients if isinstance(g, Scaled)]
    return bool(torch.stack([x.float() for x in largest]).isfinite().all())
