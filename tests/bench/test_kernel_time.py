"""Tests of the attribution of profiled kernels to calls."""

import pytest

from octile.bench.kernel_time import seconds_between
from octile.train.step.kernel_records import KernelRecord

MARK = "flush"


def test_kernels_between_two_marks_are_added():
    record = [
        KernelRecord("warm-up", 0, 9),
        KernelRecord(MARK, 1, 5),
        KernelRecord("a", 2, 3),
        KernelRecord("b", 5, 4),
        KernelRecord(MARK, 9, 5),
    ]
    assert seconds_between([*record, KernelRecord("c", 20, 1)], MARK, 2) == [7e-6, 1e-6]


def test_the_order_is_that_of_the_device():
    record = [KernelRecord("b", 30, 2), KernelRecord(MARK, 20, 5), KernelRecord("a", 10, 1), KernelRecord(MARK, 0, 5)]
    assert seconds_between(record, MARK, 2) == [1e-6, 2e-6]


@pytest.mark.parametrize("count", [1, 3])
def test_a_record_that_lacks_calls_is_refused(count):
    record = [KernelRecord(MARK, 0, 5), KernelRecord("a", 1, 1), KernelRecord(MARK, 2, 5), KernelRecord("a", 3, 1)]
    with pytest.raises(RuntimeError, match=f"of {count} calls"):
        seconds_between(record, MARK, count)


def test_a_call_without_kernels_is_refused():
    with pytest.raises(RuntimeError, match="recorded 1 of 2 calls"):
        seconds_between([KernelRecord(MARK, 0, 5), KernelRecord(MARK, 2, 5), KernelRecord("a", 3, 1)], MARK, 2)
