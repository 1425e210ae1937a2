"""Tests of the search for faster GEMM kernels that need no GPU."""

from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import pytest
import torch

from octile.bench import gemm_case, shapes, tune
from octile.bench.gemm_case import prepare_case
from octile.bench.shapes import Case
from octile.kernels.cuda.gemm import launch_plan, tuned
from octile.kernels.cuda.gemm.candidates import choose, other_rasterization
from octile.kernels.cuda.gemm.config import GemmConfig
from octile.kernels.cuda.gemm.cost_model import Chip, Problem, rounded
from octile.ops import grouped

H200 = Chip(132)
CASES = [
    Case("dense", 64, 96, 256),
    Case("dense", 64, 96, 256, tiles=True),
    Case("dense", 64, 96, 256, tiles=True, accumulate=True),
    Case("grouped", 100, 96, 256, 4),
    Case("masked", 100, 96, 256, 4),
    Case("wgrad", 96, 64, 300, 4, tiles=True, accumulate=True),
]


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTILE_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_the_problem_is_that_of_the_operands(case, monkeypatch):
    monkeypatch.setattr(gemm_case, "MASKED_ROWS", 160)
    assert tune.problem(case) == launch_plan.problem(tune.request(prepare_case(case, "cpu")))


@pytest.mark.parametrize("writes_out", [True, False], ids=["into a result", "a new result"])
def test_a_kernel_that_is_measured_for_groups_is_that_of_both_operators(writes_out):
    case = next(case for case in CASES if case.kind == "grouped")
    prepared = prepare_case(case, "cpu")
    operands = *gemm_case._flat(prepared.a), *gemm_case._flat(prepared.b), prepared.sizes
    if writes_out:
        request = grouped._grouped_request_out(prepared.out, *operands, 128)
    else:
        request = replace(grouped._grouped_request(*operands, torch.bfloat16), out=prepared.out)
    problem = launch_plan.problem(request)
    assert problem.alignment == (128 if writes_out else 1)
    measured = next(c for c in tune.shortlist(tune.problem(case), H200) if c.tile_m != choose(problem, H200).tile_m)
    tuned.store(rounded(tune.problem(case)), H200, measured, 1.0)
    assert choose(problem, H200) == replace(measured, zero_rest=not writes_out)


def _store_some(begin: int) -> None:
    config = GemmConfig(128, 64, 3, staged_boxes=1)
    for i in range(begin, begin + 20):
        tuned.store(Problem(16 * i, 64, 128), H200, config, 1.0)


def test_two_processes_that_store_kernels_lose_none():
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        list(pool.map(_store_some, (1, 101)))
    found = [tuned.lookup(Problem(16 * i, 64, 128), H200) for i in (*range(1, 21), *range(101, 121))]
    assert None not in found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_the_operands_are_read_without_copies(case, monkeypatch):
    monkeypatch.setattr(gemm_case, "MASKED_ROWS", 160)
    request = tune.request(prepare_case(case, "cpu"))
    assert launch_plan.make_tma_readable(request) is request


def test_the_first_candidate_is_the_chosen_kernel():
    p = tune.problem(shapes.LARGE[0])
    assert tune.shortlist(p, H200)[0] == choose(p, H200)


def test_candidates_are_of_various_tiles():
    configs = tune.shortlist(tune.problem(shapes.LARGE[0]), H200)
    assert len(configs) <= tune.MAX_CANDIDATES
    assert len({(c.tile_m, c.tile_n, c.ping_pong) for c in configs}) >= 5


def test_the_best_of_each_tile_has_both_rasterization_orders():
    problem = rounded(tune.problem(shapes.LARGE[0]))
    configs = tune.shortlist(problem, H200)
    best = {(c.tile_m, c.tile_n, c.warpgroups, c.ping_pong, c.transposed): c for c in reversed(configs)}
    assert best
    for config in best.values():
        other = other_rasterization(problem, config)
        assert other.raster_along_n != config.raster_along_n
        assert replace(other, raster_along_n=config.raster_along_n, raster_width=config.raster_width) == config
        assert other in configs or config in configs[-1:]  # the list ends where it is full


def test_both_ways_to_add_to_c_are_among_the_candidates_of_a_tile():
    configs = tune.shortlist(tune.problem(Case("wgrad", 4096, 1536, 896, 16, tiles=True, accumulate=True)), H200)
    assert {c.load_c for c in configs if (c.tile_m, c.tile_n, c.ping_pong) == (256, 128, False)} == {True, False}


def test_tiles_in_one_row_have_one_rasterization_order():
    configs = tune.shortlist(tune.problem(Case("dense", 16, 7168, 2048, tiles=True)), H200)
    assert not any(config.raster_along_n for config in configs)


@pytest.fixture
def configs():
    return tune.shortlist(tune.problem(shapes.LARGE[0]), H200)


def store(configs, seconds):
    message = tune._store(shapes.LARGE[0], configs, seconds, H200)
    return message, choose(tune.problem(shapes.LARGE[0]), H200)


def test_a_faster_kernel_is_used_from_then_on(configs):
    message, used = store(configs, {0: 100e-6, 3: 90e-6})
    assert used == configs[3] != configs[0]
    assert message.startswith("90.0 µs, 1378 TFLOP/s instead of 100.0 µs, with ")


def test_noise_changes_nothing(configs):
    message, used = store(configs, {0: 100e-6, 3: 99.5e-6})
    assert used == configs[0]
    assert message.endswith("the chosen kernel")


def test_a_correct_kernel_replaces_a_chosen_one_that_is_wrong(configs):
    assert store(configs, {2: 300e-6})[1] == configs[2]


def test_a_search_continues_where_it_ended(configs):
    before = tune._unknown(tune.ORDER, H200)
    store(configs, {0: 1e-6})
    assert tune._unknown(tune.ORDER, H200) == before[1:]


def test_shapes_that_share_a_kernel_are_searched_once():
    problems = [rounded(tune.problem(case)) for case in tune._unknown(tune.ORDER, H200)]
    assert len(set(problems)) == len(problems)


def test_all_shapes_are_searched():
    assert set(tune.ORDER) == set(shapes.GPU)


def test_an_entry_is_what_the_gemms_look_up(configs):
    store(configs, {0: 1e-6})
    assert tuned.lookup(rounded(tune.problem(shapes.LARGE[0])), H200) == configs[0]


class Rounds:
    """A replacement of `measure` that returns given results call by call, and records what each call leaves out."""

    def __init__(self, *found):
        self.found, self.left_out = list(found), []

    def __call__(self, measure, case, configs, left_out, seconds):
        self.left_out.append(dict(left_out))
        return self.found.pop(0)


class Compiled:
    """A finished compilation."""

    def __init__(self, reason=None):
        self.reason = reason

    def result(self, timeout):
        return self.reason


def search(configs, apart, monkeypatch, reasons=None):
    monkeypatch.setattr(tune, "call_in_subprocess", apart)
    compiled = [Compiled((reasons or {}).get(i)) for i in range(len(configs))]
    return tune._tune(shapes.LARGE[0], configs, compiled, H200, end=float("inf"))


def test_a_kernel_that_hangs_is_left_out_of_the_next_round(configs, monkeypatch):
    rounds = Rounds(
        tune.Found({}, {1: "TimeoutError: a kernel has not ended"}, broke=True),
        tune.Found({0: 2e-6, 2: 1e-6}, {1: "TimeoutError: a kernel has not ended"}),
    )
    message = search(configs, rounds, monkeypatch)
    assert rounds.left_out[1] == {1: "TimeoutError: a kernel has not ended"}
    assert message.startswith("4096×2112×7168 FP8: 1.0 µs")
    assert message.endswith("TimeoutError: a kernel has not ended")


def test_a_kernel_that_does_not_compile_well_is_not_run(configs, monkeypatch):
    rounds = Rounds(tune.Found({0: 1e-6}, {2: "8 bytes of spills"}))
    search(configs, rounds, monkeypatch, {2: "8 bytes of spills"})
    assert rounds.left_out == [{2: "8 bytes of spills"}]


def test_a_shape_without_a_correct_kernel_stores_none(configs, monkeypatch):
    message = search(configs, Rounds(tune.Found({}, {0: "differs"})), monkeypatch)
    assert "no kernel is right" in message
    assert not tuned.path().exists()


@pytest.fixture
def candidates(monkeypatch):
    """candidates(calls): the results of `measure` for these calls; each is 1 µs slower than the one before."""

    def run(*calls):
        made = prepare_case(CASES[0], "cpu")
        monkeypatch.setattr(tune, "prepare_case", lambda case, device: made)
        monkeypatch.setattr(tune, "launcher", lambda setup, call: lambda: call(setup))
        monkeypatch.setattr(tune, "wait_for_gpu", lambda: None)
        monkeypatch.setattr(tune, "work_seconds", lambda calls, rounds: {i: 1e-6 * (1 + int(i)) for i in calls})
        return tune.measure(CASES[0], calls, {})

    return run


def correct(setup):
    return setup.call()


def wrong(setup):
    return setup.out.zero_()


def hangs(setup):
    raise TimeoutError("a kernel has not ended")


def test_only_correct_kernels_are_timed(candidates):
    found = candidates(correct, wrong, correct)
    assert found.seconds == {0: 1e-6, 2: 3e-6}
    assert "differs" in found.failed[1]


def test_a_kernel_that_hangs_ends_the_process(candidates):
    found = candidates(correct, hangs, correct)
    assert (found.seconds, found.broke, list(found.failed)) == ({}, True, [1])


def test_the_chosen_kernel_is_timed_again_with_the_best(candidates, monkeypatch):
    found = candidates(*[correct] * 8)
    assert set(found.seconds) == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("shape", "minutes", "message"),
    [
        (None, float("nan"), "minutes must be above 0, not nan"),
        (None, 0.0, "minutes must be above 0, not 0"),
        (None, -1.0, "minutes must be above 0, not -1"),
        ((0, 128, 128), 1.0, "shape must be three numbers of at least 1, not 0,128,128"),
    ],
)
def test_a_search_over_nothing_is_refused(shape, minutes, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        tune.run(shape, minutes)


def test_the_search_without_hopper_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="needs a GPU of sm_90"):
        tune.run(None, 1.0)
