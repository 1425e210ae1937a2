"""Commands of other threads for the thread that steps an engine."""

import threading
from multiprocessing.connection import wait

import pytest

from octile.serve.process.commands import Commands, Waker


def never() -> None:
    raise AssertionError("it is not called")


def test_commands_are_carried_out_in_order_before_the_next_step():
    commands, done = Commands(None, lambda: None), []
    for name in "abc":
        commands.add(lambda name=name: done.append(name))
    assert commands.carry_out(lambda: done, never)
    assert done == ["a", "b", "c"]


def test_there_is_nothing_to_step_while_nothing_runs():
    commands, rested = Commands(None, lambda: None), []
    commands.add(lambda: None)
    threading.Timer(0.05, commands.stop).start()
    assert not commands.carry_out(lambda: False, lambda: rested.append(True))
    assert rested == [True]


def test_an_engine_that_must_not_rest_is_stepped_though_nothing_runs():
    assert Commands(0.0, lambda: None).carry_out(lambda: False, never)


def test_what_was_added_before_the_end_is_carried_out():
    commands, done = Commands(None, lambda: None), []
    commands.add(lambda: done.append(True))
    commands.stop()
    assert not commands.carry_out(lambda: True, never)
    assert done == [True]


def test_a_command_wakes_a_step_that_waits():
    woken = []
    commands = Commands(None, lambda: woken.append(True))
    commands.add(lambda: None)
    commands.stop()
    assert woken == [True, True]


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
