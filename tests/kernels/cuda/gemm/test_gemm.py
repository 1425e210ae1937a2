"""Tests of the GEMM kernel in the CPU emulator: its result is bit for bit that of Hopper's tensor cores.

Outputs are filled with NaN first, and the emulator guards the memory around every tensor. Every case has another seed,
and with it another order of all operations whose order is undefined on a GPU.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.gemm.config import GemmConfig, Scales, Schedule, Store
from tests.kernels.cuda.emulated import (
    between,
    config,
    emulate,
    exact,
    group,
    operand,
    poisoned,
    rows,
)
from tools import emulator
from tools.emulator import build

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="the emulator needs a C++ compiler")

ROW, BLOCK, TENSOR = Scales.PER_ROW, Scales.PER_BLOCK, Scales.PER_TENSOR
GROUPED, MASKED, ALONG_K = Schedule.GROUPED, Schedule.MASKED, Schedule.ALONG_K
SINGLE, PAIRS = Store.SINGLE, Store.PAIRS

DENSE = {
    "256 rows": config(256, 128, 4, raster_width=2),
    "three warpgroups": config(192, 128, warpgroups=3, cluster_n=2, staged_boxes=2),
    "three warpgroups, 1D1D, float32, accumulating": config(
        192, 120, warpgroups=3, cluster_m=2, b_scales=ROW, store=PAIRS, out_float=True, accumulate=True
    ),
    "columns of two blocks": config(128, 160, staged_boxes=5),
    "columns of two blocks, at any column": config(128, 144, staged_boxes=3),
    "a cluster shares a": config(128, 96, cluster_n=2, staged_boxes=3),
    "a cluster shares b": config(128, 48, cluster_m=2, staged_boxes=2),
    "256 rows, 1D1D, some scales cached": config(256, 128, 3, b_scales=ROW, staged_boxes=2),
    "one warpgroup": config(64, 64, 2, warpgroups=1),
    "two accumulators": config(128, 64, 4, accumulators=2),
    "two accumulators for two waves": config(256, 64, 4, accumulators=2, staged_boxes=2),
    "two accumulators for two waves, 1D1D": config(256, 96, 4, b_scales=ROW, accumulators=2, staged_boxes=3),
    "two accumulators for two waves, 1D1D, float32, accumulating": config(
        256, 96, 4, b_scales=ROW, accumulators=2, out_float=True, accumulate=True, staged_boxes=2
    ),
    "two accumulators for two waves, loading C": config(
        256, 96, 3, b_scales=ROW, accumulators=2, out_float=True, accumulate=True, load_c=True, staged_boxes=3
    ),
    "two accumulators for two waves in a cluster, any strides": config(
        256, 48, b_scales=ROW, accumulators=2, cluster_m=2, store=SINGLE
    ),
    "ping-pong": config(64, 64, ping_pong=True),
    "ping-pong, in clusters, two accumulators": config(64, 32, ping_pong=True, cluster_m=2, accumulators=2),
    "ping-pong of 128 rows": config(128, 64, ping_pong=True, staged_boxes=2),
    "1D1D": config(128, 64, b_scales=ROW),
    "1D1D, two accumulators, float32": config(128, 40, b_scales=ROW, accumulators=2, store=PAIRS, out_float=True),
    "128×128 scales of a": config(128, 48, a_scales=BLOCK, b_scales=ROW),
    "float32, by TMA": config(256, 96, out_float=True, staged_boxes=3),
    "1D1D, float32, accumulating, by TMA": config(
        256, 128, b_scales=ROW, out_float=True, accumulate=True, staged_boxes=4
    ),
    "1D1D, float32, prefetching C": config(
        256, 128, b_scales=ROW, out_float=True, accumulate=True, prefetch_c=True, staged_boxes=4
    ),
    "three warpgroups, prefetching C": config(
        192, 96, 3, warpgroups=3, b_scales=ROW, out_float=True, accumulate=True, prefetch_c=True, staged_boxes=1
    ),
    "ping-pong in a cluster, narrow store boxes, prefetching C": config(
        128,
        48,
        2,
        ping_pong=True,
        cluster_n=2,
        b_scales=ROW,
        out_float=True,
        accumulate=True,
        prefetch_c=True,
        staged_boxes=1,
    ),
    "split-K, prefetching C": config(
        128, 64, 2, b_scales=ROW, out_float=True, accumulate=True, prefetch_c=True, split_k=3, staged_boxes=2
    ),
    "256 rows, loading C": config(
        256, 128, 3, b_scales=ROW, out_float=True, accumulate=True, load_c=True, staged_boxes=4
    ),
    "ping-pong, float32, accumulating, by TMA": config(
        128, 32, ping_pong=True, b_scales=ROW, out_float=True, accumulate=True, staged_boxes=2
    ),
    "256 rows, loading BF16 C": config(256, 128, 3, accumulate=True, load_c=True, staged_boxes=2),
    "loading BF16 C, adding what is rounded": config(
        128, 64, accumulate=True, load_c=True, adds_rounded=True, staged_boxes=1
    ),
    "narrow store boxes, loading BF16 C": config(128, 48, b_scales=ROW, accumulate=True, load_c=True, staged_boxes=3),
    "ping-pong in a cluster, loading BF16 C": config(
        128, 32, 3, ping_pong=True, cluster_n=2, accumulate=True, load_c=True, staged_boxes=1
    ),
    "ping-pong, loading C": config(
        128, 32, ping_pong=True, b_scales=ROW, out_float=True, accumulate=True, load_c=True, staged_boxes=1
    ),
    "three warpgroups, loading C": config(
        192, 96, warpgroups=3, b_scales=ROW, out_float=True, accumulate=True, load_c=True, staged_boxes=3
    ),
    "two accumulators in a cluster, loading C": config(
        128, 48, accumulators=2, cluster_n=2, out_float=True, accumulate=True, load_c=True, staged_boxes=3
    ),
    "256 rows in a cluster, loading C": config(
        256, 64, cluster_m=2, b_scales=ROW, out_float=True, accumulate=True, load_c=True, staged_boxes=2
    ),
    "no promotion, loading C": config(
        256,
        64,
        a_scales=TENSOR,
        b_scales=TENSOR,
        promote=False,
        out_float=True,
        accumulate=True,
        load_c=True,
        staged_boxes=2,
    ),
    "per-tensor scales": config(128, 64, a_scales=TENSOR, b_scales=TENSOR),
    "no promotion": config(256, 64, a_scales=TENSOR, b_scales=TENSOR, promote=False),
    "float32": config(128, 64, store=PAIRS, out_float=True),
    "float32, accumulating": config(128, 24, store=PAIRS, out_float=True, accumulate=True),
    "float32, accumulating, any strides": config(128, 64, store=SINGLE, out_float=True, accumulate=True),
    "accumulating": config(128, 64, store=PAIRS, accumulate=True),
    "accumulating, any strides": config(128, 64, store=SINGLE, accumulate=True),
    "adding what is rounded": config(128, 64, store=PAIRS, accumulate=True, adds_rounded=True),
    "adding what is rounded, any strides": config(128, 64, store=SINGLE, accumulate=True, adds_rounded=True),
    "transposed": config(128, 32, a_scales=BLOCK, b_scales=ROW, transposed=True, staged_boxes=1),
    "transposed, 256 rows": config(256, 16, a_scales=BLOCK, b_scales=ROW, transposed=True, staged_boxes=2),
    "transposed, one warpgroup": config(
        64, 16, warpgroups=1, accumulators=2, a_scales=BLOCK, b_scales=ROW, transposed=True, staged_boxes=1
    ),
    "split-K": config(128, 64, split_k=3),
    "split-K, one warpgroup": config(64, 48, warpgroups=1, accumulators=2, split_k=3, staged_boxes=1),
    "split-K, transposed": config(128, 16, a_scales=BLOCK, b_scales=ROW, transposed=True, split_k=4),
    "split-K, in clusters, accumulating": config(
        64, 32, warpgroups=1, cluster_m=2, split_k=2, store=PAIRS, out_float=True, accumulate=True
    ),
    "E5M2 times E4M3": config(128, 64, a_e5m2=True),
}


FURTHER_DENSE = {  # each pair of values of their fields is in another case
    "columns of two blocks, at any column",
    "a cluster shares a",
    "a cluster shares b",
    "256 rows, 1D1D, some scales cached",
    "two accumulators for two waves",
    "two accumulators for two waves, 1D1D",
    "two accumulators for two waves, 1D1D, float32, accumulating",
    "two accumulators for two waves, loading C",
    "ping-pong of 128 rows",
    "1D1D",
    "float32, by TMA",
    "1D1D, float32, accumulating, by TMA",
    "256 rows, loading C",
    "256 rows, loading BF16 C",
    "narrow store boxes, loading BF16 C",
    "float32",
    "float32, accumulating",
    "accumulating, any strides",
    "transposed",
}


def _cases(kernels: Iterable[str], further: set[str]) -> list:
    """The cases of a test, of which the further ones are exhaustive."""
    return [pytest.param(case, marks=[pytest.mark.exhaustive] if case in further else []) for case in kernels]


@pytest.mark.one_case
@pytest.mark.parametrize("case", _cases(DENSE, FURTHER_DENSE))
def test_dense(case: str):
    kernel = DENSE[case]
    m, n = kernel.tile_m, kernel.tile_n
    if kernel.transposed:
        m, n = n, m
    shapes = [(1, 1, 1), (m - 1, n + 1, 129), (m + 1, n - 1, 127), (2 * m, 2 * n, 256), (3 * m - 7, n + 9, 1000)]
    for seed, (m, n, k) in enumerate(shapes):
        _dense(kernel, m, n + n % 2 if kernel.store is PAIRS else n, k, seed)


@pytest.fixture
def prefetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of boxes that each launch prefetches."""
    found: list[int] = []
    run = emulator.run
    monkeypatch.setattr(emulator, "run", lambda *args, **settings: found.append(run(*args, **settings)))
    return found


@pytest.mark.parametrize("case", ["1D1D, float32, prefetching C", "three warpgroups, prefetching C"])
def test_all_of_c_is_prefetched_where_there_are_enough_k_blocks(case: str, prefetched: list[int]):
    kernel, m, n = DENSE[case], 300, 200
    _dense(kernel, m, n, 700, seed=3)
    assert prefetched == [math.ceil(m / 64) * math.ceil(n / kernel.store_columns)]


def test_c_of_all_groups_is_prefetched(prefetched: list[int]):
    m, n, ends = 257, 120, [256, 256, 520]
    a, b = operand((m, 520), ROW, 0), operand((n, 520), ROW, 1)
    emulate(WGRAD["prefetching C"], torch.zeros(len(ends), m, n), a, b, _sizes(ends))
    assert prefetched == [2 * math.ceil(m / 64) * math.ceil(n / 32)]  # the second group has no tokens


@pytest.mark.slow
@pytest.mark.parametrize("along_n", [False, True])
def test_each_tile_is_computed_once(along_n: bool):
    kernel = config(64, 16, 2, warpgroups=1, raster_along_n=along_n, raster_width=2)
    for seed, (m_tiles, n_tiles) in enumerate([(1, 5), (5, 1), (4, 6), (3, 7)]):
        _dense(kernel, m_tiles * 64 - 5, n_tiles * 16 - 3, 130, seed)


EARLY = (  # kernels that begin before the previous one of the stream has ended
    "256 rows",
    "a cluster shares b",
    "one warpgroup",
    "two accumulators",
    "ping-pong",
    "1D1D",
    "transposed",
    "transposed, one warpgroup",
    "split-K, transposed",
    "accumulating",
    "ping-pong in a cluster, loading BF16 C",
)


@pytest.mark.one_case
@pytest.mark.parametrize("case", _cases(EARLY, {"two accumulators", "1D1D", "a cluster shares b", "accumulating"}))
def test_weights_are_loaded_before_the_previous_kernel_has_ended_and_nothing_else(case: str):
    kernel = replace(DENSE[case], programmatic=True)
    for seed, (m, n, k) in enumerate([(4, 16, 16), (132, 80, 896), (260, 272, 128)]):  # a is contiguous
        _dense(kernel, m, n, k, seed)


LONG = (
    "columns of two blocks",
    "two accumulators",
    "split-K",
    "128×128 scales of a",
    "transposed, 256 rows",
    "ping-pong",
)


@pytest.mark.one_case
@pytest.mark.parametrize("case", [*LONG, "ping-pong, in clusters, two accumulators"])
def test_many_k_blocks(case: str):
    _dense(DENSE[case], 3, 200, 128 * 67 + 1, seed=1)  # more than twice as many k-blocks as a warp has lanes


def test_slots_of_block_scales_are_reused_with_many_stages():
    _dense(config(64, 16, 20, warpgroups=1), 3, 9 * 16, 128 * 37 + 1, seed=2)  # on four SMs


def _dense(kernel: GemmConfig, m: int, n: int, k: int, seed: int) -> None:
    a_scales, b_scales = kernel.a_scales, kernel.b_scales
    if kernel.transposed:
        a_scales, b_scales = b_scales, a_scales
    a = operand((m, k), a_scales, seed, "e5m2" if kernel.a_e5m2 else "e4m3")
    b = operand((n, k), b_scales, seed + 100)
    out = poisoned(m, n, dtype=_dtype(kernel), gap=_gap(kernel, n))
    before = torch.zeros(m, n)
    if kernel.accumulate:
        before = torch.randn(m, n).to(out.dtype).float()
        out.copy_(before)
    emulate(kernel, out, a, b, seed=seed)
    product = _exact(kernel, a, b)
    expected = before + (product.bfloat16().float() if kernel.adds_rounded else product)
    torch.testing.assert_close(out, expected.to(out.dtype), rtol=0, atol=0, msg=lambda why: f"{(m, n, k)}: {why}")


def _exact(kernel: GemmConfig, a, b) -> Tensor:
    """The result in the kernel's order: split-K partials one after the other, a per-tensor scale at the end."""
    if kernel.a_scales is TENSOR and kernel.promote:
        ones = torch.ones(1, 1)
        unscaled = exact((a[0], ones, TENSOR), (b[0], ones, TENSOR), promote=True)
        return unscaled * (a[1] * b[1])
    k = a[0].shape[-1]
    k_per_split = math.ceil(math.ceil(k / 128) / kernel.split_k) * 128
    total = None
    for first in range(0, k_per_split * kernel.split_k, k_per_split):
        split = slice(min(first, k), min(first + k_per_split, k))
        partial = exact(between(a, split), between(b, split), kernel.promote)
        total = partial if total is None else total + partial
    return total


def _dtype(kernel: GemmConfig) -> torch.dtype:
    return torch.float32 if kernel.out_float else torch.bfloat16


def _gap(kernel: GemmConfig, n: int) -> int:
    """Elements between two rows of the result, which must not be written; an odd stride for Store.SINGLE."""
    if kernel.store is Store.SINGLE:
        return 5 + n % 2
    return 8 + -n % 8


ENDS = {
    "ordinary": [60, 130, 150, 200],
    "first, last and others empty": [0, 0, 90, 90, 200, 200],
    "all empty": [0, 0, 0],
    "one has all": [200, 200],
    "rows after the last": [3, 4, 5, 7],
    "one row each": list(range(1, 31)),
    "ends at tiles and k-blocks": [64, 128, 128, 192],
}
ROWS_GROUPED = {
    "two warpgroups": config(128, 64, schedule=GROUPED),
    "one warpgroup": config(64, 48, schedule=GROUPED, warpgroups=1, accumulators=2, staged_boxes=2),
    "three warpgroups": config(192, 32, schedule=GROUPED, warpgroups=3),
    "raster along N": config(64, 16, schedule=GROUPED, warpgroups=1, raster_along_n=True, raster_width=2),
    "a cluster shares a": config(128, 32, schedule=GROUPED, cluster_n=2),
    "a cluster shares b": config(64, 16, schedule=GROUPED, warpgroups=1, cluster_m=2),
    "ping-pong": config(64, 48, schedule=GROUPED, ping_pong=True, staged_boxes=2),
    "float32": config(256, 24, schedule=GROUPED, store=PAIRS, out_float=True),
    "float32, by TMA": config(256, 48, schedule=GROUPED, out_float=True, staged_boxes=3),
    "256 rows, a buffer for each half": config(256, 32, schedule=GROUPED, staged_boxes=2),
    "ping-pong, float32, by TMA": config(64, 32, schedule=GROUPED, ping_pong=True, out_float=True),
    "1D1D": config(128, 64, schedule=GROUPED, b_scales=ROW, accumulators=2),
    "two accumulators for two waves": config(256, 48, schedule=GROUPED, accumulators=2, staged_boxes=3),
}


FURTHER_GROUPED = {  # each value of their fields is in another case
    "raster along N",
    "float32, by TMA",
    "256 rows, a buffer for each half",
    "ping-pong, float32, by TMA",
}


def _grouped(kernel: GemmConfig, seed: int, ends: list[int], n: int, k: int) -> None:
    a, b = operand((200, k), ROW, seed), operand((len(ends), n, k), kernel.b_scales, seed + 100)
    out = poisoned(200, n, dtype=_dtype(kernel), gap=_gap(kernel, n))
    emulate(kernel, out, a, b, _sizes(ends), seed=seed)
    expected = torch.zeros(200, n)
    for g, (start, end) in enumerate(pairwise([0, *ends])):
        expected[start:end] = exact(rows(a, slice(start, end)), group(b, g))
    torch.testing.assert_close(out, expected.to(out.dtype), rtol=0, atol=0, msg=lambda why, e=ends: f"{e}: {why}")


@pytest.mark.one_case
@pytest.mark.parametrize("case", _cases(ROWS_GROUPED, FURTHER_GROUPED))
def test_grouped(case: str):
    kernel = ROWS_GROUPED[case]
    for seed, ends in enumerate(ENDS.values()):
        _grouped(kernel, seed, ends, *((40, 160) if seed % 2 else (kernel.tile_n * 2 + 1 + kernel.out_float, 256)))


@pytest.mark.one_case
@pytest.mark.parametrize("early_groups", [False, True])
@pytest.mark.parametrize("case", ["two warpgroups", "a cluster shares b", "ping-pong", "1D1D"])
def test_groups_and_their_weights_are_read_before_the_previous_kernel_has_ended(case: str, early_groups: bool):
    kernel = replace(ROWS_GROUPED[case], programmatic=True, early_groups=early_groups)
    for seed, ends in enumerate(ENDS.values()):
        _grouped(kernel, seed, ends, 40, 256)


LAST_TILES = [193, 257, 385]  # three warpgroups have 192 rows of a tile; the last two tiles divide theirs evenly


def test_the_last_two_tiles_of_a_group_have_each_row_once():
    kernel = config(192, 24, schedule=GROUPED, warpgroups=3, cluster_n=2)
    ends = list(accumulate(LAST_TILES))
    a, b = operand((ends[-1], 128), ROW), operand((len(ends), 56, 128), BLOCK, 1)
    out = poisoned(ends[-1], 56, dtype=torch.bfloat16, gap=8)
    emulate(kernel, out, a, b, _sizes(ends))
    for g, (start, end) in enumerate(pairwise([0, *ends])):
        expected = exact(rows(a, slice(start, end)), group(b, g)).bfloat16()
        torch.testing.assert_close(out[start:end], expected, rtol=0, atol=0)


def test_the_last_two_tiles_of_a_masked_group_have_each_row_once():
    kernel = config(192, 24, schedule=MASKED, warpgroups=3)
    a, b = operand((len(LAST_TILES), 400, 128), ROW), operand((len(LAST_TILES), 56, 128), BLOCK, 1)
    out = poisoned(len(LAST_TILES), 400, 56, dtype=torch.bfloat16, gap=8)
    emulate(kernel, out, a, b, _sizes(LAST_TILES))
    for g, count in enumerate(LAST_TILES):
        expected = exact(group(a, g), group(b, g))[:count].bfloat16()
        torch.testing.assert_close(out[g, :count], expected, rtol=0, atol=0)


def test_rows_of_nan_stay_in_their_group():
    a, b = operand((200, 256), ROW), operand((3, 40, 256), BLOCK, 1)
    a[0].view(torch.uint8)[100:103] = 0x7F
    out = emulate(
        ROWS_GROUPED["two warpgroups"], poisoned(200, 40, dtype=torch.bfloat16), a, b, _sizes([100, 103, 200])
    )
    assert out[100:103].isnan().all()
    assert out[:100].isfinite().all()
    assert out[103:].isfinite().all()


def test_rows_of_nan_after_the_last_group_become_zero():
    a, b = operand((200, 256), ROW), operand((3, 40, 256), BLOCK, 1)
    a[0].view(torch.uint8)[150:] = 0x7F
    a[1][150:] = math.nan
    out = emulate(ROWS_GROUPED["two warpgroups"], poisoned(200, 40, dtype=torch.bfloat16), a, b, _sizes([50, 60, 150]))
    assert out[:150].isfinite().all()
    assert not out[150:].any()


def test_rows_after_the_last_group_are_not_written_without_zero_rest():
    a, b = operand((200, 256), ROW), operand((3, 40, 256), BLOCK, 1)
    kernel = replace(ROWS_GROUPED["two warpgroups"], zero_rest=False)
    out = emulate(kernel, torch.full((200, 40), 7.0, dtype=torch.bfloat16), a, b, _sizes([50, 60, 150]))
    assert (out[:150] != 7).any(1).all()
    assert (out[150:] == 7).all()


def test_wrong_offsets_are_clamped():
    a, b = operand((200, 128), ROW), operand((4, 40, 128), BLOCK, 1)
    for kernel in (ROWS_GROUPED["two warpgroups"], ROWS_GROUPED["float32"]):
        emulate(kernel, poisoned(200, 40, dtype=_dtype(kernel)), a, b, _sizes([-5, 150, 20, 10**9]))


@pytest.mark.one_case
@pytest.mark.each_value
@pytest.mark.parametrize(
    "case",
    [
        "two warpgroups",
        "one warpgroup",
        "a cluster shares a",
        "a cluster shares b",
        "ping-pong",
        "float32",
        "float32, by TMA",
        "256 rows, a buffer for each half",
    ],
)
@pytest.mark.parametrize("counts", [[0, 3, 150], [150, 150], [0, 0], [1, 128, 0, 129, 64]], ids=str)
def test_masked(case: str, counts: list[int]):
    values = {"schedule": MASKED}
    kernel = GemmConfig(**(_fields(ROWS_GROUPED[case]) | values))
    n, k = 41 + kernel.out_float, 200
    a, b = operand((len(counts), 150, k), ROW), operand((len(counts), n, k), BLOCK, 1)
    out = poisoned(len(counts), 150, n, dtype=_dtype(kernel), gap=_gap(kernel, n))
    emulate(kernel, out, a, b, _sizes(counts), seed=sum(counts))
    for g, count in enumerate(counts):
        expected = exact(group(a, g), group(b, g))[:count]
        torch.testing.assert_close(out[g, :count], expected.to(out.dtype), rtol=0, atol=0)


WGRAD = {
    "float32": config(128, 64, schedule=ALONG_K, b_scales=ROW, store=PAIRS, out_float=True),
    "accumulating": config(128, 64, schedule=ALONG_K, b_scales=ROW, store=PAIRS, out_float=True, accumulate=True),
    "bfloat16": config(256, 32, schedule=ALONG_K, b_scales=ROW),
    "float32, by TMA": config(128, 64, schedule=ALONG_K, b_scales=ROW, out_float=True, staged_boxes=2),
    "three warpgroups": config(192, 24, schedule=ALONG_K, b_scales=ROW, store=PAIRS, out_float=True, warpgroups=3),
    "bfloat16, accumulating, any strides": config(
        64, 24, schedule=ALONG_K, b_scales=ROW, store=SINGLE, accumulate=True, warpgroups=1
    ),
    "ping-pong": config(64, 32, 4, schedule=ALONG_K, b_scales=ROW, ping_pong=True),
    "accumulating, by TMA": config(
        256, 64, schedule=ALONG_K, b_scales=ROW, out_float=True, accumulate=True, staged_boxes=2
    ),
    "prefetching C": config(
        256, 64, schedule=ALONG_K, b_scales=ROW, out_float=True, accumulate=True, prefetch_c=True, staged_boxes=2
    ),
    "loading C": config(
        256, 64, schedule=ALONG_K, b_scales=ROW, out_float=True, accumulate=True, load_c=True, staged_boxes=2
    ),
    "bfloat16, loading C": config(
        256, 64, schedule=ALONG_K, b_scales=ROW, accumulate=True, load_c=True, staged_boxes=1
    ),
    "ping-pong in a cluster, loading C": config(
        64, 32, 4, schedule=ALONG_K, b_scales=ROW, ping_pong=True, cluster_n=2, out_float=True, accumulate=True,
        load_c=True, staged_boxes=1,
    ),
    "two accumulators for two waves": config(256, 96, schedule=ALONG_K, b_scales=ROW, accumulators=2, staged_boxes=3),
    "a cluster shares b, two accumulators": config(
        128, 48, schedule=ALONG_K, b_scales=ROW, cluster_m=2, accumulators=2, store=SINGLE, out_float=True
    ),
    "1D2D": config(256, 64, schedule=ALONG_K, out_float=True, staged_boxes=2),
    "1D2D, three warpgroups, accumulating": config(
        192, 96, schedule=ALONG_K, warpgroups=3, store=PAIRS, out_float=True, accumulate=True
    ),
}  # fmt: skip


FURTHER_WGRAD = {  # each value of their fields is in another case
    "accumulating",
    "bfloat16",
    "float32, by TMA",
    "three warpgroups",
    "ping-pong",
    "accumulating, by TMA",
    "bfloat16, loading C",
}


@pytest.mark.one_case
@pytest.mark.parametrize("case", _cases(WGRAD, FURTHER_WGRAD))
def test_wgrad(case: str):
    kernel = WGRAD[case]
    for seed, ends in enumerate(ENDS.values()):
        m, n = (40, 51 + kernel.tile_n) if seed % 2 else (kernel.tile_m + 1, 50)
        n += n % 2 if kernel.store is PAIRS else 0
        a, b = operand((m, 200), ROW, seed), operand((n, 200), kernel.b_scales, seed + 100)
        out = poisoned(len(ends), m, n, dtype=_dtype(kernel), gap=_gap(kernel, n))
        before = torch.zeros(out.shape)
        if kernel.accumulate:
            before = torch.randn(out.shape).to(out.dtype).float()
            out.copy_(before)
        emulate(kernel, out, a, b, _sizes(ends), seed=seed)
        for g, (start, end) in enumerate(pairwise([0, *ends])):
            expected = before[g] + _k_blocks(a, b, start, end)
            torch.testing.assert_close(
                out[g], expected.to(out.dtype), rtol=0, atol=0, msg=lambda why, e=ends: f"{e}: {why}"
            )


def _k_blocks(a, b, start: int, end: int) -> Tensor:
    """The sum over the k-blocks with tokens of a group. Other k-blocks would add zero, unless their scales are NaN."""
    if start == end:
        return torch.zeros(len(a[0]), len(b[0]))
    return exact(between(a, slice(start, end)), between(b, slice(start, end)))


@pytest.mark.parametrize("nan", ["data", "scales"])
def test_tokens_of_nan_stay_in_their_group(nan: str):
    ends, bad = [20, 20, 128, 200], [30, 100]
    a, b = operand((130, 200), ROW), operand((50, 200), ROW, 1)
    for x in (a, b):
        if nan == "data":
            x[0].view(torch.uint8)[:, bad] = 0x7F
        else:
            x[1][:, 1] = math.nan  # of the tokens from 128 on
    out = emulate(WGRAD["float32"], poisoned(4, 130, 50, dtype=torch.float32), a, b, _sizes(ends))
    has_nan = [bool(out[g].isnan().any()) for g in range(4)]
    assert has_nan == ([False, False, True, False] if nan == "data" else [False, False, False, True])


@pytest.mark.slow
@pytest.mark.parametrize("case", ["ping-pong, in clusters, two accumulators", "split-K", "a cluster shares a"])
def test_many_orders_give_the_same_bits(case: str):
    a, b = operand((300, 700), ROW), operand((130, 700), BLOCK, 1)
    first = emulate(DENSE[case], poisoned(300, 130, dtype=torch.bfloat16, gap=6), a, b)
    for seed in range(1, 6):
        out = poisoned(300, 130, dtype=torch.bfloat16, gap=6)
        assert torch.equal(emulate(DENSE[case], out, a, b, seed=seed), first)


@pytest.mark.one_case
@pytest.mark.parametrize("num_sms", [1, 2, 7, 64])
def test_any_number_of_sms(num_sms: int):
    """From one SM, where a warpgroup has no rows in every other tile, to one for each tile."""
    a, b = operand((300, 260), ROW), operand((130, 260), BLOCK, 1)
    expected = exact(a, b)
    for case in ("ping-pong", "a cluster shares b", "256 rows", "float32, by TMA"):
        out = poisoned(300, 130, dtype=_dtype(DENSE[case]), gap=6)
        emulate(DENSE[case], out, a, b, num_sms=num_sms)
        assert torch.equal(out, expected.to(out.dtype))


@pytest.mark.one_case
@pytest.mark.parametrize("waves", [2, 3, 4])
def test_staged_boxes_are_not_overwritten_before_they_are_stored(waves: int):
    kernel = config(64 * waves, 32, warpgroups=1, staged_boxes=2)
    for seed in range(4):
        _dense(kernel, 5 * kernel.tile_m, 64, 128, seed)


def _sizes(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _fields(kernel: GemmConfig) -> dict:
    return {name: getattr(kernel, name) for name in kernel.__dataclass_fields__}
