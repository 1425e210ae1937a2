"""Bit-exact model of NVIDIA tensor cores, which runs on any machine.

Hopper multiplies FP8 numbers exactly, but a step of its tensor core keeps only 13 fraction bits below the largest of 32
products and the accumulator, and truncates the rest. Over a long K the accumulator grows, and with it what is truncated
from every product. The published remedy is promotion: every 128 products the accumulator is added to an FP32 register
outside the tensor core, and starts again at zero.

    tensor_core_matmul           multiply two matrices as the instruction does
    tensor_core_scaled_matmul    multiply two block-scaled matrices as a kernel does
    tensor_core                  a context in which octile's FP8 GEMMs are computed so, forward and backward

    architectures.py    the parameters of each instruction, and the evidence for them
    reference.py        the specification: one step in exact arithmetic
    operand.py          operands as values and exponents
    vectorized.py       whole matrices in plain torch
    native.py           the same in C++

On a CPU the model runs in C++ or, without a compiler, in plain torch; on a GPU in Triton. All give the same bits.
Sources: `octile.lab.tensor_core.architectures`; promotion: DeepSeek-V3 (arXiv 2412.19437) §3.3.2, figure 7.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from octile.lab.tensor_core import native, vectorized
from octile.lab.tensor_core.architectures import NAN, Instruction, find_instruction
from octile.lab.tensor_core.operand import DecodedOperand, decode
from octile.lab.tensor_core.vectorized import Summation
from octile.ops.accumulator import summed_by
from octile.ops.matmul import check_pair
from octile.ops.quantize import check_scale

SCALE_COLUMNS = 32  # elements along K that share a UE8M0 scale


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
    """Compute c + a[M, K] · b[N, K]ᵀ bit for bit as a chain of tensor core instructions along K does.

    Args:
        a, b: FP8 (each operand E4M3 or E5M2), both FP16, both BF16, or both FP32, which is truncated to TF32. K is any
            size; zeros pad the last instruction.
        c: [M, N] in out_dtype, or None for zeros: the initial accumulator; with promotion, the initial FP32 sum.
        arch: "sm_80", "sm_89", "sm_90" (wgmma), "sm_90_mma" (Hopper's mma.sync) or "sm_100".
        promote_every: the number of products after which the accumulator is added to an FP32 sum, rounded to nearest,
            and starts again at zero; None for no promotion.
        out_dtype: float32, or float16 if the instruction has an FP16 accumulator.
        a_scale, b_scale: float8_e8m0fnu [M, ⌈K/32⌉] and [N, ⌈K/32⌉] for the block-scaled instruction of sm_100.

    Returns:
        [M, N] in out_dtype. A NaN is 0x7FFFFFFF (0x7FFF in FP16), as tensor cores write it; a zero is +0.

    Raises:
        ValueError: shapes or devices do not match; arch is unknown; promote_every is not a multiple of a step, or is
            given for an FP16 accumulator or for an instruction that promotes itself.
        TypeError: the architecture has no such instruction; an operand is not a tensor, or promote_every not an int.
    """
    _check(a, b, c, out_dtype, a_scale, b_scale)
    instruction = find_instruction(arch, a.dtype, b.dtype, scaled=a_scale is not None)
    fp16_accumulator = out_dtype == torch.float16
    if fp16_accumulator and instruction.fp16_floor is None:
        raise TypeError(f"{arch}'s {instruction.name} has no FP16 accumulator for operands of {a.dtype}")
    if fp16_accumulator and promote_every is not None:
        raise ValueError(f"promote_every must be None for an FP16 accumulator, not {promote_every}")
    interval = _interval(instruction, promote_every, a.shape[1])
    start = torch.zeros(len(a), len(b), device=a.device) if c is None else c.float() + 0.0  # -0 + 0 is +0
    summation = Summation(
        instruction,
        interval,
        promote=(instruction.promotes_every or promote_every) is not None,
        fp16_accumulator=fp16_accumulator,
    )
    return sum_products(decode(a, instruction, a_scale), decode(b, instruction, b_scale), start, summation).to(
        out_dtype
    )


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
    """Compute a[M, K] · b[N, K]ᵀ of block-scaled FP8 operands bit for bit as octile's kernels do.

    With promotion, after every interval of K (promote_every, or the extent of a block along K if that is smaller),

        sum = fma(accumulator, a_scale · b_scale, sum)

    in FP32, rounded to nearest, with a_scale · b_scale rounded first; the accumulator starts again at zero. The formula
    is the same for 1×128 with 128×128 blocks (1D2D) and for 1×128 with 1×128 blocks (1D1D). Scales that span all of K
    are applied at the end: sum = sum + accumulator in each interval, and finally sum · (a_scale · b_scale).

    Without promotion the accumulator holds the sum over all of K and is multiplied by its scale at the end. Where
    blocks are shorter than K, the accumulator is multiplied by (last scale / next scale) before each next block, each
    of the three operations rounded to FP32, and stays in the tensor core. A Hopper kernel without an FP32 sum would
    work this way.

    Args:
        a, b: float8_e4m3fn, float8_e5m2 or another dtype that the instruction takes, any strides.
        a_scale, b_scale, a_block, b_block: as in `octile.ops.matmul.matmul_nt`.
        arch, promote_every: as in `tensor_core_matmul`; arch may also be an Instruction that no architecture has.

    Returns:
        float32 [M, N].

    Raises:
        ValueError, TypeError: as in `tensor_core_matmul`; a scale does not fit its operand and block; or a block ends
            within a step along K.
    """
    _check_tensors(a=a, a_scale=a_scale, b=b, b_scale=b_scale)
    instruction = find_instruction(arch, a.dtype, b.dtype) if isinstance(arch, str) else arch
    for name, data, scale, block in (("a", a, a_scale, a_block), ("b", b, b_scale, b_block)):
        if data.dtype not in [f.dtype for f in instruction.formats]:
            raise TypeError(f"{name} must be an operand of {instruction.name}, not {data.dtype}")
        if data.dim() != 2 or len(block) != 2:
            raise ValueError(
                f"{name} and its block must have 2 dimensions, not the shapes {tuple(data.shape)} and {tuple(block)}"
            )
        check_scale(name, data, scale, *block)
    check_pair(a, b, torch.float32)
    k = a.shape[1]
    promote = (instruction.promotes_every or promote_every) is not None
    extents = [columns for _, columns in (a_block, b_block) if columns < k]
    interval = math.gcd(*extents, *([_interval(instruction, promote_every, k)] if promote or not extents else []))
    group = instruction.promotes_every or instruction.terms  # products between which a scale cannot change
    if interval % group:
        raise ValueError(
            f"blocks must extend over multiples of {group} along K for {arch}, "
            f"but a has {tuple(a_block)} and b {tuple(b_block)}"
        )
    start = torch.zeros(len(a), len(b), device=a.device)
    if not k:
        return start
    every = interval if extents else k
    scales = (
        _scale_per_interval(a_scale, a_block, len(a), k, every),
        _scale_per_interval(b_scale, b_block, len(b), k, every),
    )
    summation = Summation(instruction, interval, promote, *(scales if extents else (None, None)))
    sums = sum_products(decode(a, instruction), decode(b, instruction), start, summation)
    if extents:
        return sums
    scaled = sums * (scales[0] * scales[1].T)
    scaled.view(torch.int32).masked_fill_(scaled.isnan(), NAN)
    return scaled


@contextmanager
def tensor_core(arch: str = "sm_90", promote_every: int | None = None) -> Iterator[None]:
    """Compute octile's FP8 GEMMs inside the context with `tensor_core_scaled_matmul`, in forward and backward.

    The context affects all four GEMM operators, also in a compiled model and on a GPU. Other GEMMs (layers that are not
    converted, attention, INT8 operands) stay as they are.

    Raises:
        ValueError, TypeError: arch is unknown or has no FP8 instruction; promote_every does not fit it.
    """
    _interval(find_instruction(arch, torch.float8_e4m3fn, torch.float8_e4m3fn), promote_every, 0)

    with summed_by(partial(tensor_core_scaled_matmul, arch=arch, promote_every=promote_every)):
        yield


def sum_products(a: DecodedOperand, b: DecodedOperand, start: Tensor, summation: Summation) -> Tensor:
    """Compute start[M, N] + a[M, K] · b[N, K]ᵀ in float32 with the fastest implementation on this machine."""
    if k := a.value.shape[1]:
        summation = replace(summation, interval=min(summation.interval, k))  # a larger one may not fit in 64 bits
    if not start.is_cuda:
        return native.sum_products(a, b, start, summation)
    if summation.fp16_accumulator or not start.numel() or not k:
        return vectorized.sum_products(a, b, start, summation)
    from octile.kernels.triton import tensor_core as kernel  # a machine without a GPU has no Triton

    out, instruction = start.clone(), summation.instruction
    kernel.launch(
        out,
        (a.value, a.exponent),
        (b.value, b.exponent),
        None if summation.a_scale is None or summation.b_scale is None else (summation.a_scale, summation.b_scale),
        summation.interval,
        summation.promote,
        instruction.terms,
        instruction.fraction_bits,
        instruction.output_bits,
        instruction.floor,
        instruction.truncation == "down",
    )
    return out


def _interval(instruction: Instruction, promote_every: int | None, k: int) -> int:
    """Return the number of products between two promotions; without promotion, all of K in whole steps.

    Raises:
        TypeError: promote_every is not an int.
        ValueError: promote_every does not fit the instruction.
    """
    if promote_every is None:
        return instruction.promotes_every or max(-(-k // instruction.terms), 1) * instruction.terms
    if not isinstance(promote_every, int) or isinstance(promote_every, bool):
        raise TypeError(f"promote_every must be an int or None, not {promote_every!r}")
    if instruction.promotes_every:
        raise ValueError(
            f"promote_every must be None for {instruction.name}, which adds every {instruction.promotes_every} products"
            " in FP32"
        )
    if promote_every < 1 or promote_every % instruction.terms:
        raise ValueError(
            f"promote_every must be a multiple of the {instruction.terms} products a step, not {promote_every}"
        )
    return promote_every


def _scale_per_interval(scale: Tensor, block: Sequence[int], m: int, k: int, interval: int) -> Tensor:
    """Expand scales [⌈M/R⌉, ⌈K/C⌉] to [M, intervals]."""
    starts = torch.arange(0, k, interval, device=scale.device)
    return scale.repeat_interleave(block[0], dim=0)[:m].index_select(1, starts // block[1])


def _check_tensors(**arguments: Tensor) -> None:
    for name, value in arguments.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, not {type(value).__name__}")


def _check(
    a: Tensor, b: Tensor, c: Tensor | None, out_dtype: torch.dtype, a_scale: Tensor | None, b_scale: Tensor | None
) -> None:
    given = {"c": c, "a_scale": a_scale, "b_scale": b_scale}
    _check_tensors(a=a, b=b, **{name: value for name, value in given.items() if value is not None})
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
            raise ValueError(f"a and {name} must be on one device, not on {a.device} and {other.device}")
