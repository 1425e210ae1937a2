"""What wakes a thread that waits for files."""

import threading
from multiprocessing.connection import wait

import pytest

from octile.serve.process.waker import Waker


@pytest.fixture
def waker():
    made = Waker()
    yield made
    made.close()


def test_it_is_not_ready_at_first(waker):
    assert wait([waker.fileno()], 0) == []


def test_any_thread_wakes_one_that_waits(waker):
    threading.Timer(0.05, waker.wake).start()
    assert wait([waker.fileno()], 30) == [waker.fileno()]


def test_it_stays_ready_until_it_is_cleared(waker):
    waker.wake()
    waker.wake()
    assert wait([waker.fileno()], 0) == [waker.fileno()]
    waker.clear()
    assert wait([waker.fileno()], 0) == []


def test_waking_never_waits(waker):
    for _ in range(10_000):  # more bytes than the system buffers
        waker.wake()
    assert wait([waker.fileno()], 0) == [waker.fileno()]
