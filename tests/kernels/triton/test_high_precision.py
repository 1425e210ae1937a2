"""Grouped GEMMs of 16-bit operands with FP32 results agree with the reference for any sizes of the groups."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octile.kernels.triton import high_precision as kernel
from octile.ops.high_precision import high_precision_grouped_nt, high_precision_grouped_tn

pytestmark = pytest.mark.usefixtures("gpu")
T, N, K = 200, 40, 72
OFFSETS = {
    "ordinary": [60, 130, 150, 200],
    "some empty": [0, 90, 90, 200],
    "all empty": [0, 0, 0, 0],
    "one has all": [200, 200, 200, 200],
    "rows past the last": [3, 4, 5, 7],
    "ends at k-blocks": [64, 128, 128, 192],
}
every_offset = pytest.mark.parametrize("ends", OFFSETS.values(), ids=OFFSETS.keys())
every_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def _operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in ((T, K), (4, N, K), (T, N)))


def _offs(ends: list[int]) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def _assert_close(out: Tensor, expected: Tensor) -> None:
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.one_case
@pytest.mark.each_pair
@every_dtype
@every_offset
def test_nt(ends: list[int], dtype: torch.dtype):
    x, w, _ = _operands(dtype)
    out = kernel.launch_nt(x, w, _offs(ends))
    _assert_close(out, high_precision_grouped_nt(x, w, _offs(ends), torch.float32))
    assert not out[ends[-1] :].any(), "rows past the last group must be zero"


@pytest.mark.one_case
@pytest.mark.each_pair
@every_dtype
@every_offset
@pytest.mark.parametrize("rows", [T, 7, 1])
def test_nt_in_the_dtype_of_the_operands(ends: list[int], dtype: torch.dtype, rows: int):
    x, w, _ = _operands(dtype)
    offs = _offs(ends).clamp(max=rows)
    out = kernel.launch_nt(x[:rows], w, offs, 0, dtype)
    expected = high_precision_grouped_nt(x[:rows], w, offs, torch.float32)
    torch.testing.assert_close(out, expected.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)
    assert out.dtype == dtype


def test_with_expected_rows_a_row_has_the_same_bits_in_a_group_of_any_size():
    a, b, _ = _operands(torch.bfloat16)
    together = kernel.launch_nt(a, b, _offs([0, 150, 150, 200]), 64)
    alone = kernel.launch_nt(a[40:41], b, _offs([0, 1, 1, 1]), 64)
    assert torch.equal(alone, together[40:41])


@pytest.mark.one_case
@pytest.mark.each_pair
@every_dtype
@every_offset
def test_tn(ends: list[int], dtype: torch.dtype):
    x, _, dy = _operands(dtype)
    out = kernel.launch_tn(dy, x, _offs(ends))
    _assert_close(out, high_precision_grouped_tn(dy, x, _offs(ends), torch.float32))


def test_strides_do_not_matter():
    (x, w, dy), offs = _operands(torch.bfloat16), _offs([60, 130, 150, 200])
    _assert_close(kernel.launch_nt(dy, w.mT, offs), high_precision_grouped_nt(dy, w.mT, offs, torch.float32))
    columns = x.mT.contiguous().mT
    assert torch.equal(kernel.launch_nt(columns, w, offs), kernel.launch_nt(x, w, offs))
    assert torch.equal(kernel.launch_tn(dy[:, ::2], columns, offs), kernel.launch_tn(dy[:, ::2].contiguous(), x, offs))


def test_nan_stays_within_its_group():
    (x, _, dy), offs = _operands(torch.bfloat16), _offs([60, 130, 150, 200])
    x[130] = float("nan")  # the first row of group 2
    finite = kernel.launch_tn(dy, x, offs).isfinite().flatten(1).all(1)
    assert finite.tolist() == [True, True, False, True]


@pytest.mark.parametrize(("columns", "expected"), [(384, 128), (640, 128), (768, 256), (7168, 256), (2176, 256)])
def test_wide_tiles_are_used_where_few_of_their_columns_lie_outside(gpu, columns: int, expected: int):
    tile = kernel._choose_tile(1536, columns, 32, gpu)
    assert tile["TILE_N"] == (expected if gpu.fp8 else 128)  # sm_80 has no shared memory for wider ones


@pytest.mark.parametrize(
    ("rows", "groups", "columns", "expected"), [(1, 6, 2816, 128), (1, 6, 2048, 64), (3, 64, 2816, 128)]
)
def test_few_rows_have_narrow_tiles_and_deep_pipelines(gpu, rows: int, groups: int, columns: int, expected: int):
    tile = kernel._choose_tile(rows, columns, groups, replace(gpu, num_sms=132))
    assert (tile["TILE_M"], tile["TILE_N"], tile["num_stages"]) == (16, expected, 6)


def test_no_groups_and_no_rows():
    x, w, dy = _operands(torch.bfloat16)
    assert not kernel.launch_nt(x, w[:0], _offs([])).any()
    assert kernel.launch_nt(x[:0], w, _offs([0, 0, 0, 0])).shape == (0, N)
    assert kernel.launch_tn(dy, x, _offs([])).shape == (0, N, K)
    assert not kernel.launch_tn(dy[:0], x[:0], _offs([0, 0])).any()


@every_dtype
@every_offset
def test_rows_past_the_last_group_are_set_to_zero_and_no_other(ends: list[int], dtype: torch.dtype):
    y = torch.full((T, N), float("nan")).to(dtype)
    kernel.zero_rest(y, _offs(ends))
    assert y[: ends[-1]].isnan().all()
    assert not y[ends[-1] :].any()


def test_all_rows_are_set_to_zero_without_groups():
    y = torch.full((T, N), float("nan"))
    kernel.zero_rest(y, _offs([]))
    assert not y.any()
    kernel.zero_rest(y[:0], _offs([0]))


def test_offsets_past_the_rows_do_not_write_outside_of_them():
    memory = torch.ones(3 * T, N)
    kernel.zero_rest(memory[T : 2 * T], _offs([-5]))
    kernel.zero_rest(memory[T : 2 * T], _offs([T + 7]))
    assert torch.equal(memory.any(1), torch.cat((torch.ones(T), torch.zeros(T), torch.ones(T))).bool())
