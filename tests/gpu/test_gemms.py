"""GEMMs on a GPU, compared with exact ones of the same 8-bit operands.

Tensor cores sum a k-block of 128, with 13 fraction bits relative to the largest term; the k-blocks are summed in FP32.
Data of one sign shows the accumulation error best, since no terms cancel. At K = 4096 the largest error is 0.08% with
promotion every 128, and 7.9% without promotion.
"""

import pytest
import torch
from torch import Tensor

from octile.kernels.memory_layout import new_scale
from octile.ops.grouped import grouped_matmul_nt, grouped_wgrad, masked_grouped_matmul_nt
from octile.ops.matmul import matmul_nt, matmul_nt_out
from octile.ops.quantize import dequantize, quantize
from octile.ops.row_invariant import row_invariant_scaled_nt_out

Operand = tuple[Tensor, Tensor, tuple[int, int]]

# Relative error of a result of one sign: on Hopper each of the 4 instructions of a k-block cuts 32 products and the
# accumulator below 2⁻¹³ of the largest, which is no larger than the sum. The measured error is some 0.2%.
WORST = 4 * 33 * 2.0**-13
TILE, COLUMN_TILE, BLOCK = (1, 128), (128, 1), (128, 128)
FORMATS = [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("int8", "int8"), ("int8", "e4m3")]


def _operand(shape: tuple[int, ...], block: tuple[int, int], fmt: str = "e4m3", seed: int = 0) -> Operand:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator).abs() * torch.exp2(torch.randn(*shape[:-1], 1, generator=generator))
    return *(t.cuda() for t in quantize(x, *block, fmt, False)), block


def _exact(operand: Operand) -> Tensor:
    """The operand in FP64, with the scale applied there: a scale applied in FP32 would round."""
    data, scale, block = operand
    ones = dequantize(torch.ones_like(data, dtype=torch.float32).to(data.dtype), scale, *block, torch.float32)
    return data.float().double() * ones.double()


def _mT(operand: Operand) -> Operand:
    data, scale, (rows, cols) = operand
    return data.mT, scale.mT, (cols, rows)


def _assert_close(out: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(out.double(), exact, rtol=WORST + torch.finfo(out.dtype).eps / 2, atol=0)


@pytest.mark.parametrize("formats", FORMATS, ids=" · ".join)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 128, 128), (7, 576, 7168), (129, 2112, 1000), (300, 257, 10944), (512, 512, 4096), (3, 5, 77)]
)
def test_matmul(m: int, n: int, k: int, formats: tuple[str, str]):
    a, b = _operand((m, k), TILE, formats[0]), _operand((n, k), BLOCK, formats[1], seed=1)
    _assert_close(matmul_nt(*a, *b, torch.float32), _exact(a) @ _exact(b).mT)


@pytest.mark.parametrize("a_block", [TILE, BLOCK, (1, 700), (200, 700), (1, 64)])
@pytest.mark.parametrize("b_block", [TILE, BLOCK, (1, 700), (300, 700), (32, 32)])
def test_matmul_with_other_blocks(a_block: tuple[int, int], b_block: tuple[int, int]):
    a, b = _operand((200, 700), a_block), _operand((300, 700), b_block, seed=1)
    _assert_close(matmul_nt(*a, *b, torch.bfloat16), _exact(a) @ _exact(b).mT)


def test_blocks_of_32_are_summed_with_more_bits_than_fp8_tensor_cores_keep():
    """MXFP8 is emulated: the FP16 tensor cores cut 32 products below 2⁻²⁵ of the largest, and 128 blocks are added."""
    a, b = _operand((200, 4096), (1, 32)), _operand((300, 4096), (1, 32), seed=1)
    exact = _exact(a) @ _exact(b).mT
    torch.testing.assert_close(matmul_nt(*a, *b, torch.float32).double(), exact, rtol=256 * 2.0**-24, atol=0)


@pytest.mark.parametrize("t", [4096, 1000, 77])
def test_wgrad_of_transposed_views(t: int):
    dy, x = _mT(_operand((t, 300), COLUMN_TILE)), _mT(_operand((t, 500), COLUMN_TILE, seed=1))
    before = torch.rand(300, 500, device="cuda")
    out = before.clone()
    matmul_nt_out(out, *dy, *x, True)
    _assert_close(out, before.double() + _exact(dy) @ _exact(x).mT)


def _offs(*ends: int) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32, device="cuda")


def _rows(offs: Tensor) -> list[slice]:
    ends = offs.tolist()
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


OFFSETS = [(1000, 1000, 2000, 3000), (1, 130, 131, 2900), (0, 0, 0, 0), (0, 0, 0, 3000), (700, 701, 702, 703)]


@pytest.mark.parametrize("ends", OFFSETS, ids=str)
@pytest.mark.parametrize("k", [1024, 1408])
def test_grouped(k: int, ends: tuple[int, ...]):
    a, b, offs = _operand((3000, k), TILE), _operand((4, 300, k), BLOCK, seed=1), _offs(*ends)
    exact = torch.zeros(3000, 300, dtype=torch.float64, device="cuda")
    for g, rows in enumerate(_rows(offs)):
        exact[rows] = _exact(a)[rows] @ _exact(b)[g].mT
    out = grouped_matmul_nt(*a, *b, offs, torch.bfloat16)
    assert not out[ends[-1] :].any(), "rows past the last group must be zero"
    if ends[-1]:
        _assert_close(out, exact)


def test_grouped_with_many_groups():
    ends = torch.randint(0, 40, (256,), generator=torch.Generator().manual_seed(0)).cumsum(0)
    a, b, offs = _operand((int(ends[-1]), 256), TILE), _operand((256, 64, 256), BLOCK, seed=1), _offs(*ends.tolist())
    exact = torch.cat([_exact(a)[rows] @ _exact(b)[g].mT for g, rows in enumerate(_rows(offs))])
    _assert_close(grouped_matmul_nt(*a, *b, offs, torch.float32), exact)


@pytest.mark.parametrize("counts", [(0, 3, 200), (200, 200, 200), (129, 1, 64)], ids=str)
def test_masked(counts: tuple[int, ...]):
    a, b = _operand((3, 200, 1408), TILE), _operand((3, 300, 1408), BLOCK, seed=1)
    out = masked_grouped_matmul_nt(*a, *b, _offs(*counts), torch.bfloat16)
    for g, count in enumerate(counts):
        if count:
            _assert_close(out[g, :count], (_exact(a)[g] @ _exact(b)[g].mT)[:count])


@pytest.mark.parametrize("ends", OFFSETS, ids=str)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "int8"])
@pytest.mark.parametrize("x_block", [COLUMN_TILE, BLOCK], ids=["1D1D", "1D2D"])
def test_grouped_wgrad(x_block: tuple[int, int], fmt: str, ends: tuple[int, ...]):
    dy, x, offs = _operand((3000, 300), COLUMN_TILE, fmt), _operand((3000, 520), x_block, fmt, 1), _offs(*ends)
    out = grouped_wgrad(*dy, *x, offs, torch.float32)
    for g, rows in enumerate(_rows(offs)):
        if rows.start == rows.stop:
            assert not out[g].any(), "a group without rows must be zero"
        else:
            _assert_close(out[g], _exact(dy)[rows].mT @ _exact(x)[rows])


def test_more_than_2_31_elements():
    rows = (1 << 31) // 4096 + 100
    data = torch.zeros(rows, 4096, dtype=torch.float8_e4m3fn, device="cuda")
    data[-1].fill_(1.0)
    scale = torch.ones(rows, 32, device="cuda")
    b = _operand((64, 4096), BLOCK)
    _assert_close(matmul_nt(data, scale, TILE, *b, torch.float32)[-1:], _exact(b).sum(1)[None])


@pytest.mark.parametrize(("n", "k"), [(2048, 2048), (3648, 2048), (576, 7168), (200, 384)])
def test_a_row_of_a_row_invariant_gemm_has_the_same_bits_among_any_others(n: int, k: int):
    """Also the bits of a grouped GEMM with one group, which never splits K."""
    torch.manual_seed(n)
    a, b = (torch.randn(rows, k, device="cuda").bfloat16() for rows in (700, n))
    (x, x_scale), (w, w_scale) = quantize(a, *TILE, "e4m3", False), quantize(b, *BLOCK, "e4m3", False)
    residual = torch.randn(700, n, device="cuda").bfloat16()
    end = torch.tensor([700], dtype=torch.int32, device="cuda")
    operands = TILE, w[None], w_scale[None], BLOCK, end
    together = grouped_matmul_nt(x, x_scale, *operands, torch.bfloat16)
    for rows in (slice(0, 700), slice(3, 259), slice(3, 203), slice(40, 72), slice(8, 9), slice(8, 15)):
        own_scale = new_scale(x[rows], *TILE).copy_(x_scale[rows])
        own = x[rows], own_scale, TILE, w, w_scale, BLOCK
        product, added = torch.empty_like(together[rows]), residual[rows].clone()
        row_invariant_scaled_nt_out(product, *own, False)
        assert torch.equal(product, together[rows]), f"rows {rows}"
        row_invariant_scaled_nt_out(added, *own, True)
        assert torch.equal(added, residual[rows] + product), f"rows {rows}, added"
