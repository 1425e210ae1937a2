"""Scales that are not computed from the tensor itself: delayed scaling, and no scaling at all.

With delayed scaling a tensor's scale comes from its largest magnitudes (amax) in the last steps.  The amax of this step
is only stored, so quantization needs no pass over the tensor beforehand; an outlier beyond the history saturates.  A
step ends when `end_step` is called; micro-batches and recomputed forward passes of one step raise the same entry.
Source: NVIDIA's FP8 recipe (arXiv 2209.05433), Transformer Engine's `DelayedScaling`.
"""

import torch
from torch import Tensor, nn

from octile.ops.quantize import SMALLEST_SCALE, quantize_with_scale, round_up_to_power_of_2
from octile.recipe import OperandFormat
from octile.scaled import ScaledTensor

OPERANDS = ("x", "w", "dy")


class AmaxHistory(nn.Module):
    """The amax of a layer's operands: [3, 1 + window] float32, with this step in column 0.

    It is written in training mode only, so that a validation in between changes nothing. The buffer is not part of the
    `state_dict`, so a layer's weights load into and from `nn.Linear`; a checkpoint of the model alone has none.
    """

    amax_OH: Tensor

    def __init__(self, window: int, device: torch.device | None = None):
        super().__init__()
        amax_OH = torch.zeros(len(OPERANDS), 1 + window, device=device)
        self.register_buffer("amax_OH", amax_OH, persistent=False)

    @torch.no_grad()
    def quantize(self, t: Tensor, operand: str, operand_format: OperandFormat) -> ScaledTensor:
        """Quantize t [..., M, K] with the scale of the past steps, and store its amax.

        During the format's warm-up, the scale comes from t. A NaN or an Inf in t makes the whole result NaN and is not
        stored.
        """
        history_H = self.amax_OH[OPERANDS.index(operand)]
        amax, past_H = _amax(t), history_H[1 : 1 + operand_format.window]
        if self.training:
            history_H[0] = torch.maximum(history_H[0], amax.nan_to_num(0.0, posinf=0.0))
        known_H = past_H > 0
        is_warm = known_H.all() if operand_format.warm_up == "until_full" else known_H.any()
        source = torch.where(is_warm, past_H.amax(), amax)
        scale = torch.where(source > 0, (source / operand_format.fmt.max).clamp(min=SMALLEST_SCALE), 1.0)
        if operand_format.scale == "power_of_2":
            scale = round_up_to_power_of_2(scale)
        return _quantize_with_scale(t, torch.where(amax.isfinite(), scale, torch.nan), operand_format)

    @torch.no_grad()
    def end_step(self, skip: Tensor | None = None) -> None:
        """Move every entry on by one step, and drop the oldest; change nothing if skip, bool [], is true."""
        moved_OH = self.amax_OH.roll(1, dims=1)
        moved_OH[:, 0] = 0
        self.amax_OH.copy_(moved_OH if skip is None else torch.where(skip, self.amax_OH, moved_OH))


def amax_histories(model: nn.Module) -> dict[str, AmaxHistory]:
    """The amax histories of a model's layers, by their modules' names; none without delayed scaling.

    They are not in the model's `state_dict`: a checkpoint stores `amax_OH` of each.
    """
    return {name: module for name, module in model.named_modules() if isinstance(module, AmaxHistory)}


def end_step(model: nn.Module, skip: Tensor | None = None) -> None:
    """Move delayed scales on by one step: call it after each optimizer step. Does nothing for other recipes.

    Without it the histories stay empty, and scales come from the tensors themselves.

    Args:
        model: the model.
        skip: bool [] on the model's device: if true, the step was skipped and nothing changes.
    """
    for history in amax_histories(model).values():
        history.end_step(skip)


def quantize_unscaled(t: Tensor, operand_format: OperandFormat) -> ScaledTensor:
    """Quantize t [..., M, K] with scale 1.

    In E5M2, which has an Inf, a value beyond the format makes the whole result NaN, so that a loss scale can back off.
    E4M3 has none and saturates; only an Inf or a NaN in t makes the whole result NaN.
    """
    amax = _amax(t)
    fits = amax <= operand_format.fmt.max if operand_format.fmt.has_inf else amax.isfinite()
    return _quantize_with_scale(t, torch.where(fits, 1.0, torch.nan), operand_format)


def _amax(t: Tensor) -> Tensor:
    return t.detach().abs().amax().float() if t.numel() else t.new_zeros((), dtype=torch.float32)


def _quantize_with_scale(t: Tensor, scale: Tensor, operand_format: OperandFormat) -> ScaledTensor:
    """Quantize t with one scale for the whole tensor; values beyond the format saturate."""
    *batch, m, k = t.shape
    data = quantize_with_scale(t, scale.reshape(1), operand_format.fmt.name)
    scales = scale.expand(*batch, min(m, 1), min(k, 1)).contiguous()  # an empty tensor has no block and no scale
    return ScaledTensor(data, scales, (max(m, 1), max(k, 1)))
