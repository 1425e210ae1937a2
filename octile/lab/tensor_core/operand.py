"""Operands of a tensor core as values and exponents, which is how its algorithm sees them."""

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
        value: float32, or float64 where the instruction keeps more bits of a sum than FP32 has.
        exponent: int16, ⌊log2 |value|⌋ or the format's smallest exponent if that is larger; ZERO_EXPONENT for zero.
    """

    value: Tensor
    exponent: Tensor


ZERO_EXPONENT = -4096  # below the exponent of any product, also when added to another exponent


def decode(x: Tensor, row: Instruction, scale: Tensor | None = None) -> DecodedOperand:
    """[R, K] FP8, FP16, BF16 or FP32 (cut to TF32) → DecodedOperand, K padded with zeros to whole steps.

    Args:
        scale: float8_e8m0fnu [R, ⌈K/32⌉], multiplied into the values.
    """
    if row.via_fp16:
        x = x.half()
    fmt = FORMATS[x.dtype]
    value = decode_e4m3(x) if x.dtype == torch.float8_e4m3fn else x.float()
    bits = value.view(torch.int32)
    if fmt is FP32:
        bits = bits & ~0x1FFF  # TF32: an FP32 with ten fraction bits
        value = bits.view(torch.float32)
    exponent = ((bits >> 23 & 0xFF) - 127).clamp_(min=1 - fmt.bias).to(torch.int16)
    if row.fraction_bits > 13:
        value = value.double()
    if scale is not None:
        per_column = scale.view(torch.uint8).repeat_interleave(32, dim=1)[:, : x.shape[1]]
        value = value * per_column_value(per_column)
        exponent += per_column.to(torch.int16) - 127
    exponent.masked_fill_(value == 0, ZERO_EXPONENT)
    return _in_steps(DecodedOperand(value, exponent), 32 if row.via_fp16 else row.terms, row.via_fp16)


def per_column_value(codes: Tensor) -> Tensor:
    """2^(code − 127) of UE8M0 codes, float64; the last code is NaN."""
    value = (codes.long() - 127 + 1023 << 52).view(torch.float64)
    return value.masked_fill(codes == 0xFF, torch.nan)


def _in_steps(x: DecodedOperand, group: int, pairs: bool) -> DecodedOperand:
    missing = -x.value.shape[1] % group
    value = torch.nn.functional.pad(x.value, (0, missing))
    exponent = torch.nn.functional.pad(x.exponent, (0, missing), value=ZERO_EXPONENT)
    if pairs:  # k = 0 1 4 5 8 9 … of every 32, then 2 3 6 7 …
        value, exponent = (t.unflatten(1, (-1, 8, 2, 2)).transpose(2, 3).flatten(1) for t in (value, exponent))
    return DecodedOperand(value, exponent)
