"""A server that steps an engine, and the commands of other threads for the thread that steps it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from octile.serve.engine.request import Output, RequestFactory, Sampling
from octile.serve.process.messages import Cancel, Failed, Stepped
from octile.serve.process.server import Commands, EngineServer
from tests.serve.fake_engine import FakeEngine


class Ends:
    """A server in a thread, and the other end of its pipe."""

    def __init__(self, engine: FakeEngine):
        self.engine = engine
        connection, self.other = Pipe()
        self.server = EngineServer(engine, connection)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()

    def add(self, prompt: list[int], sampling: Sampling) -> int:
        (request,) = FACTORY.make(prompt, sampling)
        self.other.send([request])
        return request.id

    def read(self, request_id: int) -> list[Output]:
        """The outputs of a request until it has ended."""
        found: list[Output] = []
        while not found or found[-1].finish_reason is None:
            message = receive(self.other, Stepped)
            found += [output for output in message.outputs if output.request_id == request_id]
        return found


FACTORY = RequestFactory(vocab_size=256, max_position=10**6)


def receive(connection: Connection, kind: type):
    assert connection.poll(30)
    message = connection.recv()
    assert isinstance(message, kind)
    return message


@contextmanager
def joined(tokenizer, **options) -> Iterator[Ends]:
    ends = Ends(FakeEngine(tokenizer, **options))
    yield ends
    ends.other.close()
    ends.thread.join(30)
    assert not ends.thread.is_alive()


def test_requests_that_are_sent_together_are_in_one_step(tokenizer):
    with joined(tokenizer) as ends:
        requests = FACTORY.make([5], *[Sampling(max_new_tokens=1)] * 3)
        ends.other.send(requests)
        assert [output.request_id for output in receive(ends.other, Stepped).outputs] == [r.id for r in requests]


def test_canceling_what_has_ended_does_nothing(tokenizer):
    with joined(tokenizer) as ends:
        ends.read(first := ends.add([5], Sampling(max_new_tokens=1)))
        ends.other.send(Cancel(first))
        ends.read(ends.add([6], Sampling(max_new_tokens=1)))
        assert (ends.engine.canceled, ends.server.failure) == (0, None)


def test_what_ends_the_engine_is_sent(tokenizer):
    with joined(tokenizer, fails_after=2) as ends:
        ends.add([5], Sampling(max_new_tokens=10))
        for _ in range(2):
            receive(ends.other, Stepped)
        assert str(receive(ends.other, Failed).error) == "a kernel has failed"
        ends.thread.join(30)
        assert str(ends.server.failure) == "a kernel has failed"


def test_an_exception_that_cannot_be_sent_is_named(tokenizer):
    class OfThisTestError(Exception):
        pass

    def fail() -> list[Output]:
        raise OfThisTestError("a lock is held")

    with joined(tokenizer) as ends:
        ends.engine.step = fail
        ends.add([5], Sampling())
        error = receive(ends.other, Failed).error
        assert (type(error), "OfThisTestError: a lock is held" in str(error)) == (RuntimeError, True)


def test_an_engine_that_must_not_rest_is_stepped_though_nothing_runs(tokenizer, monkeypatch):
    monkeypatch.setattr(FakeEngine, "idle_seconds", 0.01)
    with joined(tokenizer) as ends:
        while receive(ends.other, Stepped).stats.steps < 3:
            pass


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


def test_there_is_something_to_step_while_an_engine_must_not_rest():
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
