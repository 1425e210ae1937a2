"""A tensor at rest: small numbers times one scale.

FP8-LM (arXiv 2310.18313 §2) keeps gradients, moments and master weights in 8 and 16 bits. Their range is narrow, so
each tensor comes with one scale that maps its largest magnitude to the upper half of the format's range:

    scale = amax / max of the format, rounded up to a power of two      data = round(x / scale)      x ≈ data · scale

It is a power of two because a tensor is stored again at each step and one of its numbers may change the scale of all: a
weight that rests is then only shifted, where any other scale would round it anew and let it drift.

The smallest numbers of a format, the subnormal ones, are evenly spaced, and rounding them to nearest can be wrong for a
moment: 3 spacings times 0.9 are 2.7, which is 3 again, for ever. `tiny` says where they are rounded to.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from octile.ops.quantize import SMALLEST_SCALE, decode, round_up_to_power_of_2


class Scaled(NamedTuple):
    """data in a small dtype, any shape, times scale, float32 []."""

    data: Tensor
    scale: Tensor

    @classmethod
    def zeros_like(cls, x: Tensor, dtype: torch.dtype) -> "Scaled":
        """Zeros of x's shape on x's device."""
        return cls(torch.zeros_like(x, dtype=dtype), torch.ones((), device=x.device))

    def load(self) -> Tensor:
        """data · scale, a new float32 tensor."""
        return decode(self.data).mul_(self.scale)

    def store_(self, x: Tensor, tiny: Literal["nearest", "toward_zero", "up"] = "nearest") -> None:
        """Overwrites data and scale so that data · scale ≈ x.

        A normal number of the format is off by at most epsilon / 2 of itself. An Inf or NaN in x makes the scale NaN
        and with it the whole tensor: it is never hidden.

        Args:
            x: float32 of data's shape.
            tiny: how magnitudes below the smallest normal number are rounded.
        """
        limits = torch.finfo(self.data.dtype)
        ratio = (x.abs().max() / limits.max).clamp(min=SMALLEST_SCALE)  # clamp keeps NaN
        self.scale.copy_(round_up_to_power_of_2(ratio))
        x = x / self.scale
        if tiny != "nearest":
            spacing = limits.smallest_normal * limits.eps
            part = x.clamp(-limits.smallest_normal, limits.smallest_normal)  # what is cut off here stays as it is
            count = part / spacing
            whole = count.trunc_() if tiny == "toward_zero" else count.ceil_()
            x += whole.mul_(spacing).sub_(part)
        self.data.copy_(x)
