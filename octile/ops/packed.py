"""The product of operands whose scales are powers of two, packed: a[M, K] · b[N, K]ᵀ in Blackwell's own format.

The tensor cores of sm_100 multiply MXFP8 by themselves: E4M3 with a UE8M0 scale every 32 along K. Scales that stand for
128 values are such scales written four times, so nothing is rounded. That scales are powers of two cannot be seen from
FP32 ones without reading them; packed ones are by construction, so the path is chosen by the type of the scales.

torch ≥ 2.11 has no 1×128 product with FP32 scales on sm_100 (cuBLASLt offers it on sm_90 only), but it has this one:
`torch.nn.functional.scaled_mm` with BlockWise1x32 scales in 128×4 tiles. It is called on sm_100 only, and **has not
been run on that chip**; what surrounds the call is tested on a CPU. Elsewhere the scales are unpacked and `matmul_nt`
does the work.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.ops.matmul import OUT_DTYPES, matmul_nt
from octile.ops.operator import operator
from octile.ops.scale_layouts import PER_INT, tile_128x4, unpack_exponents, unpack_ue8m0

MX_BLOCK = 32
SIDE = 16  # cuBLASLt wants N and K in multiples of 16 bytes; blocks of 32 want 32 of K


@operator()
def packed_matmul_nt(
    a: Tensor, a_scale: Tensor, a_cols: int, b: Tensor, b_scale: Tensor, b_cols: int, out_dtype: torch.dtype
) -> Tensor:
    """a[M, K] · b[N, K]ᵀ → [M, N].

    Args:
        a, b: float8_e4m3fn, any strides.
        a_scale, b_scale: int32 [M, ⌈⌈K/cols⌉/4⌉] and [N, …], as `scale_layouts.pack_ue8m0` gives them.
        a_cols, b_cols: how many values along K a scale stands for, each row by itself: 32 or 128.
        out_dtype: bfloat16 or float32.

    Raises:
        TypeError, ValueError: as `matmul_nt`.
    """
    _check(a, a_scale, a_cols, b, b_scale, b_cols, out_dtype)
    return _unpacked(a, a_scale, a_cols, b, b_scale, b_cols, out_dtype)


@packed_matmul_nt.register_fake
def _(a, a_scale, a_cols, b, b_scale, b_cols, out_dtype):
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


@packed_matmul_nt.register_kernel("cuda")
def _(a, a_scale, a_cols, b, b_scale, b_cols, out_dtype):
    _check(a, a_scale, a_cols, b, b_scale, b_cols, out_dtype)
    if torch.cuda.get_device_capability(a.device) == (10, 0) and 0 not in (*a.shape, *b.shape):
        return mx_product(a, a_scale, a_cols, b, b_scale, b_cols, out_dtype)
    return _unpacked(a, a_scale, a_cols, b, b_scale, b_cols, out_dtype)


def mx_product(a, a_scale, a_cols, b, b_scale, b_cols, out_dtype) -> Tensor:
    """The product on sm_100, by torch's MXFP8 one; not yet run there. M, N and K are at least 1."""
    a_data, a_tiles = mx_operand(a, a_scale, a_cols)
    b_data, b_tiles = mx_operand(b, b_scale, b_cols)
    scaling, swizzle = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    out = F.scaled_mm(
        a_data, b_data.mT, a_tiles, scaling, b_tiles, scaling, swizzle, swizzle, output_dtype=out_dtype
    )  # fmt: skip
    return out[: a.shape[0], : b.shape[0]].contiguous()


def mx_operand(data: Tensor, scale: Tensor, cols: int) -> tuple[Tensor, Tensor]:
    """An operand as `scaled_mm` reads it: rows and columns filled up with zeros, one scale every 32 in 128×4 tiles."""
    mn, k = data.shape
    codes = unpack_exponents(scale, -(-k // cols)).repeat_interleave(cols // MX_BLOCK, dim=1)
    padded = F.pad(data.view(torch.uint8), (0, -k % MX_BLOCK, 0, -mn % SIDE)).view(data.dtype)
    rows, blocks = padded.shape[0], padded.shape[1] // MX_BLOCK
    codes = F.pad(codes[:, :blocks], (0, 0, 0, rows - mn))
    return padded.contiguous(), tile_128x4(codes).view(torch.float8_e8m0fnu)


def _unpacked(a, a_scale, a_cols, b, b_scale, b_cols, out_dtype) -> Tensor:
    a_scale = unpack_ue8m0(a_scale, -(-a.shape[1] // a_cols))
    b_scale = unpack_ue8m0(b_scale, -(-b.shape[1] // b_cols))
    return matmul_nt(a, a_scale, (1, a_cols), b, b_scale, (1, b_cols), out_dtype)


def _check(a, a_scale, a_cols, b, b_scale, b_cols, out_dtype) -> None:
    for name, data, scale, cols in (("a", a, a_scale, a_cols), ("b", b, b_scale, b_cols)):
        if data.dtype != torch.float8_e4m3fn:
            raise TypeError(f"{name} must be float8_e4m3fn, not {data.dtype}")
        if scale.dtype != torch.int32:
            raise TypeError(f"{name}'s scale must be int32, four UE8M0 codes each, not {scale.dtype}")
        if data.dim() != 2:
            raise ValueError(f"{name} must have 2 dimensions, not the shape {tuple(data.shape)}")
        if cols not in (MX_BLOCK, 128):
            raise ValueError(f"{name}_cols must be 32 or 128, not {cols}")
        shape = (data.shape[0], -(-data.shape[1] // (cols * PER_INT)))
        if scale.shape != shape:
            raise ValueError(f"{name}'s scale must be {shape} for {tuple(data.shape)}, not {tuple(scale.shape)}")
        if scale.device != data.device:
            raise ValueError(f"{name} lies on {data.device} but its scale on {scale.device}")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"a and b must agree in K: a is {tuple(a.shape)}, b is {tuple(b.shape)}")
    if a.device != b.device:
        raise ValueError(f"a lies on {a.device} but b on {b.device}")
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype must be bfloat16 or float32, not {out_dtype}")
