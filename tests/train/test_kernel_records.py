"""Tests of what is computed from the kernels that the profiler recorded."""

import pytest

from octile.train.kernel_records import Cost, KernelRecord, busy, costs, idle_share, span

KERNELS = [KernelRecord("a", 0, 10), KernelRecord("b", 5, 10), KernelRecord("c", 6, 2), KernelRecord("b", 20, 5)]


def test_time_in_which_kernels_overlap_counts_once():
    assert busy(KERNELS) == 20


def test_the_span_begins_with_the_first_kernel_and_ends_with_the_last_to_end():
    assert span([KernelRecord("a", 3, 100), KernelRecord("b", 5, 10)]) == 100


def test_idle_is_what_is_left_of_the_span():
    assert idle_share(KERNELS) == pytest.approx(0.2)


def test_the_costs_of_a_step_in_descending_order():
    assert costs(KERNELS, 2) == [Cost("b", 1.0, 0.0075), Cost("a", 0.5, 0.005), Cost("c", 0.5, 0.001)]
