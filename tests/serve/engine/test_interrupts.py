"""Ctrl-C takes effect where requests are whole."""

import signal
import threading

import pytest

from octile.serve.engine.interrupts import held_interrupts

pytestmark = pytest.mark.usefixtures("interruptible")


def interrupt(times: int, done: list[str]) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)
    done.append("inside")


def test_an_interrupt_comes_at_the_end():
    done = []
    with pytest.raises(KeyboardInterrupt):
        held_interrupts()(interrupt)(1, done)
    assert done == ["inside"]


def test_a_second_interrupt_comes_at_once():
    done = []
    with pytest.raises(KeyboardInterrupt):
        held_interrupts()(interrupt)(2, done)
    assert done == []


def test_an_interrupt_comes_at_the_end_of_the_outer_one_of_two():
    done = []

    @held_interrupts()
    def outer() -> None:
        held_interrupts()(interrupt)(1, done)
        done.append("outside")

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert done == ["inside", "outside"]


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])
def test_the_handler_is_as_before(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with held_interrupts():
            pass
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_leaves_the_handler_alone():
    found = []

    def look() -> None:
        with held_interrupts():
            found.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]
