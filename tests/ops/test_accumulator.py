"""Tests of accumulator.summed_by: all four GEMM operators use the given GEMM, with operands of equal values."""

import pytest
import torch

import octile
from octile.ops import accumulator, quantize


def decoded(a, a_scale, a_block, b, b_scale, b_block):
    """A GEMM whose result changes if a group is split incorrectly."""
    seen.append((a, b))
    x, w = (
        quantize.dequantize(data.contiguous(), scale.contiguous(), *block, torch.float32)
        for data, scale, block in ((a, a_scale, a_block), (b, b_scale, b_block))
    )
    return x @ w.mT


seen: list = []
OFFS = torch.tensor([37, 37, 165, 200], dtype=torch.int32)


@pytest.fixture(autouse=True)
def forget():
    seen.clear()


def operand(*shape, block, fmt=octile.E4M3):
    return octile.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))), block, fmt)


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: octile.matmul_nt(operand(20, 150, block=(1, 128)), operand(30, 150, block=(128, 128)),
                                              torch.float32), id="matmul"),
        pytest.param(lambda: octile.matmul_nt(operand(20, 150, block=(1, 128)), operand(30, 150, block=(128, 128)),
                                              out=torch.ones(20, 30), accumulate=True), id="matmul accumulated"),
        pytest.param(lambda: octile.matmul_nt(operand(150, 20, block=(128, 1)).mT, operand(150, 30, block=(128, 1)).mT,
                                              torch.float32), id="matmul transposed"),
        pytest.param(lambda: octile.grouped_matmul_nt(operand(210, 150, block=(1, 128)),
                                                      operand(4, 30, 150, block=(128, 128)), OFFS, torch.float32),
                     id="grouped"),
        pytest.param(lambda: octile.grouped_matmul_nt(operand(210, 150, block=(128, 128)),
                                                      operand(4, 30, 150, block=(128, 128)), OFFS, torch.float32),
                     id="grouped, blocks of rows"),
        pytest.param(lambda: octile.masked_grouped_matmul_nt(operand(4, 9, 150, block=(1, 128)),
                                                             operand(4, 30, 150, block=(128, 128)),
                                                             torch.tensor([0, 9, 3, 5], dtype=torch.int32),
                                                             torch.float32), id="masked"),
        pytest.param(lambda: octile.grouped_wgrad(operand(210, 30, block=(128, 1)), operand(210, 20, block=(128, 1)),
                                                  OFFS), id="wgrad"),
        pytest.param(lambda: octile.grouped_wgrad(operand(210, 30, block=(None, None)),
                                                  operand(210, 20, block=(None, None)), OFFS),
                     id="wgrad, one scale a tensor"),
    ],
)  # fmt: skip
def test_every_operator_uses_the_accumulator(call):
    expected = call()
    assert not seen
    with accumulator.summed_by(decoded):
        actual = call()
    assert seen
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-4)


def test_a_weight_gradient_is_promoted_where_the_tiles_of_all_tokens_end():
    with accumulator.summed_by(decoded):
        octile.grouped_wgrad(operand(210, 30, block=(128, 1)), operand(210, 20, block=(128, 1)), OFFS)
    # groups 0 … 37, 37 … 165 and 165 … 200: the last begins with the tile at 128, its first 37 tokens zeros
    assert [a.shape[1] for a, _ in seen] == [37, 165, 72]
    assert seen[2][0][:, :37].float().abs().max() == 0


def test_int8_and_gemms_outside_of_the_context_do_not_change():
    a = operand(4, 64, block=(1, 64), fmt=octile.INT8)
    with accumulator.summed_by(decoded):
        octile.matmul_nt(a, a)
    octile.matmul_nt(operand(4, 64, block=(1, 64)), operand(4, 64, block=(1, 64)))
    assert not seen
