"""Tests of a gate's GEMM in FP32, and of the BF16 terms from which a GPU computes it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octile.ops.gate import bfloat16_terms, gate_logits, gate_logits_backward


def tensor(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_equal_the_gemm_in_float32(dtype):
    x, w = tensor(5, 40, dtype=dtype), tensor(3, 40)
    assert torch.equal(gate_logits(x, w), x.float() @ w.mT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_equal_autograd(dtype):
    x, w, dy = tensor(5, 40, dtype=dtype).requires_grad_(), tensor(3, 40).requires_grad_(), tensor(5, 3)
    (x.float() @ w.mT).backward(dy)
    dx, dw = gate_logits_backward(dy, x.detach(), w.detach())
    assert dx.dtype == dtype
    torch.testing.assert_close((dx, dw), (x.grad, w.grad))


def test_autocast_changes_nothing():
    x, w = tensor(5, 40), tensor(3, 40)
    expected = x @ w.mT
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gate_logits(x, w), expected)


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda v: v == 0 or abs(v) > 2.0**-100), min_size=1))
def test_three_bf16_terms_sum_to_the_value(values):
    t = torch.tensor(values)
    parts = bfloat16_terms(t)
    assert parts.dtype == torch.bfloat16
    assert torch.equal(parts.double().sum(0), t.double())


def test_a_bfloat16_value_has_one_term():
    t = tensor(4, 4, dtype=torch.bfloat16)
    assert torch.equal(bfloat16_terms(t), t[None])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((tensor(5, 4).double(), tensor(3, 4)), TypeError, "x must be float32"),
        ((tensor(5, 4), tensor(3, 4).long()), TypeError, "weight must be float32"),
        ((tensor(5, 4, 2), tensor(3, 4)), ValueError, "x must be a matrix"),
        ((tensor(5, 4), tensor(3, 6)), ValueError, r"x \(5, 4\) must end in the D = 6"),
    ],
)
def test_operands_that_do_not_fit_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        gate_logits(*arguments)


@pytest.mark.parametrize(
    ("dy", "error", "message"),
    [
        (tensor(5, 3).bfloat16(), TypeError, "dy must be float32"),
        (tensor(4, 3), ValueError, r"dy must be \(5, 3\)"),
    ],
)
def test_gradients_that_do_not_fit_are_refused(dy, error, message):
    with pytest.raises(error, match=message):
        gate_logits_backward(dy, tensor(5, 4), tensor(3, 4))
