"""Tests of a GEMM benchmark case: its operands, its calls, and the detection of wrong results."""

import sys
from types import SimpleNamespace

import pytest
import torch

import octile.compat.deep_gemm
from octile.bench import gemm_case, gemm_peers
from octile.bench.gemm_case import MAX_DIFFERENCE, prepare_case
from octile.bench.shapes import GPU, Case

CASES = [
    Case("dense", 64, 96, 256),
    Case("dense", 64, 96, 256, tiles=True),
    Case("dense", 64, 96, 256, tiles=True, accumulate=True),
    Case("grouped", 100, 96, 256, 4),
    Case("masked", 100, 96, 256, 4),
    Case("wgrad", 96, 64, 300, 4, tiles=True, accumulate=True),
]


@pytest.fixture(autouse=True)
def few_masked_rows(monkeypatch):
    monkeypatch.setattr(gemm_case, "MASKED_ROWS", 160)


@pytest.fixture(params=CASES, ids=lambda case: case.what)
def made(request):
    return prepare_case(request.param, "cpu")


def test_octiles_gemm_is_correct(made):
    assert made.check(made.call, made.high_precision(), made.out, MAX_DIFFERENCE) > 0


def test_a_result_that_is_not_written_is_detected(made):
    with pytest.raises(ArithmeticError, match="differs"):
        made.check(lambda: None, made.high_precision(), made.out, MAX_DIFFERENCE)


def test_a_part_that_is_not_written_is_detected(made):
    def call():
        before = made.out.clone()
        made.call()
        made.out[..., :1, :1] = before[..., :1, :1]

    with pytest.raises(ArithmeticError, match="differs"):
        made.check(call, made.high_precision(), made.out, 1e-6 if made.case.accumulate else MAX_DIFFERENCE)


@pytest.mark.parametrize("case", [case for case in CASES if case.accumulate or not case.tiles], ids=lambda c: c.what)
def test_deep_gemm_is_called_with_its_layouts(case, monkeypatch):
    made = prepare_case(case, "cpu")
    monkeypatch.setitem(sys.modules, "deep_gemm", octile.compat.deep_gemm)
    call, out = gemm_peers._deep_gemm(made)
    made.check(call, made.high_precision(), out, MAX_DIFFERENCE)


def test_our_1d2d_peer_of_1d1d_has_the_same_operands():
    made = prepare_case(CASES[1], "cpu")
    call, out = gemm_peers._octile_1d2d(made)
    made.check(call, made.high_precision(), out, MAX_DIFFERENCE)


@pytest.mark.parametrize(
    ("case", "has_it"),
    [
        (Case("wgrad", 96, 64, 300, 4, tiles=True, accumulate=True), True),
        (Case("wgrad", 96, 64, 300, 4, tiles=True), False),
        (Case("dense", 64, 96, 256, tiles=True), False),
        (Case("dense", 64, 96, 256), True),
    ],
    ids=lambda case: getattr(case, "what", None),
)
def test_deep_gemm_adds_products_of_row_scales_and_stores_none(case, has_it, monkeypatch):
    monkeypatch.setattr(gemm_peers, "find_spec", lambda name: name)
    setup = SimpleNamespace(case=case, x=SimpleNamespace(is_cuda=True))
    assert ("DeepGEMM" in gemm_peers._candidates(setup)) == has_it


def test_a_peer_that_computes_something_else_is_left_out(monkeypatch, capsys):
    made = prepare_case(CASES[0], "cpu")
    monkeypatch.setattr(gemm_peers, "_high_precision", lambda s: (lambda: s.x @ s.w.mT + 3, torch.empty(0)))
    assert gemm_peers.peer_calls(made, made.high_precision()) == {}
    assert "no torch FP32: ArithmeticError" in capsys.readouterr().err


def test_the_difference_of_equal_matrices_is_nothing():
    x = torch.randn(5, 7)
    assert gemm_case.difference(x, x) == pytest.approx(0, abs=1e-15)
    assert gemm_case.difference(x, -x) == 2


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case("dense", 2, 3, 256), 2 * 256 + 2 * 2 * 4 + 3 * 256 + 2 * 3 * 4 / 128 + 2 * 3 * 2),
        (Case("dense", 2, 3, 256, tiles=True, accumulate=True), 5 * 256 + 5 * 2 * 4 + 2 * 3 * 4 * 2),
    ],
    ids=["stored", "added"],
)
def test_bytes_are_counted_once(case, expected):
    assert prepare_case(case, "cpu").bytes == int(expected)


def test_names_tell_the_cases_apart():
    assert len({(case.name, case.what) for case in GPU}) == len(GPU)


def test_sizes_of_groups_are_those_that_are_taken_without_padding():
    sizes = {size % 128 for case in GPU if case.kind in ("grouped", "wgrad") for size in case.sizes}
    assert sizes == {0}
