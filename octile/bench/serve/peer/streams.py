"""The speed of a server as clients see it whose requests arrive as a Poisson process, and how two servers compare.

For 64 and for 256 streams, of which so many are open at once at most:

    always busy         each stream is followed by the next one at once. This gives octile's capacity in requests/s
    arrivals at 50%     requests arrive as a Poisson process at half of that rate
    arrivals at 90%     and at nine tenths of it

The peer gets the same prompts (1,024 random tokens each, as lists of tokens), the same number of new tokens (128,
`ignore_eos`), temperature 1, and arrivals at the same seconds. Where both keep up, their output tokens/s are equal, and
the time between tokens decides; where the peer does not, its tokens/s are fewer.

Output tokens/s are those of the server's own usage, from the first arrival to the end of the last answer. The time
between tokens is that between two events of a stream with text, as the client reads them. A server that sends several
tokens in an event has fewer and longer ones, which the tokens of an event show. The time to the first token begins with
the arrival, also if a request waits for a stream.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from octile.bench.goals import THROUGHPUT, arrivals_case, busy_case
from octile.bench.rows import Row
from octile.bench.serve.latency import latency_rows
from octile.serve.http.stress import Stress, StressResult, stress_test

SHARES = (50, 90)  # % of octile's capacity


@dataclass(frozen=True)
class Traffic:
    """What clients send.

    Attributes:
        streams: how many are open at once, and how many requests there are then.
        prompt: tokens of a prompt.
        new_tokens: tokens of an answer.
        seconds: for one load.
    """

    streams: tuple[tuple[int, int], ...] = ((64, 256), (256, 768))
    prompt: int = 1024
    new_tokens: int = 128
    seconds: float = 240.0


def measure_server(url: str, name: str, traffic: Traffic, vocab_size: int, capacity: dict[int, float]) -> Iterator[Row]:
    """Yield what clients of a server see.

    Args:
        url: address of the server.
        name: name of the model, with which cases begin.
        traffic: what they send.
        vocab_size: number of tokens of the model.
        capacity: requests/s of octile by the number of streams, which this server adds where they are missing.

    Raises:
        RuntimeError: a request was refused, broken or not answered in time.
    """
    for clients, requests in traffic.streams:
        warm_up, first, *seeds = range(10 * clients, 10 * clients + 2 + len(SHARES))  # no prompt comes twice
        busy = Stress(
            clients=clients, requests=requests, new_tokens=traffic.new_tokens, seconds=traffic.seconds, seed=first,
            prompt_tokens=traffic.prompt, vocab_size=vocab_size, temperature=1.0,
        )  # fmt: skip
        _run(url, replace(busy, requests=clients, new_tokens=min(8, traffic.new_tokens), seed=warm_up))
        result = _run(url, busy)
        yield from _values(busy_case(name, clients), result)
        rate = capacity.setdefault(clients, result.completed / result.seconds)
        for seed, share in zip(seeds, SHARES, strict=True):
            result = _run(url, replace(busy, rate=share / 100 * rate, seed=seed))
            yield from _values(arrivals_case(name, clients, share), result)


def _run(url: str, stress: Stress) -> StressResult:
    """Run a stress test of which every request must be answered.

    Raises:
        RuntimeError: one was not.
    """
    arrive = "at once" if stress.rate is None else f"at {stress.rate:.2f}/s"
    what = f"{stress.clients} streams, {stress.requests} requests {arrive}, {stress.new_tokens} new tokens"
    print(f"measuring {what}", file=sys.stderr, flush=True)
    result = asyncio.run(stress_test(url, stress))
    if result.completed < stress.requests:
        raise RuntimeError(f"the server did not answer as it should: {result.report()}")
    return result


def _values(case: str, result: StressResult) -> Iterator[Row]:
    yield Row(case, THROUGHPUT, result.tokens_per_second, "tokens/s")
    if result.stress.rate is not None:
        yield Row(case, "arrivals", result.stress.rate, "requests/s")
    yield from latency_rows(case, result)
    events = len(result.first_token) + len(result.between_tokens)
    yield Row(case, "tokens of an event", result.new_tokens / events, "tokens")
