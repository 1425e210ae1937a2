"""Decode operands of a tensor core into values and exponents, the form in which its algorithm uses them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octile.formats import BF16, E4M3, E5M2, FP16, FP32, FloatFormat
from octile.kernels.cpu import decode_e4m3
from octile.lab.tensor_core.architectures import Instruction

FORMATS: dict[torch.dtype, FloatFormat] = {f.dtype: f for f in (E4M3, E5M2, FP16, BF16, FP32) if f.dtype is not None}


@dataclass(frozen=True)
class DecodedOperand:
    """A matrix [R, K] of values with their exponents.

    Attributes:
        value: float32; float64 if the instruction's sums have more bits than FP32.
        exponent: int16, ⌊log2 |value|⌋, at least the format's smallest exponent; `ZERO_EXPONENT` for zero.
    """

    value: Tensor
    exponent: Tensor


ZERO_EXPONENT = -4096  # plus any exponent, it is below the exponent of every product


def decode(x: Tensor, instruction: Instruction, scale: Tensor | None = None) -> DecodedOperand:
    """Decode a matrix into values and exponents, with K padded with zeros to whole steps.

    Args:
        x: [R, K] in FP8, FP16, BF16, or FP32, which is truncated to TF32.
        instruction: the instruction that takes the operand.
        scale: float8_e8m0fnu [R, ⌈K/32⌉], multiplied into the values.
    """
    if instruction.via_fp16:
        x = x.half()
    fmt = FORMATS[x.dtype]
    value = decode_e4m3(x) if x.dtype == torch.float8_e4m3fn else x.float()
    bits = value.view(torch.int32)
    if fmt is FP32:
        bits = bits & ~0x1FFF  # TF32 has ten fraction bits
        value = bits.view(torch.float32)
    exponent = ((bits >> 23 & 0xFF) - 127).clamp_(min=1 - fmt.bias).to(torch.int16)
    if instruction.fraction_bits > 13:
        value = value.double()
    if scale is not None:
        per_column = scale.view(torch.uint8).repeat_interleave(32, dim=1)[:, : x.shape[1]]
        scale_value = (per_column.long() - 127 + 1023 << 52).view(torch.float64)
        value = value * scale_value.masked_fill(per_column == 0xFF, torch.nan)  # 2^(encoded − 127); 0xFF is NaN
        exponent += per_column.to(torch.int16) - 127
    exponent.masked_fill_(value == 0, ZERO_EXPONENT)
    padding = -x.shape[1] % (32 if instruction.via_fp16 else instruction.terms)
    value = torch.nn.functional.pad(value, (0, padding))
    exponent = torch.nn.functional.pad(exponent, (0, padding), value=ZERO_EXPONENT)
    if instruction.via_fp16:  # k = 0 1 4 5 8 9 … of every 32, then 2 3 6 7 …
        value, exponent = (t.unflatten(1, (-1, 8, 2, 2)).transpose(2, 3).flatten(1) for t in (value, exponent))
    return DecodedOperand(value, exponent)
