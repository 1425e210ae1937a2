"""m_grouped_*: every group of rows is multiplied by its own b, in each of the three layouts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import octile.compat.deep_gemm as deep_gemm
from octile.compat.deep_gemm import grouped
from tests.compat.deep_gemm.conftest import assert_gemm, blocks_128, random, tiles, values

N, K, ALIGNMENT = 40, 200, 16
counts = st.lists(st.integers(0, 40), min_size=1, max_size=5)


@pytest.fixture(autouse=True)
def small_tiles(alignment_of_128):
    deep_gemm.set_mk_alignment_for_contiguous_layout(ALIGNMENT)


def aligned(rows: int) -> int:
    return -(-rows // ALIGNMENT) * ALIGNMENT


def spans(sizes: list[int]) -> list[slice]:
    """The rows of each group, where each begins at a multiple of the alignment."""
    found, start = [], 0
    for size in sizes:
        found.append(slice(start, start + size))
        start = aligned(start + size)
    return found


def indices(sizes: list[int], m: int) -> torch.Tensor:
    layout = torch.full((m,), -1, dtype=torch.int32)
    for g, rows in enumerate(spans(sizes)):
        layout[rows] = g
    return layout


def ends(sizes: list[int]) -> torch.Tensor:
    return torch.tensor([rows.stop for rows in spans(sizes)], dtype=torch.int32)


def rows_of(sizes: list[int]) -> int:
    return aligned(spans(sizes)[-1].stop)


def assert_groups(d, a, b, sizes):
    for g, rows in enumerate(spans(sizes)):
        assert_gemm(d[rows], values(a, 1, 128)[rows], values(b, 128, 128)[g])


# Contiguous


@given(sizes=counts, spare=st.sampled_from([0, 3, 50]))
def test_rows_are_multiplied_by_the_group_of_their_index(sizes, spare):
    m = rows_of(sizes) + spare
    a, b, d = tiles(m, K), blocks_128(len(sizes), N, K, seed=1), torch.full((m, N), float("nan"))
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, indices(sizes, m))
    assert_groups(d, a, b, sizes)


@given(sizes=counts, spare=st.sampled_from([0, 3, 50]))
def test_rows_are_multiplied_by_the_group_that_ends_after_them(sizes, spare):
    m = rows_of(sizes) + spare
    a, b, d = tiles(m, K), blocks_128(len(sizes), N, K, seed=1), torch.full((m, N), float("nan"))
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, ends(sizes), use_psum_layout=True)
    assert_groups(d, a, b, sizes)


@given(sizes=counts)
def test_groups_need_no_alignment_where_each_row_has_an_index(sizes):
    m = sum(sizes)
    a, b, d = tiles(m, K), blocks_128(len(sizes), N, K, seed=1), torch.full((m, N), float("nan"))
    layout = torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(torch.tensor(sizes))
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout)
    for g, (a_g, d_g) in enumerate(zip(values(a, 1, 128).split(sizes), d.split(sizes), strict=True)):
        assert_gemm(d_g, a_g, values(b, 128, 128)[g])


@given(sizes=counts.filter(any))
def test_padding_of_zeros_gives_zeros_up_to_the_end_of_the_last_tile(sizes):
    m = rows_of(sizes)
    a, b, layout = tiles(m, K), blocks_128(len(sizes), N, K, seed=1), indices(sizes, m)
    a[0].view(torch.uint8)[layout < 0] = 0
    d = torch.full((m, N), float("nan"))
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout)
    end = aligned(int((layout >= 0).nonzero().max()) + 1)
    assert not d[:end][layout[:end] < 0].any()


@given(sizes=counts)
def test_rows_between_groups_are_zeros_where_that_is_asked_for_whatever_a_holds(sizes):
    m = rows_of(sizes)
    a, b, d = tiles(m, K), blocks_128(len(sizes), N, K, seed=1), torch.full((m, N), float("nan"))
    a[0].view(torch.uint8)[indices(sizes, m) < 0] = 0x7F  # NaN
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, ends(sizes), use_psum_layout=True, ensure_zero_padding=True)
    assert not d[indices(sizes, m) < 0].any()


@pytest.mark.parametrize("psum", [False, True])
def test_rows_past_the_last_tile_are_not_written(psum):
    a, b, d = tiles(100, K), blocks_128(2, N, K), torch.full((100, N), 7.0)
    layout = ends([10, 5]) if psum else indices([10, 5], 100)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, d, layout, use_psum_layout=psum)
    assert (d[2 * ALIGNMENT :] == 7).all()


def test_the_operator_gets_the_alignment(monkeypatch):
    found = []
    monkeypatch.setattr(grouped, "grouped_matmul_nt_out", lambda *arguments: found.append(arguments[-1]))
    d, layout = torch.empty(32, N, dtype=torch.bfloat16), indices([32], 32)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(tiles(32, K), blocks_128(1, N, K), d, layout)
    assert found == [ALIGNMENT]


def test_b_may_be_given_transposed():
    sizes = [10, 20]
    m = rows_of(sizes)
    a, b = tiles(m, K), blocks_128(2, N, K, seed=1)
    expected, d = torch.zeros(m, N), torch.zeros(m, N)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(a, b, expected, indices(sizes, m))
    given_b = (b[0].mT.contiguous(), b[1].mT.contiguous())
    deep_gemm.m_grouped_fp8_gemm_nn_contiguous(a, given_b, d, indices(sizes, m))
    assert torch.equal(d, expected)


@pytest.mark.parametrize(
    ("layout", "error", "message"),
    [
        ([1, 0], ValueError, "grouped_layout must ascend, not have 0 in row 1 after 1"),
        (
            [0, 2],
            ValueError,
            r"grouped_layout must hold −1 \(padding\) or one of the 2 groups of b, from 0, not 2 in row 1",
        ),
        ([0], ValueError, r"grouped_layout must be \[2\], one for each row, not \(1,\)"),
        ([0.0, 1.0], TypeError, "grouped_layout must be int32, not torch.float32"),
    ],
    ids=["falling", "no such group", "too short", "dtype"],
)
def test_a_layout_that_does_not_fit_is_refused(layout, error, message):
    dtype = torch.float32 if isinstance(layout[0], float) else torch.int32
    with pytest.raises(error, match=message):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            tiles(2, K), blocks_128(2, N, K), torch.zeros(2, N), torch.tensor(layout, dtype=dtype)
        )


def test_d_is_contiguous():
    with pytest.raises(ValueError, match="d must be contiguous"):
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            tiles(4, K), blocks_128(2, N, K), torch.zeros(N, 4).T, torch.zeros(4, dtype=torch.int32)
        )


# Masked


@given(used=st.lists(st.integers(0, 24), min_size=1, max_size=4), dtype=st.sampled_from(["bf16", "fp32"]))
def test_the_first_rows_of_each_group_are_multiplied_and_others_not_written(used, dtype):
    groups = len(used)
    a, b = tiles(groups, 24, K), blocks_128(groups, N, K, seed=1)
    d = torch.full((groups, 24, N), 7.0, dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])
    deep_gemm.m_grouped_fp8_gemm_nt_masked(a, b, d, torch.tensor(used, dtype=torch.int32), expected_m=9)
    for g, rows in enumerate(used):
        assert_gemm(d[g, :rows], values(a, 1, 128)[g, :rows], values(b, 128, 128)[g])
        assert (d[g, rows:] == 7).all()


def test_masked_operands_have_the_same_groups():
    with pytest.raises(ValueError, match="a and b must have the same number of groups, not 2 and 3"):
        deep_gemm.m_grouped_fp8_gemm_nt_masked(
            tiles(2, 4, K), blocks_128(3, N, K), torch.zeros(2, 4, N), torch.zeros(2, dtype=torch.int32), 4
        )


def test_masked_m_has_one_count_a_group():
    with pytest.raises(ValueError, match=r"masked_m must be \[2\], one for each group, not \(3,\)"):
        deep_gemm.m_grouped_fp8_gemm_nt_masked(
            tiles(2, 4, K), blocks_128(2, N, K), torch.zeros(2, 4, N), torch.zeros(3, dtype=torch.int32), 4
        )


# BF16


@pytest.mark.parametrize("psum", [False, True])
def test_bf16_rows_are_multiplied_by_their_group(psum):
    sizes = [10, 0, 33, 7]
    m = rows_of(sizes)
    a, b = random(m, K).bfloat16(), random(4, N, K, seed=1).bfloat16()
    d = torch.full((m, N), float("nan"), dtype=torch.bfloat16)
    layout = ends(sizes) if psum else indices(sizes, m)
    deep_gemm.m_grouped_bf16_gemm_nt_contiguous(a, b, d, layout, use_psum_layout=psum)
    for g, rows in enumerate(spans(sizes)):
        assert_gemm(d[rows], a[rows].double(), b[g].double())
    again = torch.zeros_like(d)
    deep_gemm.m_grouped_bf16_gemm_nn_contiguous(a, b.mT.contiguous(), again, layout, use_psum_layout=psum)
    assert torch.equal(again, d)


def test_bf16_masked_rows_are_multiplied():
    a, b = random(2, 9, K).bfloat16(), random(2, N, K, seed=1).bfloat16()
    d = torch.full((2, 9, N), float("nan"), dtype=torch.bfloat16)
    deep_gemm.m_grouped_bf16_gemm_nt_masked(a, b, d, torch.tensor([9, 4], dtype=torch.int32), 9)
    for g, rows in enumerate([9, 4]):
        assert_gemm(d[g, :rows], a[g, :rows].double(), b[g].double())
