"""bf16_gemm_*: the GEMM in FP32, rounded once; the grouped forms are tested with the FP8 ones."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import octile.compat.deep_gemm as deep_gemm
from tests.compat.deep_gemm.conftest import assert_gemm, random

sides = {"m": st.integers(1, 40), "n": st.integers(1, 40), "k": st.integers(1, 100)}


@given(**sides, dtype=st.sampled_from([torch.bfloat16, torch.float32]), add=st.booleans())
def test_the_result_is_stored_or_accumulated(m, n, k, dtype, add):
    a, b, c = random(m, k).bfloat16(), random(n, k, seed=1).bfloat16(), random(m, n, seed=2).to(dtype)
    d = torch.full((m, n), float("nan"), dtype=dtype)
    deep_gemm.bf16_gemm_nt(a, b, d, c if add else None)
    assert_gemm(d, a.double(), b.double(), c if add else None)


@pytest.mark.parametrize("form", ["nt", "nn", "tn", "tt"])
def test_transposed_operands_are_the_same_operands(form):
    a, b = random(20, 30).bfloat16(), random(40, 30, seed=1).bfloat16()
    d = torch.zeros(20, 40)
    given_a = a.T.contiguous() if form[0] == "t" else a
    given_b = b.T.contiguous() if form[1] == "n" else b
    getattr(deep_gemm, f"bf16_gemm_{form}")(given_a, given_b, d)
    assert_gemm(d, a.double(), b.double())


def test_autocast_changes_nothing():
    a, b = random(20, 30).bfloat16(), random(40, 30, seed=1).bfloat16()
    outside, inside = torch.zeros(20, 40), torch.zeros(20, 40)
    deep_gemm.bf16_gemm_nt(a, b, outside)
    with torch.autocast("cpu", torch.bfloat16):
        deep_gemm.bf16_gemm_nt(a, b, inside)
    assert torch.equal(inside, outside)


@pytest.mark.parametrize(
    ("a", "error", "message"),
    [
        (torch.zeros(20, 30), TypeError, "a must be bfloat16, not torch.float32"),
        (torch.zeros(20, 31).bfloat16(), ValueError, r"a and b must agree in K: a is \(20, 31\), b is \(40, 30\)"),
        (torch.zeros(1, 20, 30).bfloat16(), ValueError, "a must have 2 dimensions"),
    ],
)
def test_what_does_not_fit_is_refused(a, error, message):
    with pytest.raises(error, match=message):
        deep_gemm.bf16_gemm_nt(a, torch.zeros(40, 30).bfloat16(), torch.zeros(20, 40))
