"""Tests of grouped GEMMs in high precision: experts equal a loop over them for every shape and stride."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from octile.nn.functional import grouped_linear, linear
from octile.nn.fused.high_precision import HighPrecisionLinear
from octile.recipe import Recipe

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


@pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("ends", [None, [4, 4, 9]], ids=["dense", "experts"])
@pytest.mark.parametrize("name", ["bf16", "fp16_loss_scaling"])
def test_a_weight_gradient_is_summed_and_stored_in_float32(name, ends, main_grad):
    torch.manual_seed(0)
    recipe, x, dy = Recipe.named(name), torch.randn(9, 24), torch.randn(9, 16)
    w = nn.Parameter(torch.randn(*([] if ends is None else [len(ends)]), 16, 24))
    if main_grad:
        w.main_grad = torch.zeros_like(w)
    y = linear(x, w, None, recipe) if ends is None else grouped_linear(x, w, torch.tensor(ends).int(), recipe)
    y.backward(dy)
    x64, dy64 = x.to(recipe.compute).double(), dy.to(recipe.compute).double()
    rows = [slice(None)] if ends is None else [slice(i, j) for i, j in zip([0, *ends], ends, strict=False)]
    expected = torch.stack([dy64[r].T @ x64[r] for r in rows]).view(w.shape)
    torch.testing.assert_close((w.main_grad if main_grad else w.grad).double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ends", [None, [4, 4, 9]], ids=["dense", "experts"])
@pytest.mark.parametrize("name", ["bf16", "fp16_loss_scaling"])
def test_results_in_float32_are_not_rounded_to_the_operands_dtype(name, ends):
    torch.manual_seed(0)
    recipe, x, dy = Recipe.named(name), torch.randn(9, 24, requires_grad=True), torch.randn(9, 16)
    w = torch.randn(*([] if ends is None else [len(ends)]), 16, 24)
    y = linear(x, w, None, recipe) if ends is None else grouped_linear(x, w, torch.tensor(ends).int(), recipe)
    y.backward(dy)
    x64, w64, dy64 = (t.detach().to(recipe.compute).double() for t in (x, w, dy))
    rows = [slice(None)] if ends is None else [slice(i, j) for i, j in zip([0, *ends], ends, strict=False)]
    each = list(zip(rows, w64.view(-1, 16, 24), strict=True))
    torch.testing.assert_close(y.double(), torch.cat([x64[r] @ u.T for r, u in each]), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), torch.cat([dy64[r] @ u for r, u in each]), rtol=1e-6, atol=1e-6)
