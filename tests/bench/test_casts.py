"""Tests of the device copy with which quantization is compared."""

import pytest

from octile.bench.casts import ALIGNMENT, _halves


@pytest.mark.parametrize("moved", [1, 2 * ALIGNMENT, 2 * ALIGNMENT + 1, 89_026_560])
def test_a_copy_moves_as_much_between_aligned_buffers(moved: int):
    source, target = _halves(moved, "cpu")
    assert source.nbytes == target.nbytes
    assert moved <= 2 * source.nbytes < moved + 2 * ALIGNMENT
    assert source.data_ptr() % ALIGNMENT == target.data_ptr() % ALIGNMENT == 0
    assert target.data_ptr() - source.data_ptr() == source.nbytes
