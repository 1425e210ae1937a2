"""The dense GEMM agrees with the reference: the same exact products, summed in another order."""

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.gemm import request
from octile.kernels.cuda.gemm.config import Schedule
from octile.kernels.cuda.gemm.request import GemmRequest
from octile.kernels.triton import matmul
from octile.kernels.triton.device import DeviceProperties
from octile.kernels.triton.k_loop import choose_tile, operand_arguments
from octile.ops import matmul as reference
from octile.ops.quantize import quantize

Operand = tuple[Tensor, Tensor, tuple[int, int]]


def _operand(rows: int, cols: int, block: tuple[int, int], fmt: str = "e4m3") -> Operand:
    spread = torch.exp2(torch.randn(rows, 1) * 3)  # so that a scale taken from another row is seen
    return *quantize(torch.randn(rows, cols) * spread, *block, fmt, False), block


def _launch(out: Tensor, a: Operand, b: Operand, accumulate: bool = False) -> None:
    operands = request.Operand(*a), request.Operand(*b)
    assert matmul.launch(GemmRequest(Schedule.DENSE, *operands, out.dtype, out, None, accumulate)) is out


def _assert_agrees(a: Operand, b: Operand) -> None:
    out = torch.full((a[0].shape[0], b[0].shape[0]), float("nan"))
    _launch(out, a, b)
    _assert_close(out, reference.matmul_nt(*a, *b, torch.float32))


def _assert_close(out: Tensor, expected: Tensor) -> None:
    """FP32 sums of at most 300 terms differ by a few units in the last place of the largest partial sums of the row."""
    size = expected.float().norm(dim=-1, keepdim=True)
    rounding = torch.finfo(out.dtype).eps
    torch.testing.assert_close(out / size, expected / size, rtol=rounding, atol=1e-5)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("formats", [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("int8", "int8"), ("int8", "e5m2")])
def test_formats(formats: tuple[str, str]):
    torch.manual_seed(0)
    _assert_agrees(_operand(5, 200, (1, 128), formats[0]), _operand(40, 200, (128, 128), formats[1]))


@pytest.mark.one_case
@pytest.mark.each_pair
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("b_block", [(1, 128), (128, 128), (1, 300), (150, 300), (64, 64), (1, 32)])
@pytest.mark.parametrize("a_block", [(1, 128), (8, 128), (20, 300), (1, 32)])
def test_blocks_and_ragged_shapes(a_block: tuple[int, int], b_block: tuple[int, int]):
    torch.manual_seed(1)
    _assert_agrees(_operand(20, 300, a_block), _operand(150, 300, b_block))


def test_blocks_of_32_are_emulated_on_fp16_tensor_cores(gpu: DeviceProperties):
    operands = request.Operand(*_operand(8, 256, (1, 32))), request.Operand(*_operand(8, 256, (1, 32)))
    tile = choose_tile(8, 8, 256, 1, (1, 32), (1, 32), gpu)
    arguments = operand_arguments(*operands, tile["BLOCK_K"], gpu)
    assert (arguments["a"].dtype, arguments["b"].dtype) == (torch.uint8, torch.uint8)


def test_tiles_of_128_are_multiplied_by_fp8_tensor_cores_where_there_are_any(gpu: DeviceProperties):
    operands = request.Operand(*_operand(8, 256, (1, 128))), request.Operand(*_operand(8, 256, (1, 128)))
    arguments = operand_arguments(*operands, 128, gpu)
    assert arguments["a"].dtype == (torch.float8_e4m3fn if gpu.fp8 else torch.uint8)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (3, 130, 128), (17, 33, 257), (2, 576, 64)])
def test_shapes(m: int, n: int, k: int):
    torch.manual_seed(2)
    _assert_agrees(_operand(m, k, (1, 128)), _operand(n, k, (128, 128)))


@pytest.mark.usefixtures("gpu")
def test_transposed_views():
    torch.manual_seed(3)
    a, b = _operand(300, 20, (128, 1)), _operand(300, 50, (128, 1))
    _assert_agrees((a[0].mT, a[1].mT, (1, 128)), (b[0].mT, b[1].mT, (1, 128)))


@pytest.mark.usefixtures("gpu")
def test_rows_of_a_larger_tensor():
    torch.manual_seed(4)
    data, scale, block = _operand(20, 256, (1, 128))
    _assert_agrees((data[2:9], scale[2:9], block), _operand(32, 256, (128, 128)))
    _assert_agrees((data[:, 1:129], scale[:, 1:], block), _operand(32, 128, (128, 128)))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accumulates_into_a_strided_output(dtype: torch.dtype):
    torch.manual_seed(5)
    a, b = _operand(20, 256, (1, 128)), _operand(30, 256, (1, 128))
    before = torch.randn(20, 30).to(dtype)
    out = torch.randn(30, 40).to(dtype).mT[:20]
    out.copy_(before)
    _launch(out, a, b, accumulate=True)
    expected = (before.float() + reference.matmul_nt(*a, *b, torch.float32)).to(dtype)
    _assert_close(out, expected)


@pytest.mark.usefixtures("gpu")
def test_no_terms_to_sum():
    out = torch.ones(3, 5)
    nothing = torch.empty(3, 0, dtype=torch.float8_e4m3fn), torch.empty(3, 0), (1, 128)
    b = nothing[0].new_empty(5, 0), torch.empty(1, 0), (128, 128)
    _launch(out, nothing, b, accumulate=True)
    assert torch.equal(out, torch.ones(3, 5))
    _launch(out, nothing, b)
    assert torch.equal(out, torch.zeros(3, 5))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("m", "n"), [(0, 8), (8, 0)])
def test_no_results(m: int, n: int):
    _launch(torch.empty(m, n), _operand(m, 128, (1, 128)), _operand(n, 128, (128, 128)))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "int8"])
def test_a_nan_reaches_its_row_and_no_other(fmt: str):
    x = torch.randn(4, 256)
    x[2, 130] = float("nan")
    out = torch.empty(4, 16)
    _launch(out, (*quantize(x, 1, 128, fmt, False), (1, 128)), _operand(16, 256, (128, 128), fmt))
    assert out.isnan().all(dim=1).tolist() == [False, False, True, False]
    assert out.isnan().any(dim=1).tolist() == [False, False, True, False]


@pytest.mark.usefixtures("gpu")
def test_blocks_too_short_for_a_k_step_are_refused():
    a, b = _operand(4, 256, (128, 1)), _operand(4, 256, (1, 128))
    with pytest.raises(ValueError, match=r"a has \(128, 1\) and b \(1, 128\)"):
        _launch(torch.empty(4, 4), a, b)
