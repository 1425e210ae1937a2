"""Queries and keys of the lightning indexer: rotated by their positions and by the Hadamard matrix, then quantized.

    first R channels    (x₀, x₁) → (x₀ · cos − x₁ · sin, x₁ · cos + x₀ · sin), of channels i and i + R/2
    all E channels      x · H / √E, H the Hadamard matrix of Sylvester's construction
    E4M3                with one power-of-two scale for the E channels of a head

In FP32, each product and sum rounded. The Hadamard rotation, the same of queries and keys, changes no product of them,
and spreads outliers over all channels before they are quantized. Its sums have one order, so that the bits of a row
depend on no other row.

Source: DeepSeek-V3.2-Exp §1 and inference/model.py (https://github.com/deepseek-ai/DeepSeek-V3.2-Exp), with the pairs
that the published weights need, as in transformers' `deepseek_v32`. GLM-5's pairs are interleaved: channels 2i and
2i + 1, as in transformers' `glm_moe_dsa`.
Shapes: B batch, S positions, H heads, E channels, R rotary channels.
"""

import torch
from torch import Tensor

from octile.formats import TILE
from octile.ops.operator import operator
from octile.ops.quantize import check_device, check_input_dtype, quantize

MAX_CHANNELS = TILE[1]  # that share a scale


@operator()
def index_rows(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate and quantize queries or keys.

    Args:
        x: [B, S, H, E], float32, bfloat16 or float16; E a power of two up to 128, channels contiguous.
        cos, sin: float32 [S, R/2], contiguous, R at most E.
        interleaved: whether a pair is of adjacent channels.

    Returns:
        data [B, S, H, E] float8_e4m3fn and scale [B, S, H] float32, contiguous. A NaN or an Inf makes its row NaN.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes, strides or devices do not fit together, or E is not such a power of two.
    """
    _check(x, cos, sin)
    data, scale = quantize(hadamard(rotate_first(x, cos, sin, interleaved)), *TILE, "e4m3", True)
    return data, scale[..., 0].contiguous()


@index_rows.register_fake
def _(x, cos, sin, interleaved=False):
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(x.shape[:3], dtype=torch.float32)


@index_rows.register_kernel("cuda")
def _(x, cos, sin, interleaved=False):
    from octile.kernels.triton import index_rows as kernel  # late: a machine without a GPU has no Triton

    _check(x, cos, sin)
    return kernel.launch(x, cos, sin, interleaved)


def rotate_first(x_SHE: Tensor, cos_SR: Tensor, sin_SR: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the pairs of the first R channels of x [..., S, H, E]; float32. With −sin the rotation is reversed."""
    cos_S1R, sin_S1R, width = cos_SR[:, None], sin_SR[:, None], 2 * cos_SR.shape[1]
    pairs, rest = x_SHE.float().split([width, x_SHE.shape[-1] - width], dim=-1)
    a, b = pairs.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else pairs.chunk(2, dim=-1)
    rotated = a * cos_S1R - b * sin_S1R, b * cos_S1R + a * sin_S1R
    return torch.cat((torch.stack(rotated, dim=-1).flatten(-2), rest) if interleaved else (*rotated, rest), dim=-1)


def hadamard(x: Tensor) -> Tensor:
    """Multiply rows [..., E] by the Hadamard matrix over √E, which is orthogonal and symmetric; E a power of two."""
    width, step = x.shape[-1], 1
    while step < width:
        a, b = x.unflatten(-1, (-1, 2, step)).unbind(-2)
        x, step = torch.stack((a + b, a - b), dim=-2).flatten(-3), 2 * step
    return x * width**-0.5


def _check(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_input_dtype("x", x)
    if x.dim() != 4:
        raise ValueError(f"x must be [B, S, H, E], not {tuple(x.shape)}")
    width = x.shape[3]
    if width & (width - 1) or not 2 <= width <= MAX_CHANNELS:
        raise ValueError(f"x must have a power of two from 2 to {MAX_CHANNELS} channels, not {width}")
    if x.stride(3) != 1:
        raise ValueError(f"channels of x must be contiguous, not have strides {x.stride()}")
    for name, t in (("cos", cos), ("sin", sin)):
        if t.dtype != torch.float32:
            raise TypeError(f"{name} must be float32, not {t.dtype}")
        if t.dim() != 2 or t.shape[0] != x.shape[1] or 2 * t.shape[1] > width or not t.is_contiguous():
            raise ValueError(
                f"{name} must be ({x.shape[1]}, R/2), contiguous, R at most {width}, "
                f"not {tuple(t.shape)} with strides {t.stride()}"
            )
        check_device("x", x, name, t)
    if sin.shape != cos.shape:
        raise ValueError(f"sin must be {tuple(cos.shape)} as cos, not {tuple(sin.shape)}")
