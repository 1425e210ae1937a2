"""GEMM requests: the calls that operators of `octile::` pass to a backend, and whether Hopper's kernels support them.

A request is made once, from the operator's flat schema, and is passed unchanged to the launch.
"""

import functools
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from octile.kernels.cuda.gemm.config import BLOCK_K, SCALE_KINDS, Scales, Schedule

MAX_GROUPS = 1024
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
Block = tuple[int, int]


@dataclass(eq=False, slots=True)  # faster to make than a named tuple
class Operand:
    """A quantized operand of a GEMM: data [..., rows, columns], float32 scales, and the (rows, columns) of a block."""

    data: Tensor
    scale: Tensor
    block: Block

    def parts(self) -> tuple[Tensor, Tensor, Block]:
        """Return data, scale and block."""
        return self.data, self.scale, self.block

    @property
    def mT(self) -> "Operand":
        """The transposed operand; a view."""
        return Operand(self.data.mT, self.scale.mT, (self.block[1], self.block[0]))


@dataclass(eq=False, slots=True)
class GemmRequest:
    """One call of a GEMM.

        schedule    a               b           out         result
        DENSE       [M, K]          [N, K]      [M, N]      a · bᵀ
        GROUPED     [T, K]          [G, N, K]   [T, N]      a[rows of g] · b[g]ᵀ
        MASKED      [G, M, K]       [G, N, K]   [G, M, N]   a[g] · b[g]ᵀ for the first sizes[g] rows
        ALONG_K     [T, M]          [T, N]      [G, M, N]   a[rows of g]ᵀ · b[rows of g], as wgrad needs it

    Attributes:
        out_dtype: bfloat16 or float32.
        out: the tensor to write; None: it is allocated.
        sizes: int32 [G]: where each group of rows ends, or how many rows of a masked group are used.
        accumulate: the result is added to out.
        promote: the accumulator is promoted every 128 along K; False needs one scale an operand.
        zero_rest: rows after the last group are set to zero; otherwise they are not written.
        expected_rows: rows that are used of a masked group, which helps to choose a kernel; 0: not known.
        alignment: number that the sizes of groups of rows are multiples of, which helps to choose a kernel.
        row_invariant: a row is summed in the same order for any M, so that a dense GEMM does not split K, and a result
            is rounded before it is added to out.
    """

    schedule: Schedule
    a: Operand
    b: Operand
    out_dtype: torch.dtype
    out: Tensor | None = None
    sizes: Tensor | None = None
    accumulate: bool = False
    promote: bool = True
    zero_rest: bool = True
    expected_rows: int = 0
    alignment: int = 1
    row_invariant: bool = False

    def tensors(self) -> list[Tensor]:
        """Return the tensors that are given."""
        tensors = [self.a.data, self.a.scale, self.b.data, self.b.scale]
        if self.sizes is not None:
            tensors.append(self.sizes)
        if self.out is not None:
            tensors.append(self.out)
        return tensors

    def nt_operands(self) -> tuple[Operand, Operand]:
        """Both operands with K as their last dimension: [..., M, K] and [..., N, K]."""
        return (self.a.mT, self.b.mT) if self.schedule is Schedule.ALONG_K else (self.a, self.b)

    def flops(self) -> int:
        """Return the FLOPs, where groups have all rows that are given: how many they have is on the device.

        Of BF16 operands, whose K counts bytes, it is twice as many.
        """
        a, b = self.nt_operands()
        return 2 * a.data.numel() * b.data.shape[-2]

    def out_shape(self) -> tuple[int, ...]:
        """Shape of the result."""
        a, b = self.a.data, self.b.data
        if self.schedule is Schedule.ALONG_K:
            assert self.sizes is not None
            return (*self.sizes.shape, a.shape[1], b.shape[1])
        return (*a.shape[:-1], b.shape[-2])

    def output(self) -> Tensor:
        """The tensor that takes the result: `out`, or a new one."""
        return self.a.data.new_empty(self.out_shape(), dtype=self.out_dtype) if self.out is None else self.out

    def scale_kinds(self) -> tuple[Scales, Scales]:
        """Return the kind of block of each operand.

        Raises:
            ValueError: the kernels have no such blocks; see `why_unsupported`.
        """
        a, b = self.nt_operands()
        dense = self.schedule is Schedule.DENSE
        return _scale_kinds(a.block, a.data.shape[-2:], b.block, b.data.shape[-2:], dense)


def why_unsupported(request: GemmRequest) -> str | None:
    """Return why Hopper's own kernels do not support a request; None: they do."""
    a, b, a_block, b_block = request.a.data, request.b.data, request.a.block, request.b.block
    rows, columns = a.shape[-2:]
    n, groups = b.shape[-2], None if request.sizes is None else request.sizes.shape[0]
    along_k = request.schedule is Schedule.ALONG_K
    if along_k:
        a_block, b_block, rows, columns, n = a_block[::-1], b_block[::-1], columns, rows, b.shape[-1]
    blocks = (*a_block, *b_block)
    return _why_unsupported(a.device, a.dtype, b.dtype, *blocks, rows, columns, n, groups, along_k, request.promote)


@functools.lru_cache(4096)
def _why_unsupported(
    device: torch.device, a_dtype: torch.dtype, b_dtype: torch.dtype, a_rows: int, a_columns: int, b_rows: int,
    b_columns: int, m: int, k: int, n: int, groups: int | None, along_k: bool, promote: bool,
) -> str | None:  # fmt: skip
    if reason := why_not_on(device):
        return reason
    if a_dtype not in FP8 or b_dtype not in FP8:
        return f"its tensor cores multiply 8-bit floats, not {a_dtype} and {b_dtype}"
    try:
        kinds = _scale_kinds((a_rows, a_columns), (m, k), (b_rows, b_columns), (n, k), dense=groups is None)
    except ValueError as error:
        return str(error)
    has_row_scales = kinds[0] is Scales.PER_ROW  # groups of rows may begin anywhere, and so within a block of a
    if kinds not in SCALE_KINDS or (groups is not None and not along_k and not has_row_scales):
        return f"blocks of {a_rows}×{a_columns} with {b_rows}×{b_columns} are none of 1×128 with 1×128 or 128×128"
    if not promote and kinds != (Scales.PER_TENSOR, Scales.PER_TENSOR):
        blocks = f"{a_rows}×{a_columns} and {b_rows}×{b_columns}"
        return f"without promotion it needs one scale an operand, not blocks of {blocks}"
    if groups is not None and groups > MAX_GROUPS:
        return f"there are {groups} groups, and {MAX_GROUPS} at most have room in shared memory"
    return None


@functools.cache
def why_not_on(device: torch.device) -> str | None:
    """Return why Hopper's own kernels do not run on a device at all; None: they do."""
    if device.type == "meta":  # their launches are planned there
        return None
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "they are written for Hopper (sm_90)"
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return 'cuda-bindings and NVRTC are not installed: pip install "octile[cuda]"'
    return None


def _scale_kinds(
    a_block: Block, a_shape: tuple[int, ...], b_block: Block, b_shape: tuple[int, ...], dense: bool
) -> tuple[Scales, Scales]:
    """Return `GemmRequest.scale_kinds`; where a dense GEMM has one block an operand, it is per tensor."""
    pairs = ((a_block, a_shape), (b_block, b_shape))
    if dense and all(block[0] >= rows and block[1] >= columns for block, (rows, columns) in pairs):
        return Scales.PER_TENSOR, Scales.PER_TENSOR
    return _scale_kind(a_block, *a_shape), _scale_kind(b_block, *b_shape)


def _scale_kind(block: Block, rows: int, columns: int) -> Scales:
    if tuple(block) == (1, BLOCK_K):
        return Scales.PER_ROW
    if tuple(block) == (BLOCK_K, BLOCK_K):
        return Scales.PER_BLOCK
    if block[0] >= rows and block[1] >= columns:
        return Scales.PER_TENSOR
    raise ValueError(f"blocks must be 1×128, 128×128 or the whole tensor, not {block[0]}×{block[1]}")
