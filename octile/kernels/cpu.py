"""Fast conversions of E4M3 and E5M6 on a CPU, where torch's are slow or missing."""

import torch
import torch.nn.functional as F
from torch import Tensor


def decode_e4m3(data: Tensor) -> Tensor:
    """Convert float8_e4m3fn to float32 exactly, several times as fast as `data.float()`.

    Shifted to the top of an FP16 number, the bits of an E4M3 number stand for 2^(e−15) instead of 2^(e−7), so a
    multiplication by 2^8 decodes normal and subnormal numbers alike. (FP32 in place of FP16 would lose subnormal
    numbers on a processor that flushes denormals.) The encoding of NaN becomes 480, which no number does.

    Args:
        data: float8_e4m3fn, any shape.

    Returns:
        a new float32 tensor of data's shape.
    """
    bits = data.view(torch.int8).to(torch.int16)  # sign extension puts the sign where FP16 has it
    bits = bits.bitwise_left_shift_(7).bitwise_and_(~0x4000)
    values = bits.view(torch.float16).to(torch.float32).mul_(2.0**8)
    if values.numel():
        smallest, largest = values.aminmax()
        if largest > 448 or smallest < -448:
            values.masked_fill_(values.abs() > 448, float("nan"))
    return values


def encode_e5m6(x: Tensor) -> Tensor:
    """Round float32 values to packed E5M6, as `formats.pack12(E5M6.encode(x))` does.

    Adding 1.5 · 2^(e+17) to a number of exponent e rounds it, ties to even, to the bits that E5M6 stores; below 2⁻¹⁴
    the spacing is constant. After subtracting it again, the number is one of FP16, whose upper 12 bits are E5M6.

    Args:
        x: float32 [..., n] within ±65024, n even.

    Returns:
        packed E5M6 [..., 3n/2] uint8.
    """
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32).clamp_(min=2.0**-14)
    shift = power.mul_(1.5 * 2.0**17)
    rounded = (x + shift).sub_(shift).copysign_(x)
    halves = rounded.to(torch.float16).view(*x.shape[:-1], x.shape[-1] // 2, 2).view(torch.int32)
    pairs = (halves >> 4 & 0xFFF) | (halves >> 8 & 0xFFF000)
    return pairs.view(torch.uint8)[..., :3].flatten(-2)


def decode_e5m6(packed: Tensor) -> Tensor:
    """Convert packed E5M6 [..., 3n/2] uint8 to float32 [..., n] exactly: E5M6 is the upper 12 bits of FP16."""
    pairs = F.pad(packed.reshape(*packed.shape[:-1], packed.shape[-1] // 3, 3), (0, 1)).view(torch.int32)
    halves = (pairs & 0xFFF) << 4 | (pairs & 0xFFF000) << 8
    return halves.view(torch.float16).flatten(-2).to(torch.float32)
