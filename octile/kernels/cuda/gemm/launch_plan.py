"""Launch plans: the kernel of a GEMM, its number of thread blocks and its arguments.

TMA needs data that is contiguous along K, an address and strides that are multiples of 16 bytes, and 1×128 scales that
are contiguous along the rows. octile's quantization kernels write this layout. Any other operand is copied first by one
more kernel: two bytes of traffic per element, a few percent of a GEMM's time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from octile.kernels.cuda.gemm.candidates import choose
from octile.kernels.cuda.gemm.config import BLOCK_K, GemmConfig, Scales, Schedule, Store
from octile.kernels.cuda.gemm.cost_model import MASKED_ROWS, Chip, Problem
from octile.kernels.cuda.gemm.request import GemmRequest, Operand
from octile.kernels.cuda.jit.launch import loads_others_early, overlaps
from octile.kernels.cuda.jit.tensor_map import BYTES, TensorMap
from octile.kernels.memory_layout import VECTOR, padded

NO_MAP = bytes(BYTES)  # for a parameter that the kernel does not read
UNKNOWN = VECTOR  # stands for a map's pointer until the launch; it is aligned


@dataclass(frozen=True)
class LaunchPlan:
    """How to launch a GEMM of tensors of certain shapes, strides and alignment.

    Attributes:
        config: the kernel.
        grid: number of thread blocks.
        maps: tensor maps of a, b, their scales and out, without their pointers; None where the kernel uses none.
        strides_and_extents: strides of the scales of 128×128 blocks; strides of out; m, n, k and groups of the kernel.
        partials: floats of workspace for split-K partials.
        arrivals: ints of workspace that count them; zero before and after a launch.
    """

    config: GemmConfig
    grid: int
    maps: tuple[TensorMap | None, ...]
    strides_and_extents: tuple[tuple[int, ...], ...]
    partials: int
    arrivals: int

    def arguments(
        self, pointers: Sequence[int], partials: int, arrivals: int, encode: Callable[[TensorMap, int], Any]
    ) -> list[Any]:
        """Return the kernel's arguments in its order.

        Args:
            pointers: addresses of a, b, their scales, sizes and out.
            partials, arrivals: addresses of the workspace.
            encode: returns the argument for a map and a pointer.
        """
        a, b, a_scale, b_scale, sizes, out = pointers
        if self.config.transposed:
            a, b, a_scale, b_scale = b, a, b_scale, a_scale
        mapped = zip(self.maps, (a, b, a_scale, b_scale, out), strict=True)
        maps = [NO_MAP if described is None else encode(described, pointer) for described, pointer in mapped]
        scale_strides, out_strides, extents = self.strides_and_extents
        return [*maps, a_scale, b_scale, *scale_strides, out, *out_strides, partials, arrivals, sizes, *extents]


def plan_launch(request: GemmRequest, chip: Chip, config: GemmConfig | None = None) -> LaunchPlan:
    """Plan the launch of a request that TMA can read and that has an out.

    Args:
        config: the kernel; None: the one that `choose` finds.
    """
    is_early = request.schedule is Schedule.GROUPED and loads_others_early()
    config = config or replace(choose(problem(request), chip), programmatic=overlaps(), early_groups=is_early)
    (a, a_scale, _), (b, b_scale, _) = (operand.parts() for operand in request.nt_operands())
    out = _out(request)
    (m, k), n = a.shape[-2:], b.shape[-2]
    groups = 1 if request.sizes is None else request.sizes.shape[0]
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

    tiles_m, tiles_n = -(-m // config.cluster_tile_m), -(-n // config.cluster_tile_n)  # of a cluster
    tiles = {
        Schedule.DENSE: tiles_m * tiles_n * config.split_k,
        Schedule.GROUPED: (tiles_m + groups) * tiles_n,  # each group, and the rows after them, ends with a partial tile
        Schedule.MASKED: tiles_m * tiles_n * groups,
        Schedule.ALONG_K: tiles_m * tiles_n * groups,
    }[request.schedule]
    split_tiles = tiles_m * tiles_n * config.cluster_size if config.split_k > 1 else 0
    return LaunchPlan(
        config,
        grid=min(chip.clusters(config.cluster_size), tiles) * config.cluster_size,
        maps=maps,
        strides_and_extents=(_strides(block_scale), _strides(out), (m, n, k, groups)),
        partials=split_tiles * config.split_k * config.tile_m * config.tile_n,
        arrivals=split_tiles * config.warpgroups,
    )


def problem(request: GemmRequest) -> Problem:
    """Return the problem by which the kernel of a request is chosen."""
    a, b = (operand.data for operand in request.nt_operands())
    a_scales, b_scales = request.scale_kinds()
    out, rows = _out(request), a.shape[-2]
    if request.schedule is Schedule.MASKED:
        rows = min(request.expected_rows or MASKED_ROWS, rows)
    return Problem(
        m=rows,
        n=b.shape[-2],
        k=a.shape[-1],
        groups=1 if request.sizes is None else request.sizes.shape[0],
        schedule=request.schedule,
        a_scales=a_scales,
        b_scales=b_scales,
        out_float=out.dtype == torch.float32,
        accumulate=request.accumulate,
        promote=request.promote,
        zero_rest=request.zero_rest,
        store=_store(out),
        transposable=request.schedule is Schedule.DENSE and a_scales is not b_scales,
        a_e5m2=a.dtype == torch.float8_e5m2,
        b_e5m2=b.dtype == torch.float8_e5m2,
        row_invariant=request.row_invariant,
        alignment=request.alignment,
    )


def make_tma_readable(request: GemmRequest) -> GemmRequest:
    """Return the request with copies of the operands that TMA cannot read; the request itself if there are none."""
    operands = request.nt_operands()
    readable = []
    for operand, kind in zip(operands, request.scale_kinds(), strict=True):
        data, scale, block = operand.parts()
        readable_data = data if _is_aligned(data) else _k_major(data)
        is_scale_read = kind is not Scales.PER_ROW or _is_aligned(scale.mT)
        readable.append(Operand(readable_data, scale if is_scale_read else _rows_first(scale), block))
    pairs = zip(operands, readable, strict=True)
    if all(old.data is new.data and old.scale is new.scale for old, new in pairs):
        return request
    a, b = readable
    return replace(request, a=a.mT, b=b.mT) if request.schedule is Schedule.ALONG_K else replace(request, a=a, b=b)


def _is_aligned(t: Tensor) -> bool:
    """Return whether t [..., rows, columns] has contiguous columns, and rows that begin at multiples of 16 bytes."""
    *outer, last = zip(t.shape, t.stride(), strict=True)
    contiguous = last[1] == 1 or last[0] == 1
    steps = [stride * t.itemsize for extent, stride in outer if extent > 1]
    return contiguous and t.data_ptr() % VECTOR == 0 and all(s > 0 and s % VECTOR == 0 for s in steps)


def _k_major(data: Tensor) -> Tensor:
    from octile.kernels.triton.layout import to_k_major  # late: Triton may not be installed without a GPU

    return to_k_major(data)[..., : data.shape[-1]]


def _rows_first(scale: Tensor) -> Tensor:
    *batch, rows, columns = scale.shape
    return scale.new_empty(*batch, columns, padded(rows, 4))[..., :rows].mT.copy_(scale)


def _out(request: GemmRequest) -> Tensor:
    assert request.out is not None, "a launch is planned for a request that has an out"
    return request.out


def _store(out: Tensor) -> Store:
    """Return the fastest store that out's strides allow."""
    *outer, column = out.stride()
    if column != 1 and out.shape[-1] > 1:
        return Store.SINGLE
    strides = [stride for stride, extent in zip(outer, out.shape, strict=False) if extent > 1]
    address, size = out.data_ptr(), out.itemsize
    # TMA writes all 16 bytes at the end of a row, even if the row ends within them (observed on an H200)
    whole = (address // size, out.shape[-1], *strides)
    if all(i % (VECTOR // size) == 0 for i in whole):
        return Store.TMA
    pairs = out.shape[-1] % 2 == 0 and address % (2 * size) == 0 and all(i % 2 == 0 for i in strides)
    return Store.PAIRS if pairs else Store.SINGLE


def _map(t: Tensor, box: tuple[int, int], swizzle: int = 0) -> TensorMap:
    """Describe t [rows, columns] or [groups, rows, columns], always with three dimensions; FP8 as bytes."""
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
