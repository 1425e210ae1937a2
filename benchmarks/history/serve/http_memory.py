"""What malloc holds in a server's HTTP side, and how long its garbage collections take, under load on a CPU.

    python -m benchmarks.history.serve.http_memory 60

The engine is the tests' that repeats prompts, in the same process; the clients, 64 at a time with the requests of
tools/measure_long_load.py, are another one.
"""

import asyncio
import gc
import multiprocessing
import os
import sys
import time
from typing import Any

from octile.bench.serve.peer.random_folder import letter_tokenizer
from octile.serve.engine.request import Request
from octile.serve.http.config import Limits, Parsers
from octile.serve.process.signals import freeze_loaded
from tests.chat.templates import V31, with_tokens
from tests.malloc_info import malloc_info
from tests.serve.fake_engine import FakeEngine
from tests.serve.http.conftest import Served
from tools.long_load import Load, drawn_requests

CLIENTS, VOCABULARY, STEP_SECONDS, EVERY = 64, 8192, 0.006, 10.0


class Repeating(FakeEngine):
    """The tests' engine, which holds nothing of requests that have ended."""

    def submit(self, request: Request) -> None:
        super().submit(request)
        self.samplings.clear()


def send(url: str, seconds: float) -> None:
    """Send requests for so long."""
    asyncio.run(Load(url).run(drawn_requests(), CLIENTS, seconds))


def main() -> None:
    seconds = float(sys.argv[1])
    engine = Repeating(with_tokens(letter_tokenizer(VOCABULARY)), STEP_SECONDS)
    served = Served(engine, Limits(), (), V31, parsers=Parsers("deepseek_r1", "deepseek_v31"))
    freeze_loaded()
    collected, begin = list[tuple[float, int]](), [0.0]

    def look(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            begin[0] = time.perf_counter()
        elif info["generation"] == 2:
            collected.append((1e3 * (time.perf_counter() - begin[0]), info["collected"]))

    gc.callbacks.append(look)
    clients = multiprocessing.get_context("spawn").Process(target=send, args=(served.url, seconds))
    clients.start()
    first = time.perf_counter()
    while clients.is_alive():
        clients.join(EVERY)
        found = malloc_info()
        print(
            f"{time.perf_counter() - first:.0f} s: in use {found.uordblks >> 20} MiB, free {found.fordblks >> 20} MiB, "
            f"{engine.added:,} answers, {len(collected)} collections of all objects, at most "
            f"{max((ms for ms, _ in collected), default=0):.0f} ms",
            flush=True,
        )
    os._exit(0)


if __name__ == "__main__":
    main()
