"""The kernels of decode steps compute the references' numbers."""

import pytest
import torch
from torch import Tensor

from octile.kernels.triton import decode_step as kernel
from octile.ops.decode_step import (
    DRAFTS,
    FIELDS,
    NO_DRAFT,
    TEMPERATURE,
    accepted_rows,
    continued_tokens,
    record_choices,
    text_rows,
)
from tests.kernels.triton.gpus import any_gpu

pytestmark = [pytest.mark.usefixtures("gpu"), any_gpu]
SIZES = pytest.mark.parametrize(("b", "k"), [(1, 1), (5, 1), (3, 2), (130, 1), (40, 4)])


def integers(below: int, *shape: int) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(sum(shape)))


@SIZES
@pytest.mark.parametrize("parity", [0, 1])
def test_tokens_of_the_step_before_or_as_given(b: int, k: int, parity: int):
    host = integers(1000, 2, FIELDS + k + 1, b + 3)[:, : FIELDS + k, :b]
    for numbers in host:
        numbers[0] = integers(b + 2, b) - 2
        numbers[TEMPERATURE] = torch.linspace(0, 2, b, dtype=torch.float64).view(torch.int64)
        numbers[DRAFTS] = integers(k, b)
    left = integers(100, b, k + 2)[:, : k + 1] - 2, integers(k, b) + 1
    parities = [torch.tensor([parity, -1]) for _ in range(2)]
    found = kernel.launch_continued(host, parities[0], *left, FIELDS, DRAFTS, TEMPERATURE, NO_DRAFT)
    assert all(map(torch.equal, found, continued_tokens(host, parities[1], *left)))
    assert parities[0].tolist() == parities[1].tolist() == [parity, 1 - parity]


@SIZES
def test_rows_of_texts(b: int, k: int):
    pages = integers(2**20, b, 9).int()[:, :7]
    end = integers(7 * 64, b)
    end[0] = 0
    given = integers(100, b, k) - 2, integers(6 * 64, b), end, pages
    for found, expected in zip(kernel.launch_rows(*given, 64), text_rows(*given), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


@SIZES
def test_rows_after_accepted_drafts(b: int, k: int):
    given = integers(3, b, k) - 1, integers(2, b, k + 1)[:, 1:].contiguous(), integers(2**40, b)
    for found, expected in zip(kernel.launch_accepted(*given), accepted_rows(*given), strict=True):
        assert torch.equal(found, expected)


@SIZES
@pytest.mark.parametrize("parity", [0, 1])
def test_choices(b: int, k: int, parity: int):
    given = integers(2, b, k), integers(2, b, k + 1)[:, 1:].contiguous(), integers(2, b, k - 1)
    found, expected = (
        [torch.tensor([parity, 1 - parity]), *(torch.full(shape, -7) for shape in ((b, k + 2), (b,), (2, b, 2 * k)))]
        for _ in range(2)
    )
    for run, (steps, last, *rest) in ((kernel.launch_choices, found), (record_choices, expected)):
        run(*given, steps, last[:, :k], *rest)
    assert all(map(torch.equal, found, expected))
    assert found[0].tolist() == 2 * [1 - parity]
