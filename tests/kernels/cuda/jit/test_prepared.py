"""Tests of PreparedKernel: a launch is prepared once for the same values on the same stream."""

from typing import Any

import pytest

from octile.kernels.cuda.jit import prepared
from octile.kernels.cuda.jit.prepared import BoundedCache, PreparedKernel


class FakeKernel:
    def __init__(self) -> None:
        self.stream = 7
        self.made: list[tuple[Any, ...]] = []

    def current_stream(self) -> int:
        return self.stream

    def ready(self, *arguments: Any) -> object:
        self.made.append(arguments)
        return object()


@pytest.fixture
def kernel(monkeypatch) -> FakeKernel:
    monkeypatch.setattr(prepared, "_launches", BoundedCache(8))
    return FakeKernel()


def test_the_same_values_are_prepared_once(kernel: FakeKernel):
    for programmatic in (False, True):
        made = PreparedKernel(kernel, 132, 1, 256, 1024, programmatic)
        assert made.launch_at((16, 1.0)) is made.launch_at((16, 1.0))
        assert kernel.made == [(132, 1, 256, 1024, (16, 1.0), 7, programmatic)]
        kernel.made.clear()


def test_other_values_are_another_launch(kernel: FakeKernel):
    made = PreparedKernel(kernel, 132, 1, 256, 1024)
    assert made.launch_at((16, 1.0)) is not made.launch_at((32, 1.0))


def test_another_stream_is_another_launch(kernel: FakeKernel):
    made = PreparedKernel(kernel, 132, 1, 256, 1024)
    first = made.launch_at((16,))
    kernel.stream = 8
    assert made.launch_at((16,)) is not first


def test_another_launch_shape_is_another_launch(kernel: FakeKernel):
    made = [PreparedKernel(kernel, grid, 1, 256, 1024) for grid in (132, 66)]
    assert made[0].launch_at((16,)) is not made[1].launch_at((16,))
