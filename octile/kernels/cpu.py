"""Quantization to E4M3, GEMMs of it, paged attention, AdamW, and conversions, on a CPU, where torch's are slow.

`cpu.cpp` quantizes and dequantizes as the references in `octile.ops` do, bit for bit but for the sign of a NaN, in one
pass instead of a dozen. Without a C++ compiler these functions are missing, and the references are used
(`octile.kernels.native`).

It multiplies E4M3 operands where the processor multiplies BF16 (AVX512-BF16): it is exact for their values, and twice
as fast as FP32. As in the references, products are summed in FP32; the order of the sums differs. GEMMs whose rows must
not depend on each other are multiplied in FP32, with the products of each result added one after the other.
"""

import ctypes
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.formats import TILE
from octile.kernels import native
from octile.kernels.cuda.gemm.config import Schedule
from octile.kernels.cuda.gemm.request import GemmRequest, Operand
from octile.kernels.memory_layout import new_quantized_transposed, new_scale

SOURCE = Path(__file__).with_name("cpu.cpp")


def count_cores() -> int:
    """The cores that this process may use; all cores where the system does not say, as on macOS."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.cache
def library() -> ctypes.CDLL | None:
    """The functions of `cpu.cpp`; None without a compiler."""
    threads = ("-fopenmp",) if _has_gnu_openmp() else ()  # torch's threads, not another pool
    return native.load(SOURCE, (*native.OPTIONS, *threads), "quantization on the CPU runs")


def _has_gnu_openmp() -> bool:
    """Whether torch has loaded GNU's OpenMP into the process."""
    try:
        return hasattr(ctypes.CDLL(None), "GOMP_parallel")
    except TypeError:  # on Windows a library needs a name
        return False


def can_quantize(fmt: str, *quantized: Tensor) -> bool:
    """Whether the functions below quantize to this format, and read this data."""
    is_e4m3 = all(t.dtype == torch.float8_e4m3fn and t.stride(-1) == 1 for t in quantized)
    return fmt == "e4m3" and is_e4m3 and library() is not None


def quantize(x: Tensor, block_rows: int, block_cols: int, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """Compute `octile.ops.quantize.quantize` to E4M3: x [..., M, K] → data and scale."""
    x = x.float().contiguous()
    data = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = new_scale(x, block_rows, block_cols)
    for x_MK, data_MK, scale_MK in _matrices(block_rows, x, data, scale):
        block = (ctypes.c_int64(block_rows), ctypes.c_int64(block_cols), ctypes.c_bool(power_of_2))
        _library().octile_quantize(_address(x_MK), *_sizes(x_MK), *block, _address(data_MK), _scale(scale_MK))
    return data, scale


def dequantize(data: Tensor, scale: Tensor, block_rows: int, block_cols: int) -> Tensor:
    """Compute `octile.ops.quantize.dequantize` of E4M3 to float32; data [..., M, K] is contiguous along K."""
    values = torch.empty(data.shape, dtype=torch.float32)
    for data_MK, scale_MK, values_MK in _matrices(block_rows, data, scale, values):
        sizes = (ctypes.c_int64(data_MK.stride(0)), *_sizes(data_MK))
        block = ctypes.c_int64(block_rows), ctypes.c_int64(block_cols)
        _library().octile_dequantize(_address(data_MK), *sizes, *block, _scale(scale_MK), _address(values_MK))
    return values


def quantize_columns(x: Tensor, power_of_2: bool, tiles: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute data_t and scale_t of `octile.ops.transpose.quantize_rows_and_columns` in E4M3, from x [M, K]."""
    x = x.float()
    x = x if x.stride(-1) == 1 else x.contiguous()
    return _quantize_columns(x, None, power_of_2, None, tiles)


def requantize_transposed(
    data: Tensor, scale: Tensor, power_of_2: bool, rows: Tensor | None, tiles: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute `octile.ops.transpose.requantize_transposed` in E4M3; data [M, K] is contiguous along K.

    Raises:
        IndexError: a row does not exist.
    """
    return _quantize_columns(data, scale, power_of_2, rows, tiles)


def _quantize_columns(
    source: Tensor, scale: Tensor | None, power_of_2: bool, rows: Tensor | None, tiles: Tensor | None
) -> tuple[Tensor, Tensor]:
    m, k = source.shape
    count = m if rows is None else len(rows)
    rows, tiles = (None if t is None else t.contiguous() for t in (rows, tiles))
    data_t, scale_t = new_quantized_transposed(source.new_empty(()).expand(count, k), torch.float8_e4m3fn, tiles)
    succeeded = _library().octile_quantize_columns(
        _address(source if scale is None else None),
        _address(None if scale is None else source),
        *(ctypes.c_int64(n) for n in (source.stride(0), m, k)),
        _scale(scale_t if scale is None else scale),
        _address(rows),
        ctypes.c_int64(count),
        _address(tiles),
        *(ctypes.c_int64(n) for n in (-(-data_t.shape[1] // TILE[1]), data_t.shape[1])),
        ctypes.c_bool(power_of_2),
        _address(data_t),
        ctypes.c_int64(data_t.stride(0)),
        _scale(scale_t),
    )
    if not succeeded:
        raise IndexError(f"rows and tiles must name rows from 0 to {m - 1}")
    return data_t, scale_t


def can_multiply() -> bool:
    """Whether `multiply` was compiled, and the processor has its instructions."""
    return library() is not None and _library().octile_can_multiply() == 1


def why_not_multiply(request: GemmRequest) -> str:
    """Return why `multiply` does not serve a request; "" if it does."""
    for x in _along_k(request):
        if x.data.dtype != torch.float8_e4m3fn:
            return f"an operand is {x.data.dtype}, not float8_e4m3fn"
        if x.block[1] != TILE[1]:
            return f"a block has {x.block[1]} values along K, not {TILE[1]}"
    return "" if can_multiply() else "no compiled kernel: the processor does not multiply BF16, or there is no compiler"


def multiply(request: GemmRequest) -> Tensor:
    """Compute a GEMM request that was checked. Offsets do not decrease, and groups along K begin at multiples of 128.

    Returns:
        request.out, or a new tensor in request.out_dtype.
    """
    out = request.out
    if out is not None and out.dtype == torch.float32 and out.stride(-1) == 1:
        _multiply_to(out, request, request.accumulate)
        return out
    result = torch.empty(request.out_shape(), dtype=torch.float32)
    if out is not None and request.schedule is Schedule.GROUPED:
        result.copy_(out)  # rows after the last group stay
    _multiply_to(result, request, False)
    if out is None:
        return result.to(request.out_dtype)
    return out.copy_(out.float() + result if request.accumulate else result)


def _multiply_to(out: Tensor, request: GemmRequest, accumulate: bool) -> None:
    (a, b), offs = _along_k(request), request.sizes
    (m, k), n = a.data.shape, b.data.shape[-2]
    if offs is not None and request.schedule is Schedule.GROUPED and request.zero_rest:
        out[int(offs[-1]) if len(offs) else 0 :] = 0.0
    _library().octile_gemm(
        *(_operand(x) for x in (a, b)),
        *(ctypes.c_int64(size) for size in (m, n, k)),
        _address(None if offs is None else offs.contiguous()),
        ctypes.c_int64(-1 if offs is None else len(offs)),
        ctypes.c_bool(request.schedule is Schedule.ALONG_K),
        _address(out),
        ctypes.c_int64(out.stride(-2)),
        ctypes.c_bool(accumulate),
    )


def _along_k(request: GemmRequest) -> tuple[Operand, Operand]:
    """The operands with the contracted dimension last."""
    return (request.a.mT, request.b.mT) if request.schedule is Schedule.ALONG_K else (request.a, request.b)


class _Matrices(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("matrix_stride", ctypes.c_int64), ("row_stride", ctypes.c_int64))


def multiply_rows(a: Tensor, b: Tensor) -> Tensor:
    """Compute `octile.ops.row_invariant.row_invariant_matmul_nt` of a [B, M, K] and b [B, N, K] → [B, M, N] float32."""
    a, b = (x if x.stride(2) == 1 else x.contiguous() for x in (a.float(), b.float()))
    out = a.new_empty(*a.shape[:2], b.shape[1])
    operands = (ctypes.byref(_Matrices(x.data_ptr(), *x.stride()[:2])) for x in (a, b))
    sizes = a.shape[0], a.shape[1], b.shape[1], a.shape[2]
    _library().octile_multiply_rows(*operands, *map(ctypes.c_int64, sizes), _address(out))
    return out


def can_update(*moments: Tensor) -> bool:
    """Whether `adamw` updates moments of these dtypes."""
    dtypes = {moment.dtype for moment in moments}
    return len(dtypes) == 1 and dtypes <= {torch.float32, torch.bfloat16} and library() is not None


class _Cache(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("row_bytes", "page", "latent", "rope")),
        ("format", ctypes.c_int32),
    )


CACHE_FORMATS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}


def can_attend(cache: Tensor) -> bool:
    """Whether `paged_attention` reads a cache of this dtype."""
    return cache.dtype in CACHE_FORMATS and library() is not None


def paged_attention(
    q: Tensor,
    cache: Tensor,
    pages: Tensor,
    lengths: Tensor,
    latent_dim: int,
    scale: float,
    lse: Tensor | None = None,
) -> Tensor:
    """Compute `octile.ops.paged_attention.paged_attention`, whose arguments were checked: o [R, H, C] float32.

    The logarithm of each softmax's denominator is written to lse [R, H] float32, contiguous, if it is given.
    """
    rows, heads, width = q.shape
    q, lengths = q.float().contiguous(), lengths.contiguous()
    o = q.new_empty(rows, heads, latent_dim)
    row_bytes, rope_dim = cache.stride(1) * cache.itemsize, width - latent_dim
    described = _Cache(cache.data_ptr(), row_bytes, cache.shape[1], latent_dim, rope_dim, CACHE_FORMATS[cache.dtype])
    _library().octile_paged_attention(
        ctypes.byref(described),
        _address(q),
        *(ctypes.c_int64(n) for n in (rows, heads)),
        _address(pages),
        ctypes.c_int64(pages.stride(0)),
        _address(lengths),
        ctypes.c_float(scale),
        ctypes.c_int64(-(-torch.get_num_threads() // max(rows, 1))),
        _address(o),
        _address(lse),
    )
    return o


class AdamWSettings(ctypes.Structure):
    """The factors of an AdamW step (`octile.ops.adamw`), in float32; rest1 is 1 − β₁ and rest2 is 1 − β₂."""

    _fields_ = tuple(
        (name, ctypes.c_float)
        for name in ("step_size", "root", "decay", "rest1", "rest2", "beta2", "eps", "gradient_scale")
    )


def adamw(weight: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, settings: AdamWSettings) -> None:
    """Update one weight and its moments in place, as `octile.ops.adamw.adamw` does."""
    gradient = gradient.float().contiguous()
    is_bf16 = ctypes.c_bool(exp_avg.dtype == torch.bfloat16)
    addresses = (_address(t) for t in (weight, gradient, exp_avg, exp_avg_sq))
    _library().octile_adamw(*addresses, is_bf16, ctypes.c_int64(weight.numel()), ctypes.byref(settings))


class _Scale(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("row_stride", ctypes.c_int64), ("column_stride", ctypes.c_int64))


class _Operand(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("row_stride", ctypes.c_int64),
        ("k_stride", ctypes.c_int64),
        ("group_stride", ctypes.c_int64),
        ("scale", _Scale),
        ("scale_group_stride", ctypes.c_int64),
        ("block_rows", ctypes.c_int64),
    )


def _operand(x: Operand) -> object:
    """An operand [rows, K] or [G, rows, K]."""
    groups, *strides = (0, *x.data.stride())[-3:]
    scale_groups, *scale_strides = (0, *x.scale.stride())[-3:]
    scale = _Scale(x.scale.data_ptr(), *scale_strides)
    return ctypes.byref(_Operand(x.data.data_ptr(), *strides, groups, scale, scale_groups, x.block[0]))


def _scale(scale: Tensor) -> object:
    return ctypes.byref(_Scale(scale.data_ptr(), *scale.stride()))


def _address(t: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if t is None else t.data_ptr())


def _sizes(matrix: Tensor) -> tuple[ctypes.c_int64, ...]:
    return tuple(map(ctypes.c_int64, matrix.shape))


def _matrices(block_rows: int, *batches: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The matrices of tensors [..., M, K], as views; contiguous matrices of whole blocks are one matrix."""
    first = batches[0]
    if first.dim() == 2:
        yield batches
    elif first.shape[-2] % block_rows == 0 and all(t.is_contiguous() for t in batches):
        yield tuple(t.flatten(0, -2) for t in batches)
    else:
        for parts in zip(*(t.unbind() for t in batches), strict=True):
            yield from _matrices(block_rows, *parts)


def _library() -> ctypes.CDLL:
    found = library()
    assert found is not None  # `can_quantize` was asked
    return found


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
