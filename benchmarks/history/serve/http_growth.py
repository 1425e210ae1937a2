"""What grows in the HTTP process of `octile serve` under load on a CPU: its memory by allocator, and its objects.

    python -m benchmarks.history.serve.http_growth 600          # its engine is the tests' that repeats prompts
    python -m benchmarks.history.serve.http_growth 600 served   # an untrained model of `tiny`'s shape in FP8

The process is the one of `octile serve`. The clients are another one, 64 at a time, each request with a connection of
its own: those of tools/measure_long_load.py, with answers of 20 tokens at most. A probe in a thread of the HTTP
process, and with `served` of the engine's, too, looks every 30 seconds. In the end no request runs, and it has garbage
collected and malloc release what it can. Sizes are KiB: resident (all, and without files), what malloc holds in use
and free, what Python's allocator of small objects has and has in use; then objects that garbage collections visit.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from octile.serve.http import worker
from octile.serve.http.address import bind, url_of
from octile.serve.http.config import HttpConfig, Limits, Parsers
from tests.malloc_info import LIBC, malloc_info

if TYPE_CHECKING:
    from tests.serve.http.mixed_load import Asked

# torch is imported late, where it is needed: the HTTP process imports this module, and has no torch
CLIENTS, STEP_SECONDS, EVERY, MAX_TOKENS, OK = 64, 0.004, 30.0, 20, 200
FOLDER = "HTTP_GROWTH"  # the variable of the environment with the folder for what is found
HTTP, ENGINE = "HTTP process", "engine"


def small_objects() -> tuple[int, int]:
    """KiB that Python's allocator of small objects has, and those in use."""
    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        sys._debugmallocstats()
        os.dup2(before, 2)
        os.close(before)
        file.seek(0)
        text = file.read().decode()
    counts = dict(
        re.findall(r"^# (arenas allocated current|bytes in allocated blocks) +=\s+([\d,]+)$", text, re.MULTILINE)
    )
    n_arenas, used = (int(count.replace(",", "")) for count in counts.values())
    return n_arenas << 10, used >> 10


def memory() -> dict[str, int]:
    """The memory of this process, in KiB."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    info, (arenas, used) = malloc_info(), small_objects()
    return {
        "resident": int(fields["VmRSS"].split()[0]),
        "anonymous": int(fields["RssAnon"].split()[0]),
        "malloc": (info.uordblks + info.hblkhd) >> 10,
        "free": info.fordblks >> 10,
        "python": arenas,
        "python used": used,
    }


def objects() -> Counter[str]:
    """Objects of each type that garbage collections visit, which are not those of the start."""
    return Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())


def probe(folder: Path, name: str) -> None:
    """Write the memory every so many seconds, and in the end what can be released."""
    begin, n, file = time.perf_counter(), 0, folder / f"{name}.jsonl"

    def write(what: str, **others: Any) -> None:
        row = {"what": what, **memory(), "objects": len(gc.get_objects()), **others}
        with file.open("a") as lines:
            print(json.dumps(row), file=lines)

    while not (folder / "end").exists():
        if time.perf_counter() >= begin + n * EVERY:
            write(f"{EVERY * n:.0f} s")
            n += 1
        time.sleep(0.5)
    write("no request")
    gc.collect()
    write("collected")
    LIBC.malloc_trim(0)
    write("trimmed", types=objects().most_common(8))
    file.rename(folder / f"{name}.done")


def start_probe(folder: Path, name: str) -> None:
    """Have a thread write the memory of this process."""
    threading.Thread(target=probe, args=(folder, name), daemon=True).start()


served = worker.answer


def answer(*given: Any) -> None:
    """What the HTTP process runs, with a probe."""
    start_probe(Path(os.environ[FOLDER]), HTTP)
    served(*given)


class Clients:
    """Clients, each with a connection for each request."""

    def __init__(self, url: str):
        self.url, (self.host, _, self.port) = url, url.removeprefix("http://").rpartition(":")
        self.answers, self.wrong = 0, Counter[str]()

    async def ask(self, request: Asked) -> None:
        """Send a request, and read the answer, or leave."""
        from tests.serve.http.mixed_load import leave

        if request.leaves:
            return await leave(self.url, request)
        reader, writer = await asyncio.open_connection(self.host, int(self.port))
        content = json.dumps(request.body).encode()
        head = f"POST {request.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
        found = await reader.read()
        writer.close()
        self.answers += 1
        if not found.startswith(b"HTTP/1.1 200") or (request.body.get("stream") and b"data: [DONE]" not in found):
            self.wrong[f"{request.kind}: {found[:200]!r}"] += 1

    async def run(self, seconds: float, folder: Path) -> None:
        """Send requests for so long, and write how many have been answered."""
        end, requests = time.perf_counter() + seconds, short_requests()

        async def go_on() -> None:
            while time.perf_counter() < end:
                try:
                    await self.ask(next(requests))
                except (OSError, AssertionError) as error:
                    self.wrong[repr(error)] += 1

        async def count() -> None:
            while True:
                with (folder / "answers").open("a") as file:
                    print(f"{self.answers:,}", file=file)
                await asyncio.sleep(EVERY)

        counting = asyncio.create_task(count())
        await asyncio.gather(*(go_on() for _ in range(CLIENTS)))
        counting.cancel()
        print(f"{self.answers:,} answers, wrong: {dict(self.wrong) or 'none'}", flush=True)


def short_requests() -> Iterator[Asked]:
    """Requests without end, with short answers."""
    from tools.long_load import drawn_requests

    for asked in drawn_requests():
        yield replace(asked, body={**asked.body, "max_tokens": min(asked.body["max_tokens"], MAX_TOKENS)})


def send(url: str, seconds: float, folder: Path) -> None:
    """Send requests for so long."""
    asyncio.run(Clients(url).run(seconds, folder))


def is_open(url: str) -> bool:
    """Whether a server answers."""
    try:
        return httpx.get(f"{url}/health").status_code == OK
    except httpx.HTTPError:
        return False


def load(url: str, seconds: float, folder: Path, names: list[str]) -> None:
    """Have clients send requests, print what the probes have found, and end the server."""
    while not is_open(url):
        time.sleep(0.5)
    clients = multiprocessing.get_context("spawn").Process(target=send, args=(url, seconds, folder))
    clients.start()
    clients.join()
    time.sleep(5)
    (folder / "end").touch()
    files = [folder / f"{name}.done" for name in names]
    while not all(file.exists() for file in files):
        time.sleep(0.5)
    answers = (folder / "answers").read_text().splitlines()
    for name, file in zip(names, files, strict=True):
        print(name)
        for i, row in enumerate(map(json.loads, file.read_text().splitlines())):
            cells = [f"{value:,} {field}" for field, value in row.items() if isinstance(value, int)]
            print(f"{row['what']}: {answers[i] if i < len(answers) else '':>7} answers, {', '.join(cells)}")
        print("objects that stay:", row["types"], flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> None:
    seconds, is_served = float(sys.argv[1]), sys.argv[2:] == ["served"]
    from octile.bench.serve.peer.random_folder import letter_tokenizer
    from octile.bench.serve.peer.vllm import free_port
    from octile.cli import main as run
    from octile.serve.http.process import HttpProcess
    from octile.tokenizer import Tokenizer
    from octile.train.config import MODELS
    from tests.chat.templates import V31, with_tokens
    from tests.serve.fake_engine import FakeEngine
    from tools.long_load import VOCABULARY, write_model

    def begin(url: str, *names: str) -> None:
        threading.Thread(target=load, args=(url, seconds, folder, [*names]), daemon=True).start()

    worker.answer = answer  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        os.environ[FOLDER] = made
        if is_served:
            write_model(folder / "micro", MODELS["tiny"](), "cpu")
            port = free_port()
            start_probe(folder, ENGINE)
            begin(f"http://127.0.0.1:{port}", HTTP, ENGINE)
            parsers = "--reasoning-parser", "deepseek_r1", "--tool-call-parser", "deepseek_v31"
            return run(["serve", str(folder / "micro"), "--port", str(port), *parsers])
        engine = FakeEngine(with_tokens(letter_tokenizer(VOCABULARY)), STEP_SECONDS)
        Tokenizer(engine.tokenizer.backend, {**engine.tokenizer.config, "chat_template": V31}).save(folder)
        bound = bind("127.0.0.1", 0)
        process, config = (
            HttpProcess(bound),
            HttpConfig("micro", Limits(), parsers=Parsers("deepseek_r1", "deepseek_v31")),
        )
        given = folder, engine.tokenizer.vocab_size, engine.max_position, engine.stats(), {}, None, config
        process.listen(worker.Start(*given))
        begin(url_of(bound), HTTP)
        process.serve(engine, "the server ends")
    return None


if __name__ == "__main__":
    main()
