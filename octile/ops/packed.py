"""GEMM of operands with packed power-of-two scales, a[M, K] · b[N, K]ᵀ, in Blackwell's MXFP8 format.

The tensor cores of sm_100 multiply MXFP8: E4M3 with a UE8M0 scale every 32 along K. A scale of 128 values is written as
four equal scales of 32, so nothing is rounded. The dtype of the scales chooses this path: packed scales are powers of
two, while FP32 scales would have to be read to know.

torch ≥ 2.11 has no GEMM with FP32 scales of 1×128 on sm_100 (cuBLASLt has it on sm_90 only), but it has MXFP8:
`torch.nn.functional.scaled_mm` with BlockWise1x32 scales in 128×4 tiles. It is called on sm_100 only, and **has not
been run on that chip**; the code around the call is tested on a CPU. On other devices the scales are unpacked and
`matmul_nt` is called.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.ops.matmul import OUT_DTYPES, matmul_nt
from octile.ops.operator import operator
from octile.ops.scale_layouts import PER_INT, tile_128x4, unpack_exponents, unpack_ue8m0

MX_BLOCK = 32
ROWS = 16  # cuBLASLt needs a multiple of 16 rows; K is padded to a multiple of MX_BLOCK


@operator()
def packed_matmul_nt(
    a: Tensor, a_scale: Tensor, a_cols: int, b: Tensor, b_scale: Tensor, b_cols: int, out_dtype: torch.dtype
) -> Tensor:
    """Multiply a[M, K] · b[N, K]ᵀ → [M, N], with packed power-of-two scales.

    Args:
        a, b: float8_e4m3fn, any strides.
        a_scale, b_scale: int32 [M, ⌈⌈K/cols⌉/4⌉] and [N, …], as `scale_layouts.pack_ue8m0` returns them.
        a_cols, b_cols: columns of a block of one row, 32 or 128.
        out_dtype: bfloat16 or float32.

    Raises:
        TypeError, ValueError: as for `matmul_nt`.
    """
    _check(a, a_scale, a_cols, b, b_scale, b_cols, out_dtype)
    return _unpacked(a, a_scale, a_cols, b, b_scale, b_cols, out_dtype)


@packed_matmul_nt.register_fake
def _(a, a_scale, a_cols, b, b_scale, b_cols, out_dtype):
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)


@packed_matmul_nt.register_flops
def _(a, a_scale, a_cols, b, b_scale, b_cols, out_dtype):
    return 2 * a.numel() * b.shape[0]


@packed_matmul_nt.register_kernel("cuda")
def _(a, a_scale, a_cols, b, b_scale, b_cols, out_dtype):
    _check(a, a_scale, a_cols, b, b_scale, b_cols, out_dtype)
    if torch.cuda.get_device_capability(a.device) == (10, 0) and 0 not in (*a.shape, *b.shape):
        return mx_matmul(a, a_scale, a_cols, b, b_scale, b_cols, out_dtype)
    return _unpacked(a, a_scale, a_cols, b, b_scale, b_cols, out_dtype)


def mx_matmul(a, a_scale, a_cols, b, b_scale, b_cols, out_dtype) -> Tensor:
    """Multiply on sm_100 with torch's MXFP8 GEMM, which has not been run there yet. M, N and K are at least 1."""
    a_data, a_tiles = mx_operand(a, a_scale, a_cols)
    b_data, b_tiles = mx_operand(b, b_scale, b_cols)
    scaling, swizzle = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    out = F.scaled_mm(
        a_data, b_data.mT, a_tiles, scaling, b_tiles, scaling, swizzle, swizzle, output_dtype=out_dtype
    )  # fmt: skip
    return out[: a.shape[0], : b.shape[0]].contiguous()


def mx_operand(data: Tensor, scale: Tensor, cols: int) -> tuple[Tensor, Tensor]:
    """Return an operand for `scaled_mm`: data padded with zeros, and one scale every 32 along K in 128×4 tiles."""
    mn, k = data.shape
    exponents = unpack_exponents(scale, -(-k // cols)).repeat_interleave(cols // MX_BLOCK, dim=1)
    padded = F.pad(data.view(torch.uint8), (0, -k % MX_BLOCK, 0, -mn % ROWS)).view(data.dtype)
    rows, blocks = padded.shape[0], padded.shape[1] // MX_BLOCK
    exponents = F.pad(exponents[:, :blocks], (0, 0, 0, rows - mn))
    return padded.contiguous(), tile_128x4(exponents).view(torch.float8_e8m0fnu)


def _unpacked(a, a_scale, a_cols, b, b_scale, b_cols, out_dtype) -> Tensor:
    a_scale = unpack_ue8m0(a_scale, -(-a.shape[1] // a_cols))
    b_scale = unpack_ue8m0(b_scale, -(-b.shape[1] // b_cols))
    return matmul_nt(a, a_scale, (1, a_cols), b, b_scale, (1, b_cols), out_dtype)


def _check(a, a_scale, a_cols, b, b_scale, b_cols, out_dtype) -> None:
    for name, data, scale, cols in (("a", a, a_scale, a_cols), ("b", b, b_scale, b_cols)):
        if data.dtype != torch.float8_e4m3fn:
            raise TypeError(f"{name} must be float8_e4m3fn, not {data.dtype}")
        if scale.dtype != torch.int32:
            raise TypeError(f"{name}'s scale must be int32, four UE8M0 exponents each, not {scale.dtype}")
        if data.dim() != 2:
            raise ValueError(f"{name} must have 2 dimensions, not the shape {tuple(data.shape)}")
        if cols not in (MX_BLOCK, 128):
            raise ValueError(f"{name}_cols must be 32 or 128, not {cols}")
        shape = (data.shape[0], -(-data.shape[1] // (cols * PER_INT)))
        if scale.shape != shape:
            raise ValueError(f"{name}'s scale must be {shape} for {tuple(data.shape)}, not {tuple(scale.shape)}")
        if scale.device != data.device:
            raise ValueError(f"{name} is on {data.device} but its scale on {scale.device}")
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"a and b must agree in K: a is {tuple(a.shape)}, b is {tuple(b.shape)}")
    if a.device != b.device:
        raise ValueError(f"a is on {a.device} but b on {b.device}")
    if out_dtype not in OUT_DTYPES:
        raise TypeError(f"out_dtype must be bfloat16 or float32, not {out_dtype}")
