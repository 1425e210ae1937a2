"""Tests of aligned groups: every row is in one tile, and every tile holds rows of one group."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octile.ops.groups import ROWS, align_groups, num_tiles, take_tiles
from octile.ops.transpose import quantize_rows_and_columns
from tests.ops.operators import assert_fake_is_true, assert_well_formed

some_counts = st.lists(st.integers(0, 300), max_size=6)


def ends(counts: list[int]) -> Tensor:
    return torch.tensor(counts, dtype=torch.int32).cumsum(0).to(torch.int32)


@given(counts=some_counts, past=st.integers(0, 200))
def test_tiles_are_those_of_each_group_and_of_the_rows_past_the_last_one(counts: list[int], past: int):
    tiles, offs = align_groups(ends(counts), sum(counts) + past)
    expected, aligned, first = [], [], 0
    for count in (*counts, past):
        expected += [[start, min(start + ROWS, first + count)] for start in range(first, first + count, ROWS)]
        aligned.append(ROWS * len(expected))
        first += count
    assert tiles[: len(expected)].tolist() == expected
    assert not tiles[len(expected) :].any()
    assert offs.tolist() == aligned[:-1]


@given(groups=st.integers(0, 5), past=st.integers(0, 1), whole=st.integers(0, 3))
def test_some_groups_need_all_tiles(groups: int, past: int, whole: int):
    """One row more than whole tiles in each group needs the most tiles."""
    counts = [1 + ROWS * whole] * groups
    tiles, _ = align_groups(ends(counts), sum(counts) + past)
    assert (tiles[:, 0] < tiles[:, 1]).all() or not past  # without rows past the groups, their tile may be left over
    assert len(tiles) == num_tiles(sum(counts) + past, groups)


@given(counts=some_counts, past=st.integers(0, 200))
def test_rows_are_copied_to_their_tiles_and_zeros_follow(counts: list[int], past: int):
    rows = sum(counts) + past
    tiles, offs = align_groups(ends(counts), rows)
    x = torch.arange(1, rows + 1.0)[:, None].expand(rows, 3)
    found = take_tiles(x, tiles)
    first = aligned = 0
    for count, end in zip(counts, offs.tolist(), strict=True):
        assert torch.equal(found[aligned : aligned + count], x[first : first + count])
        assert not found[aligned + count : end].any()
        first, aligned = first + count, end
    assert torch.equal(found[aligned : aligned + past], x[first:])
    assert not found[aligned + past :].any()


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint16, torch.bool, torch.bfloat16, torch.complex64]
)
def test_rows_of_any_dtype_are_copied_and_zeros_follow(dtype: torch.dtype):
    tiles, _ = align_groups(ends([2]), 3)
    x = torch.ones(3, 5).to(dtype)
    found = take_tiles(x, tiles)
    assert found.dtype == dtype
    rows = found.view(torch.uint8).view(2, ROWS, -1)
    one = x[:1].view(torch.uint8)
    assert torch.equal(rows[0, :2], one.expand(2, -1))
    assert torch.equal(rows[1, :1], one)
    assert not rows[0, 2:].any()
    assert not rows[1, 1:].any()


def test_a_nan_stays_in_its_tile():
    tiles, _ = align_groups(ends([5, 6]), 11)
    x = torch.ones(11, 2)
    x[0] = float("nan")
    assert take_tiles(x, tiles)[1:].isfinite().all()


@pytest.mark.parametrize("counts", [[], [0, 0], [3, 0, 200]], ids=str)
def test_it_is_a_well_formed_operator(counts: list[int]):
    arguments = (ends(counts), sum(counts) + 1)
    assert_well_formed(align_groups, arguments)
    assert_fake_is_true(align_groups, arguments)


@pytest.mark.parametrize(
    ("offs", "error", "message"),
    [
        (torch.tensor([4.0]), TypeError, "offs must be int32, not torch.float32"),
        (torch.zeros(1, 1, dtype=torch.int32), ValueError, r"offs must be \[G\], not \(1, 1\)"),
        (ends([8, 3]), ValueError, "offs must be nondecreasing from 0 to at most 10, the rows"),
        (ends([8, -3]), ValueError, "offs must be nondecreasing from 0 to at most 10, the rows"),
        (ends([-1, 5]), ValueError, "offs must be nondecreasing from 0 to at most 10, the rows"),
    ],
    ids=["dtype", "matrix", "too many rows", "decreasing", "negative"],
)
def test_invalid_offsets_are_refused(offs: Tensor, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        align_groups(offs, 10)


@pytest.mark.parametrize(
    ("shape", "tiles", "error", "message"),
    [
        ((5, 8), torch.zeros(1, 2), TypeError, "tiles must be int32, not torch.float32"),
        ((5, 8), torch.zeros(2, dtype=torch.int32), ValueError, r"tiles must be \[P/128, 2\], contiguous, not \(2,\)"),
        ((5, 8), torch.zeros(2, 2, dtype=torch.int32).mT, ValueError, r"tiles must be \[P/128, 2\], contiguous"),
        ((2, 5, 8), torch.zeros(1, 2, dtype=torch.int32), ValueError, "x must be a matrix where it has tiles"),
    ],
    ids=["dtype", "shape", "strides", "stack"],
)
def test_tiles_that_do_not_fit_are_refused(shape, tiles: Tensor, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        quantize_rows_and_columns(torch.zeros(shape), "e4m3", False, tiles)
