"""Storage of a tensor in FP8 or FP16 with one scale.

FP8-LM (arXiv 2310.18313 §2) stores gradients, moments and master weights in 8 and 16 bits. The range of these formats
is narrow, so each tensor has one scale that maps its largest magnitude to the upper half of the format's range:

    scale = amax / max of the format, rounded up to a power of two      data = round(x / scale)      x ≈ data · scale

The scale is a power of two because a tensor is stored again at each step, and one element may change the scale of all.
With a power of two an unchanged weight is only shifted; with any other scale it would be rounded again and drift.

The subnormal numbers of a format are evenly spaced, and rounding them to nearest can be wrong for a moment: 3 spacings
times 0.9 are 2.7, which is rounded to 3 again, so that the moment never decays. `subnormals` selects their rounding.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from octile.ops.quantize import SMALLEST_SCALE, decode, round_up_to_power_of_2


class Scaled(NamedTuple):
    """A tensor as data · scale: data in FP8 or FP16 of any shape, scale float32 []."""

    data: Tensor
    scale: Tensor

    @classmethod
    def zeros_like(cls, x: Tensor, dtype: torch.dtype) -> "Scaled":
        """Zeros of the shape and on the device of x."""
        return cls(torch.zeros_like(x, dtype=dtype), torch.ones((), device=x.device))

    def load(self) -> Tensor:
        """The values data · scale as a new float32 tensor."""
        return decode(self.data).mul_(self.scale)

    def store_(
        self,
        x: Tensor,
        subnormals: Literal["nearest", "toward_zero", "up"] = "nearest",
        skip: Tensor | None = None,
    ) -> None:
        """Overwrite data and scale so that data · scale ≈ x.

        The relative error of a normal number is at most epsilon / 2. An Inf or NaN in x makes the scale NaN and with it
        the whole tensor, so that it is not hidden.

        Args:
            x: float32 of data's shape.
            subnormals: how magnitudes below the smallest normal number are rounded.
            skip: bool []: if true, data and scale keep their values.
        """
        limits = torch.finfo(self.data.dtype)
        ratio = (x.abs().max() / limits.max).clamp(min=SMALLEST_SCALE)  # clamp keeps NaN
        overwrite_(self.scale, round_up_to_power_of_2(ratio), skip)
        x = x / self.scale
        if subnormals != "nearest":
            spacing = limits.smallest_normal * limits.eps
            part = x.clamp(-limits.smallest_normal, limits.smallest_normal)  # larger values stay as they are
            count = part / spacing
            whole = count.trunc_() if subnormals == "toward_zero" else count.ceil_()
            x += whole.mul_(spacing).sub_(part)
        overwrite_(self.data, x, skip)


def shard(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this process holds, as FSDP2 shards parameters; any other tensor itself.

    A partial DTensor, as gradients of norms are under SequenceParallel, is summed over its ranks first.
    """
    return _summed(tensor).to_local() if hasattr(tensor, "to_local") else tensor


def _summed(tensor: Any) -> Any:
    if not any(placement.is_partial() for placement in tensor.placements):
        return tensor
    from torch.distributed.tensor import Replicate  # late: it is slow, and only who has DTensors has imported it

    placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
    return tensor.redistribute(placements=placements)


def overwrite_(tensor: Tensor, values: Tensor, skip: Tensor | None) -> None:
    """Overwrite a tensor with values of its shape, rounded to its dtype, unless `skip` (bool []) is true."""
    if skip is not None:
        tensor_bytes = tensor.unsqueeze(-1).view(torch.uint8)  # torch.where does not take FP8
        values = torch.where(skip, tensor_bytes, values.to(tensor.dtype).unsqueeze(-1).view(torch.uint8))
        values = values.view(tensor.dtype).squeeze(-1)
    tensor.copy_(values)
