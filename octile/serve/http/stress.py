"""A stress test of bounded length: many clients stream completions from a server with OpenAI's protocol.

    result = asyncio.run(stress_test("http://127.0.0.1:8000", Stress(clients=64, requests=256)))
    print(result.report())

Without a rate each client sends its next request when it has an answer. With one, requests arrive as a Poisson process,
whatever the server does, and the clients are the streams that can be open at once.

Times are those of a client: from the arrival of a request, which without a rate is when it is sent, to its first event
with text, and between two such events. Tokens that arrive in one event count once between tokens; the number of all
tokens is the server's own count, in its usage.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any
from urllib.parse import urlsplit

from octile.validation import Range, check_fields

LETTERS = "abcdefghijklmnopqrstuvwxyz"
OK = 200


@dataclass(frozen=True)
class Stress:
    """What the clients do.

    Attributes:
        clients: how many there are; each has one request at a time.
        requests: number of requests of all clients together.
        prompt_words: random words of each prompt; no two prompts begin alike.
        new_tokens: tokens of each answer.
        seconds: when they are over, no request is begun and those that run are canceled.
        seed: seed of the prompts, and of the times at which they arrive.
        rate: requests that arrive per second, as a Poisson process; one waits while every client has one. None: a
            client that has an answer sends the next request.
        prompt_tokens: random tokens of each prompt, which is sent as a list of them in place of words.
        vocab_size: the tokens are below it; needed with prompt_tokens.
        temperature: temperature of the sampling; 0 is greedy.

    Raises:
        TypeError, ValueError: a field has another type or is outside its range, or only one of prompt_tokens and
            vocab_size is given.
    """

    clients: Annotated[int, Range(at_least=1, at_most=100_000)] = 64
    requests: Annotated[int, Range(at_least=1)] = 256
    prompt_words: Annotated[int, Range(at_least=1, at_most=1_000_000)] = 32
    new_tokens: Annotated[int, Range(at_least=1)] = 64
    seconds: Annotated[float, Range(above=0, at_most=3600)] = 60.0
    seed: int = 0
    rate: Annotated[float, Range(above=0, at_most=1_000_000)] | None = None
    prompt_tokens: Annotated[int, Range(at_least=1, at_most=1_000_000)] | None = None
    vocab_size: Annotated[int, Range(at_least=1)] | None = None
    temperature: Annotated[float, Range(at_least=0, at_most=2)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.prompt_tokens is None) != (self.vocab_size is None):
            missing, given = sorted(("prompt_tokens", "vocab_size"), key=lambda name: getattr(self, name) is not None)
            raise ValueError(f"{missing} is needed, too, with {given}")


@dataclass
class StressResult:
    """What the clients saw.

    Attributes:
        stress: what they did.
        seconds: from the first request to the last answer.
        completed: answers that are complete.
        canceled: requests that time was too short for, of those that had begun.
        prompt_tokens, new_tokens: counts of the complete answers.
        first_token: seconds from the arrival of each request to its first token.
        between_tokens: seconds between two events of an answer.
        refused: how many requests had each status that is not 200.
        broken: answers that ended with an error or without the end of the stream, by what was wrong.
    """

    stress: Stress
    seconds: float = 0.0
    completed: int = 0
    canceled: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    first_token: list[float] = field(default_factory=list)
    between_tokens: list[float] = field(default_factory=list)
    refused: Counter[int] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of the complete answers per second of the test."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    def report(self) -> str:
        """The result in lines."""
        refused = ", ".join(f"{count} with status {status}" for status, count in sorted(self.refused.items()))
        arrivals = f", {self.stress.rate:g} arrivals/s" if self.stress.rate else ""
        lines = [
            f"{self.stress.clients} clients{arrivals}, {self.completed} of {self.stress.requests} requests answered in "
            f"{self.seconds:.1f} s",
            f"throughput       {self.tokens_per_second:,.1f} new tokens/s; {self.prompt_tokens} tokens read",
            f"first token      {_times(self.first_token)}",
            f"between tokens   {_times(self.between_tokens)}",
            f"refused          {refused or 'none'}",
        ]
        if self.canceled:
            lines.append(f"canceled         {self.canceled}, when {self.stress.seconds:g} s were over")
        lines += [f"broken           {count}: {what}" for what, count in self.broken.items()]
        return "\n".join(lines)


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of the values does not exceed; NaN if there is none."""
    if not values:
        return float("nan")
    return sorted(values)[max(0, -(-len(values) * round(share * 100) // 100) - 1)]


async def stress_test(url: str, stress: Stress, api_key: str | None = None) -> StressResult:
    """Send requests to a server and time its answers.

    Args:
        url: address of the server, without a path: http://HOST:PORT.
        stress: what the clients do.
        api_key: key of the server, if it needs one.

    Raises:
        ValueError: the URL is not such a one.
        ConnectionError: there is no server, or it does not name a model.
    """
    server = _Server.of(url, api_key)
    model = await server.model()
    result, prompts = StressResult(stress), _prompts(stress)
    begin = time.perf_counter()
    try:
        async with asyncio.timeout(stress.seconds), asyncio.TaskGroup() as clients:
            if stress.rate is None:
                for _ in range(min(stress.clients, stress.requests)):
                    clients.create_task(_client(server, model, prompts, result))
            else:
                free = asyncio.Semaphore(stress.clients)
                for arrival, prompt in zip(arrivals(stress.rate, stress.requests, stress.seed), prompts, strict=True):
                    await asyncio.sleep(begin + arrival - time.perf_counter())
                    clients.create_task(_stream(server, model, prompt, begin + arrival, free, result))
    except TimeoutError:
        pass
    result.seconds = time.perf_counter() - begin
    return result


def arrivals(rate: float, n: int, seed: int) -> list[float]:
    """The seconds at which n requests of a Poisson process with this rate per second arrive."""
    chosen = random.Random(seed)
    return list(accumulate(chosen.expovariate(rate) for _ in range(n)))


async def _client(server: _Server, model: str, prompts: Iterator[str | list[int]], result: StressResult) -> None:
    for prompt in prompts:
        await _request(server, model, prompt, time.perf_counter(), result)


async def _stream(
    server: _Server, model: str, prompt: str | list[int], arrival: float, free: asyncio.Semaphore, result: StressResult
) -> None:
    async with free:
        await _request(server, model, prompt, arrival, result)


async def _request(server: _Server, model: str, prompt: str | list[int], arrival: float, result: StressResult) -> None:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": result.stress.new_tokens,
        "temperature": result.stress.temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        await _answer(server, body, arrival, result)
    except asyncio.CancelledError:
        result.canceled += 1
        raise
    except (OSError, EOFError, ValueError) as error:
        result.broken[f"{type(error).__name__}: {error}"] += 1


async def _answer(server: _Server, body: dict[str, Any], arrival: float, result: StressResult) -> None:
    """Read one answer into the result."""
    last, usage, is_first = arrival, None, True
    async with aclosing(server.events(body)) as events:
        status = await anext(events)
        if status != OK:
            result.refused[int(status)] += 1
            return
        async for event in events:
            if event == "[DONE]":
                break
            value, now = json.loads(event), time.perf_counter()
            if "error" in value:
                result.broken[value["error"]["message"]] += 1
                return
            usage = value.get("usage") or usage
            if value["choices"]:
                (result.first_token if is_first else result.between_tokens).append(now - last)
                last, is_first = now, False
        else:
            result.broken["the stream has no end"] += 1
            return
    result.completed += 1
    if usage is not None:
        result.prompt_tokens += usage["prompt_tokens"]
        result.new_tokens += usage["completion_tokens"]


@dataclass(frozen=True)
class _Server:
    """The address of a server, and HTTP/1.1 as far as the test needs it: one request per connection."""

    host: str
    port: int
    authorization: str

    @classmethod
    def of(cls, url: str, api_key: str | None) -> _Server:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/"):
            raise ValueError(f"url must be http://HOST:PORT, not {url!r}")
        return cls(parts.hostname, parts.port or 80, f"Authorization: Bearer {api_key}\r\n" if api_key else "")

    async def model(self) -> str:
        """The name of the model."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(self._head("GET /v1/models", ""))
            status, headers = await _read_head(reader)
            content = await reader.readexactly(int(headers.get("content-length", 0)))
        finally:
            writer.close()
        if status != OK:
            raise ConnectionError(f"the server at {self.host}:{self.port} answers with status {status}: {content!r}")
        return json.loads(content)["data"][0]["id"]

    async def events(self, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """Yield the status of the response to a completion, and after 200 its events."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            content = json.dumps(body).encode()
            head = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
            writer.write(self._head("POST /v1/completions", head) + content)
            status, _ = await _read_head(reader)
            yield status
            if status != OK:
                return
            async for line in _lines(reader):
                if line.startswith(b"data: "):
                    yield line[6:].decode()
        finally:
            writer.close()

    def _head(self, request: str, headers: str) -> bytes:
        host = f"Host: {self.host}:{self.port}\r\nConnection: close\r\n"
        return f"{request} HTTP/1.1\r\n{host}{self.authorization}{headers}\r\n".encode()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return int(first.split()[1]), headers


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a chunked body."""
    rest = b""
    while size := int(await reader.readline(), 16):
        *lines, rest = (rest + await reader.readexactly(size)).split(b"\n")
        await reader.readexactly(2)
        for line in lines:
            yield line


def _prompts(stress: Stress) -> Iterator[str | list[int]]:
    chosen = random.Random(stress.seed)
    for i in range(stress.requests):
        if stress.prompt_tokens is not None and stress.vocab_size is not None:
            yield chosen.choices(range(stress.vocab_size), k=stress.prompt_tokens)
            continue
        words = ("".join(chosen.choices(LETTERS, k=chosen.randint(2, 8))) for _ in range(stress.prompt_words))
        yield f"{i} {' '.join(words)}"


def _times(values: list[float]) -> str:
    """Median and 99th percentile in milliseconds."""
    if not values:
        return "none"
    return f"p50 {1e3 * percentile(values, 0.5):,.1f} ms, p99 {1e3 * percentile(values, 0.99):,.1f} ms"
