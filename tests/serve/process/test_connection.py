"""An engine at one end of a pipe, and the same engine for the process at the other end."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe

import pytest

from octile.serve.engine.request import FinishReason, Output, Sampling
from octile.serve.engine.stats import Stats
from octile.serve.process.async_engine import AsyncEngine
from octile.serve.process.connection import PipeEngine
from octile.serve.process.engine_end import EngineEnd
from octile.serve.process.messages import Drain, ProcessEndedError, Stepped
from tests.serve.fake_engine import FakeEngine


class Ends:
    """Both ends of a pipe, the engine's in a thread."""

    def __init__(self, engine: FakeEngine):
        self.engine = engine
        connection, self.connection = Pipe()
        self.end = EngineEnd(engine, connection)
        self.far = PipeEngine(self.connection, engine.tokenizer.vocab_size, engine.max_position, engine.stats())
        self.thread = threading.Thread(target=self.end.run, daemon=True)
        self.thread.start()

    def read(self, n_requests: int) -> dict[int, list[Output]]:
        """Step until so many requests have ended; return the outputs of each request."""
        found: dict[int, list[Output]] = {}
        while sum(outputs[-1].finish_reason is not None for outputs in found.values()) < n_requests:
            for output in self.far.step():
                found.setdefault(output.request_id, []).append(output)
        return found


@contextmanager
def joined(tokenizer, **options) -> Iterator[Ends]:
    ends = Ends(FakeEngine(tokenizer, **options))
    yield ends
    ends.far.close()
    ends.thread.join(30)
    assert not ends.thread.is_alive()


def tokens_of(outputs: list[Output]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


def test_each_request_gets_its_own_outputs(tokenizer):
    with joined(tokenizer) as ends:
        ends.engine.add([9], Sampling(max_new_tokens=10**5))  # so that both ends number requests differently
        first = ends.far.add([5, 6, 7], Sampling(max_new_tokens=5))
        second = ends.far.add([8], Sampling(max_new_tokens=2))
        found = ends.read(2)
    assert {i: tokens_of(outputs) for i, outputs in found.items()} == {first.id: [5, 6, 7, 5, 6], second.id: [8, 8]}
    assert "".join(output.text for output in found[first.id]) == tokenizer.decode([5, 6, 7, 5, 6])
    assert found[first.id][-1].finish_reason is FinishReason.LENGTH


def test_a_seed_that_is_drawn_is_the_engines(tokenizer):
    with joined(tokenizer) as ends:
        ends.engine.may_step.clear()
        request = ends.far.add([5], Sampling(seed=None, max_new_tokens=1))
        while not ends.engine.requests:
            time.sleep(0.001)
        assert ends.engine.requests[0].seed == request.seed
        ends.engine.may_step.set()
        ends.read(1)


def test_counts_are_those_after_the_last_step(tokenizer):
    with joined(tokenizer) as ends:
        ends.far.add([5, 6], Sampling(max_new_tokens=3))
        ends.read(1)
        assert ends.far.stats() == ends.engine.stats()


def test_a_canceled_request_has_no_more_outputs_and_frees_its_pages(tokenizer):
    with joined(tokenizer, step_seconds=0.001) as ends:
        request = ends.far.add([5], Sampling(max_new_tokens=4000))
        while not ends.far.step():
            pass
        ends.far.cancel(request.id)
        while ends.far.stats().used_pages:
            ends.far.step()
        assert ends.engine.canceled == 1


def test_canceling_what_has_ended_does_nothing(tokenizer):
    with joined(tokenizer) as ends:
        request = ends.far.add([5], Sampling(max_new_tokens=1))
        ends.read(1)
        ends.far.cancel(request.id)
        ends.far.add([6], Sampling(max_new_tokens=1))
        ends.read(1)
        assert (ends.engine.canceled, ends.end.failure) == (0, None)


def test_what_the_model_cannot_continue_is_refused_before_it_is_sent(tokenizer):
    with joined(tokenizer) as ends, pytest.raises(ValueError, match="prompt must have at least one token"):
        ends.far.check([], Sampling())


def test_what_ends_the_engine_is_raised_at_both_ends(tokenizer):
    with joined(tokenizer, fails_after=2) as ends:
        ends.far.add([5], Sampling(max_new_tokens=10))
        with pytest.raises(RuntimeError, match="a kernel has failed"):
            ends.read(1)
        ends.thread.join(30)
        assert str(ends.end.failure) == "a kernel has failed"


def test_an_exception_that_cannot_be_sent_is_named(tokenizer):
    class OfThisTestError(Exception):
        pass

    def fail() -> list[Output]:
        raise OfThisTestError("a lock is held")

    with joined(tokenizer) as ends:
        ends.engine.step = fail
        ends.far.add([5], Sampling())
        with pytest.raises(RuntimeError, match="OfThisTestError: a lock is held"):
            ends.read(1)


def test_an_engine_whose_process_has_ended_raises_it(tokenizer):
    connection, far = Pipe()
    engine = PipeEngine(far, tokenizer.vocab_size, 64, Stats())
    connection.close()
    engine.add([5], Sampling())
    engine.cancel(0)
    with pytest.raises(ProcessEndedError, match="the process of the engine has ended"):
        engine.step()


def test_a_step_that_waits_is_awakened(tokenizer):
    with joined(tokenizer) as ends:
        threading.Timer(0.05, ends.far.wake).start()
        assert ends.far.step() == []


def test_several_steps_are_returned_together(tokenizer):
    connection, far = Pipe()
    engine = PipeEngine(far, tokenizer.vocab_size, 64, Stats())
    for n in (1, 2):
        connection.send(Stepped([Output(0, (n,))], Stats(steps=n)))
    assert (engine.step(), engine.stats()) == ([Output(0, (1,)), Output(0, (2,))], Stats(steps=2))


def test_the_process_of_the_engine_can_ask_for_the_end(tokenizer):
    asked = []
    with joined(tokenizer) as ends:
        ends.far.on_drain = lambda: asked.append(True)
        ends.end.send(Drain())
        ends.far.step()
    assert asked == [True]


def test_an_engine_that_must_not_rest_is_stepped_though_nothing_runs(tokenizer, monkeypatch):
    monkeypatch.setattr(FakeEngine, "idle_seconds", 0.01)
    with joined(tokenizer) as ends:
        while ends.far.stats().steps < 3:
            ends.far.step()


def test_an_event_loop_reads_it_like_an_engine_of_its_own_process(tokenizer):
    async def main(ends: Ends) -> list[int]:
        engine, found = AsyncEngine(ends.far), []
        engine.start()
        stream = engine.submit([([5, 6, 7], Sampling(max_new_tokens=50))])
        while new := await stream.next():
            found += [token for _, output in new for token in output.tokens]
        stream.close()
        await engine.stop()
        return found

    with joined(tokenizer) as ends:
        assert asyncio.run(main(ends)) == ([5, 6, 7] * 17)[:50]
