"""Tests of memory layouts: copies of rows that are not adjacent."""

import pytest
import torch

from octile.kernels.memory_layout import contiguous_copy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "columns",
    [
        slice(0, 32),
        slice(32, 64),
        slice(16, 48),
        pytest.param(slice(3, 35), id="that do not begin at 16 bytes"),
        pytest.param(slice(0, 7), id="that do not end at 16 bytes"),
        pytest.param(slice(0, 64, 2), id="every other one"),
    ],
)
def test_a_copy_has_the_columns(dtype: torch.dtype, columns: slice):
    x = torch.randn(3, 5, 80).to(dtype)[..., columns]
    copy = contiguous_copy(x)
    assert copy.is_contiguous()
    assert not copy._is_view()
    assert torch.equal(copy.view(torch.uint8), x.contiguous().view(torch.uint8))


def test_what_is_contiguous_is_not_copied():
    x = torch.randn(3, 8)
    assert contiguous_copy(x) is x


def test_rows_that_do_not_begin_at_16_bytes_are_copied():
    x = torch.randn(5, 19)
    assert torch.equal(contiguous_copy(x[:, :16]), x[:, :16])
