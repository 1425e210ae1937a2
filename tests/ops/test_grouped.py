"""Tests of the grouped GEMMs: equal to a loop over their groups, which is within the bound of FP32 summation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octile.ops.grouped import (
    grouped_matmul_nt,
    grouped_matmul_nt_out,
    grouped_wgrad,
    grouped_wgrad_out,
    masked_grouped_matmul_nt,
    masked_grouped_matmul_nt_out,
)
from octile.ops.matmul import matmul_nt
from octile.ops.quantize import quantize
from tests.ops.operators import WITHOUT_ALLCLOSE

Operand = tuple[Tensor, Tensor, tuple[int, int]]

FORMATS = ["e4m3", "e5m2", "int8"]
TILE, COLUMN_TILE, BLOCK = (1, 128), (128, 1), (128, 128)

every_format = pytest.mark.parametrize("fmt", FORMATS)
# Sizes of groups, some of them empty, and the number of rows past the last group.
a_batch = {
    "counts": st.lists(st.integers(0, 150), min_size=1, max_size=5),
    "past": st.integers(0, 20),
    "n": st.integers(1, 70),
    "k": st.integers(1, 140),
    "fmt": st.sampled_from(FORMATS),
}


def operand(*shape: int, fmt: str = "e4m3", block: tuple[int, int] = TILE, seed: int = 0) -> Operand:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return (*quantize(x, *block, fmt, False), block)


def ends(counts: list[int]) -> Tensor:
    return torch.tensor(counts, dtype=torch.int32).cumsum(0).to(torch.int32)


def values(q: Operand) -> Tensor:
    """data · scale in FP64, where nothing is rounded."""
    data, scale, block = q
    rows, cols = data.shape[-2:]
    scale = scale.double().repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :cols]
    return data.double() * scale


def groups(x: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
    """The rows of each group."""
    return x[: sum(counts)].split(counts)


def bound(a: Tensor, b: Tensor) -> Tensor:
    """The error bound of FP32 summation over K: K + 2 roundings, see test_matmul.py; a and b are exact values."""
    return (a.shape[-1] + 2) * 2.0**-24 * (a.abs() @ b.abs().mT) * (1 + 1e-4)


# Rows sorted by group


@pytest.mark.oldest_torch
@given(**a_batch)
def test_every_group_of_rows_is_multiplied_by_its_own_weight(counts, past, n, k, fmt):
    a, b = operand(sum(counts) + past, k, fmt=fmt), operand(len(counts), n, k, fmt=fmt, block=BLOCK, seed=1)
    y = grouped_matmul_nt(*a, *b, ends(counts), torch.float32).double()
    for y_g, a_g, b_g in zip(groups(y, counts), groups(values(a), counts), values(b), strict=True):
        assert ((y_g - a_g @ b_g.T).abs() <= bound(a_g, b_g)).all()


@given(**a_batch)
def test_rows_past_the_last_group_are_zero(counts, past, n, k, fmt):
    a, b = operand(sum(counts) + past, k, fmt=fmt), operand(len(counts), n, k, fmt=fmt, block=BLOCK)
    y = grouped_matmul_nt(*a, *b, ends(counts), torch.float32)
    assert torch.equal(y[sum(counts) :], torch.zeros(past, n))


def test_one_group_equals_a_dense_gemm():
    a, b = operand(20, 130), operand(1, 30, 130, block=BLOCK)
    y = grouped_matmul_nt(*a, *b, ends([20]), torch.float32)
    assert torch.equal(y, matmul_nt(*a, b[0][0], b[1][0], BLOCK, torch.float32))


def test_a_grouped_bf16_result_is_the_fp32_one_rounded():
    arguments = (*operand(20, 130), *operand(2, 30, 130, block=BLOCK), ends([5, 10]))
    assert torch.equal(
        grouped_matmul_nt(*arguments, torch.bfloat16), grouped_matmul_nt(*arguments, torch.float32).bfloat16()
    )


def test_a_nan_in_one_weight_reaches_its_group_and_no_other():
    a, b = operand(6, 130), operand(3, 30, 130, block=BLOCK)
    b[0][1].view(torch.uint8)[:, 7] = 0x7F
    y = grouped_matmul_nt(*a, *b, ends([2, 2, 2]), torch.float32)
    assert y.isnan().all(1).tolist() == [False, False, True, True, False, False]


def test_a_nan_past_the_last_group_is_not_seen():
    a, b = operand(6, 130), operand(1, 30, 130, block=BLOCK)
    a[0][4:].view(torch.uint8)[:] = 0x7F
    assert grouped_matmul_nt(*a, *b, ends([4]), torch.float32).isfinite().all()


# Masked rows


@given(counts=st.lists(st.integers(0, 40), min_size=1, max_size=4), n=st.integers(1, 70), k=st.integers(1, 140))
def test_the_first_rows_of_every_group_are_multiplied(counts, n, k):
    a, b = operand(len(counts), 40, k), operand(len(counts), n, k, block=BLOCK, seed=1)
    y = masked_grouped_matmul_nt(*a, *b, torch.tensor(counts, dtype=torch.int32), torch.float32)
    for g, count in enumerate(counts):
        a_g, b_g = values(a)[g, :count], values(b)[g]
        assert ((y[g, :count] - a_g @ b_g.T).abs() <= bound(a_g, b_g)).all()


def test_a_nan_in_an_unused_row_is_not_seen():
    a, b = operand(2, 8, 130), operand(2, 30, 130, block=BLOCK)
    a[0][:, 5:].view(torch.uint8)[:] = 0x7F
    y = masked_grouped_matmul_nt(*a, *b, torch.tensor([5, 3], dtype=torch.int32), torch.float32)
    assert y.isfinite().all()


def test_autocast_changes_nothing_in_masked_gemms():
    arguments = (*operand(2, 8, 130), *operand(2, 30, 130, block=BLOCK), torch.tensor([8, 3], dtype=torch.int32))
    with torch.autocast("cpu", torch.bfloat16):
        inside = masked_grouped_matmul_nt(*arguments, torch.float32)
    assert torch.equal(inside, masked_grouped_matmul_nt(*arguments, torch.float32))


# The weight gradient: groups along the summed dimension


@given(**a_batch)
def test_wgrad_sums_over_the_rows_of_each_group_also_where_a_tile_straddles_two(counts, past, n, k, fmt):
    t = sum(counts) + past
    dy, x = operand(t, n, fmt=fmt, block=COLUMN_TILE), operand(t, k, fmt=fmt, block=COLUMN_TILE, seed=1)
    dw = grouped_wgrad(*dy, *x, ends(counts), torch.float32).double()
    for dw_g, dy_g, x_g in zip(dw, groups(values(dy), counts), groups(values(x), counts), strict=True):
        assert ((dw_g - dy_g.T @ x_g).abs() <= bound(dy_g.T, x_g.T)).all()


def test_a_group_without_rows_has_a_gradient_of_zero():
    dy, x = operand(9, 5, block=COLUMN_TILE), operand(9, 7, block=COLUMN_TILE)
    assert torch.equal(grouped_wgrad(*dy, *x, ends([4, 0, 5]), torch.float32)[1], torch.zeros(5, 7))


def test_a_nan_reaches_the_gradient_of_its_group_and_no_other():
    dy, x = operand(9, 5, block=COLUMN_TILE), operand(9, 7, block=COLUMN_TILE)
    dy[0].view(torch.uint8)[6] = 0x7F
    dw = grouped_wgrad(*dy, *x, ends([4, 5]), torch.float32)
    assert dw.isnan().flatten(1).all(1).tolist() == [False, True]


@pytest.mark.parametrize("counts", [[], [0, 0]])
def test_no_rows_at_all_are_no_error(counts):
    b, dy = operand(len(counts), 5, 7, block=BLOCK), operand(0, 5, block=COLUMN_TILE)
    assert grouped_matmul_nt(*operand(0, 7), *b, ends(counts), torch.float32).shape == (0, 5)
    assert grouped_wgrad(*dy, *operand(0, 7, block=COLUMN_TILE), ends(counts), torch.float32).shape == (
        len(counts),
        5,
        7,
    )


# With a given output


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_in_a_group_are_written_and_rows_past_all_are_unchanged(dtype):
    arguments = (*operand(20, 130), *operand(2, 30, 130, block=BLOCK), ends([5, 10]))
    out = torch.full((20, 30), 7.0, dtype=dtype)
    grouped_matmul_nt_out(out, *arguments)
    assert torch.equal(out[:15], grouped_matmul_nt(*arguments, dtype)[:15])
    assert (out[15:] == 7).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_within_the_count_are_written_and_others_are_unchanged(dtype):
    arguments = (*operand(2, 8, 130), *operand(2, 30, 130, block=BLOCK), torch.tensor([8, 3], dtype=torch.int32))
    out = torch.full((2, 8, 30), 7.0, dtype=dtype)
    masked_grouped_matmul_nt_out(out, *arguments)
    assert torch.equal(out[1, :3], masked_grouped_matmul_nt(*arguments, dtype)[1, :3])
    assert (out[1, 3:] == 7).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("accumulate", [False, True])
def test_wgrad_is_stored_or_added_in_fp32(dtype, accumulate):
    dy, x = operand(20, 5, block=COLUMN_TILE), operand(20, 7, block=COLUMN_TILE, seed=1)
    out = torch.randn(2, 5, 7).to(dtype)
    expected = grouped_wgrad(*dy, *x, ends([5, 0]), torch.float32) + accumulate * out.float()
    grouped_wgrad_out(out, *dy, *x, ends([5, 0]), accumulate)
    assert torch.equal(out, expected.to(dtype))


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (torch.zeros(20, 30, dtype=torch.float16), TypeError, "out must be bfloat16 or float32"),
        (torch.zeros(20, 31), ValueError, r"out must be \(20, 30\), not \(20, 31\)"),
        (torch.zeros(30, 20).mT, ValueError, "out must be contiguous"),
    ],
    ids=["dtype", "shape", "strides"],
)
def test_an_out_that_does_not_fit_is_refused(out, error, message):
    with pytest.raises(error, match=message):
        grouped_matmul_nt_out(out, *operand(20, 130), *operand(2, 30, 130, block=BLOCK), ends([5, 10]))


# Operator checks of torch; see test_matmul.py for the checks that FP8 cannot pass on a CPU


def checks(fmt: str):
    return "ALL" if fmt == "int8" else WITHOUT_ALLCLOSE


@pytest.mark.one_case
@pytest.mark.each_value
@every_format
@pytest.mark.parametrize("counts", [[3, 0, 4], [7], [0]], ids=str)
def test_grouped_matmul_nt_is_a_well_formed_operator(fmt, counts):
    a, b = operand(sum(counts) + 2, 130, fmt=fmt), operand(len(counts), 5, 130, fmt=fmt, block=BLOCK)
    torch.library.opcheck(grouped_matmul_nt.overload, (*a, *b, ends(counts), torch.bfloat16), test_utils=checks(fmt))


@pytest.mark.one_case
@every_format
def test_grouped_matmul_nt_takes_transposed_weights_as_a_well_formed_operator(fmt):
    b, b_scale, _ = operand(2, 130, 5, fmt=fmt, block=BLOCK)
    arguments = (*operand(9, 130, fmt=fmt), b.mT, b_scale.mT, BLOCK, ends([4, 5]), torch.float32)
    torch.library.opcheck(grouped_matmul_nt.overload, arguments, test_utils=checks(fmt))


@pytest.mark.one_case
@every_format
def test_masked_grouped_matmul_nt_is_a_well_formed_operator(fmt):
    a, b = operand(2, 6, 130, fmt=fmt), operand(2, 5, 130, fmt=fmt, block=BLOCK)
    arguments = (*a, *b, torch.tensor([6, 0], dtype=torch.int32), torch.bfloat16)
    torch.library.opcheck(masked_grouped_matmul_nt.overload, arguments, test_utils=checks(fmt))


@pytest.mark.one_case
@pytest.mark.each_value
@every_format
@pytest.mark.parametrize("counts", [[3, 0, 4], [7], [0]], ids=str)
def test_grouped_wgrad_is_a_well_formed_operator(fmt, counts):
    dy = operand(sum(counts) + 2, 5, fmt=fmt, block=COLUMN_TILE)
    x = operand(sum(counts) + 2, 130, fmt=fmt, block=COLUMN_TILE)
    torch.library.opcheck(grouped_wgrad.overload, (*dy, *x, ends(counts), torch.float32), test_utils=checks(fmt))


@pytest.mark.one_case
@every_format
def test_the_out_variants_are_well_formed_operators(fmt):
    a, b = operand(9, 130, fmt=fmt), operand(2, 5, 130, fmt=fmt, block=BLOCK)
    torch.library.opcheck(
        grouped_matmul_nt_out.overload, (torch.zeros(9, 5), *a, *b, ends([3, 4])), test_utils=checks(fmt)
    )
    masked = (torch.zeros(2, 6, 5), *operand(2, 6, 130, fmt=fmt), *b, torch.tensor([6, 0], dtype=torch.int32))
    torch.library.opcheck(masked_grouped_matmul_nt_out.overload, masked, test_utils=checks(fmt))
    dy, x = operand(9, 5, fmt=fmt, block=COLUMN_TILE), operand(9, 130, fmt=fmt, block=COLUMN_TILE)
    wgrad = (torch.zeros(2, 5, 130), *dy, *x, ends([3, 4]), True)
    torch.library.opcheck(grouped_wgrad_out.overload, wgrad, test_utils=checks(fmt))


# Refusals


@pytest.mark.parametrize("offs", [[3, 2], [-1, 4], [2, 10]], ids=["falling", "negative", "past the rows"])
def test_invalid_offsets_are_refused(offs):
    a, b = operand(9, 130), operand(2, 5, 130, block=BLOCK)
    with pytest.raises(ValueError, match=r"offs must be nondecreasing from 0 to at most 9, the number of rows, not \["):
        grouped_matmul_nt(*a, *b, torch.tensor(offs, dtype=torch.int32), torch.float32)


def test_offsets_are_int32():
    with pytest.raises(TypeError, match=r"offs must be int32, not torch.int64"):
        grouped_matmul_nt(
            *operand(9, 130), *operand(2, 5, 130, block=BLOCK), ends([4, 5]).to(torch.int64), torch.float32
        )


def test_there_must_be_one_offset_per_weight():
    with pytest.raises(ValueError, match=r"offs must be \[2\], one for each group, not \(3,\)"):
        grouped_matmul_nt(*operand(9, 130), *operand(2, 5, 130, block=BLOCK), ends([4, 5, 0]), torch.float32)


def test_weights_are_stacked():
    with pytest.raises(ValueError, match=r"b must have 3 dimensions, not the shape \(5, 130\)"):
        grouped_matmul_nt(*operand(9, 130), *operand(5, 130), ends([9]), torch.float32)


@pytest.mark.parametrize("counts", [[-1, 0], [0, 7]])
def test_counts_beyond_a_group_are_refused(counts):
    a, b = operand(2, 6, 130), operand(2, 5, 130)
    with pytest.raises(ValueError, match="counts must be from 0 to the 6 rows of a group"):
        masked_grouped_matmul_nt(*a, *b, torch.tensor(counts, dtype=torch.int32), torch.float32)


def test_masked_operands_must_agree_in_groups():
    a, b = operand(3, 6, 130), operand(2, 5, 130)
    with pytest.raises(ValueError, match=r"same number of groups: a is \(3, 6, 130\), b is \(2, 5, 130\)"):
        masked_grouped_matmul_nt(*a, *b, torch.tensor([6, 0], dtype=torch.int32), torch.float32)


def test_counts_are_int32():
    a, b = operand(2, 6, 130), operand(2, 5, 130)
    with pytest.raises(TypeError, match=r"counts must be int32, not torch.float32"):
        masked_grouped_matmul_nt(*a, *b, torch.tensor([6.0, 0.0]), torch.float32)


def test_the_operands_of_wgrad_must_agree_in_t():
    dy, x = operand(9, 5, block=COLUMN_TILE), operand(8, 7, block=COLUMN_TILE)
    with pytest.raises(ValueError, match=r"dy and x must agree in T: dy is \(9, 5\), x is \(8, 7\)"):
        grouped_wgrad(*dy, *x, ends([8]), torch.float32)
