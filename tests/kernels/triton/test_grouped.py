"""Grouped GEMMs agree with the reference for any sizes of the groups."""

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.gemm.config import Schedule
from octile.kernels.cuda.gemm.request import GemmRequest, Operand
from octile.kernels.triton import grouped
from octile.ops import grouped as reference
from octile.ops.quantize import quantize

T, N, K = 200, 40, 160
TILE, COLUMN_TILE, BLOCK = (1, 128), (128, 1), (128, 128)
OFFSETS = {
    "ordinary": [60, 130, 150, 200],
    "some empty": [0, 90, 90, 200],
    "all empty": [0, 0, 0, 0],
    "one has all": [200, 200, 200, 200],
    "rows past the last": [3, 4, 5, 7],
    "ends at steps": [64, 128, 128, 192],
}


def _quantized(shape: tuple[int, ...], block: tuple[int, int], fmt: str = "e4m3") -> tuple[Tensor, Tensor]:
    torch.manual_seed(sum(shape))
    spread = torch.exp2(torch.randn(*shape[:-1], 1) * 3)
    return quantize(torch.randn(shape) * spread, *block, fmt, False)


def _offs(ends: list[int]) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def _launch(a, a_block, b, b_block, offs, out_dtype, out=None) -> Tensor:
    operands = Operand(*a, a_block), Operand(*b, b_block)
    request = GemmRequest(Schedule.GROUPED, *operands, out_dtype, out, offs, zero_rest=out is None)
    return grouped.launch(request)


def _launch_masked(a, a_block, b, b_block, counts, out_dtype, out=None) -> Tensor:
    operands = Operand(*a, a_block), Operand(*b, b_block)
    return grouped.launch_masked(GemmRequest(Schedule.MASKED, *operands, out_dtype, out, counts))


def _launch_wgrad(dy, dy_block, x, x_block, offs, out_dtype, out=None, accumulate=False) -> Tensor:
    operands = Operand(*dy, dy_block), Operand(*x, x_block)
    return grouped.launch_wgrad(GemmRequest(Schedule.ALONG_K, *operands, out_dtype, out, offs, accumulate))


def _assert_close(out: Tensor, expected: Tensor) -> None:
    size = expected.norm(dim=-1, keepdim=True).clamp(min=1e-20)
    torch.testing.assert_close(out / size, expected / size, rtol=0, atol=1e-5)


@pytest.mark.one_case
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("ends", OFFSETS.values(), ids=OFFSETS.keys())
def test_grouped(ends: list[int]):
    a, b, offs = _quantized((T, K), TILE), _quantized((4, N, K), BLOCK), _offs(ends)
    out = _launch(a, TILE, b, BLOCK, offs, torch.float32)
    _assert_close(out, reference.grouped_matmul_nt(*a, TILE, *b, BLOCK, offs, torch.float32))
    assert not out[ends[-1] :].any(), "rows past the last group must be zero"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("groups", [1, 3, 9])
def test_number_of_groups(groups: int):
    a, b = _quantized((30, K), TILE), _quantized((groups, N, K), BLOCK)
    offs = _offs([30 * (g + 1) // groups for g in range(groups)])
    out = _launch(a, TILE, b, BLOCK, offs, torch.bfloat16)
    expected = reference.grouped_matmul_nt(*a, TILE, *b, BLOCK, offs, torch.bfloat16)
    torch.testing.assert_close(out, expected, rtol=2**-7, atol=1e-3)


@pytest.mark.usefixtures("gpu")
def test_no_groups_and_no_rows():
    a, b = _quantized((30, K), TILE), _quantized((0, N, K), BLOCK)
    assert not _launch(a, TILE, b, BLOCK, _offs([]), torch.float32).any()
    a, b = _quantized((0, K), TILE), _quantized((2, N, K), BLOCK)
    assert _launch(a, TILE, b, BLOCK, _offs([0, 0]), torch.float32).shape == (0, N)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("counts", [[0, 3, 20], [20, 20, 20], [0, 0, 0]])
def test_masked(counts: list[int]):
    a, b = _quantized((3, 20, K), TILE), _quantized((3, N, K), BLOCK)
    out = _launch_masked(a, TILE, b, BLOCK, _offs(counts), torch.float32)
    expected = reference.masked_grouped_matmul_nt(*a, TILE, *b, BLOCK, _offs(counts), torch.float32)
    for g, count in enumerate(counts):
        _assert_close(out[g, :count], expected[g, :count])


@pytest.mark.one_case
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("ends", OFFSETS.values(), ids=OFFSETS.keys())
def test_wgrad(ends: list[int]):
    dy, x, offs = _quantized((T, N), COLUMN_TILE), _quantized((T, 50), COLUMN_TILE), _offs(ends)
    out = _launch_wgrad(dy, COLUMN_TILE, x, COLUMN_TILE, offs, torch.float32)
    _assert_close(out, reference.grouped_wgrad(*dy, COLUMN_TILE, *x, COLUMN_TILE, offs, torch.float32))
    empty = torch.tensor([start == end for start, end in zip([0, *ends], ends, strict=False)])
    assert not out[empty].any(), "groups without rows must be zero"


@pytest.mark.one_case
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("block", [(T, None), BLOCK, (32, 1)], ids=["one scale a tensor", "blocks", "MX"])
@pytest.mark.parametrize("fmt", ["e4m3", "int8"])
def test_wgrad_with_other_blocks(block: tuple[int, int | None], fmt: str):
    dy_block, x_block = (block[0], block[1] or N), (block[0], block[1] or 50)
    dy, x, offs = _quantized((T, N), dy_block, fmt), _quantized((T, 50), x_block, fmt), _offs(OFFSETS["ordinary"])
    out = _launch_wgrad(dy, dy_block, x, x_block, offs, torch.float32)
    _assert_close(out, reference.grouped_wgrad(*dy, dy_block, *x, x_block, offs, torch.float32))


@pytest.mark.usefixtures("gpu")
def test_wgrad_of_an_empty_group_in_a_block_of_nan_is_zero():
    x = torch.randn(T, N)
    x[30] = float("nan")
    q = quantize(x, *COLUMN_TILE, "e4m3", False)
    out = _launch_wgrad(q, COLUMN_TILE, q, COLUMN_TILE, _offs([20, 20, 128, 200]), torch.float32)
    assert out[0].isnan().all(), "the block's scale is NaN for every token in it"
    assert not out[1].any()
    assert out[2].isnan().all()
    assert out[3].isfinite().all()


@pytest.mark.usefixtures("gpu")
def test_wgrad_of_no_tokens():
    dy, x = _quantized((0, N), COLUMN_TILE), _quantized((0, 50), COLUMN_TILE)
    out = _launch_wgrad(dy, COLUMN_TILE, x, COLUMN_TILE, _offs([0, 0]), torch.float32)
    assert torch.equal(out, torch.zeros(2, N, 50))


@pytest.mark.one_case
@pytest.mark.each_pair
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("ends", OFFSETS.values(), ids=OFFSETS.keys())
def test_grouped_into_a_given_tensor_leaves_the_rows_past_all_groups(ends: list[int]):
    a, b, offs = _quantized((T, K), TILE), _quantized((4, N, K), BLOCK), _offs(ends)
    out = torch.full((T, N), 7.0)
    _launch(a, TILE, b, BLOCK, offs, torch.float32, out)
    assert torch.equal(out[: ends[-1]], _launch(a, TILE, b, BLOCK, offs, torch.float32)[: ends[-1]])
    assert (out[ends[-1] :] == 7).all()


@pytest.mark.usefixtures("gpu")
def test_masked_into_a_given_tensor_leaves_the_rows_past_the_counts():
    a, b, counts = _quantized((3, 20, K), TILE), _quantized((3, N, K), BLOCK), [0, 3, 20]
    out = torch.full((3, 20, N), 7.0)
    _launch_masked(a, TILE, b, BLOCK, _offs(counts), torch.float32, out)
    expected = reference.masked_grouped_matmul_nt(*a, TILE, *b, BLOCK, _offs(counts), torch.float32)
    for g, count in enumerate(counts):
        _assert_close(out[g, :count], expected[g, :count])
        assert (out[g, count:] == 7).all()


@pytest.mark.one_case
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_wgrad_added_to_a_given_tensor(dtype: torch.dtype):
    dy, x, offs = _quantized((T, N), COLUMN_TILE), _quantized((T, 50), COLUMN_TILE), _offs(OFFSETS["some empty"])
    out = torch.randn(4, N, 50).to(dtype)
    expected = out.float() + _launch_wgrad(dy, COLUMN_TILE, x, COLUMN_TILE, offs, torch.float32)
    _launch_wgrad(dy, COLUMN_TILE, x, COLUMN_TILE, offs, dtype, out, accumulate=True)
    assert torch.equal(out, expected.to(dtype))
