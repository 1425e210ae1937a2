"""Operands reach the GEMMs contiguous along K, in whole vectors."""

import pytest
import torch

from octile.kernels.triton.layout import to_k_major


def _encoded(*shape: int) -> torch.Tensor:
    return torch.randint(0, 255, shape, dtype=torch.uint8)


def test_an_aligned_operand_is_not_copied():
    data = _encoded(5, 64)
    assert to_k_major(data) is data


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_transposed_view_is_copied(dtype: torch.dtype):
    data = _encoded(3, 150, 140).view(dtype).mT
    copy = to_k_major(data)
    assert copy.dtype == dtype
    assert copy.stride() == (140 * 160, 160, 1)
    assert torch.equal(copy.view(torch.uint8)[..., :150], data.view(torch.uint8))
    assert not copy.view(torch.uint8)[..., 150:].any(), "what pads K must be zeros"


@pytest.mark.usefixtures("gpu")
def test_a_row_that_does_not_begin_at_a_vector_is_copied():
    data = _encoded(5, 65)[:, 1:]
    assert torch.equal(to_k_major(data), data)
    assert to_k_major(data).stride() == (64, 1)
