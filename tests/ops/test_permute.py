"""Tests of the order of tokens' rows, and of permute and unpermute: gathers and sums, the one the other's adjoint."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octile.ops.permute import (
    count_tokens,
    permute,
    routing_plan,
    unpermute,
    unpermute_add_,
    unpermute_backward,
    weighted_routing_plan,
)
from octile.ops.quantize import dequantize, quantize
from tests.ops.operators import assert_fake_is_true, assert_well_formed

T, K, D = 13, 3, 200


def random_row_ids(t: int = T, k: int = K, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(t * k, generator=generator).view(t, k).to(torch.int32)


def with_order(row_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Row indices and their inverse."""
    return row_ids, row_ids.flatten().argsort().to(torch.int32)


def tiles(t: int = T, fmt: str = "e4m3") -> tuple[Tensor, Tensor]:
    return quantize(torch.randn(t, D, generator=torch.Generator().manual_seed(1)), 1, 128, fmt, True)


@pytest.mark.parametrize("expert", [-1, 4])
@pytest.mark.parametrize("batch", [1, 2])
def test_an_expert_that_does_not_exist_counts_for_no_sequence(expert: int, batch: int):
    experts = torch.tensor([[0], [1], [expert], [2]])
    with pytest.raises(RuntimeError, match="experts must be from 0 to 3, not"):
        count_tokens(experts, 4, batch)


@given(st.integers(0, 20), st.integers(1, 5), st.sampled_from(["e4m3", "e5m2", "int8"]), st.integers(0, 99))
def test_permute_copies_each_row_to_its_destinations_with_its_scales(t: int, k: int, fmt: str, seed: int):
    (data, scale), row_ids = tiles(t, fmt), random_row_ids(t, k, seed)
    moved, moved_scale = permute(data, scale, *with_order(row_ids))
    values = dequantize(data, scale, 1, 128, torch.float32)
    expected = torch.empty(t * k, D)
    for token, rows in enumerate(row_ids.tolist()):
        expected[rows] = values[token]
    assert torch.equal(dequantize(moved, moved_scale, 1, 128, torch.float32), expected)


def test_scales_have_the_layout_of_quantize():
    moved, moved_scale = permute(*tiles(), *with_order(random_row_ids()))
    assert moved_scale.stride() == quantize(torch.zeros(T * K, D), 1, 128, "e4m3", True)[1].stride()
    assert moved.is_contiguous()


@given(st.integers(0, 20), st.integers(1, 5), st.booleans(), st.integers(0, 99))
def test_unpermute_sums_the_rows_of_a_token_in_the_order_of_k(t: int, k: int, added: bool, seed: int):
    y, row_ids = torch.randn(t * k, 8).bfloat16(), random_row_ids(t, k, seed)
    add = torch.randn(t, 8).bfloat16() if added else None
    expected = []
    for token, rows in enumerate(row_ids.tolist()):
        total = add[token].float() if add is not None else torch.zeros(8)
        for row in rows:
            total = total + y[row].float()
        expected.append(total.bfloat16())
    assert torch.equal(unpermute(y, row_ids, add), torch.stack(expected) if t else torch.empty(0, 8).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("added", [False, True])
def test_a_weighted_sum_is_in_float32_and_rounded_once(dtype: torch.dtype, added: bool):
    y, row_ids, weight = torch.randn(T * K, 8).to(dtype), random_row_ids(), torch.rand(T, K)
    add = torch.randn(T, 8).to(dtype) if added else None
    total = torch.zeros(T, 8) if add is None else add.float()
    for k in range(K):
        total = total + y[row_ids[:, k]].float() * weight[:, k, None]
    assert torch.equal(unpermute(y, row_ids, add, weight), total.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_a_weighted_sum_equal_autograd(dtype: torch.dtype):
    y, row_ids, weight, dsum = (
        torch.randn(T * K, 8).to(dtype),
        random_row_ids(),
        torch.rand(T, K),
        torch.randn(T, 8).to(dtype),
    )
    wide = [t.float().clone().requires_grad_() for t in (y, weight)]
    total = (wide[0][row_ids] * wide[1][..., None]).sum(1)
    dy, dweight = torch.autograd.grad(total, wide, dsum.float())
    found = unpermute_backward(dsum, y, row_ids, weight)
    assert torch.equal(found[0], dy.to(dtype))
    torch.testing.assert_close(found[1], dweight)


@given(
    st.integers(0, 20),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_sums_are_added_to_rows_as_the_sums_alone_would_be(
    t: int, k: int, added: bool, weighted: bool, dtype: torch.dtype
):
    generator = torch.Generator().manual_seed(t)
    y, row_ids, x = (
        torch.randn(t * k, 8, generator=generator).to(dtype),
        random_row_ids(t, k),
        torch.randn(t, 8).to(dtype),
    )
    add = torch.randn(t, 8).to(dtype) if added else None
    weight = torch.rand(t, k) if weighted else None
    expected = x + unpermute(y, row_ids, add, weight)
    unpermute_add_(x, y, row_ids, add, weight)
    assert torch.equal(x, expected)


def test_rows_to_which_sums_cannot_be_added_are_refused():
    y, row_ids = torch.zeros(4, 4), random_row_ids(2, 2)
    with pytest.raises(TypeError, match=r"x must be torch\.float32 as y, not torch\.bfloat16"):
        unpermute_add_(torch.zeros(2, 4).bfloat16(), y, row_ids)
    with pytest.raises(ValueError, match=r"x must be \(2, 4\), not \(4, 4\)"):
        unpermute_add_(torch.zeros(4, 4), y, row_ids)
    with pytest.raises(ValueError, match=r"x must be contiguous, not of the strides \(1, 2\)"):
        unpermute_add_(torch.zeros(4, 2).mT, y, row_ids)


def test_permute_and_unpermute_are_adjoint():
    """⟨permute(x), y⟩ = ⟨x, unpermute(y)⟩."""
    (data, scale), row_ids, y = tiles(), random_row_ids(), torch.randn(T * K, D)
    moved = dequantize(*permute(data, scale, *with_order(row_ids)), 1, 128, torch.float32)
    x = dequantize(data, scale, 1, 128, torch.float32)
    products = moved.double() * y
    difference = products.sum() - (x.double() * unpermute(y, row_ids)).sum()
    assert difference.abs() <= K * 2**-24 * products.abs().sum()  # unpermute sums K values in FP32


def test_the_addend_is_not_written():
    add = torch.ones(T, 8)
    assert unpermute(torch.zeros(T, 8), random_row_ids(k=1), add).data_ptr() != add.data_ptr()
    assert (add == 1).all()


ORDER = with_order(random_row_ids(2, 1))[1]
CALLS: dict[str, Any] = {
    "permute": lambda: (permute, (*tiles(fmt="int8"), *with_order(random_row_ids()))),
    "unpermute": lambda: (unpermute, (torch.randn(T * K, D), random_row_ids())),
    "in place": lambda: (unpermute_add_, (torch.randn(T, D), torch.randn(T * K, D), random_row_ids())),
    "added": lambda: (unpermute, (torch.randn(T * K, D), random_row_ids(), torch.randn(T, D))),
    "weighted": lambda: (unpermute, (torch.randn(T * K, D), random_row_ids(), None, torch.rand(T, K))),
    "gradients": lambda: (
        unpermute_backward,
        (torch.randn(T, D), torch.randn(T * K, D), random_row_ids(), torch.rand(T, K)),
    ),
}


@pytest.mark.one_case
@pytest.mark.parametrize("name", CALLS)
def test_operators_are_well_formed(name: str):
    assert_well_formed(*CALLS[name]())


@pytest.mark.parametrize("name", [name for name in CALLS if name != "in place"])
def test_meta_tensors_have_the_shapes_and_strides_of_real_ones(name: str):
    assert_fake_is_true(*CALLS[name]())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            (torch.zeros(2, 4), torch.ones(2, 1), random_row_ids(2, 1), ORDER),
            TypeError,
            "data must be float8_e4m3fn, float8_e5m2 or",
        ),
        (
            (torch.zeros(2, 4).char(), torch.ones(2, 2), random_row_ids(2, 1), ORDER),
            ValueError,
            r"scale must be \(2, 1\)",
        ),
        (
            (torch.zeros(2, 4).char(), torch.ones(2, 1), random_row_ids(2, 1).long(), ORDER),
            TypeError,
            "row_ids must be int32, not",
        ),
        (
            (torch.zeros(2, 4).char(), torch.ones(2, 1), random_row_ids(2, 1)[0], ORDER),
            ValueError,
            r"row_ids must be \[T, K\], not",
        ),
        (
            (torch.zeros(2, 4).char(), torch.ones(2, 1), random_row_ids(3, 1), ORDER),
            ValueError,
            "for each of the 2 rows of data, not 3",
        ),
        (
            (torch.zeros(2, 4).char(), torch.ones(2, 1), random_row_ids(2, 1), ORDER.long()),
            TypeError,
            "order must be int32, not",
        ),
        (
            (torch.zeros(2, 4).char(), torch.ones(2, 1), random_row_ids(2, 1), ORDER[:1]),
            ValueError,
            r"order must be \[2\], one",
        ),
    ],
    ids=["dtype", "scale", "dtype of row_ids", "shape of row_ids", "rows", "dtype of order", "order"],
)
def test_invalid_arguments_of_permute_are_refused(arguments: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        permute(*arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.zeros(2, 4).double(), random_row_ids(2, 1)), TypeError, "y must be float32, bfloat16 or float16, not"),
        ((torch.zeros(2), random_row_ids(2, 1)), ValueError, r"y must be a matrix \[T·K, D\], not \(2,\)"),
        (
            (torch.zeros(3, 4), random_row_ids(2, 2)),
            ValueError,
            r"for each of the \(2, 2\) entries of row_ids, not 3 rows",
        ),
        (
            (torch.zeros(4, 4), random_row_ids(2, 2), torch.ones(2, 4).half()),
            TypeError,
            "add must be torch.float32 as y, not",
        ),
        (
            (torch.zeros(4, 4), random_row_ids(2, 2), torch.ones(4, 4)),
            ValueError,
            r"add must be \(2, 4\), not \(4, 4\)",
        ),
        (
            (torch.zeros(4, 4), random_row_ids(2, 2), None, torch.ones(2, 2).half()),
            TypeError,
            "weight must be float32, not",
        ),
        (
            (torch.zeros(4, 4), random_row_ids(2, 2), None, torch.ones(4)),
            ValueError,
            r"weight must be \(2, 2\) as row_ids, not",
        ),
    ],
    ids=["dtype", "shape", "rows", "add's dtype", "add", "weight's dtype", "weight"],
)
def test_invalid_arguments_of_unpermute_are_refused(arguments: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        unpermute(*arguments)


def test_invalid_gradients_of_sums_are_refused():
    y, row_ids, weight = torch.zeros(4, 4), random_row_ids(2, 2), torch.ones(2, 2)
    with pytest.raises(TypeError, match=r"dsum must be float32, bfloat16 or float16, not torch\.float64"):
        unpermute_backward(torch.zeros(2, 4).double(), y, row_ids, weight)
    with pytest.raises(ValueError, match=r"dsum must be \(2, 4\), not \(4, 4\)"):
        unpermute_backward(torch.zeros(4, 4), y, row_ids, weight)


def chosen(t: int, k: int, n_experts: int, seed: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.randint(n_experts, (t, k), generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(
    st.integers(0, 8),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_tokens_are_counted_by_sequence(length: int, batch: int, k: int, n_experts: int, dtype: torch.dtype):
    experts = chosen(length * batch, k, n_experts, length, dtype)
    counts = count_tokens(experts, n_experts, batch)
    expected = [[part.flatten().tolist().count(e) for e in range(n_experts)] for part in experts.chunk(batch)]
    assert counts.dtype == torch.int64
    assert counts.tolist() == (expected if length else [[0] * n_experts] * batch)


@given(st.integers(0, 20), st.integers(1, 4), st.integers(1, 9), st.sampled_from([torch.int32, torch.int64]))
def test_rows_are_sorted_by_expert_then_by_token(t: int, k: int, n_experts: int, dtype: torch.dtype):
    experts = chosen(t, k, n_experts, t, dtype)
    load = count_tokens(experts, n_experts)[0]
    row_ids, order, offs = routing_plan(experts, load)
    flat = experts.flatten().tolist()
    expected = sorted(range(t * k), key=lambda entry: (flat[entry], entry))
    assert order.tolist() == expected
    assert row_ids.shape == (t, k)
    assert [expected[row] for row in row_ids.flatten().tolist()] == list(range(t * k))
    assert offs.tolist() == [sum(e <= expert for e in flat) for expert in range(n_experts)]
    assert {r.dtype for r in (row_ids, order, offs)} == {torch.int32}


@given(st.integers(0, 20), st.integers(1, 4), st.integers(1, 9))
def test_a_weighted_plan_is_that_of_counted_tokens_and_each_row_has_its_weight(t: int, k: int, n_experts: int):
    experts, weights = chosen(t, k, n_experts, t), torch.rand(t, k, generator=torch.Generator().manual_seed(t))
    *plan, row_weights = weighted_routing_plan(experts, weights, n_experts)
    assert all(map(torch.equal, plan, routing_plan(experts, count_tokens(experts, n_experts)[0])))
    assert torch.equal(row_weights[plan[0].long()], weights)


def test_the_operators_are_well_formed():
    experts = chosen(6, 2, 3)
    for operator, arguments in (
        (count_tokens, (experts, 3, 2)),
        (routing_plan, (experts, torch.tensor([4, 4, 4]))),
        (weighted_routing_plan, (experts, torch.rand(6, 2), 3)),
    ):
        assert_well_formed(operator, arguments)
        assert_fake_is_true(operator, arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((chosen(4, 2, 3).float(), 3), TypeError, "experts must be int64 or int32, not torch.float32"),
        ((chosen(4, 2, 3)[0], 3), ValueError, r"experts must be a matrix \[T, K\] with K of at least 1, not \(2,\)"),
        ((chosen(4, 2, 3), 0), ValueError, "the number of experts must be from 1 to 4096, not 0"),
        ((chosen(4, 2, 3), 3, 3), ValueError, "batch must divide the 4 tokens of experts, not be 3"),
        ((chosen(4, 2, 3), 3, 0), ValueError, "batch must divide the 4 tokens of experts, not be 0"),
        ((torch.tensor([[0, 3]]), 3), RuntimeError, "experts must be from 0 to 2, not 0 to 3"),
    ],
)
def test_counts_that_cannot_be_made_are_refused(arguments, error, message: str):
    with pytest.raises(error, match=message):
        count_tokens(*arguments)


@pytest.mark.parametrize(
    ("load", "error", "message"),
    [
        (torch.ones(3), TypeError, "load must be int64 or int32, not torch.float32"),
        (torch.ones(1, 3, dtype=torch.int64), ValueError, r"load must be \[E\], not \(1, 3\)"),
        (torch.ones(3, dtype=torch.int64, device="meta"), ValueError, "experts is on cpu but load on meta"),
    ],
)
def test_plans_that_cannot_be_made_are_refused(load: torch.Tensor, error, message: str):
    with pytest.raises(error, match=message):
        routing_plan(chosen(4, 2, 3), load)


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (torch.ones(4, 2).double(), TypeError, "weights must be float32, not torch.float64"),
        (torch.ones(4, 3), ValueError, r"weights must be \[4, 2\] like experts, not \[4, 3\]"),
        (torch.ones(4, 2, device="meta"), ValueError, "experts is on cpu but weights on meta"),
    ],
)
def test_weighted_plans_that_cannot_be_made_are_refused(weights: torch.Tensor, error, message: str):
    with pytest.raises(error, match=message):
        weighted_routing_plan(chosen(4, 2, 3), weights, 3)
