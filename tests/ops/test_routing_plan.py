"""Tests of the counts of tokens and of the order of their rows: by loops in Python, and what is refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octile.ops.permute import count_tokens, routing_plan
from tests.ops.operators import assert_fake_is_true, assert_well_formed


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


def test_the_operators_are_well_formed():
    experts = chosen(6, 2, 3)
    for operator, arguments in ((count_tokens, (experts, 3, 2)), (routing_plan, (experts, torch.tensor([4, 4, 4])))):
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
        ((torch.tensor([[0, 3]]), 3), RuntimeError, "index 3 is out of bounds"),
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
