"""Tests of what quantization is compared with, and of the optimizer on many tensors."""

import pytest

from octile.bench.casts import ALIGNMENT, _halves, _optimizer_cases, _parameter_shapes


@pytest.mark.parametrize("moved", [1, 2 * ALIGNMENT, 2 * ALIGNMENT + 1, 89_026_560])
def test_a_copy_moves_as_much_between_aligned_buffers(moved: int):
    source, target = _halves(moved, "cpu")
    assert source.nbytes == target.nbytes
    assert moved <= 2 * source.nbytes < moved + 2 * ALIGNMENT
    assert source.data_ptr() % ALIGNMENT == target.data_ptr() % ALIGNMENT == 0
    assert target.data_ptr() - source.data_ptr() == source.nbytes


def test_the_optimizer_updates_each_parameter_of_a_preset():
    shapes = _parameter_shapes("tiny")
    (_, adamw, tensors), (_, norms, gradients) = _optimizer_cases(shapes, "cpu")
    before = [t.clone() for t in tensors]
    assert len(adamw(*tensors)) == 3 * len(shapes)
    changed = [not bool((t == old).all()) for t, old in zip(tensors, before, strict=True)]
    n = len(shapes)
    assert changed == [True] * n + [False] * n + [True] * (2 * n) + [False]
    assert norms(*gradients).shape == (n,)
