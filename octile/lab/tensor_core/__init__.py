"""The tensor core, bit for bit, on any machine: what FP8 training really sums in.

Hopper multiplies FP8 numbers exactly, but a step of its tensor core keeps 13 fraction bits below the largest of 32
products and the running sum, and cuts off the rest. Over a long K the running sum grows, and with it what is cut off
from every product. The published remedy is promotion: every 128 products the sum moves to an FP32 register outside
the tensor core, and begins again at zero.

    tensor_core_matmul    the product of two matrices as the instruction computes it
    product               the product of block-scaled matrices as a kernel computes it
    tensor_core           octile's own products are computed so: a whole model trains and evaluates through it

On a CPU this is C++ (`native`) or, without a compiler, plain torch (`vectorized`); on a GPU Triton. All give the same
bits. `architectures` is the table of what is known and says how it is known, `reference` the specification.
Sources: `octile.lab.tensor_core.architectures`; promotion: DeepSeek-V3 (arXiv 2412.19437) §3.3.2, figure 7.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from octile.lab.tensor_core import native, vectorized
from octile.lab.tensor_core.architectures import NAN, Instruction, find_instruction
from octile.lab.tensor_core.operand import DecodedOperand, decode
from octile.lab.tensor_core.vectorized import Summation
from octile.ops.accumulator import summed_by

SCALE_COLUMNS = 32  # operands along K that share a UE8M0 scale


def tensor_core_matmul(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    arch: str = "sm_90",
    promote_every: int | None = None,
    out_dtype: torch.dtype = torch.float32,
    a_scale: Tensor | None = None,
    b_scale: Tensor | None = None,
) -> Tensor:
    """c + a[M, K] · b[N, K]ᵀ, bit for bit as a chain of tensor core instructions along K computes it.

    Args:
        a, b: FP8 (E4M3 and E5M2, each operand its own), both FP16, both BF16, or both FP32, which is read as TF32. Any
            K: zeros fill the last instruction.
        c: [M, N] in out_dtype, or None for zeros: what the accumulator holds first; with promotion, the FP32 sum.
        arch: "sm_80", "sm_89", "sm_90" (wgmma), "sm_90_mma" (Hopper's mma.sync) or "sm_100".
        promote_every: every so many products the accumulator is added to an FP32 sum, to nearest, and begins again at
            zero; None: it is never.
        out_dtype: float32, or float16 where the instruction has an FP16 accumulator.
        a_scale, b_scale: float8_e8m0fnu [M, ⌈K/32⌉] and [N, ⌈K/32⌉]: sm_100's block-scaled instruction.

    Returns:
        [M, N] in out_dtype. A NaN is 0x7FFFFFFF (0x7FFF), as tensor cores write it; a zero is +0.

    Raises:
        ValueError: shapes or devices do not fit together; arch is unknown; promote_every is no whole number of steps,
            or is given for an FP16 accumulator or an instruction that promotes by itself.
        TypeError: the architecture has no such instruction.
    """
    _check(a, b, c, out_dtype, a_scale, b_scale)
    row = find_instruction(arch, a.dtype, b.dtype, scaled=a_scale is not None)
    fp16_accumulator = out_dtype == torch.float16
    if fp16_accumulator and row.fp16_floor is None:
        raise TypeError(f"{arch}'s {row.name} has no FP16 accumulator for operands of {a.dtype}")
    if fp16_accumulator and promote_every is not None:
        raise ValueError(f"promote_every must be None for an FP16 accumulator, not {promote_every}")
    interval = _interval(row, promote_every, a.shape[1])
    start = torch.zeros(len(a), len(b), device=a.device) if c is None else c.float()
    how = Summation(
        row, interval, promote=(row.promotes_every or promote_every) is not None, fp16_accumulator=fp16_accumulator
    )
    return sum_products(decode(a, row, a_scale), decode(b, row, b_scale), start, how).to(out_dtype)


def tensor_core_scaled_matmul(
    a: Tensor,
    a_scale: Tensor,
    a_block: Sequence[int],
    b: Tensor,
    b_scale: Tensor,
    b_block: Sequence[int],
    arch: str | Instruction = "sm_90",
    promote_every: int | None = 128,
) -> Tensor:
    """a[M, K] · b[N, K]ᵀ of block-scaled FP8 operands, bit for bit as our kernels compute it.

    With promotion, after every interval of K (promote_every, or the blocks' extent along K where that is smaller),

        sum = fma(accumulator, a_scale · b_scale, sum)

    in FP32, to nearest, the product of the scales rounded first; the accumulator begins again at zero. For 1×128 with
    128×128 (1D2D) and 1×128 with 1×128 (1D1D) that is one formula. Scales that hold for all of K are multiplied in at
    the end: sum = sum + accumulator, and then sum · (a_scale · b_scale).

    Without promotion the accumulator is the running sum over all of K, multiplied by its scale at the end. Where blocks
    are shorter than K a scale cannot wait that long: before each next block the accumulator is multiplied by
    (last scale / next scale), each of the three operations rounded to FP32, and stays in the tensor core. That is the
    kernel one would write for Hopper if there were no FP32 sum beside it.

    Args:
        a, b: float8_e4m3fn or float8_e5m2, any strides.
        a_scale, b_scale, a_block, b_block: as in `octile.ops.matmul.matmul_nt`.
        arch, promote_every: as in `tensor_core_matmul`; an Instruction is one that no architecture need have.

    Returns:
        float32 [M, N].

    Raises:
        ValueError, TypeError: as `tensor_core_matmul`; a block ends within a step along K.
    """
    row = find_instruction(arch, a.dtype, b.dtype) if isinstance(arch, str) else arch
    k = a.shape[1]
    promote = (row.promotes_every or promote_every) is not None
    extents = [columns for _, columns in (a_block, b_block) if columns < k]
    interval = math.gcd(*extents, *([_interval(row, promote_every, k)] if promote or not extents else []))
    if interval % _group(row):
        raise ValueError(
            f"blocks must extend over multiples of {_group(row)} along K for {arch}, "
            f"but a has {tuple(a_block)} and b {tuple(b_block)}"
        )
    start = torch.zeros(len(a), len(b), device=a.device)
    if not k:
        return start
    every = interval if extents else k
    scales = _of_intervals(a_scale, a_block, len(a), k, every), _of_intervals(b_scale, b_block, len(b), k, every)
    how = Summation(row, interval, promote, *(scales if extents else (None, None)))
    sums = sum_products(decode(a, row), decode(b, row), start, how)
    return sums if extents else _written(sums * (scales[0] * scales[1].T))


@contextmanager
def tensor_core(arch: str = "sm_90", promote_every: int | None = None) -> Iterator[None]:
    """octile's products of FP8 operands inside are `product`s of this tensor core: a model trains and evaluates on it.

    All four operators are concerned, forward and backward, also in a compiled model and on a GPU. Products that are
    not FP8 (a layer that was not converted, attention, INT8 operands) stay as they are.

    Raises:
        ValueError, TypeError: arch is unknown or multiplies no FP8; promote_every does not fit it.
    """
    _interval(find_instruction(arch, torch.float8_e4m3fn, torch.float8_e4m3fn), promote_every, 0)

    with summed_by(partial(tensor_core_scaled_matmul, arch=arch, promote_every=promote_every)):
        yield


def sum_products(a: DecodedOperand, b: DecodedOperand, start: Tensor, how: Summation) -> Tensor:
    """start[M, N] + a[M, K] · b[N, K]ᵀ in float32 by the fastest form that this machine has."""
    if not start.is_cuda:
        return native.sum_products(a, b, start, how)
    if how.fp16_accumulator or not start.numel() or not a.value.shape[1]:
        return vectorized.sum_products(a, b, start, how)
    from octile.kernels.triton import tensor_core as kernel  # late: a machine without a GPU has no Triton

    out, row = start.clone(), how.instruction
    kernel.launch(
        out,
        (a.value, a.exponent),
        (b.value, b.exponent),
        None if how.a_scale is None or how.b_scale is None else (how.a_scale, how.b_scale),
        how.interval,
        how.promote,
        row.terms,
        row.fraction_bits,
        row.output_bits,
        row.floor,
        row.truncation == "down",
    )
    return out


def _written(x: Tensor) -> Tensor:
    """NaN as GPUs write it."""
    x.view(torch.int32).masked_fill_(x.isnan(), NAN)
    return x


def _group(row: Instruction) -> int:
    """Products that an instruction sums before anything else can happen to the sum."""
    return row.promotes_every or row.terms


def _interval(row: Instruction, promote_every: int | None, k: int) -> int:
    if promote_every is None:
        return row.promotes_every or max(-(-k // row.terms), 1) * row.terms
    if row.promotes_every:
        raise ValueError(
            f"promote_every must be None for {row.name}, which adds every {row.promotes_every} products in FP32"
        )
    if promote_every < 1 or promote_every % row.terms:
        raise ValueError(f"promote_every must be a multiple of the {row.terms} products a step, not {promote_every}")
    return promote_every


def _of_intervals(scale: Tensor, block: Sequence[int], m: int, k: int, interval: int) -> Tensor:
    """[⌈M/R⌉, ⌈K/C⌉] → [M, intervals]."""
    starts = torch.arange(0, k, interval, device=scale.device)
    return scale.repeat_interleave(block[0], dim=0)[:m].index_select(1, starts // block[1])


def _check(
    a: Tensor, b: Tensor, c: Tensor | None, out_dtype: torch.dtype, a_scale: Tensor | None, b_scale: Tensor | None
) -> None:
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"a and b must be [M, K] and [N, K], not {tuple(a.shape)} and {tuple(b.shape)}")
    if out_dtype not in (torch.float32, torch.float16):
        raise TypeError(f"out_dtype must be float32 or float16, not {out_dtype}")
    if c is not None and c.dtype != out_dtype:
        raise TypeError(f"c must be {out_dtype} as the result, not {c.dtype}")
    if c is not None and c.shape != (len(a), len(b)):
        raise ValueError(f"c must be {(len(a), len(b))}, not {tuple(c.shape)}")
    if (a_scale is None) != (b_scale is None):
        raise ValueError("a_scale and b_scale must be given together")
    for name, data, scale in (("a_scale", a, a_scale), ("b_scale", b, b_scale)):
        if scale is None:
            continue
        if scale.dtype != torch.float8_e8m0fnu:
            raise TypeError(f"{name} must be float8_e8m0fnu, not {scale.dtype}")
        if scale.shape != (len(data), -(-data.shape[1] // SCALE_COLUMNS)):
            shape = (len(data), -(-data.shape[1] // SCALE_COLUMNS))
            raise ValueError(f"{name} must be {shape}, not {tuple(scale.shape)}")
    for name, other in (("b", b), ("c", c), ("a_scale", a_scale), ("b_scale", b_scale)):
        if other is not None and other.device != a.device:
            raise ValueError(f"a lies on {a.device} but {name} on {other.device}")
