"""Tests of compilation ahead of launches: threads compile planned kernels, and nothing depends on them."""

import threading
from concurrent.futures import CancelledError

import pytest
import torch

from octile.kernels import compile_ahead, planning
from octile.kernels.compile_ahead import KernelsAhead
from octile.kernels.planning import record, recorded_kernels

SECONDS = 10
GPU = torch.device("cuda", 0)


class Kernel:
    """A kernel whose compilation waits, and may fail."""

    def __init__(self, name, may_end=None, error=None):
        self.name = self.key = name
        self.begun, self.may_end, self.error = threading.Event(), may_end, error
        self.future = None

    def _compile(self, device):
        self.begun.set()
        assert device == GPU
        if self.may_end is not None:
            assert self.may_end.wait(SECONDS)
        if self.error is not None:
            raise self.error
        return self.name

    def compile_ahead(self, pool, device):
        self.future = pool.submit(self._compile, device)
        return self.future


def test_kernels_are_compiled_at_the_same_time():
    kernels = [Kernel("first", threading.Event()), Kernel("second", threading.Event())]
    ahead = KernelsAhead(lambda: kernels, GPU, n_threads=2)
    assert all(kernel.begun.wait(SECONDS) for kernel in kernels)
    assert (ahead.total, ahead.done) == (2, 0)
    for kernel in kernels:
        kernel.may_end.set()
    assert [kernel.future.result(SECONDS) for kernel in kernels] == ["first", "second"]


def test_progress_counts_kernels():
    reports, all_done = [], threading.Event()

    def report(done, total):
        reports.append((done, total))
        if done == total:
            all_done.set()

    kernels = [Kernel(str(i), threading.Event()) for i in range(3)]
    ahead = KernelsAhead(lambda: kernels, GPU, n_threads=1)
    ahead.wait_for_plan()
    ahead.report_to(report)
    for kernel in kernels:
        kernel.may_end.set()
    assert all_done.wait(SECONDS)
    assert reports == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_an_error_of_a_kernel_leaves_the_others():
    kernels = [Kernel("broken", error=RuntimeError("does not compile")), Kernel("sound")]
    ahead = KernelsAhead(lambda: kernels, GPU, n_threads=1)
    ahead.wait_for_plan()
    assert kernels[1].future.result(SECONDS) == "sound"
    assert ahead.done == 2


def test_an_error_of_the_plan_is_not_raised():
    def plan():
        raise ValueError("no plan")

    ahead = KernelsAhead(plan, GPU)
    ahead.wait_for_plan()
    assert ahead.total == 0


def test_no_kernel_begins_after_the_end():
    kernels = [Kernel("running", threading.Event()), Kernel("waiting")]
    ahead = KernelsAhead(lambda: kernels, GPU, n_threads=1)
    assert kernels[0].begun.wait(SECONDS)
    ahead.close()
    kernels[0].may_end.set()
    with pytest.raises(CancelledError):
        kernels[1].future.result(SECONDS)
    assert not kernels[1].begun.is_set()


def test_the_threads_keep_no_process_from_exiting():
    kernel = Kernel("running", threading.Event())
    ahead = KernelsAhead(lambda: [kernel], GPU, n_threads=1)
    assert kernel.begun.wait(SECONDS)
    assert all(thread.daemon for thread in (ahead._planner, *ahead._pool._threads))
    kernel.may_end.set()


def test_at_exit_running_compilers_are_waited_for():
    kernel = Kernel("running", threading.Event())
    ahead = KernelsAhead(lambda: [kernel], GPU, n_threads=1)
    assert kernel.begun.wait(SECONDS)
    threading.Timer(0.05, kernel.may_end.set).start()
    ahead._end()
    assert kernel.future.done()


def test_a_plan_that_ends_after_the_run_begins_no_kernel():
    kernel, planning, may_end = Kernel("late"), threading.Event(), threading.Event()

    def plan():
        planning.set()
        assert may_end.wait(SECONDS)
        return [kernel]

    ahead = KernelsAhead(plan, GPU)
    assert planning.wait(SECONDS)
    ahead.close()
    may_end.set()
    ahead.wait_for_plan()
    assert kernel.future.cancelled()


def test_a_kernel_is_recorded_once():
    first = Kernel("same")
    with recorded_kernels() as kernels:
        record(first)
        record(Kernel("same"))
        record(Kernel("other"))
    assert list(kernels) == ["same", "other"]
    assert kernels["same"] is first


def test_without_a_record_nothing_is_planned():
    with pytest.raises(ValueError, match="gemm cannot be launched on the meta device"):
        planning.record(Kernel("gemm"))


def test_a_machine_with_one_core_compiles_too(monkeypatch):
    monkeypatch.setattr(compile_ahead, "count_cores", lambda: 1)
    kernel = Kernel("only")
    KernelsAhead(lambda: [kernel], GPU).wait_for_plan()
    assert kernel.future.result(SECONDS) == "only"
