"""Tests of the choice of keys: the highest logits of a query's range, ties by position, whatever other columns hold."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octile.ops import top_keys as module
from octile.ops.top_keys import top_keys
from tests.ops.operators import assert_fake_is_true, assert_well_formed
from tests.ops.paged_keys import int32

LOGITS = [-math.inf, -2.5, -1.0, -0.0, 0.0, 1.0, math.inf]  # few, so that there are ties
rows = st.lists(
    st.tuples(st.lists(st.sampled_from(LOGITS), min_size=9, max_size=9), st.integers(-2, 9), st.integers(0, 11))
)


def expected(row: list[float], start: int, end: int, k: int) -> list[int]:
    columns = sorted(range(max(start, 0), min(end, len(row))), key=lambda column: (-row[column], column))[:k]
    return columns + [-1] * (k - len(columns))


@settings(deadline=None)
@given(rows, st.integers(1, 12))
def test_columns_are_sorted_by_logit_then_position(drawn: list[tuple[list[float], int, int]], k: int):
    logits = torch.tensor([row for row, _, _ in drawn]).view(-1, 9)
    starts, ends = int32([start for _, start, _ in drawn]), int32([end for *_, end in drawn])
    assert top_keys(logits, starts, ends, k).tolist() == [expected(*one, k) for one in drawn]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_is_chosen_first(dtype: torch.dtype):
    logits = torch.tensor([[1.0, math.inf, math.nan, -math.nan, 2.0]], dtype=dtype)
    assert top_keys(logits, int32([0]), int32([5]), 4).tolist() == [[2, 3, 1, 4]]


def test_columns_outside_of_the_range_are_not_looked_at():
    logits = torch.tensor([[math.nan, 1.0, 2.0, math.inf]])
    assert top_keys(logits, int32([1]), int32([3]), 3).tolist() == [[2, 1, -1]]


def test_rows_do_not_depend_on_the_parts_that_they_are_computed_in(monkeypatch: pytest.MonkeyPatch):
    logits = torch.randn(50, 30, generator=torch.Generator().manual_seed(0))
    ends = torch.arange(50, dtype=torch.int32)
    whole = top_keys(logits, ends * 0, ends, 7)
    monkeypatch.setattr(module, "MAX_ELEMENTS", 100)
    assert torch.equal(top_keys(logits, ends * 0, ends, 7), whole)


@pytest.mark.parametrize(("s", "w"), [(0, 5), (3, 0)])
def test_nothing_to_choose(s: int, w: int):
    ends = torch.full((s,), w, dtype=torch.int32)
    assert torch.equal(top_keys(torch.ones(s, w), ends * 0, ends, 2), torch.full((s, 2), -1, dtype=torch.int32))


def test_the_operator_is_well_formed():
    arguments = torch.randn(4, 9), int32([0, 1, 2, 3]), int32([9, 9, 2, 5]), 3
    assert_well_formed(top_keys, arguments)
    assert_fake_is_true(top_keys, arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(2, 3).double(), int32([0, 0]), int32([1, 1]), 1), TypeError, "logits must be float32"),
        ((torch.ones(3), int32([0, 0]), int32([1, 1]), 1), ValueError, "logits must be a matrix"),
        ((torch.ones(2, 3), int32([0]), int32([1, 1]), 1), ValueError, r"starts must be \(2,\)"),
        ((torch.ones(2, 3), int32([0, 0]), torch.ones(2), 1), TypeError, "ends must be int32"),
        (
            (torch.ones(2, 3), int32([0, 0]), int32([1, 1]).to("meta"), 1),
            ValueError,
            "logits is on cpu but ends on meta",
        ),
        ((torch.ones(2, 3), int32([0, 0]), int32([1, 1]), 0), ValueError, "k must be at least 1, not 0"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[Tensor, ...], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        top_keys(*arguments)
