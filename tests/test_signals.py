"""Tests of Ctrl-C and SIGTERM: a run acknowledges and collects the first, a step of an engine holds it back."""

import ctypes
import os
import signal
import subprocess
import sys
import threading

import pytest

from octile.signals import held_interrupts, stop_requests, terminable

pytestmark = pytest.mark.usefixtures("interruptible")
LIBC = ctypes.CDLL(None)


def ignore(number: int) -> None:
    """The acknowledgment that says nothing."""


def test_the_first_signal_is_collected():
    with stop_requests(ignore) as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop == [signal.SIGTERM]


def test_the_second_signal_interrupts():
    with stop_requests(ignore) as stop:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert stop == [signal.SIGINT]


@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)])
def test_the_second_signal_interrupts_if_it_is_of_another_kind(numbers):
    with terminable(), stop_requests(ignore):
        signal.raise_signal(numbers[0])
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(numbers[1])


def test_a_second_ctrl_c_interrupts_a_process_that_a_shell_has_begun_in_the_background():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stop_requests(ignore):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


HANGING_KERNEL = """
import ctypes, os, signal, threading
import octile.signals
octile.signals.GRACE = 0.1
with octile.signals.stop_requests(lambda _: os.kill(os.getpid(), signal.SIGTERM)):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})  # another thread receives them
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()  # when the function is called
    ctypes.CDLL(None).sleep(600)
"""


def test_a_second_signal_ends_the_process_while_a_kernel_runs():
    """The main thread waits in a C function, as in a kernel, and can raise nothing."""
    ended = subprocess.run([sys.executable, "-c", HANGING_KERNEL], stderr=subprocess.PIPE, timeout=60, check=False)
    assert (ended.returncode, ended.stderr.decode()) == (
        143,
        "octile: stopped at once, within a step; what was saved before stays\n",
    )


def test_the_handlers_from_before_are_restored():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with stop_requests(ignore):
        assert signal.getsignal(signal.SIGINT) is not before[0]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_the_context_ends_although_a_forked_process_holds_its_socket():
    with stop_requests(ignore):
        number = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(number)
        copy = os.dup(number)  # a forked process has such a copy
        gives_up = threading.Timer(20, os.close, (copy,))
        gives_up.start()
    is_open = gives_up.is_alive()
    gives_up.cancel()
    assert is_open
    os.close(copy)


def test_a_signal_is_acknowledged_while_a_kernel_runs():
    """The main thread waits in a C function, as in a kernel, for what the acknowledgment writes."""
    read_end, write_end = os.pipe()
    acknowledged = []

    def acknowledge(number: int) -> None:
        acknowledged.append(number)
        os.write(write_end, b"a")

    gives_up = threading.Timer(20, os.write, (write_end, b"-"))
    byte = ctypes.create_string_buffer(1)
    with stop_requests(acknowledge) as stop:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # another thread of the process receives it
        try:
            gives_up.start()
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            LIBC.read(read_end, byte, 1)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            gives_up.cancel()
    os.close(read_end)
    os.close(write_end)
    assert (byte.raw, acknowledged, stop) == (b"a", [signal.SIGINT], [signal.SIGINT])


def test_only_the_first_signal_is_acknowledged():
    acknowledged = []
    with stop_requests(acknowledged.append):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert acknowledged == [signal.SIGINT]


@pytest.mark.parametrize(
    ("rank", "ranks", "says"),
    [("0", "2", "octile: terminated\n"), ("1", "2", ""), ("1", "", "octile: terminated\n")],
    ids=["the first", "another", "not one of several"],
)
def test_a_rank_that_torchrun_ends_while_it_imports_leaves_the_line_to_the_first(rank, ranks, says):
    script = "import os, signal; from octile.signals import end_at_signals; end_at_signals(); os.kill(os.getpid(), 15)"
    found = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "RANK": rank, "WORLD_SIZE": ranks}, stderr=subprocess.PIPE
    )
    assert (found.returncode, found.stderr.decode()) == (128 + signal.SIGTERM, says)


def interrupt(times: int, done: list[str]) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)
    done.append("inside")


def test_a_held_interrupt_comes_at_the_end():
    done = []
    with pytest.raises(KeyboardInterrupt):
        held_interrupts()(interrupt)(1, done)
    assert done == ["inside"]


def test_a_second_held_interrupt_comes_at_once():
    done = []
    with pytest.raises(KeyboardInterrupt):
        held_interrupts()(interrupt)(2, done)
    assert done == []


def test_a_held_interrupt_comes_at_the_end_of_the_outer_one_of_two():
    done = []

    @held_interrupts()
    def outer() -> None:
        held_interrupts()(interrupt)(1, done)
        done.append("outside")

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert done == ["inside", "outside"]


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])
def test_the_handler_is_as_before_it_was_held(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with held_interrupts():
            pass
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_holds_no_interrupts():
    found = []

    def look() -> None:
        with held_interrupts():
            found.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]
