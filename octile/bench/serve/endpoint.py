"""The speed of `octile serve`, started in a process of its own, as its clients see it.

1 client              one request after the other
64 clients            each has one request at a time
1,000 clients         all at once: more than the server takes; what it refuses is counted
1 client, 1 draft …   speculative decoding with up to one, two and four drafts, if the model has a multi-token
                      prediction layer: answers of 256 tokens, with and without drafts
"""

from __future__ import annotations

import asyncio
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from octile.bench.goals import FASTEST_DRAFTS, LONG_CLIENT, THROUGHPUT
from octile.bench.rows import Row, compare
from octile.bench.serve.latency import latency_rows
from octile.checkpoint.hugging_face import read_model_config
from octile.command_text import path_argument
from octile.extras import require
from octile.serve.http.command import PACKAGES
from octile.serve.http.stress import Stress, StressResult, stress_test
from octile.text import format_count

WARM_UP = Stress(clients=64, requests=64, new_tokens=8)
ONE = Stress(clients=1, requests=8, new_tokens=64)
MANY = Stress(clients=64, requests=256, new_tokens=64)
CROWD = Stress(clients=1000, requests=1000, prompt_words=8, new_tokens=8)
LONG = Stress(clients=1, requests=8, new_tokens=256)
DRAFTS = 1, 2, 4  # draft tokens per step at most
ONE_CLIENT, MANY_CLIENTS, CROWD_CASE = "1 client", "64 clients", "1,000 clients at once"


def rows(run: Path) -> Iterator[Row]:
    """Yield throughput, times and refusals.

    Raises:
        ImportError: a package of the extra `serve` is missing; no server is started.
        FileNotFoundError: there is no model or no tokenizer.
        RuntimeError: the server ends early, or breaks a stream.
    """
    require(*PACKAGES, extra="serve")
    can_draft = read_model_config(run).num_nextn_predict_layers > 0
    with _announced_server(run) as url:
        one, many, crowd = (_run(url, load) for load in (ONE, MANY, CROWD))
        long = _run(url, LONG) if can_draft else None
    yield Row(ONE_CLIENT, THROUGHPUT, one.tokens_per_second, "tokens/s")
    yield from latency_rows(ONE_CLIENT, one)
    yield compare(MANY_CLIENTS, THROUGHPUT, many.tokens_per_second, "tokens/s", ONE_CLIENT, one.tokens_per_second)
    yield from latency_rows(MANY_CLIENTS, many)
    yield Row(CROWD_CASE, "answered", crowd.completed, "requests")
    yield Row(CROWD_CASE, "refused with 503", crowd.refused[503], "requests")
    yield Row(
        CROWD_CASE, "neither answered nor refused", CROWD.requests - crowd.completed - crowd.refused[503], "requests"
    )
    yield from latency_rows(CROWD_CASE, crowd)
    if long is not None:
        yield Row(LONG_CLIENT, THROUGHPUT, long.tokens_per_second, "tokens/s")
        yield from _drafted(run, long.tokens_per_second)


def _drafted(run: Path, undrafted: float) -> Iterator[Row]:
    """Yield throughput with drafts, vs. that without, the share of drafts that are accepted, and drafts per step."""
    speeds = list[float]()
    for n_drafts in DRAFTS:
        with _announced_server(run, "--engine.n-drafts", str(n_drafts)) as url:
            before = _counts(url)
            speed = _run(url, LONG).tokens_per_second
            generated, verified, accepted = (b - a for a, b in zip(before, _counts(url), strict=True))
        case = f"{LONG_CLIENT}, {format_count(n_drafts, 'draft')}"
        speeds.append(speed)
        yield compare(case, THROUGHPUT, speed, "tokens/s", LONG_CLIENT, undrafted)
        yield Row(case, "drafts accepted", 100 * accepted / verified, "%")
        yield Row(case, "drafts per step", verified / (generated - accepted), "drafts")
    yield compare(FASTEST_DRAFTS, THROUGHPUT, max(speeds), "tokens/s", LONG_CLIENT, undrafted)


@contextmanager
def _announced_server(run: Path, *options: str) -> Iterator[str]:
    """Start a server, say so on stderr, and warm it up."""
    print(f"starting octile serve {shlex.join((path_argument(run), *options))}", file=sys.stderr, flush=True)
    with serving(run, *options) as url:
        _run(url, WARM_UP, "warming up with")
        yield url


@contextmanager
def serving(run: Path, *options: str) -> Iterator[str]:
    """Start `octile serve` in a process of its own, and yield its URL.

    Raises:
        RuntimeError: it ends before it serves.
    """
    command = [sys.executable, "-m", "octile", "serve", path_argument(run), "--port", "0", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        for line in server.stdout:
            if address := re.search(r"^try it at (http://[^,]+),", line):
                yield address[1]
                break
        else:
            error = server.communicate()[1].strip()
            raise RuntimeError(f"octile serve ended with exit code {server.returncode} before it served: {error}")
    finally:
        server.terminate()
        server.communicate()


def _run(url: str, stress: Stress, why: str = "measuring") -> StressResult:
    """Run a stress test in which no stream may break, and say why on stderr.

    Raises:
        RuntimeError: one did, or none was complete.
    """
    what = f"{format_count(stress.clients, 'client')}, {format_count(stress.requests, 'request')}"
    print(f"{why} {what} of {format_count(stress.new_tokens, 'token')}", file=sys.stderr, flush=True)
    result = asyncio.run(stress_test(url, stress))
    if result.broken or not result.completed:
        raise RuntimeError(f"the server did not answer as it should: {result.report()}")
    return result


def _counts(url: str) -> list[float]:
    """The tokens that the server has generated, the drafts that it has verified, and those that it has accepted."""
    with urlopen(f"{url}/metrics") as response:
        text = response.read().decode()
    names = "generation", "spec_decode_num_draft", "spec_decode_num_accepted"
    return [float(re.findall(rf"^octile_{name}_tokens_total\{{.*\}} (.*)$", text, re.MULTILINE)[0]) for name in names]
