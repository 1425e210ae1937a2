"""The one cast that torch does slowly on a CPU, done with exponent arithmetic."""

import torch
from torch import Tensor


def decode_e4m3(data: Tensor) -> Tensor:
    """float8_e4m3fn to float32, exactly, several times as fast as `data.float()`.

    Moved to the top of an FP16, the four exponent bits read 2^(e−15) where 2^(e−7) is meant, so one product with 2^8
    decodes normal and subnormal numbers alike. (As FP32 they would read right as well, but a processor that is told to
    flush denormals would lose the subnormal ones.) The code for NaN comes out as 480, which no number does.
    """
    bits = data.view(torch.int8).to(torch.int16)  # sign extension puts the sign where FP16 has it
    bits = bits.bitwise_left_shift_(7).bitwise_and_(~0x4000)
    values = bits.view(torch.float16).to(torch.float32).mul_(2.0**8)
    if values.numel():
        smallest, largest = values.aminmax()
        if largest > 448 or smallest < -448:
            values.masked_fill_(values.abs() > 448, float("nan"))
    return values
