"""Tests of the indexer's logits: close to the sum in float64, of contiguous keys and of keys in any pages."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octile.ops.mqa_logits import PAGE, SPLIT, mqa_logits, paged_mqa_logits, paged_mqa_schedule
from tests.ops.operators import assert_fake_is_true, assert_well_formed
from tests.ops.paged_keys import filled_pages, in_order, int32, scored

S, T, H, D = 6, 200, 8, 32
STARTS, ENDS = int32([0, 3, -4, 150, 90, 0]), int32([1, 200, 7, 150, 260, 0])
B, NEXT_N, PAGES = 3, 2, int32([[4, 1, 0], [2, 2, 3], [5, 5, 5]])
LENGTHS = int32([[70, 71], [192, 64], [0, 0]])


def operands(s: int = S, t: int = T, h: int = H, d: int = D) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(s)
    q, k = (torch.randn(*shape, generator=g).to(torch.float8_e4m3fn) for shape in ((s, h, d), (t, d)))
    return q, k, torch.rand(t, generator=g) + 0.5, torch.randn(s, h, generator=g)


def paged_operands() -> tuple[Tensor, ...]:
    q, k, scale, weights = operands(B * NEXT_N, 6 * PAGE)
    cache = filled_pages(k, scale)
    return q.view(B, NEXT_N, H, D), cache, weights, LENGTHS, PAGES, paged_mqa_schedule(LENGTHS, 4)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_logits_are_the_weighted_sum_over_heads(dtype: torch.dtype, rounding: float):
    q, k, scale, weights = operands()
    found = mqa_logits(q, k, scale, weights, STARTS, ENDS, 0, True, dtype)
    exact = scored(q, k, scale, weights)
    key = torch.arange(T)
    seen = (key >= STARTS[:, None]) & (key < ENDS[:, None])
    torch.testing.assert_close(found.double()[seen], exact[seen], rtol=rounding, atol=1e-4)
    assert (found[~seen] == -math.inf).all()
    assert found.dtype == dtype


@pytest.mark.parametrize("width", [1, 110, 230])
def test_compressed_logits_begin_at_the_first_key(width: int):
    arguments = (*operands(), STARTS, ENDS)
    whole = mqa_logits(*arguments, 0, False, torch.float32)
    found = mqa_logits(*arguments, width, False, torch.float32)
    assert found.shape == (S, width)
    for row, (start, end) in enumerate(zip(STARTS.clamp(min=0).tolist(), ENDS.clamp(max=T).tolist(), strict=True)):
        count = max(min(end - start, width), 0)
        assert torch.equal(found[row, :count], whole[row, start : start + count])


@pytest.mark.parametrize("which", [0, 2, 3])
def test_nan_appears_in_its_logits(which: int):
    arguments = [*operands()]
    arguments[which][3] = math.nan
    found = mqa_logits(*arguments, int32([0] * S), int32([T] * S), 0, True, torch.float32)
    of_query = which != 2
    assert (found[3] if of_query else found[:, 3]).isnan().all()
    assert not (found[2] if of_query else found[:, 2]).isnan().any()


@pytest.mark.parametrize("t", [0, 5])
@pytest.mark.parametrize("s", [0, 5])
def test_no_queries_or_no_keys(s: int, t: int):
    ends = torch.full((s,), t, dtype=torch.int32)
    assert mqa_logits(*operands(s, t), ends * 0, ends, 0, True, torch.float32).shape == (s, t)


def test_pages_hold_the_same_keys():
    q, cache, weights, *places = paged_operands()
    found = paged_mqa_logits(q, cache, weights, *places, 200, True, torch.float32).view(B, NEXT_N, 200)
    for i in range(B):
        k, scale = in_order(cache, PAGES[i], D)
        exact = scored(q[i], k, scale, weights.view(B, NEXT_N, H)[i])
        for j, length in enumerate(LENGTHS[i].tolist()):
            torch.testing.assert_close(found[i, j, :length].double(), exact[j, :length], rtol=1e-6, atol=1e-4)
            assert (found[i, j, length:] == -math.inf).all()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 3000), min_size=1, max_size=20), st.integers(1, 40))
def test_the_schedule_divides_all_keys_evenly(lengths: list[int], n_blocks: int):
    schedule = paged_mqa_schedule(int32(lengths)[:, None], n_blocks).tolist()
    units = [(i, j) for i, length in enumerate(lengths) for j in range(-(-length // SPLIT))]
    position = {unit: i for i, unit in enumerate(units)} | {(len(lengths), 0): len(units)}
    begins = [position[tuple(entry)] for entry in schedule]
    assert (begins[0], begins[-1]) == (0, len(units))
    counts = [end - begin for begin, end in pairwise(begins)]
    assert max(counts) - min(counts) <= 1


def test_a_sequence_is_scheduled_by_its_longest_length():
    assert torch.equal(paged_mqa_schedule(int32([[0, 700], [256, 1]]), 2), paged_mqa_schedule(int32([[700], [256]]), 2))


def test_the_operators_are_well_formed():
    cases = (
        (mqa_logits, (*operands(), STARTS, ENDS, 0, True, torch.float32)),
        (mqa_logits, (*operands(), STARTS, ENDS, 7, False, torch.bfloat16)),
        (paged_mqa_logits, (*paged_operands(), 200, True, torch.float32)),
        (paged_mqa_schedule, (LENGTHS, 5)),
    )
    for op, arguments in cases:
        assert_well_formed(op, arguments)
        assert_fake_is_true(op, arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": operands()[0].float()}, TypeError, "q must be float8_e4m3fn"),
        ({"q": operands()[0].transpose(0, 1)}, ValueError, r"q must be \[S, H, D\], contiguous"),
        ({"k": operands()[1][:, 1:]}, ValueError, r"k must be \[T, 32\], contiguous"),
        ({"k": operands()[1].view(torch.int8)}, TypeError, "k must be float8_e4m3fn"),
        ({"k_scale": torch.ones(T + 1)}, ValueError, r"k_scale must be \(200,\)"),
        ({"k_scale": torch.ones(T).double()}, TypeError, "k_scale must be float32"),
        ({"weights": torch.ones(S, H + 1)}, ValueError, r"weights must be \(6, 8\)"),
        ({"weights": torch.ones(H, S).mT}, ValueError, "weights must be .* contiguous rows"),
        ({"weights": torch.ones(S, H).bfloat16()}, TypeError, "weights must be float32"),
        ({"starts": STARTS.long()}, TypeError, "starts must be int32"),
        ({"ends": ENDS[1:]}, ValueError, r"ends must be \(6,\)"),
        ({"ends": ENDS.to("meta")}, ValueError, "q is on cpu but ends on meta"),
        ({"width": -1}, ValueError, "width must be from 0 to 2,147,483,647, not -1"),
        ({"width": 5}, ValueError, "clean must be False where width is 5"),
        ({"out_dtype": torch.float16}, TypeError, "out_dtype must be bfloat16 or float32"),
    ],
)
def test_wrong_arguments_are_refused(change: dict, error: type[Exception], message: str):
    names = "q", "k", "k_scale", "weights", "starts", "ends", "width", "clean", "out_dtype"
    arguments = dict(zip(names, (*operands(), STARTS, ENDS, 0, True, torch.float32), strict=True))
    with pytest.raises(error, match=message):
        mqa_logits(*(arguments | change).values())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": paged_operands()[0][0]}, ValueError, r"q must be \[B, next_n, H, D\]"),
        ({"cache": paged_operands()[1].view(torch.int8)}, TypeError, "cache must be uint8"),
        ({"cache": paged_operands()[1][:, 1:]}, ValueError, "cache must have 2304 bytes a page for q's 32 channels"),
        ({"cache": torch.zeros(6, 2305, dtype=torch.uint8)[:, :2304]}, ValueError, "multiples of 16 bytes"),
        ({"weights": torch.ones(B, H)}, ValueError, r"weights must be \(6, 8\)"),
        ({"lengths": LENGTHS[:, :1].contiguous()}, ValueError, r"lengths must be \(3, 2\)"),
        ({"lengths": LENGTHS + 150}, ValueError, "lengths must be from 0 to the 192 keys"),
        ({"lengths": LENGTHS - 1}, ValueError, "lengths must be from 0"),
        ({"pages": PAGES[1:]}, ValueError, r"pages must be \(3, M\)"),
        ({"pages": PAGES + 3}, ValueError, "pages must be from 0 to below the 6 pages of cache"),
        ({"pages": PAGES.mT.contiguous().mT}, ValueError, "pages must have 2 dimensions and contiguous rows"),
        ({"schedule": LENGTHS[:1]}, ValueError, r"schedule must be \[blocks \+ 1, 2\]"),
        ({"width": -1}, ValueError, "width must be from 0 to 2,147,483,647"),
        ({"out_dtype": torch.float64}, TypeError, "out_dtype must be bfloat16 or float32"),
    ],
)
def test_wrong_arguments_with_pages_are_refused(change: dict, error: type[Exception], message: str):
    names = "q", "cache", "weights", "lengths", "pages", "schedule", "width", "clean", "out_dtype"
    arguments = dict(zip(names, (*paged_operands(), 200, True, torch.float32), strict=True))
    with pytest.raises(error, match=message):
        paged_mqa_logits(*(arguments | change).values())


@pytest.mark.parametrize(
    ("lengths", "n_blocks", "error", "message"),
    [
        (LENGTHS.long(), 4, TypeError, "lengths must be int32"),
        (LENGTHS[0], 4, ValueError, "lengths must have 2 dimensions"),
        (LENGTHS, 0, ValueError, "n_blocks must be from 1 to 65,535, not 0"),
    ],
)
def test_wrong_schedules_are_refused(lengths: Tensor, n_blocks: int, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        paged_mqa_schedule(lengths, n_blocks)
