"""Scales that are not looked up in the tensor itself: delayed scaling, and none at all.

With delayed scaling a tensor's scale comes from the largest values of the last steps.  The amax of this step is only
noted, so quantising needs no pass over the tensor beforehand; an outlier larger than anything remembered saturates.  A
step is over when `end_step` is called; micro-batches and recomputed forward passes of one step only raise its entry.
Source: NVIDIA's FP8 recipe (arXiv 2209.05433).
"""

import torch
from torch import Tensor, nn

from octile.ops.quantize import quantize_with_scale
from octile.recipe import AMAX_HISTORY, OperandFormat
from octile.scaled import ScaledTensor

OPERANDS = ("x", "w", "dy")


class AmaxHistory(nn.Module):
    """The largest magnitudes of a layer's operands: [3, 1 + AMAX_HISTORY] float32, this step's in column 0.

    It is written in training mode only, so that a validation in between changes nothing. The buffer is not part of the
    `state_dict`, so a layer's weights load into and from `nn.Linear`.
    """

    amax_OH: Tensor

    def __init__(self, device: torch.device | None = None):
        super().__init__()
        amax_OH = torch.zeros(len(OPERANDS), 1 + AMAX_HISTORY, device=device)
        self.register_buffer("amax_OH", amax_OH, persistent=False)

    @torch.no_grad()
    def quantize(self, t: Tensor, operand: str, cast: OperandFormat) -> ScaledTensor:
        """t [..., M, K] with the scale of the past steps; its own amax is noted, and serves where there is no past.

        A NaN or an Inf in t makes all of it NaN and is not remembered.
        """
        history_H = self.amax_OH[OPERANDS.index(operand)]
        amax, past = _amax(t), history_H[1:].amax()
        if self.training:
            history_H[0] = torch.maximum(history_H[0], amax.nan_to_num(0.0, posinf=0.0))
        scale = torch.where(past > 0, past, amax) / cast.fmt.max
        scale = torch.where(scale > 0, scale, 1.0)
        return _with_scale(t, torch.where(amax.isfinite(), scale, torch.nan), cast)

    @torch.no_grad()
    def end_step(self) -> None:
        """Moves every entry on by one step; the oldest is forgotten."""
        self.amax_OH.copy_(self.amax_OH.roll(1, dims=1))
        self.amax_OH[:, 0] = 0


def end_step(model: nn.Module) -> None:
    """To be called after each optimizer step: delayed scales move on by one step. Does nothing for other recipes."""
    for module in model.modules():
        if isinstance(module, AmaxHistory):
            module.end_step()


def unscaled(t: Tensor, cast: OperandFormat) -> ScaledTensor:
    """t [..., M, K] with scale 1.

    What is too large for E5M2, which has Inf, makes all of t NaN, so that a loss scale can back off. E4M3 has none and
    saturates; only an Inf or a NaN in t makes all of it NaN.
    """
    amax = _amax(t)
    fits = amax <= cast.fmt.max if cast.fmt.has_inf else amax.isfinite()
    return _with_scale(t, torch.where(fits, 1.0, torch.nan), cast)


def _amax(t: Tensor) -> Tensor:
    return t.detach().abs().amax().float() if t.numel() else t.new_zeros((), dtype=torch.float32)


def _with_scale(t: Tensor, scale: Tensor, cast: OperandFormat) -> ScaledTensor:
    """t quantised with one given scale; what is larger saturates."""
    *batch, m, k = t.shape
    data = quantize_with_scale(t, scale.reshape(1), cast.fmt.name)
    scales = scale.expand(*batch, min(m, 1), min(k, 1)).contiguous()  # an empty tensor has no block and no scale
    return ScaledTensor(data, scales, (max(m, 1), max(k, 1)))
