"""The engine for an event loop, stepped by a thread at the other end of a pipe."""

import asyncio
from collections.abc import Awaitable, Callable
from multiprocessing import Pipe

import pytest

from octile.serve.engine.request import FinishReason, Output, Request, RequestFactory, Sampling
from octile.serve.engine.stats import Stats
from octile.serve.process.client import EngineClient, EngineError, Observer, Stream
from octile.serve.process.messages import Drain, Failed, Stepped
from tests.serve.fake_engine import FakeEngine, Pair

FACTORY = RequestFactory(vocab_size=256, max_position=10**6)


def requests(*asked: tuple[list[int], Sampling]) -> list[Request]:
    return [request for prompt, sampling in asked for request in FACTORY.make(prompt, sampling)]


def run(tokenizer, body: Callable[[EngineClient, FakeEngine], Awaitable], observer=None, **options):
    """Run a coroutine with a started client, and stop it."""

    async def main():
        pair = Pair(FakeEngine(tokenizer, **options))
        pair.client.observer = observer or Observer()
        pair.client.start()
        try:
            return await body(pair.client, pair.engine)
        finally:
            await pair.client.stop()
            await asyncio.to_thread(pair.join)
            assert not pair.engine.requests

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
            engine.submit(requests(([5, 6, 7], Sampling(max_new_tokens=5)), ([8], Sampling(max_new_tokens=2))))
        )

    assert run(tokenizer, body) == {0: [5, 6, 7, 5, 6], 1: [8, 8]}


def test_an_engine_that_must_not_rest_is_stepped_though_nothing_runs(tokenizer):
    async def body(engine, fake):
        while fake.steps < 3:
            await asyncio.sleep(0.01)
        return await tokens_of(engine.submit(requests(([5], Sampling(max_new_tokens=2)))))

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
            engine.submit(requests(([5], Sampling())))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FakeEngine, "idle_seconds", 0.01)
        run(tokenizer, body, fails_after=2)


def test_what_a_reader_misses_is_joined(tokenizer):
    async def body(engine, fake):
        stream = engine.submit(requests(([5, 6], Sampling(max_new_tokens=100, logprobs=0))))
        while fake.finished == 0:
            await asyncio.sleep(0.01)
        return await stream.next(), await stream.next()

    ((_, output),), end = run(tokenizer, body)
    assert output.tokens == (5, 6) * 50
    assert output.text == tokenizer.decode([5, 6] * 50)
    assert (len(output.logprobs), output.finish_reason, end) == (100, FinishReason.LENGTH, [])


def test_closing_at_once_cancels_before_the_first_step(tokenizer):
    async def body(engine, fake):
        engine.submit(requests(*[([5], Sampling(max_new_tokens=10_000))] * 3)).close()
        while fake.canceled < 3:
            await asyncio.sleep(0.01)

    run(tokenizer, body, step_seconds=0.01)


def test_requests_of_one_call_with_the_same_id_are_refused(tokenizer):
    async def body(engine, fake):
        (request,) = requests(([5], Sampling(max_new_tokens=2)))
        with pytest.raises(ValueError, match=r"request\.id must differ"):
            engine.submit([request, request])
        return await tokens_of(engine.submit([request]))

    assert [*run(tokenizer, body).values()] == [[5, 5]]


def test_a_request_with_the_id_of_one_that_runs_is_refused_and_the_engine_goes_on(tokenizer):
    async def body(engine, fake):
        fake.may_step.clear()
        first = requests(([5, 6], Sampling(max_new_tokens=3)))
        stream = engine.submit(first)
        with pytest.raises(ValueError, match=rf"^request\.id must differ from .*, not {first[0].id}, "):
            engine.submit([*requests(([7], Sampling(max_new_tokens=2))), Request(first[0].id, [8], Sampling(), 0)])
        fake.may_step.set()
        return await tokens_of(stream), fake.added

    assert run(tokenizer, body) == ({0: [5, 6, 5]}, 1)


def test_a_failure_reaches_every_reader_and_later_ones(tokenizer):
    async def body(engine, fake):
        streams = [engine.submit(requests(([5], Sampling(max_new_tokens=100)))) for _ in range(2)]
        for stream in streams:
            with pytest.raises(EngineError, match="the engine has failed: RuntimeError: a kernel has failed"):
                await tokens_of(stream)
        with pytest.raises(EngineError, match="the engine has failed"):
            engine.submit(requests(([5], Sampling())))
        assert str(engine.failure) == "a kernel has failed"
        fake.requests.clear()  # a failed engine frees nothing

    run(tokenizer, body, fails_after=3, step_seconds=0.01)


def test_abort_ends_what_runs(tokenizer):
    async def body(engine, fake):
        stream = engine.submit(requests(([5], Sampling(max_new_tokens=10_000))))
        await stream.next()
        engine.abort("it is late")
        with pytest.raises(EngineError, match="it is late"):
            await stream.next()

    run(tokenizer, body, step_seconds=0.01)


def test_the_observer_sees_each_choice_once(tokenizer):
    seen = []

    class Recorder(Observer):
        def first_token(self, seconds, prefill_seconds, name):
            seen.append(("first", prefill_seconds, name))

        def next_tokens(self, seconds, count):
            seen.append(count)

        def decoded(self, seconds):
            assert seconds > 0
            seen.append("decoded")

        def ended(self, seconds, reason, name):
            seen.append((str(reason), name))

    async def body(engine, fake):
        await tokens_of(engine.submit(requests(([5], Sampling(max_new_tokens=3))), "a"))
        stream = engine.submit(requests(([5], Sampling(max_new_tokens=10_000))), "b")
        stream.close()
        stream.close()

    run(tokenizer, body, Recorder())
    prefill_seconds = FakeEngine.PREFILL_SECONDS
    assert seen == [("first", prefill_seconds, "a"), 1, 1, "decoded", ("length", "a"), ("canceled", "b")]


class Clock:
    """The engine's clock, which a test sets."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic


def test_the_age_of_a_step_counts_from_the_last_step_and_not_while_nothing_runs(tokenizer, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("octile.serve.process.client.time", clock)

    async def body(engine, fake):
        fake.may_step.clear()
        stream = engine.submit(requests(([5], Sampling(max_new_tokens=1))))
        clock.now += 3
        ages = [engine.step_age]
        other = engine.submit(requests(([5], Sampling(max_new_tokens=1))))
        ages.append(engine.step_age)
        assert not engine.has_stepped
        fake.may_step.set()
        await tokens_of(stream)
        await tokens_of(other)
        assert engine.has_stepped
        clock.now += 1000
        ages.append(engine.step_age)
        fake.may_step.clear()
        last = engine.submit(requests(([5], Sampling(max_new_tokens=1))))
        clock.now += 4
        ages.append(engine.step_age)
        fake.may_step.set()
        await tokens_of(last)
        return ages

    assert run(tokenizer, body) == [3, 3, 0, 4]


def test_a_request_has_its_id_and_its_seed_in_the_engine(tokenizer):
    async def body(engine, fake):
        fake.may_step.clear()
        (request,) = requests(([5], Sampling(seed=None, max_new_tokens=1)))
        stream = engine.submit([request])
        while not fake.requests:
            await asyncio.sleep(0.001)
        assert fake.requests[request.id].seed == request.seed
        fake.may_step.set()
        await tokens_of(stream)

    run(tokenizer, body)


def test_counts_are_those_after_the_last_step(tokenizer):
    async def body(engine, fake):
        await tokens_of(engine.submit(requests(([5, 6], Sampling(max_new_tokens=3)))))
        assert engine.stats == fake.stats()

    run(tokenizer, body)


def test_a_canceled_request_frees_its_pages(tokenizer):
    async def body(engine, fake):
        stream = engine.submit(requests(([5], Sampling(max_new_tokens=4000))))
        await stream.next()
        stream.close()
        while engine.stats.used_pages:
            await asyncio.sleep(0.001)
        assert fake.canceled == 1

    run(tokenizer, body, step_seconds=0.001)


def of_pipe(body: Callable[[EngineClient, object], Awaitable]) -> object:
    """Run a coroutine with a client and the other end of its pipe."""

    async def main():
        connection, other = Pipe()
        client = EngineClient(other, Stats())
        client.start()
        try:
            return await body(client, connection)
        finally:
            await client.stop()
            connection.close()

    return asyncio.run(main())


def test_an_engine_whose_process_has_ended_has_failed():
    async def body(client, connection):
        connection.close()
        stream = client.submit(requests(([5], Sampling())))
        with pytest.raises(EngineError, match="the process of the engine has ended"):
            await tokens_of(stream)
        assert client.has_ended

    of_pipe(body)


def test_steps_that_have_come_together_are_read_together():
    async def body(client, connection):
        (request,) = requests(([5], Sampling()))
        stream = client.submit([request])
        for n in (1, 2):
            connection.send(Stepped([Output(request.id, (n,))], Stats(steps=n)))
        return await stream.next(), client.stats

    ((_, output),), stats = of_pipe(body)
    assert (output.tokens, stats) == ((1, 2), Stats(steps=2))


def tokens_read(write: Callable[[Stream], bool]) -> list[tuple[int, ...]]:
    """The tokens of each `Stream.next` of a request that gets 1, 2 and 3, its last one, in three steps."""

    async def body(client, connection):
        (request,) = requests(([5], Sampling()))
        stream = client.submit([request])
        found = []

        async def read() -> None:
            while new := await stream.next():
                found.extend(output.tokens for _, output in new)
                stream.write = write

        reading = asyncio.create_task(read())
        for n, reason in ((1, None), (2, None), (3, FinishReason.LENGTH)):
            connection.send(Stepped([Output(request.id, (n,), finish_reason=reason)], Stats(steps=n, running=1)))
            while client.stats.steps < n:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0)
        await reading
        return found

    return of_pipe(body)


def test_a_reader_that_waits_is_not_woken_for_what_is_written():
    written = []
    read = tokens_read(lambda stream: not written.extend(stream.take()))
    assert (read, [output.tokens for _, output in written]) == ([(1,), (3,)], [(2,)])


def test_a_reader_that_waits_is_woken_for_what_cannot_be_written():
    assert tokens_read(lambda stream: False) == [(1,), (2,), (3,)]


def test_what_comes_while_a_reader_does_not_wait_is_not_written():
    async def body(client, connection):
        (request,) = requests(([5], Sampling()))
        stream = client.submit([request])
        stream.write = lambda stream: not stream.take()
        connection.send(Stepped([Output(request.id, (1,))], Stats(steps=1, running=1)))
        while not client.has_stepped:
            await asyncio.sleep(0.001)
        return await stream.next()

    ((_, output),) = of_pipe(body)
    assert output.tokens == (1,)


def test_an_error_in_writing_is_the_readers_and_not_the_engines():
    async def body(client, connection):
        (request,) = requests(([5], Sampling()))
        stream = client.submit([request])
        stream.write = lambda stream: stream.take()[1]
        reading = asyncio.create_task(stream.next())
        await asyncio.sleep(0)
        connection.send(Stepped([Output(request.id, (1,))], Stats(steps=1, running=1)))
        with pytest.raises(IndexError):
            await reading
        assert client.failure is None

    of_pipe(body)


def test_what_has_come_with_a_failure_is_read_before_it():
    async def body(client, connection):
        (request,) = requests(([5], Sampling()))
        stream = client.submit([request])
        connection.send(Stepped([Output(request.id, (1,))], Stats(steps=1, running=1)))
        connection.send(Failed(RuntimeError("a kernel has failed")))
        ((_, output),) = await stream.next()
        with pytest.raises(EngineError, match="a kernel has failed"):
            await stream.next()
        return output.tokens

    assert of_pipe(body) == (1,)


def test_the_process_of_the_engine_can_ask_for_the_end():
    async def body(client, connection):
        asked = asyncio.Event()
        client.on_drain = asked.set
        connection.send(Drain())
        await asyncio.wait_for(asked.wait(), 30)

    of_pipe(body)


def test_what_is_no_message_is_a_failure():
    async def body(client, connection):
        failed = asyncio.Event()
        client.on_failure = failed.set
        connection.send("nothing")
        await asyncio.wait_for(failed.wait(), 30)
        assert isinstance(client.failure, TypeError)

    of_pipe(body)


@pytest.mark.slow
def test_a_process_that_reads_nothing_does_not_hold_the_event_loop():
    async def body(client, connection):
        client.submit(requests(*[([5] * 100_000, Sampling())] * 10))  # more bytes than the pipe holds
        await asyncio.sleep(0)

    of_pipe(body)
