"""Tests of the attribution of profiled kernels to calls."""

import pytest

from octile.bench.kernel_time import Kernel, seconds_between

MARK = "flush"


def test_kernels_between_two_marks_are_added():
    record = [Kernel("warm-up", 0, 9), Kernel(MARK, 1, 5), Kernel("a", 2, 3), Kernel("b", 5, 4), Kernel(MARK, 9, 5)]
    assert seconds_between([*record, Kernel("c", 20, 1)], MARK, 2) == [7e-6, 1e-6]


def test_the_order_is_that_of_the_device():
    record = [Kernel("b", 30, 2), Kernel(MARK, 20, 5), Kernel("a", 10, 1), Kernel(MARK, 0, 5)]
    assert seconds_between(record, MARK, 2) == [1e-6, 2e-6]


@pytest.mark.parametrize("count", [1, 3])
def test_a_record_that_lacks_calls_is_refused(count):
    record = [Kernel(MARK, 0, 5), Kernel("a", 1, 1), Kernel(MARK, 2, 5), Kernel("a", 3, 1)]
    with pytest.raises(RuntimeError, match=f"of {count} calls"):
        seconds_between(record, MARK, count)


def test_a_call_without_kernels_is_refused():
    with pytest.raises(RuntimeError, match="recorded 1 of 2 calls"):
        seconds_between([Kernel(MARK, 0, 5), Kernel(MARK, 2, 5), Kernel("a", 3, 1)], MARK, 2)
