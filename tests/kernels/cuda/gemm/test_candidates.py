"""Tests of the choice of a GEMM kernel, which depends only on shape and GPU and always finds one."""

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from octile.bench import shapes
from octile.bench.tune import problem
from octile.kernels.cuda.gemm import tuned
from octile.kernels.cuda.gemm.candidates import candidates, choose
from octile.kernels.cuda.gemm.catalog import CHIPS, configs
from octile.kernels.cuda.gemm.config import SCALE_KINDS, GemmConfig, Scales, Schedule, Store
from octile.kernels.cuda.gemm.cost_model import Chip, Problem, cycles, num_tiles, rounded

H200, H100 = CHIPS
SWEEPS = Path(__file__).parents[4] / "benchmarks" / "history" / "cost-model"


@pytest.fixture(autouse=True)
def nothing_tuned(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTILE_CACHE_DIR", str(tmp_path))


@pytest.mark.slow
@given(
    sides=st.tuples(*[st.integers(1, 20000)] * 3),
    groups=st.integers(1, 1024),
    schedule=st.sampled_from(Schedule),
    scales=st.sampled_from(SCALE_KINDS),
    accumulate=st.booleans(),
    out_float=st.booleans(),
    store=st.sampled_from(Store),
    sms=st.integers(1, 132),
    gpu_multiprocessors=st.sampled_from([0, 132]),
)
def test_there_is_always_a_kernel(
    sides, groups, schedule, scales, accumulate, out_float, store, sms, gpu_multiprocessors
):
    dense, of_rows = schedule is Schedule.DENSE, schedule in (Schedule.GROUPED, Schedule.MASKED)
    assume(not of_rows or (scales[0] is Scales.PER_ROW and not accumulate))
    results = {"store": store, "transposable": dense, "accumulate": accumulate, "out_float": out_float}
    problem = Problem(*sides, 1 if dense else groups, schedule, *scales, **results)
    config = choose(problem, Chip(sms, gpu_multiprocessors))
    assert config.schedule is schedule
    uses_tma, tma_may_be_unable = config.store is Store.TMA, accumulate or (out_float and config.transposed)
    assert uses_tma == (store is Store.TMA) or (tma_may_be_unable and not uses_tma)
    assert {config.a_scales, config.b_scales} == set(scales)
    assert config.max_groups >= (0 if dense else groups)


@pytest.mark.one_case
@pytest.mark.parametrize("sms", [1, 4, 100, 116, 131])
@pytest.mark.parametrize(
    "problem",
    [
        Problem(512, 768, 8192),
        Problem(16, 2112, 7168, transposable=True),
        Problem(128, 7168, 2048),
        Problem(4096, 576, 7168),
        Problem(256, 4096, 16384, b_scales=Scales.PER_ROW, out_float=True),
        Problem(4096, 4096, 4096),
    ],
)
def test_fewer_sms_split_k_as_all_sms_do(problem: Problem, sms: int):
    """Nothing else about a kernel changes the bits of a result."""
    assert choose(problem, Chip(sms, gpu_multiprocessors=132)).split_k == choose(problem, H200).split_k


def test_a_measured_kernel_for_fewer_sms_that_splits_k_otherwise_is_left_out():
    problem, few = Problem(512, 768, 8192), Chip(100, gpu_multiprocessors=132)
    expected = choose(problem, few)
    for split_k in (expected.split_k + 1, expected.split_k):
        measured = GemmConfig(128, 64, 3, staged_boxes=1, split_k=split_k)
        tuned.store(rounded(problem), few, measured, 12.5)
        assert (choose(problem, few) == measured) == (split_k == expected.split_k)


def test_large_gemms_take_large_tiles():
    config = choose(Problem(8192, 8192, 8192), H200)
    assert config.tile_m * config.tile_n >= 128 * 160
    assert config.split_k == 1


def test_a_weight_for_few_rows_is_read_by_all_sms():
    problem = Problem(16, 2112, 7168, transposable=True)
    config = choose(problem, H200)
    assert config.transposed
    assert -(-2112 // config.tile_m) * config.split_k > 132 // 3


ALONG_N = {  # whether strips are
    "large": (Problem(4096, 7168, 2048), True),
    "groups": (Problem(8192, 4096, 2048, 32, Schedule.GROUPED), True),
    "few rows": (Problem(128, 7168, 2048), False),
    "added to": (Problem(4096, 7168, 2048, out_float=True, accumulate=True), False),
    "masked": (Problem(1024, 7168, 2048, 8, Schedule.MASKED), True),
}


@pytest.mark.parametrize("case", ALONG_N)
def test_rasterization_order(case: str):
    problem, along_n = ALONG_N[case]
    assert choose(problem, H200).raster_along_n == along_n


@pytest.mark.parametrize(("m", "n", "k"), [(8192, 51200, 5120), (19072, 7168, 20480)])
def test_the_largest_gemms_share_loads_in_clusters(m: int, n: int, k: int):
    """Without, they were 15 to 20% slower on an H100 (benchmarks/history/gemm-drawn)."""
    config = choose(Problem(m, n, k), H200)
    assert (config.tile_m, config.cluster_n) == (192, 2)


@pytest.mark.parametrize("problem", [Problem(7, 16384, 512, transposable=True), Problem(100, 64, 512)])
def test_both_blocks_of_a_cluster_have_a_tile(problem: Problem):
    """64×16 in clusters of two, for 7 rows, took 1.26 times as long as 128×16 (benchmarks/history/cost-model)."""
    for config in candidates(rounded(problem), H200):
        m, n = (problem.n, problem.m) if config.transposed else (problem.m, problem.n)
        assert config.cluster_m == 1 or m > config.tile_m
        assert config.cluster_n == 1 or n > config.tile_n


@pytest.mark.parametrize(("m", "n", "k"), [(4096, 2112, 7168), (12288, 1536, 9728), (5120, 2880, 17408)])
def test_weight_gradients_get_tiles_of_two_waves(m: int, n: int, k: int):
    """These took 0.87 to 0.97 of the time of tiles of one wave (benchmarks/history/cost-model)."""
    config = choose(Problem(m, n, k, b_scales=Scales.PER_ROW, out_float=True, accumulate=True), H200)
    assert (config.waves, config.cluster_n) == (2, 2)


@pytest.mark.parametrize(("n", "k"), [(6144, 7168), (4096, 4096), (4096, 2048)])
def test_masked_groups_of_many_rows_get_tiles_of_three_warpgroups(n: int, k: int):
    """These took 0.96 to 0.99 of the time of 256×128 or 128×192 (benchmarks/history/cost-model)."""
    config = choose(Problem(1280, n, k, 6, Schedule.MASKED), H200)
    assert (config.tile_m, config.tile_n, config.cluster_n) == (192, 128, 2)


@pytest.mark.parametrize(
    "problem", [Problem(24, 4096, 4096, 6, Schedule.MASKED), Problem(4, 32768, 512, transposable=True)]
)
def test_few_rows_that_wait_for_memory_take_no_cluster(problem: Problem):
    """In the first GEMM 64×192 took 0.97 of the time of 64×96 in clusters (benchmarks/history/cost-model)."""
    assert choose(rounded(problem), H200).cluster_size == 1


def test_neighbouring_sizes_share_a_kernel():
    assert choose(Problem(4001, 4096, 7168), H200) == choose(Problem(4090, 4096, 7168), H200)
    assert len({rounded(Problem(m, 7168, 2048)).m for m in range(1, 257)}) == 17
    assert len({rounded(Problem(m, 7168, 2048)).m for m in range(2049, 4097)}) == 32


@pytest.mark.parametrize("alignment", [64, 128])
def test_tiles_of_groups_are_counted_as_they_are_on_average_over_the_sizes(alignment: int):
    for config in candidates(Problem(9600, 512, 512, 8, Schedule.GROUPED), H200)[::20]:
        tile = config.cluster_tile_m
        sizes = range(tile + alignment, tile + 1 + math.lcm(tile, alignment), alignment)  # each remainder once
        rows, groups = sum(sizes), len(sizes)
        along_m = sum(-(-size // tile) for size in sizes)
        along_n = -(-512 // config.cluster_tile_n)
        problem = Problem(rows, 512, 512, groups, Schedule.GROUPED, alignment=alignment)
        assert num_tiles(problem, config) == along_m * along_n * config.cluster_size


def test_a_group_has_a_tile_at_least():
    problem = Problem(40, 512, 512, 20, Schedule.GROUPED)
    config = choose(problem, H200)
    assert num_tiles(problem, config) == 20 * -(-512 // config.cluster_tile_n) * config.cluster_size


def test_groups_of_multiples_of_128_rows_take_kernels_of_their_own():
    """128×192 took 0.89 of the time of 192×128 with them (benchmarks/history/cost-model)."""
    groups = Problem(2816, 18432, 6144, 4, Schedule.GROUPED)
    tiles = [choose(replace(groups, alignment=alignment), H200).tile_m for alignment in (1, 128)]
    assert tiles == [192, 128]


def test_rounding_never_makes_a_gemm_smaller():
    assert all(rounded(Problem(m, 1, 1)).m >= m for m in range(1, 3000))


def test_the_chosen_one_is_the_best_candidate():
    problem = rounded(Problem(4096, 7168, 2048))
    best = min(cycles(problem, config, H200) for config in candidates(problem, H200))
    assert cycles(problem, choose(problem, H200), H200) == best


def test_the_memory_of_the_gpu_decides_how_is_added_to_c():
    """Adding in the L2 cache took 1.19 times as long as loading C on an H100, with 1,024 tokens of a group
    (benchmarks/history/gemm-drawn). On an H200 it took 0.87 to 1.01 times as long where C is prefetched, and 1.03 to
    1.37 times with 256 to 768 tokens (benchmarks/history/gemm-accumulate).
    """
    scales = {"b_scales": Scales.PER_ROW, "out_float": True, "accumulate": True}
    for tokens, loads in ((512, [True, True]), (1024, [True, False]), (4096, [False, False])):
        experts = Problem(3072, 4096, 16 * tokens, 16, Schedule.ALONG_K, **scales)
        assert [choose(experts, chip).load_c for chip in (H100, H200)] == loads


@pytest.mark.parametrize(
    ("m", "n", "k", "prefetches"),
    [(4096, 7168, 2048, True), (4096, 7168, 16384, False), (4096, 576, 7168, True), (128, 7168, 2048, False)],
    ids=["short sums", "long sums", "one tile for each SM", "few rows"],
)
def test_c_is_prefetched_where_it_pays(m: int, n: int, k: int, prefetches: bool):
    adds = {"b_scales": Scales.PER_ROW, "out_float": True, "accumulate": True}
    assert choose(Problem(m, n, k, **adds), H200).prefetch_c is prefetches


@pytest.mark.parametrize("scales", [kinds for kinds in SCALE_KINDS if kinds != (Scales.PER_ROW, Scales.PER_ROW)])
def test_c_is_not_prefetched_with_other_scales(scales: tuple[Scales, Scales]):
    """With 128×128 scales of a the choice failed; with a scale of the whole tensor it was not timed."""
    assert not choose(Problem(4096, 7168, 2048, 1, Schedule.DENSE, *scales, True, True), H200).prefetch_c


@pytest.mark.parametrize(("m", "n"), [(512, 7168), (256, 2048), (128, 7168), (32, 7168)])
def test_bf16_that_is_added_to_is_loaded(m: int, n: int):
    """Threads took 1.25 to 1.6 times as long (benchmarks/history/gemm-accumulate/bf16.txt, serve)."""
    assert all(choose(Problem(m, n, 2048, accumulate=True, transposable=True), chip).load_c for chip in (H100, H200))


@pytest.mark.parametrize(("rows", "tiles"), [(192, 64), (256, 99), (1000, 286)])
def test_groups_of_any_sizes_are_near_their_mean(rows: int, tiles: int):
    """Of 64 groups of about 192 rows each has one tile of 256 rows, of about 256 rows every second one has two."""
    experts = Problem(64 * rows, 128, 2048, 64, Schedule.GROUPED)
    config = GemmConfig(256, 128, 3, schedule=Schedule.GROUPED, staged_boxes=1, max_groups=64)
    assert num_tiles(experts, config) == tiles


@pytest.mark.one_case
@pytest.mark.parametrize("m", [1, 32, 200])
def test_k_is_not_split_where_rows_do_not_depend_on_each_other(m: int):
    problem = Problem(m, 2048, 7168, transposable=True, row_invariant=True)
    assert {config.split_k for config in candidates(rounded(problem), H200)} == {1}
    assert max(config.split_k for config in candidates(rounded(replace(problem, row_invariant=False)), H200)) > 1
    assert choose(replace(problem, accumulate=True), H200).adds_rounded


def test_a_measured_kernel_comes_first():
    problem = Problem(4096, 7168, 2048)
    measured = GemmConfig(128, 64, 3, staged_boxes=1)
    tuned.store(rounded(problem), H200, measured, 12.5)
    assert choose(problem, H200) == measured
    assert choose(problem, Chip(100)) != measured
    assert choose(problem, H100) != measured


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_damaged_file_of_measured_kernels_is_not_used_and_renamed(text: str, caplog: pytest.LogCaptureFixture):
    tuned.path().write_text(text)
    problem, measured = Problem(4096, 7168, 2048), GemmConfig(128, 64, 3, staged_boxes=1)
    assert choose(problem, H200).stages > 1
    tuned.store(rounded(problem), H200, measured, 12.5)
    assert choose(problem, H200) == measured
    assert tuned.path().with_suffix(".damaged").read_text() == text
    assert ["not used" in message or "it is renamed" in message for message in caplog.messages] == [True, True]


def test_an_entry_of_measured_kernels_that_is_no_configuration_is_ignored():
    tuned.path().write_text('{"x": {"config": {"tile_m": 3}}}')
    assert choose(Problem(4096, 7168, 2048), H200).stages > 1


@pytest.mark.slow
def test_deepseek_v3_has_launch_plans():
    assert len(configs()) > 100


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_every_kernel_that_the_benchmark_takes_is_among_them(chip: Chip):
    """These kernels are compiled and checked for spills without a GPU."""
    compiled = set(configs().values())
    missing = [(case.name, case.what) for case in shapes.GPU if choose(problem(case), chip) not in compiled]
    assert missing == []


@pytest.mark.slow
def test_the_choice_follows_what_was_measured():
    """Choices that differ from recorded timings are listed here, so that a change of the cost model is noticed."""
    problems = {(case.name, case.what): rounded(problem(case)) for case in (*shapes.GPU, *shapes.MIDDLE)}
    first, experts, likely = (
        json.loads(gzip.decompress((SWEEPS / name).read_bytes()))["products"]
        for name in ("sweep.json.gz", "clusters_h200.json.gz", "likely_h200.json.gz")
    )
    later = [row for row in experts if row["what"] in ("FP8, grouped", "FP8, masked")]  # in place of the first
    later += [row for row in likely if row["what"] == "FP8 1D1D"]
    slower, not_measured = {}, []
    for gemm, row in {(row["case"], row["what"]): row for row in (*first, *later)}.items():
        config = choose(problems[gemm], H200)
        name = _named(config)
        if name not in row["us"]:  # rasterization along N is newer than these timings: that along M represents it
            name = _named(replace(config, raster_along_n=False))
        if name in row["us"]:
            slower[gemm] = row["us"][name] / min(row["us"].values())
        else:
            not_measured.append(gemm)
    assert math.exp(sum(map(math.log, slower.values())) / len(slower)) < 1.02
    assert max(slower.values()) < 1.12
    assert len(not_measured) <= 5


def _named(c: GemmConfig) -> str:
    """The kernel's name in the file of timings; the width of strips follows from the order and the tile."""
    parts = (
        f"{c.tile_m}x{c.tile_n}w{c.warpgroups}{'pp' if c.ping_pong else ''}a{c.accumulators}",
        f"{c.cluster_m}x{c.cluster_n}:s{c.stages}:p{c.staged_boxes}:k{c.split_k}",
        f"T{int(c.transposed)}{'F' * c.load_c}{'N' * c.raster_along_n}",
    )
    return ":".join(parts)
