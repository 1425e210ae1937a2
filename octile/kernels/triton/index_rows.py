# mypy: allow-untyped-defs
"""Queries and keys of the indexer, rotated and quantized, bit for bit as `octile.ops.index_rows` specifies."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton.fp8_bits import as_encoded, quantize_constants
from octile.kernels.triton.launch_config import EXACT, INDEX_ROWS
from octile.kernels.triton.scaling import divide, magnitude, round_to_format, scale_from_amax


def launch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate and quantize x [B, S, H, E]: data of its shape, and scales [B, S, H]."""
    b, s, h, e = x.shape
    data = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(x.shape[:3], dtype=torch.float32, device=x.device)
    if data.numel():
        with torch.cuda.device_of(x):
            rotate_and_quantize[(b * s * h,)](
                x, cos, sin, as_encoded(data), scale, s, h, *x.stride()[:3], E=e, LOG2=e.bit_length() - 1,
                HALF=cos.shape[1], INTERLEAVED=interleaved, FACTOR=e**-0.5,
                **quantize_constants(torch.float8_e4m3fn), **INDEX_ROWS, **EXACT,
            )  # fmt: skip
    return data, scale


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""
    x, cos = cases.empty(1, 256, 64, 128), cases.empty(256, 32, dtype=cases.FP32)
    return {
        "rows of the indexer": lambda: launch(x, cos, cos),
        "rows of GLM-5's indexer": lambda: launch(x, cos, cos, True),
    }


@triton.jit(do_not_specialize=["S", "x_batch"])  # they depend on the rows of a step
def rotate_and_quantize(
    x, cos, sin, data, scale, S, H, x_batch, x_position, x_head,
    E: tl.constexpr, LOG2: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, FACTOR: tl.constexpr,
    INVERSE: tl.constexpr, REST: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """A program computes the row of one head."""
    row = tl.program_id(0).to(tl.int64)
    head, position, batch = row % H, row // H % S, row // H // S
    c = tl.arange(0, E)
    row_start = x + batch * x_batch + position * x_position + head * x_head
    value = tl.load(row_start + c).to(tl.float32)
    is_rotary, is_first = c < 2 * HALF, c % 2 == 0 if INTERLEAVED else c < HALF
    partner = c ^ 1 if INTERLEAVED else tl.where(is_first, c + HALF, c - HALF)
    other = tl.load(row_start + partner, mask=is_rotary, other=0.0).to(tl.float32)
    pair = position * HALF + (c // 2 if INTERLEAVED else tl.where(is_first, c, c - HALF))
    cosine = tl.load(cos + pair, mask=is_rotary, other=0.0)
    sine = tl.load(sin + pair, mask=is_rotary, other=0.0)
    rotated = value * cosine + tl.where(is_first, -other, other) * sine
    value = tl.where(is_rotary, rotated, value)
    for i in tl.static_range(LOG2):
        pairs = tl.permute(tl.reshape(value, [E // (2 << i), 2, 1 << i]), [0, 2, 1])
        a, b = tl.split(pairs)
        value = tl.reshape(tl.permute(tl.join(a + b, a - b), [0, 2, 1]), [E])
    value = value * FACTOR
    row_scale = scale_from_amax(tl.max(magnitude(value), axis=0), INVERSE, REST, True)
    encoded = round_to_format(divide(value, row_scale, True), data.dtype.element_ty, MANTISSA, BIAS)
    tl.store(data + row * E + c, encoded)
    tl.store(scale + row, row_scale)
