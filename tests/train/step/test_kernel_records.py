"""Tests of what is computed from the kernels that the profiler recorded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octile.train.step.kernel_records import (
    PEER_KERNELS,
    Communication,
    Cost,
    KernelRecord,
    busy,
    communication,
    costs,
    idle_share,
    is_communication,
    span,
)

KERNELS = [KernelRecord("a", 0, 10), KernelRecord("b", 5, 10), KernelRecord("c", 6, 2), KernelRecord("b", 20, 5)]


def test_time_in_which_kernels_overlap_counts_once():
    assert busy(KERNELS) == 20


def test_the_span_begins_with_the_first_kernel_and_ends_with_the_last_to_end():
    assert span([KernelRecord("a", 3, 100), KernelRecord("b", 5, 10)]) == 100


def test_idle_is_what_is_left_of_the_span():
    assert idle_share(KERNELS) == pytest.approx(0.2)


def test_the_costs_of_a_step_in_descending_order():
    assert costs(KERNELS, 2) == [Cost("b", 1.0, 0.0075), Cost("a", 0.5, 0.005), Cost("c", 0.5, 0.001)]


SENDS, GEMM = "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "gemm"


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        ([], (0, 0)),
        ([(GEMM, 0, 10)], (0, 0)),
        ([(SENDS, 0, 10)], (10, 10)),
        ([(GEMM, 0, 10), (SENDS, 2, 5)], (5, 0)),
        ([(GEMM, 0, 10), (SENDS, 8, 5)], (5, 3)),
        ([(SENDS, 0, 10), (GEMM, 3, 2), (GEMM, 4, 3)], (10, 6)),
        ([(SENDS, 0, 10), (SENDS, 5, 10), (GEMM, 12, 10)], (15, 12)),
    ],
    ids=["nothing", "one rank", "alone", "hidden", "its end", "its middle", "two at once"],
)
def test_communication_is_exposed_while_nothing_else_runs(kernels, expected):
    assert communication([KernelRecord(*kernel) for kernel in kernels]) == Communication(*expected)


def test_the_exposed_share_is_that_of_the_time_of_communication():
    assert Communication(10, 4).exposed_share == 0.4
    assert Communication(0, 0).exposed_share == 0


def test_kernels_of_nccl_of_nvshmem_and_of_symmetric_memory_are_communication():
    by_nvshmem = "c10d::nvshmem_extension::allToAllV(void*, void*, long*, unsigned long, int)"
    assert all(map(is_communication, (SENDS, "ncclKernel_AllGather", by_nvshmem, *PEER_KERNELS)))
    assert not any(map(is_communication, ("gemm_kernel", "Memcpy DtoH (Device -> Pinned)", "local_experts")))


def test_the_names_are_those_of_the_kernels():
    peer_rows = pytest.importorskip("octile.kernels.triton.peer_rows")
    assert [name for name in PEER_KERNELS if not hasattr(peer_rows, name)] == []


ticks = st.integers(0, 30)


@given(st.lists(st.tuples(st.sampled_from([SENDS, GEMM]), ticks, ticks), max_size=8))
def test_every_microsecond_is_counted_once(kernels):
    def running(name: str) -> set[int]:
        return {t for of, start, length in kernels if of == name for t in range(start, start + length)}

    expected = Communication(len(running(SENDS)), len(running(SENDS) - running(GEMM)))
    assert communication([KernelRecord(*kernel) for kernel in kernels]) == expected
