"""Tests of grouped GEMMs in high precision: experts equal a loop over them for every shape and stride."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octile.nn.fused.high_precision import HighPrecisionLinear

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def loop(x_TK: Tensor, weight_GNK: Tensor, counts: list[int]) -> Tensor:
    """One GEMM for each expert, zeros past the last."""
    rows = x_TK[: sum(counts)].split(counts)
    y = [x @ w.T for x, w in zip(rows, weight_GNK, strict=True)]
    return torch.cat([*y, x_TK.new_zeros(len(x_TK) - sum(counts), weight_GNK.shape[1])])


def gradients(y: Tensor, dy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(y, inputs, dy, retain_graph=True)


@given(
    counts=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    past=st.integers(0, 5),
    n=st.integers(1, 20),
    k=st.integers(1, 20),
    dtype=st.sampled_from(DTYPES),
)
def test_experts_equal_a_loop_over_them(counts, past, n, k, dtype):
    torch.manual_seed(0)
    x = torch.randn(sum(counts) + past, k, dtype=dtype, requires_grad=True)
    w = torch.randn(len(counts), n, k, dtype=dtype, requires_grad=True)
    offs, dy = torch.tensor(counts).cumsum(0).int(), torch.randn(len(x), n, dtype=dtype)
    y, expected = HighPrecisionLinear.apply(x, w, offs, dtype, dtype), loop(x, w, counts)
    found = (y, *gradients(y, dy, x, w))
    eps = torch.finfo(dtype).eps  # both sum in FP32, in whatever order, and round once
    for a, b in zip(found, (expected, *gradients(expected, dy, x, w)), strict=True):
        torch.testing.assert_close(a, b, rtol=eps, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "dy",
    [torch.ones(1).expand(9, 5), torch.randn(5, 9).T, torch.randn(9, 10)[:, ::2]],
    ids=["expanded", "T", "strided"],
)
def test_gradients_may_have_any_strides(dtype, dy):
    x, w = torch.randn(9, 7, requires_grad=True), torch.randn(2, 5, 7, requires_grad=True)
    y = HighPrecisionLinear.apply(x, w, torch.tensor([4, 9], dtype=torch.int32), dtype, torch.float32)
    for found, expected in zip(gradients(y, dy, x, w), gradients(y, dy.contiguous(), x, w), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_input_and_weight_may_have_any_strides(dtype):
    x, w, offs = torch.randn(7, 9).T, torch.randn(2, 7, 5).mT, torch.tensor([4, 9], dtype=torch.int32)
    y = HighPrecisionLinear.apply(x, w, offs, dtype, torch.float32)
    assert torch.equal(y, HighPrecisionLinear.apply(x.contiguous(), w.contiguous(), offs, dtype, torch.float32))
