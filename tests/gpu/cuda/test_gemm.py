"""Tests of the GEMM kernel on a Hopper GPU: its error is bounded, and it reads and writes only its own memory.

tests/gpu/test_tensor_core.py compares its bits with those of the tensor core model.

The error bound of an element: each of the 4 wgmmas of a k-block truncates 32 products and the accumulator below 2⁻¹³
of the largest, and then the sum to 13 bits. That is at most 4 · 34 · 2⁻¹³ of Σ|a·b| over the k-block. K-blocks are
added in FP32. The bound holds for any data; data of one sign lose 0.08% at K = 4096 at most, and 0.06% on average.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.gemm import launch_cache, tuned
from octile.kernels.cuda.gemm.config import GemmConfig, Scales, Schedule, Store
from octile.kernels.cuda.gemm.cost_model import Chip
from octile.kernels.cuda.gemm.launch_plan import make_tma_readable, plan_launch
from octile.kernels.cuda.gemm.request import GemmRequest, Operand, why_not_on
from octile.kernels.cuda.jit import specialize
from octile.kernels.memory_layout import padded
from octile.lab.tensor_core import tensor_core_scaled_matmul as model
from octile.ops.quantize import dequantize, quantize

TILE, BLOCK, COLUMN = (1, 128), (128, 128), (128, 1)
CUT = 4 * 34 * 2.0**-13
WORST, RMS = 2e-3, 1e-3  # of data of one sign, relative
GUARD = 8  # elements around a result
NAN = 0x7F  # in E4M3 and in E5M2
Quantized = tuple[Tensor, Tensor, tuple[int, int]]
IS_1D1D = {"b_scales": Scales.PER_ROW, "out_float": True, "accumulate": True}
OVERLAPS_WAVES = GemmConfig(256, 96, 4, b_scales=Scales.PER_ROW, accumulators=2, staged_boxes=5)
KERNELS = {  # including kernels that candidates.py seldom chooses
    "128×128": GemmConfig(128, 128, 4, staged_boxes=1),
    "256×128": GemmConfig(256, 128, 3, staged_boxes=4),
    "192×128, three warpgroups": GemmConfig(192, 128, 4, warpgroups=3, staged_boxes=2),
    "256×128, float32": GemmConfig(256, 128, 4, out_float=True, staged_boxes=1),
    "192×128, float32": GemmConfig(192, 128, 4, warpgroups=3, out_float=True, staged_boxes=1),
    "64×64, one warpgroup": GemmConfig(64, 64, 8, warpgroups=1, staged_boxes=1),
    "cluster along M": GemmConfig(128, 128, 4, cluster_m=2, staged_boxes=1),
    "cluster along N": GemmConfig(128, 128, 4, cluster_n=2, staged_boxes=1),
    "ping-pong": GemmConfig(128, 128, 2, ping_pong=True, staged_boxes=1),
    "two accumulators": GemmConfig(128, 64, 6, accumulators=2, staged_boxes=1),
    "split-K": GemmConfig(128, 128, 4, split_k=3, staged_boxes=1),
    "transposed": GemmConfig(
        128, 32, 6, a_scales=Scales.PER_BLOCK, b_scales=Scales.PER_ROW, transposed=True, staged_boxes=1
    ),
    "raster along N": GemmConfig(128, 128, 4, raster_along_n=True, raster_width=2, staged_boxes=1),
    "raster along N, 256×128": GemmConfig(256, 128, 3, raster_along_n=True, raster_width=4, staged_boxes=4),
    "raster along N, cluster along M": GemmConfig(
        128, 96, 4, cluster_m=2, raster_along_n=True, raster_width=4, staged_boxes=1
    ),
    "raster along N, cluster along N": GemmConfig(
        128, 64, 4, cluster_n=2, raster_along_n=True, raster_width=2, staged_boxes=1
    ),
    "raster along N, ping-pong": GemmConfig(
        128, 128, 2, ping_pong=True, raster_along_n=True, raster_width=2, staged_boxes=1
    ),
    "raster along N, split-K": GemmConfig(128, 128, 4, split_k=3, raster_along_n=True, raster_width=2, staged_boxes=1),
    "raster along N, 1D1D": GemmConfig(
        128, 128, 3, b_scales=Scales.PER_ROW, raster_along_n=True, raster_width=2, staged_boxes=1
    ),
    "1D1D": GemmConfig(128, 128, 3, staged_boxes=1, **IS_1D1D),
    "1D1D, cluster": GemmConfig(256, 128, 3, cluster_n=2, staged_boxes=1, **IS_1D1D),
    "1D1D, ping-pong": GemmConfig(128, 128, 2, ping_pong=True, staged_boxes=1, **IS_1D1D),
    "two accumulators for two waves": OVERLAPS_WAVES,
    "two accumulators for two waves, float32": replace(OVERLAPS_WAVES, out_float=True, staged_boxes=2),
    "two accumulators for two waves, 1D2D": GemmConfig(256, 96, 3, accumulators=2, staged_boxes=3),
    "1D1D, three warpgroups, narrow store boxes": GemmConfig(
        192, 112, 4, warpgroups=3, b_scales=Scales.PER_ROW, staged_boxes=7
    ),
    "prefetching C": GemmConfig(256, 128, 4, prefetch_c=True, staged_boxes=1, **IS_1D1D),
    "prefetching C, three warpgroups": GemmConfig(192, 96, 5, warpgroups=3, prefetch_c=True, staged_boxes=1, **IS_1D1D),
    "prefetching C, cluster, narrow store boxes": GemmConfig(
        256, 112, 3, cluster_n=2, prefetch_c=True, staged_boxes=1, **IS_1D1D
    ),
    "loading C": GemmConfig(256, 128, 3, load_c=True, staged_boxes=4, **IS_1D1D),
    "loading C, cluster": GemmConfig(256, 128, 3, cluster_n=2, load_c=True, staged_boxes=4, **IS_1D1D),
    "loading C, ping-pong": GemmConfig(128, 96, 3, ping_pong=True, load_c=True, staged_boxes=3, **IS_1D1D),
    "loading bfloat16 C": GemmConfig(256, 128, 3, accumulate=True, load_c=True, staged_boxes=2),
    "loading bfloat16 C, narrow store boxes": GemmConfig(
        128, 112, 4, b_scales=Scales.PER_ROW, accumulate=True, load_c=True, staged_boxes=7
    ),
    "accumulating in bfloat16 by threads": GemmConfig(128, 128, 4, accumulate=True, store=Store.PAIRS),
}
RARE: dict[str, tuple[int, Callable[[GemmConfig], bool]]] = {  # with a seed that reaches it
    "48 columns": (92, lambda config: config.tile_n == 48),
    "transposed, A in E5M2": (243, lambda config: config.transposed and config.a_e5m2),
    "transposed, split-K, added": (
        2527, lambda config: config.transposed and config.split_k > 1 and config.accumulate
    ),
}  # fmt: skip
REUSING_SLOTS = (  # kernels with 128×128 scales, one of each kind of pipeline
    "128×128", "192×128, three warpgroups", "64×64, one warpgroup", "cluster along M", "ping-pong", "two accumulators",
    "transposed",
)  # fmt: skip
OF_GROUPS = {  # kernels of rows in groups; where a group ends, 256×N tiles may be half tiles
    "128×128": GemmConfig(128, 128, 4, staged_boxes=1, max_groups=32),
    "256×128": GemmConfig(256, 128, 3, staged_boxes=4, max_groups=32),
    "256×128, float32": GemmConfig(256, 128, 3, staged_boxes=4, max_groups=32, out_float=True),
    "256×128, raster along N": GemmConfig(
        256, 128, 3, staged_boxes=4, max_groups=32, raster_along_n=True, raster_width=2
    ),
    "256×96, cluster along M": GemmConfig(256, 96, 3, staged_boxes=3, max_groups=32, cluster_m=2),
    "256×128, cluster along N": GemmConfig(256, 128, 3, staged_boxes=2, max_groups=32, cluster_n=2),
    "192×128, three warpgroups": GemmConfig(192, 128, 4, warpgroups=3, staged_boxes=2, max_groups=32),
    "64×192, one warpgroup": GemmConfig(64, 192, 4, warpgroups=1, staged_boxes=3, max_groups=32),
    "64×96, one warpgroup, cluster along N": GemmConfig(
        64, 96, 6, warpgroups=1, staged_boxes=1, max_groups=32, cluster_n=2
    ),
    "two accumulators": GemmConfig(128, 64, 6, accumulators=2, staged_boxes=1, max_groups=32),
    "two accumulators for two waves": GemmConfig(256, 96, 3, accumulators=2, staged_boxes=3, max_groups=32),
    "ping-pong": GemmConfig(128, 128, 2, ping_pong=True, staged_boxes=1, max_groups=32, out_float=True),
}
# rows of groups: none, one, and around every multiple of 64
SIZES = (513, 0, 1, 63, 64, 65, 0, 127, 128, 129, 191, 192, 193, 255, 256, 257, 320, 383, 384, 385, 449, 512, 511, 37)


@pytest.fixture(autouse=True)
def hopper() -> None:
    if reason := why_not_on(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip(f"the GEMM kernel does not run here: {reason}")


def _operand(
    shape: tuple[int, ...], block: tuple[int, int], seed: int, fmt: str = "e4m3", signed: bool = True
) -> Quantized:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(shape, generator=generator, device="cuda")
    x = (x if signed else x.abs()) * torch.exp2(torch.randn(*shape[:-1], 1, generator=generator, device="cuda"))
    return *quantize(x, *block, fmt, False), block


def _values(operand: Quantized) -> Tensor:
    data, scale, block = operand
    ones = dequantize(torch.ones_like(data, dtype=torch.float32).to(data.dtype), scale, *block, torch.float32)
    return data.float().double() * ones.double()


def _mT(operand: Quantized) -> Quantized:
    data, scale, (rows, columns) = operand
    return data.mT, scale.mT, (columns, rows)


def _surrounded(operand: Quantized) -> Quantized:
    """Copy the operand into memory that TMA can read, surrounded by NaN, which reach the result if they are read."""
    data, scale, block = operand
    encoded = torch.full((data.shape[0] + 2, padded(data.shape[1]) + 32), NAN, dtype=torch.uint8, device="cuda")
    inside = encoded.view(data.dtype)[1:-1, 16 : 16 + data.shape[1]].copy_(data)
    scales = torch.full((scale.shape[1] + 2, padded(scale.shape[0], 4) + 8), torch.nan, device="cuda")
    return inside, scales.mT[4 : 4 + scale.shape[0], 1:-1].copy_(scale), block


def _make(
    schedule: Schedule,
    out: Tensor,
    a: Quantized,
    b: Quantized,
    sizes: Tensor | None = None,
    accumulate: bool = False,
    config: GemmConfig | None = None,
    num_sms: int | None = None,
) -> GemmConfig:
    """a · bᵀ into out of any strides, by the given kernel or by the chosen one; returns its configuration."""
    operands = [Operand(*x).mT if schedule is Schedule.ALONG_K else Operand(*x) for x in (a, b)]
    zero_rest = config.zero_rest if config else False
    request = make_tma_readable(
        GemmRequest(schedule, *operands, out.dtype, out, sizes, accumulate, zero_rest=zero_rest)
    )
    chip = Chip(num_sms or torch.cuda.get_device_properties(0).multi_processor_count)
    made = plan_launch(request, chip, config)
    kernel = specialize.load("gemm", made.config.constants(), out.device, made.config.headers())
    _, pointers = launch_cache.launch_key(request)
    prepared = launch_cache.PreparedGemm(made, kernel)
    prepared.launch_at(prepared.with_workspace(pointers, out))()
    return made.config


def _launch(
    schedule: Schedule,
    a: Quantized,
    b: Quantized,
    out: Tensor | None = None,
    sizes: Tensor | None = None,
    accumulate: bool = False,
    out_dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Return the result of a request, computed by the kernel that octile chooses."""
    dtype = out_dtype if out is None else out.dtype
    return launch_cache.launch(GemmRequest(schedule, Operand(*a), Operand(*b), dtype, out, sizes, accumulate))


class _Guarded:
    """A poisoned result within a larger tensor."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, odd: bool = False) -> None:
        self.buffer = torch.full(
            (*shape[:-2], shape[-2] + 2 * GUARD, shape[-1] + 2 * GUARD + odd), torch.nan, dtype=dtype
        ).cuda()
        self.inside = (..., slice(GUARD, GUARD + shape[-2]), slice(GUARD, GUARD + shape[-1]))
        self.out = self.buffer[self.inside]

    def check(self) -> None:
        around = self.buffer.clone()
        around[self.inside] = torch.nan
        assert around.isnan().all(), "something was written outside of the result"


def _check_one_sign(out: Tensor, exact: Tensor) -> None:
    error = (out.double() - exact) / exact
    assert error.abs().max() < WORST
    assert error.square().mean().sqrt() < RMS


def _check(out: Tensor, a: Tensor, b: Tensor, before: Tensor | float = 0.0) -> None:
    exact = a @ b.mT + before
    bound = (CUT + 2.0**-20) * (a.abs() @ b.abs().mT) + torch.finfo(out.dtype).eps * exact.abs() + 1e-30
    assert ((out.double() - exact).abs() <= bound).all()


def _seeds(default: int, further: int, step: int = 1) -> list:
    """Seeds of which those after the first `default` are exhaustive."""
    return [
        *range(0, default, step),
        *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(default, further, step)),
    ]


def _ragged_gemm(seed: int) -> tuple[Quantized, Quantized, _Guarded, bool]:
    """Draw a, b, the result's tensor, and whether the product is added to it."""
    generator = torch.Generator().manual_seed(seed)

    def draw(most: int) -> int:
        return int(2 ** (torch.rand((), generator=generator) * torch.log2(torch.tensor(float(most)))))

    m, n, k = draw(700), draw(1500), draw(4000)
    out_dtype = (torch.bfloat16, torch.float32)[seed % 2]
    a, b = (
        _operand((m, k), TILE, seed),
        _operand((n, k), (TILE, BLOCK)[seed // 2 % 2], seed + 1, ("e4m3", "e5m2")[seed % 3 == 0]),
    )
    if seed % 3 > 0:
        a, b = _surrounded(a), _surrounded(b)
    return a, b, _Guarded((m, n), out_dtype, odd=seed % 5 == 0), seed % 7 < 2


@pytest.mark.parametrize("start", _seeds(60, 500, step=10))
def test_ragged_gemms(start: int):
    for seed in range(start, start + 10):
        a, b, guarded, accumulates = _ragged_gemm(seed)
        before = guarded.out.normal_().double() if accumulates else torch.zeros((), device="cuda")
        _launch(Schedule.DENSE, a, b, guarded.out, accumulate=accumulates)
        _check(guarded.out, _values(a), _values(b), before)
        guarded.check()


@pytest.mark.parametrize("name", RARE)
def test_ragged_gemms_of_rare_kernels(name: str):
    """Kernels that seeds below 60 of `test_ragged_gemms` do not reach."""
    seed, is_it = RARE[name]
    a, b, guarded, accumulates = _ragged_gemm(seed)
    before = guarded.out.normal_().double() if accumulates else torch.zeros((), device="cuda")
    assert is_it(_make(Schedule.DENSE, guarded.out, a, b, accumulate=accumulates)), "another kernel is chosen now"
    _check(guarded.out, _values(a), _values(b), before)
    guarded.check()


@pytest.mark.parametrize("name", KERNELS)
def test_every_kind_of_kernel(name: str):
    config = KERNELS[name]
    is_1d1d = config.a_scales is config.b_scales
    a, b = _operand((300, 1408), TILE, 0), _operand((520, 1408), TILE if is_1d1d else BLOCK, 1)
    guarded = _Guarded((300, 520), torch.float32 if config.out_float else torch.bfloat16)
    before = torch.randn(300, 520, device="cuda") if config.accumulate else torch.zeros((), device="cuda")
    guarded.out.copy_(before)
    before = guarded.out.double()
    _make(Schedule.DENSE, guarded.out, a, b, accumulate=config.accumulate, config=config)
    _check(guarded.out, _values(a), _values(b), before)
    guarded.check()


def test_two_accumulators_for_two_waves_give_the_bits_of_one():
    a, b = _operand((1000, 5000), TILE, 0), _operand((1000, 5000), TILE, 1)
    results = [torch.empty(1000, 1000, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    for out, config in zip(results, (KERNELS["raster along N, 1D1D"], OVERLAPS_WAVES), strict=True):
        _make(Schedule.DENSE, out, a, b, config=config)
    assert torch.equal(*results)


def test_two_accumulators_for_two_waves_give_the_same_bits_200_times_under_load():
    a, b = _operand((3000, 8192), TILE, 0), _operand((2000, 8192), TILE, 1)
    out = torch.empty(3000, 2000, dtype=torch.bfloat16, device="cuda")

    def make() -> Tensor:
        _make(Schedule.DENSE, out.fill_(torch.nan), a, b, config=OVERLAPS_WAVES)
        return out

    first = make().clone()
    _check(first, _values(a), _values(b))
    _under_load(make, first)


@pytest.mark.parametrize("name", REUSING_SLOTS)
def test_slots_of_block_scales_are_reused(name: str):
    """An SM computes several tiles of 38 k-blocks, one after the other; scales of neighboring k-blocks differ much."""
    config, (m, n, k) = KERNELS[name], (300, 296, 128 * 37 + 64)
    a, b = _operand((m, k), TILE, 0), _operand((n, k), BLOCK, 1)
    data, scale, block = b
    factors = torch.exp2(torch.randint(-6, 7, scale.shape, generator=torch.Generator().manual_seed(2)).float())
    b = data, scale * factors.cuda(), block
    guarded = _Guarded((m, n), torch.bfloat16)
    _make(Schedule.DENSE, guarded.out, a, b, config=config, num_sms=2)
    _check(guarded.out, _values(a), _values(b))
    guarded.check()


@pytest.mark.parametrize("seed", _seeds(30, 60))
def test_ragged_groups(seed: int):
    generator = torch.Generator().manual_seed(seed)
    groups = int(torch.randint(1, 257, (), generator=generator)) if seed % 2 else seed % 7 + 1
    sizes = torch.randint(0, 40 if groups > 8 else 500, (groups,), generator=generator)
    sizes[torch.rand(groups, generator=generator) < 0.3] = 0
    ends = sizes.cumsum(0)
    t, n, k = int(ends[-1]) + seed % 3, 8 * (seed % 11 + 1) + seed % 2, 100 * (seed % 6) + 60
    if t == 0:
        return
    offs, out_dtype = ends.to(torch.int32).cuda(), (torch.bfloat16, torch.float32)[seed % 2]
    groups_of = [slice(*pair) for pair in pairwise([0, *ends.tolist()])]
    a, b = _operand((t, k), TILE, seed), _operand((groups, n, k), BLOCK, seed + 1)
    a = _surrounded(a) if seed % 3 else a
    guarded = _Guarded((t, n), out_dtype)
    _make(Schedule.GROUPED, guarded.out, a, b, offs)
    of_a, of_b = _values(a), _values(b)
    for g, rows in enumerate(groups_of):
        _check(guarded.out[rows], of_a[rows], of_b[g])
    assert guarded.out[int(ends[-1]) :].isnan().all(), "rows after the groups are not written"
    assert not _launch(Schedule.GROUPED, a, b, sizes=offs, out_dtype=out_dtype)[int(ends[-1]) :].any(), (
        "or are set to zero"
    )
    guarded.check()

    columns, accumulates = (77, 76, 80)[seed % 3], seed % 4 > 0
    dy, x = _operand((t, n), COLUMN, seed), _operand((t, columns), COLUMN, seed + 1)
    before = torch.randn(groups, n, columns, device="cuda") if accumulates else torch.zeros(groups, 1, 1, device="cuda")
    guarded = _Guarded((groups, n, columns), torch.float32 if accumulates else out_dtype)
    if accumulates:
        guarded.out.copy_(before)
    _make(Schedule.ALONG_K, guarded.out, _mT(dy), _mT(x), offs, accumulates)
    of_dy, of_x = _values(dy), _values(x)
    for g, tokens in enumerate(groups_of):
        _check(guarded.out[g], of_dy[tokens].mT, of_x[tokens].mT, before[g].double())
    guarded.check()


@pytest.mark.parametrize("zero_rest", [False, True], ids=["not written", "zero"])
@pytest.mark.parametrize("name", OF_GROUPS)
def test_every_kind_of_kernel_of_groups(name: str, zero_rest: bool):
    config = replace(OF_GROUPS[name], schedule=Schedule.GROUPED, zero_rest=zero_rest)
    ends = list(accumulate(SIZES))
    a, b = _operand((ends[-1] + 70, 300), TILE, 0), _operand((len(SIZES), 264, 300), BLOCK, 1)
    guarded = _Guarded((ends[-1] + 70, 264), torch.float32 if config.out_float else torch.bfloat16)
    offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
    _make(Schedule.GROUPED, guarded.out, a, b, offs, config=config)
    of_a, of_b = _values(a), _values(b)
    for g, rows in enumerate(slice(*pair) for pair in pairwise([0, *ends])):
        _check(guarded.out[rows], of_a[rows], of_b[g])
    rest = guarded.out[ends[-1] :]
    assert (rest == 0).all() if zero_rest else rest.isnan().all()
    guarded.check()


@pytest.mark.parametrize("name", ["chosen", "chosen, float32", *OF_GROUPS])
def test_every_kind_of_kernel_of_masked_rows(name: str):
    """Rows after the last 64 in use are not written, in the last tile of the tensor and in the others."""
    config = replace(OF_GROUPS[name], schedule=Schedule.MASKED) if name in OF_GROUPS else None
    most = max(SIZES)
    a, b = _operand((len(SIZES), most, 300), TILE, 0), _operand((len(SIZES), 264, 300), BLOCK, 1)
    out_float = config.out_float if config else "float32" in name
    guarded = _Guarded((len(SIZES), most, 264), torch.float32 if out_float else torch.bfloat16)
    _make(Schedule.MASKED, guarded.out, a, b, torch.tensor(SIZES, dtype=torch.int32, device="cuda"), config=config)
    of_a, of_b = _values(a), _values(b)
    for g, count in enumerate(SIZES):
        _check(guarded.out[g, :count], of_a[g, :count], of_b[g])
        assert guarded.out[g, -(-count // 64) * 64 :].isnan().all(), f"rows after the {count} in use"
    guarded.check()


@pytest.mark.parametrize("seed", range(20))
def test_ragged_masked_rows(seed: int):
    generator = torch.Generator().manual_seed(seed)
    groups, most, n = 3 + 61 * seed % 40, 1 + 50 * seed, 40 * seed + 3 * (seed % 2) + 8
    counts = torch.randint(0, most + 1, (groups,), generator=generator)
    counts[seed % 3] = most
    a, b = _operand((groups, most, 700), TILE, seed), _operand((groups, n, 700), BLOCK, seed + 1)
    guarded = _Guarded((groups, most, n), (torch.bfloat16, torch.float32)[seed // 2 % 2])
    _make(Schedule.MASKED, guarded.out, a, b, counts.to(torch.int32).cuda())
    of_a, of_b = _values(a), _values(b)
    for g, count in enumerate(counts.tolist()):
        _check(guarded.out[g, :count], of_a[g, :count], of_b[g])
        assert guarded.out[g, -(-count // 64) * 64 :].isnan().all()
    guarded.check()


def test_masked_rows_into_a_new_result():
    a, b = _operand((3, 300, 1408), TILE, 0), _operand((3, 520, 1408), BLOCK, 1)
    counts = torch.tensor([129, 0, 300], dtype=torch.int32, device="cuda")
    out = _launch(Schedule.MASKED, a, b, sizes=counts, out_dtype=torch.bfloat16)
    for g, count in enumerate(counts.tolist()):
        _check(out[g, :count], _values(a)[g, :count], _values(b)[g])


@pytest.fixture
def nothing_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore what `octile bench tune` found on this machine: the test decides which kernel it needs."""
    monkeypatch.setattr(tuned, "lookup", lambda problem, chip: None)


@pytest.mark.usefixtures("nothing_tuned")
@pytest.mark.parametrize(("m", "n", "k"), [(4096, 7168, 512), (3401, 3400, 2048)])
def test_large_gemms_rasterize_along_n(m: int, n: int, k: int):
    a, b = _operand((m, k), TILE, 0), _operand((n, k), BLOCK, 1)
    guarded = _Guarded((m, n), torch.bfloat16)
    config = _make(Schedule.DENSE, guarded.out, a, b)
    assert config.raster_along_n
    assert n > config.raster_width * config.cluster_tile_n, "there must be several strips"
    _check(guarded.out, _values(a), _values(b))
    guarded.check()


@pytest.mark.usefixtures("nothing_tuned")
def test_large_groups_rasterize_along_n():
    ends = [5301, 5301, 9990]
    a, b = _operand((10000, 512), TILE, 0), _operand((3, 3400, 512), BLOCK, 1)
    guarded = _Guarded((10000, 3400), torch.bfloat16)
    config = _make(Schedule.GROUPED, guarded.out, a, b, torch.tensor(ends, dtype=torch.int32, device="cuda"))
    assert config.raster_along_n
    assert config.raster_width * config.cluster_tile_n < 3400, "there must be several strips"
    of_a, of_b = _values(a), _values(b)
    for g, rows in enumerate(slice(*pair) for pair in pairwise([0, *ends])):
        _check(guarded.out[rows], of_a[rows], of_b[g])
    guarded.check()


@pytest.mark.parametrize("accumulates", [False, True], ids=["stored", "added"])
@pytest.mark.parametrize("block", [BLOCK, TILE], ids=["1D2D", "1D1D"])
def test_data_of_one_sign(block: tuple[int, int], accumulates: bool):
    for m in (1, 100, 1000):
        a, b = _operand((m, 4096), TILE, 0, signed=False), _operand((1000, 4096), block, 1, signed=False)
        out = torch.zeros(m, 1000, device="cuda") if accumulates else torch.empty(m, 1000, device="cuda")
        _launch(Schedule.DENSE, a, b, out, accumulate=accumulates)
        _check_one_sign(out, _values(a) @ _values(b).mT)


def test_groups_of_one_sign():
    ends = [500, 560, 4096, 8192]
    offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
    a, b = _operand((700, 8192), TILE, 0, signed=False), _operand((900, 8192), TILE, 1, signed=False)
    of_a, of_b = _values(a), _values(b)
    for accumulates in (False, True):
        out = torch.zeros(4, 700, 900, device="cuda")
        _launch(Schedule.ALONG_K, _mT(a), _mT(b), out, offs, accumulate=accumulates)
        for g, tokens in enumerate(slice(*pair) for pair in pairwise([0, *ends])):
            _check_one_sign(out[g], of_a[:, tokens] @ of_b[:, tokens].mT)
    x, w = _operand((700, 4096), TILE, 2, signed=False), _operand((2, 900, 4096), BLOCK, 3, signed=False)
    out = _launch(
        Schedule.GROUPED,
        x,
        w,
        sizes=torch.tensor([130, 700], dtype=torch.int32, device="cuda"),
        out_dtype=torch.float32,
    )
    for g, rows in enumerate((slice(130), slice(130, 700))):
        _check_one_sign(out[rows], _values(x)[rows] @ _values(w)[g].mT)


def test_the_error_without_promotion_is_large():
    whole = (256, 4096)
    a, b = (_operand(whole, whole, seed, signed=False) for seed in (0, 1))
    exact = _values(a) @ _values(b).mT
    errors = []
    for promote_every in (128, None):
        out = torch.empty(256, 256, device="cuda")
        promote = promote_every is not None
        launch_cache.launch(GemmRequest(Schedule.DENSE, Operand(*a), Operand(*b), out.dtype, out, promote=promote))
        assert torch.equal(out, model(*a, *b, promote_every=promote_every)) or promote_every == 128
        errors.append(float(((out.double() - exact) / exact).abs().max()))
    assert errors[0] < WORST
    assert errors[1] > 0.02


def _under_load(make: Callable[[], Tensor], first: Tensor) -> None:
    """Check for the same bits 200 times, while another stream keeps the memory and the SMs busy."""
    load, stream = torch.randn(1 << 26, device="cuda"), torch.cuda.Stream()
    for _ in range(200):
        with torch.cuda.stream(stream):
            load.mul_(1.0)
        assert torch.equal(make(), first)


LOADS_C = GemmConfig(256, 128, 3, schedule=Schedule.ALONG_K, max_groups=32, load_c=True, staged_boxes=4, **IS_1D1D)
DIRECT = GemmConfig(
    128, 128, 4, schedule=Schedule.ALONG_K, max_groups=32, b_scales=Scales.PER_ROW, accumulate=True, store=Store.PAIRS
)
WGRADS = {  # rows, columns, tokens of four groups; dtype of the result; accumulates; a kernel, or None: the chosen one
    "float32": (512, 640, 4000, torch.float32, False, None),
    "bfloat16": (512, 640, 4000, torch.bfloat16, False, None),
    "added to float32 in the L2 cache": (512, 640, 4000, torch.float32, True, None),
    "added to float32 C that is loaded": (1024, 2048, 1200, torch.float32, True, None),
    "added to float32 C that is loaded, 256×128": (512, 640, 4000, torch.float32, True, LOADS_C),
    "bfloat16, two accumulators for two waves": (
        512,
        640,
        4000,
        torch.bfloat16,
        False,
        replace(OVERLAPS_WAVES, schedule=Schedule.ALONG_K, max_groups=32),
    ),
    "added to bfloat16 C that is loaded": (512, 640, 4000, torch.bfloat16, True, None),
    "added to bfloat16 by threads": (512, 640, 4000, torch.bfloat16, True, DIRECT),
}


@pytest.mark.usefixtures("nothing_tuned")
@pytest.mark.parametrize("name", WGRADS)
def test_wgrad_gives_the_same_bits_200_times_under_load(name: str):
    m, n, t, dtype, accumulates, config = WGRADS[name]
    ends = [t // 6, t // 6, t // 2 + 1, t]
    offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
    a, b = _operand((m, t), TILE, 0), _operand((n, t), TILE, 1)
    before = torch.randn(4, m, n, device="cuda").to(dtype)
    out = torch.empty_like(before)

    def make() -> Tensor:
        out.copy_(before if accumulates else torch.tensor(torch.nan))
        taken = _make(Schedule.ALONG_K, out, a, b, offs, accumulates, config)
        assert taken.load_c == ("loaded" in name)
        return out

    first = make().clone()
    of_a, of_b = _values(a), _values(b)
    for g, tokens in enumerate(slice(*pair) for pair in pairwise([0, *ends])):
        _check(first[g], of_a[:, tokens], of_b[:, tokens], before[g].double() if accumulates else 0.0)
    _under_load(make, first)


@pytest.mark.usefixtures("nothing_tuned")
def test_split_k_gives_the_same_bits_200_times_under_load():
    a, b = _operand((64, 7168), TILE, 2), _operand((2112, 7168), BLOCK, 3)

    def make() -> Tensor:
        out = torch.full((64, 2112), torch.nan, dtype=torch.bfloat16, device="cuda")
        assert _make(Schedule.DENSE, out, a, b).split_k > 1
        return out

    _under_load(make, make())


def test_split_k_in_a_graph():
    a, b = _operand((16, 7168), TILE, 0), _operand((2112, 7168), BLOCK, 1)
    out = torch.empty(16, 2112, dtype=torch.bfloat16, device="cuda")
    _launch(Schedule.DENSE, a, b, out, accumulate=False)
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _launch(Schedule.DENSE, a, b, out, accumulate=False)
        _launch(Schedule.DENSE, a, b, out, accumulate=False)
    for _ in range(3):
        out.fill_(torch.nan)
        graph.replay()
        _launch(Schedule.DENSE, a, b, torch.empty_like(out), accumulate=False)
        assert torch.equal(out, expected)


def test_a_captured_graph_follows_the_sizes():
    a, b = _operand((900, 512), TILE, 0), _operand((4, 300, 512), BLOCK, 1)
    offs = torch.tensor([100, 200, 300, 900], dtype=torch.int32, device="cuda")
    _launch(Schedule.GROUPED, a, b, sizes=offs, out_dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = _launch(Schedule.GROUPED, a, b, sizes=offs, out_dtype=torch.bfloat16)
    for ends in ([0, 0, 0, 0], [900, 900, 900, 900], [1, 130, 131, 700]):
        offs.copy_(torch.tensor(ends, dtype=torch.int32))
        graph.replay()
        assert torch.equal(out, _launch(Schedule.GROUPED, a, b, sizes=offs, out_dtype=torch.bfloat16))


def test_operands_of_another_layout_are_copied():
    a, b = _operand((300, 1000), TILE, 0), _operand((200, 1000), BLOCK, 1)
    expected, out = (torch.empty(300, 200, device="cuda") for _ in range(2))
    _launch(Schedule.DENSE, a, b, expected, accumulate=False)
    columns_first = a[0].view(torch.uint8).mT.contiguous().mT.view(a[0].dtype)
    _launch(Schedule.DENSE, (columns_first, a[1].contiguous(), TILE), b, out)
    assert torch.equal(out, expected)
