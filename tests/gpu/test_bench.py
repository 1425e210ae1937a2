"""Benchmarks on a GPU: what is recorded, what is refused, and that a search ends."""

import pytest
import torch

from octile.bench import gemm, tune
from octile.bench.gemm_case import prepare_case
from octile.bench.gemm_peers import peer_calls
from octile.bench.kernel_time import graph_seconds, host_seconds, kernel_seconds, record_kernels, wait_for_gpu
from octile.bench.shapes import Case
from octile.kernels.cuda.gemm.cost_model import Chip

CASES = [
    Case("dense", 256, 384, 1024),
    Case("dense", 256, 384, 1024, tiles=True),
    Case("dense", 256, 384, 1024, tiles=True, accumulate=True),
    Case("grouped", 200, 384, 1024, 4),
    Case("masked", 200, 384, 1024, 4),
    Case("wgrad", 256, 384, 400, 4, tiles=True, accumulate=True),
]


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip(f"needs a GPU of sm_90, not {torch.cuda.get_device_name()}")


@pytest.fixture
def profiler() -> None:
    x = torch.zeros(1, device="cuda")
    if not record_kernels(lambda: x.add_(1)):
        pytest.skip("the profiler may not read this GPU")


@pytest.mark.parametrize("clean", [False, True], ids=["flushed by writing", "flushed by reading"])
def test_kernels_are_attributed_to_their_call(profiler, clean: bool):
    x = torch.zeros(1 << 26, device="cuda")
    once, twice = lambda: x.add_(1), lambda: (x.add_(1), x.mul_(2))
    times = kernel_seconds({"once": once, "twice": twice}, clean=clean)
    assert 0 < times["once"] < times["twice"]


def test_times_around_a_kernel_are_recorded():
    x = torch.zeros(1 << 20, device="cuda")
    assert host_seconds(lambda: x.add_(1)) > 0
    assert graph_seconds(lambda: x.add_(1)) > 0


def test_a_kernel_that_does_not_end_is_not_waited_for():
    torch.cuda._sleep(2_000_000_000)
    with pytest.raises(TimeoutError, match="has not ended within"):
        wait_for_gpu(0.05)
    torch.cuda.synchronize()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_a_case_is_rehearsed(case: Case):
    gemm.rehearse(case)


@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.what)
def test_cublaslt_is_among_the_peers(hopper, case: Case):
    setup = prepare_case(case, "cuda")
    assert "BF16" in peer_calls(setup, setup.high_precision())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.what)
def test_candidates_are_compared_and_timed(hopper, case: Case):
    configs = tune.shortlist(tune.problem(case), Chip(132))[:6]
    found = tune.measure(case, configs, {})
    assert not found.broke
    assert not found.failed
    assert 0 in found.seconds
