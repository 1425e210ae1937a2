"""Measures by which callers compare results."""

import pytest
import torch

from octile.compat.deep_gemm import testing
from tests.compat.deep_gemm.conftest import random


def test_the_difference_is_one_minus_the_similarity():
    x, y = random(20, 30).bfloat16(), random(20, 30, seed=1).bfloat16()
    similarity = 2 * (x.double() * y.double()).sum() / (x.double() ** 2 + y.double() ** 2).sum()
    assert float(testing.calc_diff(x, y)) == pytest.approx(1 - float(similarity), rel=1e-12)


@pytest.mark.parametrize(("x", "y", "difference"), [(0.0, 0.0, 0), (2.0, 2.0, 0), (2.0, -2.0, 2), (0.0, 1.0, 1)])
def test_equal_results_differ_by_zero(x, y, difference):
    assert testing.calc_diff(torch.full((3, 4), x), torch.full((3, 4), y)) == difference


def test_a_nan_is_not_equal_to_itself():
    x = torch.tensor([1.0, float("nan")])
    assert testing.calc_diff(x, x).isnan()


def test_bytes_of_nested_tensors_are_counted():
    x, pair = torch.zeros(3, 4), (torch.zeros(5, dtype=torch.float8_e4m3fn), [torch.zeros(2, dtype=torch.int32)])
    assert testing.count_bytes(x, None, pair) == 48 + 5 + 8
    assert testing.count_bytes() == 0
