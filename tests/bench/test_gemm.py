"""Tests of `octile bench gemm` on a simulated GPU: every case is tried first; wrong ones are left out and reported."""

from types import SimpleNamespace

import pytest
import torch

from octile.bench import gemm, shapes
from octile.bench.gemm_case import prepare_case
from octile.bench.gemm_table import HOST
from octile.bench.shapes import Case
from octile.bench.tune import problem
from octile.kernels.cuda.gemm.candidates import choose
from octile.kernels.cuda.gemm.cost_model import Chip, rounded

CASES = [Case("dense", 32, 16, 128), Case("dense", 48, 16, 128), Case("dense", 64, 16, 128)]


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that is a CPU and takes 1 ms for each GEMM."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80e9))
    monkeypatch.setattr(shapes, "GPU", CASES)
    monkeypatch.setattr(gemm, "why_not", lambda case, end: None)
    monkeypatch.setattr(gemm, "prepare_case", lambda case, device: prepare_case(case, "cpu"))
    monkeypatch.setattr(gemm, "work_seconds", lambda calls, rounds: dict.fromkeys(calls, 1e-3))
    monkeypatch.setattr(gemm, "host_seconds", lambda call: 12e-6)
    monkeypatch.setattr(gemm, "graph_seconds", lambda call: 1.1e-3)
    monkeypatch.setattr(gemm, "kernel_of", lambda case: choose(rounded(problem(case)), Chip(132)))


def test_a_gemm_has_all_its_figures(gpu):
    rows = [row for row in gemm.rows("list") if row.case == "32×16×128"]
    figures = {row.unit: row.value for row in rows}
    kernel_units = {gemm.REGISTERS, gemm.SHARED, gemm.COMPILED}
    assert set(figures) == {"TFLOP/s", "GB/s", "µs", "difference", "µs of host", "µs in a graph"} | kernel_units
    assert 0 < figures[gemm.REGISTERS] <= 255
    assert 0 < figures[gemm.SHARED] <= 227
    assert figures[gemm.COMPILED] > 0


def test_a_case_that_hangs_is_left_out_and_reported(gpu, monkeypatch, capsys):
    monkeypatch.setattr(gemm, "why_not", lambda case, end: "it hangs" if case is CASES[1] else None)
    assert {row.case for row in gemm.rows("list")} == {"32×16×128", "64×16×128"}
    assert "left out: 48×16×128 FP8: it hangs" in capsys.readouterr().err


def test_a_case_with_a_wrong_result_is_left_out_and_reported(gpu, monkeypatch, capsys):
    def measure(case, device):
        if case is CASES[0]:
            raise ArithmeticError("wrong")
        return prepare_case(case, "cpu")

    monkeypatch.setattr(gemm, "prepare_case", measure)
    assert {row.case for row in gemm.rows("list")} == {"48×16×128", "64×16×128"}
    assert "left out: 32×16×128 FP8: wrong" in capsys.readouterr().err


def test_cases_that_do_not_fit_into_the_time_limit_are_left_out():
    assert gemm.why_not(CASES[0], end=0.0) == "no time was left to try it"


@pytest.mark.parametrize(("memory", "trials"), [(8e9, 1), (85e9, 6), (150e9, 10), (1e12, 12)])
def test_cases_that_are_tried_together_fit_into_the_gpus_memory(monkeypatch, memory, trials):
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert gemm.n_trials(memory) == trials


def test_it_ends_with_the_goals(gpu):
    assert gemm.show(list(gemm.rows("list"))).splitlines()[-1].startswith("host time of a warm call: at most 12.0 µs")


def test_the_goals_find_the_rows_of_the_benchmark(gpu):
    rows = list(gemm.rows("list"))
    assert HOST in {row.unit for row in rows}
    assert {row.against.peer for row in rows if row.against} == {"torch FP32"}


@pytest.fixture
def deep_gemm(gpu, monkeypatch):
    """DeepGEMM as the only peer, which takes 3 ms, and 2 ms with a clean L2 cache."""
    monkeypatch.setattr(gemm, "peer_calls", lambda setup, expected: {"DeepGEMM": setup.call})
    monkeypatch.setattr(gemm, "work_seconds", lambda calls, rounds: {"octile": 1e-3, "DeepGEMM": 3e-3})
    monkeypatch.setattr(gemm, "kernel_seconds", lambda calls, rounds, clean: {"octile": 1e-3, "DeepGEMM": 2e-3})


def ratios(rows):
    return {row.against.peer: row.against.ratio for row in rows if row.against}


def test_few_rows_are_also_compared_with_a_clean_cache(deep_gemm):
    few = ratios(gemm.rows("list"))
    assert few == {"DeepGEMM": pytest.approx(3), "DeepGEMM, clean L2": pytest.approx(2)}


def test_many_rows_are_not(deep_gemm, monkeypatch):
    monkeypatch.setattr(shapes, "GPU", [Case("dense", 257, 16, 128)])
    assert ratios(gemm.rows("list")) == {"DeepGEMM": pytest.approx(3)}


def test_a_clean_cache_that_could_not_be_measured_is_reported(deep_gemm, monkeypatch, capsys):
    def refused(calls, rounds, clean):
        raise RuntimeError("no access")

    monkeypatch.setattr(gemm, "kernel_seconds", refused)
    assert set(ratios(gemm.rows("list"))) == {"DeepGEMM"}
    assert "left out: 32×16×128 FP8: clean L2: no access" in capsys.readouterr().err


def test_drawn_shapes_follow_those_of_the_list(gpu, monkeypatch, capsys):
    monkeypatch.setattr(gemm, "drawn_cases", lambda seed: [Case("dense", seed, 16, 128, drawn="large")])
    assert {row.case for row in gemm.rows(seed=5)} == {*(case.name for case in CASES), "5×16×128"}
    assert {row.what for row in gemm.rows("drawn", 5)} == {"FP8, drawn: large"}
    assert "shapes drawn by --seed 5\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "what"), [(("drawn", None), "shapes drawn is"), ((None, 5), "seed 5 draws shapes, which are")]
)
def test_shapes_are_drawn_for_a_gpu_only(arguments, what):
    with pytest.raises(ValueError, match=f"^{what} measured on a GPU, and torch finds none here"):
        next(gemm.rows(*arguments))
