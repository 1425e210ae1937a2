"""Tests of copies between host and device: several tensors in one copy."""

import numpy as np
import pytest
import torch
from torch import Tensor

from octile.serve.send import ALIGNMENT, HostCopy, send_arrays

ARRAYS = (
    np.array([1.5, -0.0, np.inf], np.float32),
    np.array([[1, -(2**62)]], np.int64),
    np.array([7], np.int32),
    np.arange(6, dtype=np.int32).reshape(2, 3).T,
    np.empty((0, 4), np.int64),
    np.array([2.0**-1074]),
)
CPU = torch.device("cpu")


def equal(found: np.ndarray, expected: np.ndarray) -> bool:
    """Whether two arrays have the same bytes, dtype and shape."""
    same_kind = found.dtype == expected.dtype and found.shape == expected.shape
    return same_kind and found.tobytes() == expected.tobytes()


def test_arrays_come_to_the_device_at_aligned_addresses():
    for t, array in zip(send_arrays(ARRAYS, CPU), ARRAYS, strict=True):
        assert equal(t.numpy(), array)
        assert not t.storage_offset() * t.element_size() % ALIGNMENT


@pytest.mark.parametrize("n", range(1, 1 + len(ARRAYS)))
def test_tensors_come_to_the_host(n):
    tensors = [torch.from_numpy(array) for array in ARRAYS[-n:]]
    assert all(map(equal, HostCopy(tensors).wait(), ARRAYS[-n:]))


def test_what_is_written_after_the_copy_is_not_in_it():
    tensors = [torch.from_numpy(array.copy()) for array in ARRAYS]
    copy = HostCopy(tensors)
    for t in tensors:
        t.zero_()
    assert all(map(equal, copy.wait(), ARRAYS))


def test_several_tensors_are_one_copy(monkeypatch):
    copies = []
    for name in "to", "copy_":
        copy = getattr(Tensor, name)
        monkeypatch.setattr(Tensor, name, lambda *args, copy=copy, **named: copies.append(1) or copy(*args, **named))
    HostCopy(send_arrays(ARRAYS, CPU))
    assert copies == [1, 1]
