"""An engine in a thread of its own, read by an event loop."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from octile.serve.engine.request import FinishReason, Sampling
from octile.serve.process.async_engine import AsyncEngine, EngineError, Observer, Stream
from tests.serve.fake_engine import FakeEngine


def run(tokenizer, body: Callable[[AsyncEngine, FakeEngine], Awaitable], observer=None, **options):
    """Run a coroutine with a started engine, and stop it."""

    async def main():
        fake = FakeEngine(tokenizer, **options)
        engine = AsyncEngine(fake, observer)
        engine.start()
        try:
            return await body(engine, fake)
        finally:
            await engine.stop()
            assert not engine._thread.is_alive()
            assert not fake.requests

    return asyncio.run(main())


async def tokens_of(stream: Stream) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    while new := await stream.next():
        for index, output in new:
            found.setdefault(index, []).extend(output.tokens)
    return found


def test_outputs_of_several_choices_arrive_in_order(tokenizer):
    async def body(engine, fake):
        return await tokens_of(
            engine.submit([([5, 6, 7], Sampling(max_new_tokens=5)), ([8], Sampling(max_new_tokens=2))])
        )

    assert run(tokenizer, body) == {0: [5, 6, 7, 5, 6], 1: [8, 8]}


def test_an_engine_that_must_not_rest_is_stepped_though_nothing_runs(tokenizer):
    async def body(engine, fake):
        while fake.steps < 3:
            await asyncio.sleep(0.01)
        return await tokens_of(engine.submit([([5], Sampling(max_new_tokens=2))]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeEngine, "idle_seconds", 0.01)
        assert run(tokenizer, body) == {0: [5, 5]}


def test_an_engine_that_may_rest_is_not_stepped_while_nothing_runs(tokenizer):
    async def body(engine, fake):
        await asyncio.sleep(0.05)
        assert fake.steps == 0

    run(tokenizer, body)


def test_an_engine_that_fails_while_nothing_runs_is_reported(tokenizer):
    async def body(engine, fake):
        while engine.failure is None:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineError, match="the engine has failed: RuntimeError: a kernel has failed"):
            engine.submit([([5], Sampling())])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeEngine, "idle_seconds", 0.01)
        run(tokenizer, body, fails_after=2)


def test_what_a_reader_misses_is_joined(tokenizer):
    async def body(engine, fake):
        stream = engine.submit([([5, 6], Sampling(max_new_tokens=100, logprobs=0))])
        while fake.finished == 0:
            await asyncio.sleep(0.01)
        return await stream.next(), await stream.next()

    ((_, output),), end = run(tokenizer, body)
    assert output.tokens == (5, 6) * 50
    assert output.text == tokenizer.decode([5, 6] * 50)
    assert (len(output.logprobs), output.finish_reason, end) == (100, FinishReason.LENGTH, [])


def test_what_the_engine_refuses_is_refused_before_it_is_submitted(tokenizer):
    async def body(engine, fake):
        with pytest.raises(ValueError, match="prompt must have at least one token"):
            engine.check([], Sampling())

    run(tokenizer, body)


def test_closing_at_once_cancels_before_the_first_step(tokenizer):
    async def body(engine, fake):
        engine.submit([([5], Sampling(max_new_tokens=10_000))] * 3).close()
        while fake.canceled < 3:
            await asyncio.sleep(0.01)

    run(tokenizer, body, step_seconds=0.01)


def test_a_failure_reaches_every_reader_and_later_ones(tokenizer):
    async def body(engine, fake):
        streams = [engine.submit([([5], Sampling(max_new_tokens=100))]) for _ in range(2)]
        for stream in streams:
            with pytest.raises(EngineError, match="the engine has failed: RuntimeError: a kernel has failed"):
                await tokens_of(stream)
        with pytest.raises(EngineError, match="the engine has failed"):
            engine.submit([([5], Sampling())])
        assert str(engine.failure) == "a kernel has failed"
        fake.requests.clear()  # a failed engine frees nothing

    run(tokenizer, body, fails_after=3, step_seconds=0.01)


def test_abort_ends_what_runs(tokenizer):
    async def body(engine, fake):
        stream = engine.submit([([5], Sampling(max_new_tokens=10_000))])
        await stream.next()
        engine.abort("it is late")
        with pytest.raises(EngineError, match="it is late"):
            await stream.next()

    run(tokenizer, body, step_seconds=0.01)


def test_the_observer_sees_each_choice_once(tokenizer):
    seen = []

    class Recorder(Observer):
        def first_token(self, seconds):
            seen.append("first")

        def next_tokens(self, seconds, count):
            seen.append(count)

        def ended(self, seconds, reason):
            seen.append(str(reason))

    async def body(engine, fake):
        await tokens_of(engine.submit([([5], Sampling(max_new_tokens=3))]))
        stream = engine.submit([([5], Sampling(max_new_tokens=10_000))])
        stream.close()
        stream.close()

    run(tokenizer, body, Recorder())
    assert seen == ["first", 1, 1, "length", "canceled"]


class Clock:
    """The engine's clock, which a test sets."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


def test_the_age_of_a_step_counts_from_the_last_step_and_not_while_nothing_runs(tokenizer, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("octile.serve.process.async_engine.time", clock)

    async def body(engine, fake):
        fake.may_step.clear()
        stream = engine.submit([([5], Sampling(max_new_tokens=1))])
        clock.now += 3
        ages = [engine.step_age]
        other = engine.submit([([5], Sampling(max_new_tokens=1))])
        ages.append(engine.step_age)
        assert not engine.has_stepped
        fake.may_step.set()
        await tokens_of(stream)
        await tokens_of(other)
        assert engine.has_stepped
        clock.now += 1000
        ages.append(engine.step_age)
        fake.may_step.clear()
        last = engine.submit([([5], Sampling(max_new_tokens=1))])
        clock.now += 4
        ages.append(engine.step_age)
        fake.may_step.set()
        await tokens_of(last)
        return ages

    assert run(tokenizer, body) == [3, 3, 0, 4]
