"""How a product is launched, decided from its tensors: which kernel, how many blocks, with which arguments.

What the copy engine asks of a tensor: elements contiguous along K, a base and strides that are multiples of 16 bytes,
and the scales of rows contiguous along the rows. This package's casts write exactly that. An operand that lies
otherwise is copied first, by one kernel more: two bytes of traffic a number, a few percent of a product's time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octile.kernels.cuda.gemm.candidates import choose
from octile.kernels.cuda.gemm.config import BLOCK_K, GemmConfig, Scales, Schedule, Store
from octile.kernels.cuda.gemm.problem import MASKED_ROWS, Chip, Problem
from octile.kernels.cuda.jit.tensor_map import BYTES, TensorMap
from octile.kernels.memory_layout import VECTOR, padded

NO_MAP = bytes(BYTES)  # for a parameter that the kernel does not look at
UNKNOWN = VECTOR  # a map's pointer until it is filled in: aligned, and nothing else


class GemmRequest(NamedTuple):
    """a[m, k] · b[n, k]ᵀ → out[m, n], each with a dimension of groups in front or not.

    Attributes:
        a_scales, b_scales: what a scale of the operand stands for.
        sizes: offsets or counts of the groups, contiguous int32.
        accumulate: out is added to.
        promote: every 128 along K is added in FP32.
        zero_rest: rows past the last group are written as zeros; otherwise they stay as they are.
        expected_rows: that are used of a masked group; 0: not known.
    """

    schedule: Schedule
    out: Tensor
    a: Tensor
    a_scale: Tensor
    a_scales: Scales
    b: Tensor
    b_scale: Tensor
    b_scales: Scales
    sizes: Tensor | None
    accumulate: bool
    promote: bool
    zero_rest: bool = True
    expected_rows: int = 0

    def pointers(self) -> tuple[int, ...]:
        """Addresses of a, b, their scales, sizes and out."""
        sizes = 0 if self.sizes is None else self.sizes.data_ptr()
        a, b, out = self.a.data_ptr(), self.b.data_ptr(), self.out.data_ptr()
        return a, b, self.a_scale.data_ptr(), self.b_scale.data_ptr(), sizes, out


@dataclass(frozen=True)
class LaunchPlan:
    """A launch for tensors of certain shapes, strides and alignment.

    Attributes:
        config: the kernel.
        grid: blocks.
        maps: of a, b, their scales and out, where the kernel uses one, without their pointers.
        numbers: strides of the scales of blocks; strides of out; m, n, k and groups, as the kernel sees them.
        parts: floats of workspace; the kernel sums split products in them.
        arrivals: ints of workspace, zero before and after.
    """

    config: GemmConfig
    grid: int
    maps: tuple[TensorMap | None, ...]
    numbers: tuple[tuple[int, ...], ...]
    parts: int
    arrivals: int

    def arguments(
        self, pointers: Sequence[int], parts: int, arrivals: int, encode: Callable[[TensorMap, int], Any]
    ) -> list[Any]:
        """What the kernel takes, in its order.

        Args:
            pointers: as `GemmRequest.pointers`.
            parts, arrivals: addresses of the workspace.
            encode: one of maps and its pointer → what is passed for it.
        """
        a, b, a_scale, b_scale, sizes, out = pointers
        if self.config.transposed:
            a, b, a_scale, b_scale = b, a, b_scale, a_scale
        mapped = zip(self.maps, (a, b, a_scale, b_scale, out), strict=True)
        maps = [NO_MAP if described is None else encode(described, pointer) for described, pointer in mapped]
        scale_strides, out_strides, extents = self.numbers
        return [*maps, a_scale, b_scale, *scale_strides, out, *out_strides, parts, arrivals, sizes, *extents]


def plan(p: GemmRequest, chip: Chip, config: GemmConfig | None = None) -> LaunchPlan:
    """Decides how a product of readable operands is made: with the kernel that `choose` finds, or the given one."""
    config = config or choose(problem(p), chip)
    (m, k), n = p.a.shape[-2:], p.b.shape[-2]
    groups = 1 if p.sizes is None else p.sizes.shape[0]
    a, a_scale, b, b_scale, out = p.a, p.a_scale, p.b, p.b_scale, p.out
    if config.transposed:
        a, a_scale, b, b_scale, out, m, n = b, b_scale, a, a_scale, out.mT, n, m

    maps = (
        _map(a, (config.tile_m, BLOCK_K), BLOCK_K),
        _map(b, (config.tile_n, BLOCK_K), BLOCK_K),
        _map(a_scale.mT, (1, config.tile_m)) if config.a_scales is Scales.PER_ROW else None,
        _map(b_scale.mT, (1, config.tile_n)) if config.b_scales is Scales.PER_ROW else None,
        _out_map(out, config) if config.store is Store.TMA else None,
    )
    block_scale = a_scale if config.a_scales is Scales.PER_BLOCK else b_scale

    units_m, units_n = -(-m // config.cluster_tile_m), -(-n // config.cluster_tile_n)
    units = {
        Schedule.DENSE: units_m * units_n * config.split_k,
        Schedule.GROUPED: (units_m + groups) * units_n,  # each group, and the rows past them, ends with part of a unit
        Schedule.MASKED: units_m * units_n * groups,
        Schedule.ALONG_K: units_m * units_n * groups,
    }[p.schedule]
    tiles = units_m * units_n * config.cluster_size if config.split_k > 1 else 0
    return LaunchPlan(
        config,
        grid=min(chip.clusters(config.cluster_size), units) * config.cluster_size,
        maps=maps,
        numbers=(_strides(block_scale), _strides(out), (m, n, k, groups)),
        parts=tiles * config.split_k * config.tile_m * config.tile_n,
        arrivals=tiles * config.warpgroups,
    )


def problem(p: GemmRequest) -> Problem:
    """What decides on the kernel."""
    rows = p.a.shape[-2]
    if p.schedule is Schedule.MASKED:
        rows = min(p.expected_rows or MASKED_ROWS, rows)
    return Problem(
        m=rows,
        n=p.b.shape[-2],
        k=p.a.shape[-1],
        groups=1 if p.sizes is None else p.sizes.shape[0],
        schedule=p.schedule,
        a_scales=p.a_scales,
        b_scales=p.b_scales,
        out_float=p.out.dtype == torch.float32,
        accumulate=p.accumulate,
        promote=p.promote,
        zero_rest=p.zero_rest,
        store=_store(p),
        transposable=p.schedule is Schedule.DENSE and p.a_scales is not p.b_scales,
        a_e5m2=p.a.dtype == torch.float8_e5m2,
        b_e5m2=p.b.dtype == torch.float8_e5m2,
    )


def is_tma_readable(p: GemmRequest) -> bool:
    """Whether the copy engine can read the operands as they lie."""
    return make_tma_readable(p, copy=lambda t: None) is p


def make_tma_readable(p: GemmRequest, copy: Callable[[Tensor], Any] | None = None) -> GemmRequest:
    """The product with operands that the copy engine can read: copied where they lie otherwise."""
    copy_data, copy_scale = copy or _k_major, copy or _rows_first
    a = p.a if _aligned(p.a) else copy_data(p.a)
    b = p.b if _aligned(p.b) else copy_data(p.b)
    a_scale = p.a_scale if p.a_scales is not Scales.PER_ROW or _aligned(p.a_scale.mT) else copy_scale(p.a_scale)
    b_scale = p.b_scale if p.b_scales is not Scales.PER_ROW or _aligned(p.b_scale.mT) else copy_scale(p.b_scale)
    if a is p.a and b is p.b and a_scale is p.a_scale and b_scale is p.b_scale:
        return p
    return p._replace(a=a, b=b, a_scale=a_scale, b_scale=b_scale)


def _aligned(t: Tensor) -> bool:
    """Whether t [..., rows, columns] is contiguous along its columns and its rows lie at multiples of 16 bytes."""
    *outer, last = zip(t.shape, t.stride(), strict=True)
    contiguous = last[1] == 1 or last[0] == 1
    steps = [stride * t.itemsize for extent, stride in outer if extent > 1]
    return contiguous and t.data_ptr() % VECTOR == 0 and all(s > 0 and s % VECTOR == 0 for s in steps)


def _k_major(data: Tensor) -> Tensor:
    from octile.kernels.triton.layout import k_major  # late: Triton is there where a GPU is

    return k_major(data)[..., : data.shape[-1]]


def _rows_first(scale: Tensor) -> Tensor:
    *batch, rows, columns = scale.shape
    return scale.new_empty(*batch, columns, padded(rows, 4))[..., :rows].mT.copy_(scale)


def _store(p: GemmRequest) -> Store:
    """The best way that the result's strides allow."""
    *outer, column = p.out.stride()
    if column != 1 and p.out.shape[-1] > 1:
        return Store.SINGLE
    strides = [stride for stride, extent in zip(outer, p.out.shape, strict=False) if extent > 1]
    address, size = p.out.data_ptr(), p.out.itemsize
    # of a row that ends within 16 bytes the copy engine would write all 16 (seen on an H200)
    whole = (address // size, p.out.shape[-1], *strides)
    if all(i % (VECTOR // size) == 0 for i in whole):
        return Store.TMA
    pairs = p.out.shape[-1] % 2 == 0 and address % (2 * size) == 0 and all(i % 2 == 0 for i in strides)
    return Store.PAIRS if pairs else Store.SINGLE


def _map(t: Tensor, box: tuple[int, int], swizzle: int = 0) -> TensorMap:
    """Of t [rows, columns] or [groups, rows, columns], always with three dimensions; FP8 as bytes."""
    group, row, _ = _strides(t)
    groups = t.shape[0] if t.dim() == 3 else 1
    rows, columns = t.shape[-2:]
    unused = VECTOR // t.itemsize  # the stride along a single row: never used, but it must be legal
    strides = (group if groups > 1 else unused, row if rows > 1 else unused, 1)
    dtype = torch.uint8 if t.itemsize == 1 else t.dtype
    return TensorMap(UNKNOWN, dtype, (groups, rows, columns), strides, (1, *box), swizzle)


def _out_map(out: Tensor, config: GemmConfig) -> TensorMap:
    if config.transposed:
        return _map(out.mT, (config.tile_n, 64), 128)
    row_bytes = config.store_columns * config.out_bytes
    return _map(out, (64, config.store_columns), row_bytes if row_bytes > VECTOR else 0)


def _strides(t: Tensor) -> tuple[int, int, int]:
    return (t.stride(0) if t.dim() == 3 else 0, t.stride(-2), t.stride(-1))
