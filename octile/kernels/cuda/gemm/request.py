"""The products that Hopper's kernel makes, with the signatures of those in Triton.

It takes 8-bit floats with scales of 1×128, both or one beside 128×128, or one scale each; `why_unsupported` says why
it does not. Sizes of groups are read on the device, so that every product can be captured in a CUDA graph; only the
first call with new shapes compiles and loads a kernel, which cannot.
"""

import functools
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from octile.kernels.cuda.gemm.config import BLOCK_K, SCALE_KINDS, Scales, Schedule
from octile.kernels.cuda.gemm.launch_cache import Look
from octile.kernels.cuda.gemm.launch_plan import GemmRequest

Block = Sequence[int]
MAX_GROUPS = 1024
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def why_unsupported(a: Tensor, a_block: Block, b: Tensor, b_block: Block, groups: int | None = None) -> str | None:
    """Why these kernels do not make a product a[…, M, K] · b[…, N, K]ᵀ; None: they do.

    Args:
        a_block, b_block: (rows, columns) that share a scale.
        groups: where rows are grouped or masked.
    """
    return _why_unsupported(a.device, a.dtype, b.dtype, *a_block, *b_block, *a.shape[-2:], b.shape[-2], groups, False)


def why_unsupported_wgrad(dy: Tensor, dy_block: Block, x: Tensor, x_block: Block, groups: int) -> str | None:
    """The same for `wgrad`, whose operands are dyᵀ and xᵀ."""
    a_block, b_block = dy_block[::-1], x_block[::-1]
    return _why_unsupported(
        x.device, dy.dtype, x.dtype, *a_block, *b_block, dy.shape[1], dy.shape[0], x.shape[1], groups, True
    )


@functools.lru_cache(4096)
def _why_unsupported(
    device: torch.device, a_dtype: torch.dtype, b_dtype: torch.dtype, a_rows: int, a_columns: int, b_rows: int,
    b_columns: int, m: int, k: int, n: int, groups: int | None, along_k: bool,
) -> str | None:  # fmt: skip
    if reason := why_not_on(device):
        return reason
    if a_dtype not in FP8 or b_dtype not in FP8:
        return f"its tensor cores multiply 8-bit floats, not {a_dtype} and {b_dtype}"
    try:
        kinds = _kinds((a_rows, a_columns), (m, k), (b_rows, b_columns), (n, k), dense=groups is None)
    except ValueError as error:
        return str(error)
    of_rows = kinds[0] is Scales.PER_ROW  # groups of rows may begin anywhere, and so within a block of a
    if kinds not in SCALE_KINDS or (groups is not None and not along_k and not of_rows):
        return f"blocks of {a_rows}×{a_columns} with {b_rows}×{b_columns} are none of 1×128 with 1×128 or 128×128"
    if groups is not None and groups > MAX_GROUPS:
        return f"there are {groups} groups, and {MAX_GROUPS} at most have room in shared memory"
    return None


@functools.cache
def why_not_on(device: torch.device) -> str | None:
    """Why the kernels do not run on a device at all; None: they do."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "they are written for Hopper (sm_90)"
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return 'cuda-bindings and NVRTC are not installed: pip install "octile[cuda]"'
    return None


def matmul(
    out: Tensor,
    a: Tensor,
    a_scale: Tensor,
    a_block: Block,
    b: Tensor,
    b_scale: Tensor,
    b_block: Block,
    accumulate: bool,
    promote_every: int | None = BLOCK_K,
    look: Look | None = None,
) -> None:
    """a[M, K] · b[N, K]ᵀ into out [M, N], any strides, or added to it in FP32.

    Args:
        promote_every: 128, or None: the tensor cores sum over all of K, which only operands with one scale allow.
        look: here and in the three functions below: of a product whose like may be launched without being checked.

    Raises:
        ValueError: promote_every is neither, or there are more scales.
    """
    if promote_every not in (BLOCK_K, None):
        raise ValueError(f"promote_every must be {BLOCK_K} or None, not {promote_every}")
    a_scales, b_scales = _kinds(a_block, a.shape, b_block, b.shape, dense=True)
    if promote_every is None and {a_scales, b_scales} != {Scales.PER_TENSOR}:
        raise ValueError(f"promote_every None needs one scale an operand, not blocks of {a_block} and {b_block}")
    promote = promote_every is not None
    _launch(
        GemmRequest(Schedule.DENSE, out, a, a_scale, a_scales, b, b_scale, b_scales, None, accumulate, promote), look
    )


def grouped(
    a: Tensor,
    a_scale: Tensor,
    a_block: Block,
    b: Tensor,
    b_scale: Tensor,
    b_block: Block,
    offs: Tensor,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
    look: Look | None = None,
) -> Tensor:
    """Rows of group g of a[T, K] times b[g]ᵀ of b[G, N, K] → [T, N]; rows past offs[-1] are zero.

    Given out, contiguous and of out_dtype, it is written and returned, as in the two functions below; rows past
    offs[-1] then stay as they are.
    """
    zero_rest = out is None
    out = a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype) if out is None else out
    scales = _scales(a_block, *a.shape), _scales(b_block, *b.shape[1:])
    operands = (out, a, a_scale, scales[0], b, b_scale, scales[1], offs.contiguous())
    _launch(GemmRequest(Schedule.GROUPED, *operands, False, True, zero_rest), look)
    return out


def masked(
    a: Tensor,
    a_scale: Tensor,
    a_block: Block,
    b: Tensor,
    b_scale: Tensor,
    b_block: Block,
    counts: Tensor,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
    expected_rows: int = 0,
    look: Look | None = None,
) -> Tensor:
    """a[g] · b[g]ᵀ for the first counts[g] rows: a[G, M, K], b[G, N, K] → [G, M, N]; other rows hold anything.

    expected_rows of a group help to choose a kernel; 0: not known.
    """
    out = a.new_empty(*a.shape[:2], b.shape[1], dtype=out_dtype) if out is None else out
    scales = _scales(a_block, *a.shape[1:]), _scales(b_block, *b.shape[1:])
    operands = (out, a, a_scale, scales[0], b, b_scale, scales[1], counts.contiguous())
    _launch(GemmRequest(Schedule.MASKED, *operands, False, True, expected_rows=expected_rows), look)
    return out


def wgrad(
    dy: Tensor,
    dy_scale: Tensor,
    dy_block: Block,
    x: Tensor,
    x_scale: Tensor,
    x_block: Block,
    offs: Tensor,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
    accumulate: bool = False,
    look: Look | None = None,
) -> Tensor:
    """dy[rows of g]ᵀ · x[rows of g] of dy[T, N] and x[T, K] → [G, N, K]; a group without rows gives zeros.

    With accumulate it is added to out in FP32.
    """
    out = x.new_empty(offs.shape[0], dy.shape[1], x.shape[1], dtype=out_dtype) if out is None else out
    a, b = dy.mT, x.mT
    scales = _scales(dy_block[::-1], *a.shape), _scales(x_block[::-1], *b.shape)
    operands = (out, a, dy_scale.mT, scales[0], b, x_scale.mT, scales[1], offs.contiguous())
    _launch(GemmRequest(Schedule.ALONG_K, *operands, accumulate, True), look)
    return out


def _kinds(
    a_block: Block, a_shape: Sequence[int], b_block: Block, b_shape: Sequence[int], dense: bool
) -> tuple[Scales, Scales]:
    """What scales stand for in a pair; in a dense product the whole tensors, where each is one block."""
    pairs = ((a_block, a_shape), (b_block, b_shape))
    if dense and all(block[0] >= rows and block[1] >= columns for block, (rows, columns) in pairs):
        return Scales.PER_TENSOR, Scales.PER_TENSOR
    return _scales(a_block, *a_shape), _scales(b_block, *b_shape)


def _scales(block: Block, rows: int, columns: int) -> Scales:
    """What a scale stands for.

    Raises:
        ValueError: something else; `why_unsupported` is to be asked first.
    """
    if tuple(block) == (1, BLOCK_K):
        return Scales.PER_ROW
    if tuple(block) == (BLOCK_K, BLOCK_K):
        return Scales.PER_BLOCK
    if block[0] >= rows and block[1] >= columns:
        return Scales.PER_TENSOR
    raise ValueError(f"blocks must be 1×128, 128×128 or the whole tensor, not {block[0]}×{block[1]}")


def _wanted(p: GemmRequest) -> Tensor:
    """Which rows of out are to be written, bool, one for all or [T, 1]."""
    if p.zero_rest or p.sizes is None:
        return torch.ones((), dtype=torch.bool, device=p.out.device)
    rows = p.sizes[-1] if len(p.sizes) else 0
    return torch.arange(p.out.shape[0], device=p.out.device)[:, None] < rows


def _launch(p: GemmRequest, look: Look | None) -> None:
    if p.out.numel() == 0:
        return
    if p.a.numel() == 0 or p.b.numel() == 0:  # a sum of nothing
        if not p.accumulate:
            p.out.masked_fill_(_wanted(p), 0.0)
        return
    from octile.kernels.cuda.gemm import launcher  # late: needs a GPU's driver

    launcher.launch(p, look)
