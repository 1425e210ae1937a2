"""Tests of copies between host and device: several tensors in one copy."""

import pytest
import torch
from torch import Tensor

from octile.serve.send import HostCopy

TENSORS = (
    torch.tensor([1.5, -0.0, torch.inf]),
    torch.tensor([[1, -(2**62)]]),
    torch.tensor([7], dtype=torch.uint8),
    torch.arange(6.0).view(2, 3).T,
    torch.empty(0, 4, dtype=torch.int32),
    torch.tensor([2.0**-1074], dtype=torch.float64),
)


@pytest.mark.parametrize("n", range(1, 1 + len(TENSORS)))
def test_tensors_of_any_dtypes_come_to_the_host(n):
    found = HostCopy(TENSORS[-n:]).wait()
    assert all(
        copied.dtype == t.dtype and torch.equal(copied, t) for copied, t in zip(found, TENSORS[-n:], strict=True)
    )


def test_what_is_written_after_the_copy_is_not_in_it():
    tensors = [t.clone() for t in TENSORS[:2]]
    copy = HostCopy(tensors)
    for t in tensors:
        t.zero_()
    assert all(map(torch.equal, copy.wait(), TENSORS))


def test_several_tensors_are_one_copy(monkeypatch):
    copies, copy = [], Tensor.copy_
    monkeypatch.setattr(Tensor, "copy_", lambda self, *args, **named: copies.append(1) or copy(self, *args, **named))
    HostCopy(TENSORS)
    assert copies == [1]
