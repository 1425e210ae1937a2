"""Tests of the GEMM whose rows do not depend on each other."""

import pytest
import torch

from octile.lab import tensor_core
from octile.ops import row_invariant
from octile.ops.matmul import matmul_nt
from octile.ops.quantize import quantize
from octile.ops.row_invariant import (
    row_invariant_matmul_nt,
    row_invariant_matmul_nt_out,
    row_invariant_scaled_nt,
    row_invariant_scaled_nt_out,
)
from tests.ops.operators import assert_fake_is_true, assert_well_formed
from tests.processor import needs_bf16


@pytest.mark.parametrize(
    "dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32)], ids=str
)
@pytest.mark.parametrize("shape", [(1, 200, 70), (3, 33, 100)], ids=str)
def test_a_row_has_the_same_bits_among_any_others(dtypes: tuple[torch.dtype, torch.dtype], shape: tuple[int, int, int]):
    b, n, k = shape
    a, w = torch.randn(b, 40, k).to(dtypes[0]), torch.randn(b, n, k).to(dtypes[1])
    together = row_invariant_matmul_nt(a, w, torch.float32)
    torch.testing.assert_close(together, a.float() @ w.float().mT, rtol=1e-5, atol=1e-4)
    for rows in (slice(0, 1), slice(3, 20), slice(23, 40)):
        assert torch.equal(row_invariant_matmul_nt(a[:, rows], w, torch.float32), together[:, rows])


def test_the_operator_is_well_formed():
    arguments = torch.randn(2, 5, 7).bfloat16(), torch.randn(2, 7, 3).bfloat16().mT, torch.float32
    assert_well_formed(row_invariant_matmul_nt, arguments)
    assert_fake_is_true(row_invariant_matmul_nt, arguments)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="a and b must be"):
        row_invariant_matmul_nt(torch.zeros(2, 3, 4), torch.zeros(2, 3, 5), torch.float32)
    with pytest.raises(TypeError, match="out_dtype must be"):
        row_invariant_matmul_nt(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4), torch.int8)
    with pytest.raises(TypeError, match="b must be float32"):
        row_invariant_matmul_nt(torch.zeros(2, 3, 4), torch.zeros(2, 3, 4).int(), torch.float32)


def test_results_are_written_to_rows_of_any_strides():
    a, w = torch.randn(2, 5, 7), torch.randn(2, 3, 7)
    wide = torch.zeros(5, 2, 4)
    row_invariant_matmul_nt_out(wide[..., 1:].transpose(0, 1), a, w)
    assert torch.equal(wide[..., 1:].transpose(0, 1), row_invariant_matmul_nt(a, w, torch.float32))
    assert not wide[..., 0].any()
    assert_well_formed(row_invariant_matmul_nt_out, (torch.zeros(2, 5, 3), a, w))


def test_another_result_is_refused():
    a, w = torch.zeros(2, 5, 7), torch.zeros(2, 3, 7)
    for out in (torch.zeros(2, 5, 4), torch.zeros(2, 3, 5).mT):
        with pytest.raises(ValueError, match=r"out must be \(2, 5, 3\) with contiguous rows"):
            row_invariant_matmul_nt_out(out, a, w)


@pytest.mark.slow
@pytest.mark.parametrize("can_multiply", [pytest.param(True, marks=needs_bf16), False])
def test_fp8_gemms_use_the_tensor_core_model_where_it_is_on(monkeypatch: pytest.MonkeyPatch, can_multiply: bool):
    monkeypatch.setattr(row_invariant.cpu, "can_multiply", lambda: can_multiply)
    a, b = quantize(torch.randn(9, 300), 1, 128, "e4m3", True), quantize(torch.randn(5, 300), 128, 128, "e4m3", False)
    operands = *a, (1, 128), *b, (128, 128)
    with tensor_core("sm_90", promote_every=None):
        found, expected = row_invariant_scaled_nt(*operands, None, torch.float32), matmul_nt(*operands, torch.float32)
    assert torch.equal(found, expected)
    usual = row_invariant_scaled_nt(*operands, None, torch.float32)
    assert not torch.equal(found, usual)
    assert torch.equal(row_invariant_scaled_nt(a[0][3:4], a[1][3:4], *operands[2:], None, torch.float32), usual[3:4])


@pytest.mark.one_case
@pytest.mark.parametrize("accumulate", [False, True])
def test_fp8_results_are_written_or_rounded_and_added(accumulate: bool):
    a, b = quantize(torch.randn(9, 300), 1, 128, "e4m3", True), quantize(torch.randn(5, 300), 128, 128, "e4m3", False)
    operands = *a, (1, 128), *b, (128, 128)
    out = torch.randn(9, 5).bfloat16()
    product = row_invariant_scaled_nt(*operands, None, torch.bfloat16)
    expected = out + product if accumulate else product
    assert_well_formed(row_invariant_scaled_nt_out, (out.clone(), *operands, accumulate))
    row_invariant_scaled_nt_out(out, *operands, accumulate)
    assert torch.equal(out, expected)
    with pytest.raises(ValueError, match="out must be"):
        row_invariant_scaled_nt_out(out[:3], *operands, accumulate)
