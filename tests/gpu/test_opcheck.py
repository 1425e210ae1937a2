"""torch's own checks of a custom operator, on CUDA tensors: schema, fake, autograd and compilation."""

from typing import Any

import pytest
import torch

from octile.ops.grouped import grouped_matmul_nt, grouped_wgrad, masked_grouped_matmul_nt
from octile.ops.matmul import matmul_nt, matmul_nt_out
from octile.ops.quantize import dequantize, quantize

TILE, COLUMN_TILE, BLOCK = (1, 128), (128, 1), (128, 128)


def _operand(shape: tuple[int, ...], block: tuple[int, int], fmt: str = "int8") -> tuple[Any, ...]:
    """INT8: torch compares an operator's inputs before and after, and has no comparison for FP8."""
    return *quantize(torch.randn(shape, device="cuda"), *block, fmt, False), block


def _offs() -> torch.Tensor:
    return torch.tensor([30, 30, 90], dtype=torch.int32, device="cuda")


CASES = {
    "quantize": lambda: (quantize, (torch.randn(2, 5, 130, device="cuda"), *TILE, "int8", True)),
    "dequantize": lambda: (dequantize, (*_operand((5, 130), TILE)[:2], *TILE, torch.bfloat16)),
    "matmul_nt": lambda: (matmul_nt, (*_operand((5, 130), TILE), *_operand((7, 130), BLOCK), torch.bfloat16)),
    "matmul_nt_out": lambda: (
        matmul_nt_out,
        (torch.zeros(5, 7, device="cuda"), *_operand((5, 130), TILE), *_operand((7, 130), BLOCK), True),
    ),
    "grouped": lambda: (
        grouped_matmul_nt,
        (*_operand((90, 130), TILE), *_operand((3, 7, 130), BLOCK), _offs(), torch.bfloat16),
    ),
    "masked": lambda: (
        masked_grouped_matmul_nt,
        (*_operand((3, 90, 130), TILE), *_operand((3, 7, 130), BLOCK), _offs() * 0 + 90, torch.bfloat16),
    ),
    "wgrad": lambda: (
        grouped_wgrad,
        (*_operand((90, 7), COLUMN_TILE), *_operand((90, 9), COLUMN_TILE), _offs(), torch.float32),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_opcheck(case: str):
    operator, arguments = CASES[case]()
    torch.library.opcheck(operator, arguments)
