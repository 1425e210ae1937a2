"""Clients of a server for minutes, what they see, and the memory that the server takes: tools/measure_long_load.py."""

import asyncio
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import torch

from octile.bench.serve.peer.random_folder import V2_LITE, letter_tokenizer, write_random_folder
from octile.bench.serve.peer.vllm import Launch, free_port, server
from octile.models.config import ModelConfig
from octile.serve.process.signals import freeze_loaded
from octile.tokenizer import Tokenizer
from octile.train.config import MODELS
from tests.chat.templates import V31, with_tokens
from tests.serve.http.mixed_load import FOLLOWING, Asked, draw, follows, leave, read_stream, read_whole

MINUTE, TICK = 60.0, 0.005  # seconds of a line, and between two looks at this process's own delay
FIRST = 20.0  # seconds of load that do not count
LONG = 2000  # letters of a long prompt
VOCABULARY = 8192
OK = 200
HEAD = ["answers", "tokens", "wrong", "longest pause, ms", "own delay, ms", "processes, GiB", "GPU, GiB"]
MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ ")  # how the first line of a mapping begins in /proc/PID/smaps


@dataclass
class Minute:
    """What happened in a minute, or in a part of it."""

    answers: int = 0
    tokens: int = 0
    wrong: int = 0
    pause: float = 0.0
    own_delay: float = 0.0
    resident: dict[int, Counter[str]] = field(default_factory=dict)  # bytes by process and what is mapped
    gpu: float = 0.0  # GiB

    def cells(self) -> list[str]:
        """The values as `HEAD` names them; the memory of all processes is a sum, the largest first."""
        pauses = f"{1e3 * self.pause:.0f}", f"{1e3 * self.own_delay:.0f}"
        sizes = sorted((mapped.total() / 2**30 for mapped in self.resident.values()), reverse=True)
        resident = f"{sum(sizes):.3f} = {' + '.join(f'{size:.3f}' for size in sizes)}"
        return [f"{self.answers:,}", f"{self.tokens:,}", f"{self.wrong:,}", *pauses, resident, f"{self.gpu:.3f}"]


@dataclass
class Load:
    """Clients of a server, and what they see."""

    url: str
    minutes: list[Minute] = field(default_factory=list)
    wrong: Counter[str] = field(default_factory=Counter)
    streaming: int = 0  # streams that have begun and not ended
    last: float = 0.0  # when one of them had its last event

    async def run(self, requests: Iterator[Asked], n_clients: int, seconds: float, folder: Path | None = None) -> None:
        """Send requests for so many seconds; with the folder of the server's model, measure each minute."""
        end = time.perf_counter() + seconds
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.minutes.append(Minute())
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as client:

            async def ask() -> None:
                while time.perf_counter() < end:
                    await self._ask(client, next(requests))

            watching = asyncio.create_task(self._watch(folder)) if folder else None
            await asyncio.gather(*(ask() for _ in range(n_clients)))
        if watching and folder:
            watching.cancel()
            self._look(folder)

    async def _ask(self, client: httpx.AsyncClient, request: Asked) -> None:
        try:
            if request.leaves:
                await leave(self.url, request)
                return
            answer = await self._answer(client, request)
        except (httpx.HTTPError, OSError, AssertionError) as error:
            return self._count_wrong(f"{request.kind}: {type(error).__name__}: {error}"[:200])
        if answer is not None:
            self.minutes[-1].answers += 1
            self.minutes[-1].tokens += answer["usage"][1]
            for choice in answer["choices"]:
                ended = choice["finish_reason"] != "length"
                if request.kind in FOLLOWING and ended and not follows(request.kind, choice):
                    self._count_wrong(f"{request.kind} does not follow its grammar")

    async def _answer(self, client: httpx.AsyncClient, request: Asked) -> dict[str, Any] | None:
        if not request.body.get("stream"):
            response = await client.post(request.path, json=request.body)
            if response.status_code == OK:
                return read_whole(response.json())
            return self._count_wrong(f"{request.kind}: status {response.status_code}")
        parts, begun = [], False
        async with client.stream("POST", request.path, json=request.body) as response:
            if response.status_code != OK:
                return self._count_wrong(f"{request.kind}: status {response.status_code}")
            try:
                async for part in response.aiter_text():
                    now = time.perf_counter()
                    if self.streaming:
                        self.minutes[-1].pause = max(self.minutes[-1].pause, now - self.last)
                    self.last = now
                    if not begun:
                        begun, self.streaming = True, self.streaming + 1
                    parts.append(part)
            finally:
                self.streaming -= begun
        return read_stream("".join(parts))

    def _count_wrong(self, what: str) -> None:
        self.minutes[-1].wrong += 1
        self.wrong[what] += 1

    async def _watch(self, folder: Path) -> None:
        begin = before = time.perf_counter()
        while True:
            await asyncio.sleep(TICK)
            now = time.perf_counter()
            self.minutes[-1].own_delay = max(self.minutes[-1].own_delay, now - before - TICK)
            if now - begin >= MINUTE * len(self.minutes):
                await asyncio.to_thread(self._look, folder)  # which would be a pause here
                self.minutes.append(Minute())
                now = time.perf_counter()
            before = now

    def _look(self, folder: Path) -> None:
        minute = self.minutes[-1]
        minute.resident = resident_bytes(str(folder))
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            minute.gpu = (total - free) / 2**30
        values = ", ".join(f"{name}: {cell}" for name, cell in zip(HEAD, minute.cells(), strict=True))
        print(f"minute {len(self.minutes)}: {values}", file=sys.stderr, flush=True)


def resident_bytes(argument: str) -> dict[int, Counter[str]]:
    """The resident memory of the processes with this argument, and of those that they have started.

    Returns:
        bytes by process and by what is mapped: a file, `[heap]`, or `anonymous`.
    """
    parents, found = dict[int, int](), set[int]()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            status = dict(line.split(":", 1) for line in (path / "status").read_text("utf-8").splitlines())
            arguments = (path / "cmdline").read_text("utf-8").split("\0")
        except OSError:  # it has ended
            continue
        parents[int(path.name)] = int(status["PPid"])
        if argument in arguments and "serve" in arguments:
            found.add(int(path.name))
    while grown := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= grown
    return {pid: mapped_bytes(pid) for pid in sorted(found)}


def mapped_bytes(pid: int) -> Counter[str]:
    """The resident bytes of a process by what is mapped; nothing if it has ended."""
    resident, name = Counter[str](), ""
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text("utf-8").splitlines()
    except OSError:
        return resident
    for line in lines:
        if MAPPING.match(line):
            fields = line.split(maxsplit=5)
            name = fields[5] if len(fields) > 5 else "anonymous"
        elif line.startswith("Rss:"):
            resident[name] += 1024 * int(line.split()[1])
    return resident


def growth(first: Minute, last: Minute) -> list[tuple[int, int, str]]:
    """What has grown by a megabyte or more: (bytes, process, what is mapped), the most first."""
    grown = [
        (size - first.resident.get(pid, Counter())[name], pid, name)
        for pid, mapped in last.resident.items()
        for name, size in mapped.items()
    ]
    return sorted((row for row in grown if row[0] >= 2**20), reverse=True)


def write_model(folder: Path, config: ModelConfig, device: str) -> None:
    """Write a model with random FP8 weights, and a tokenizer and template with DeepSeek's tokens."""
    tokenizer = with_tokens(letter_tokenizer(VOCABULARY))
    config = replace(config, vocab_size=-(-tokenizer.vocab_size // 128) * 128)
    with_template = Tokenizer(tokenizer.backend, {**tokenizer.config, "chat_template": V31})
    write_random_folder(folder, config, "fp8", device, with_template)


def drawn_requests() -> Iterator[Asked]:
    """Draw requests without end."""
    tokenizer, seed = with_tokens(letter_tokenizer(VOCABULARY)), 0
    while True:
        for i, asked in enumerate(draw(256, seed, tokenizer, longest=200)):
            body = dict(asked.body)
            if i % 8 == 0 and isinstance(body.get("prompt"), str):
                body["prompt"] = f"{seed} {i} " + body["prompt"] * (LONG // len(body["prompt"]))
            yield replace(asked, body=body)
        seed += 1


def measure(model: str, n_clients: int, seconds: float) -> Load:
    """Serve a model with random weights to so many clients at a time, and return what they saw.

    Args:
        model: "tiny", or "v2_lite".
        n_clients: how many clients there are at a time.
        seconds: how long, after the first seconds, which do not count.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made) / "micro"  # the name that the requests have
        write_model(folder, V2_LITE if model == "v2_lite" else MODELS["tiny"](), device)
        port = free_port()
        command = [sys.executable, "-m", "octile", "serve", str(folder), "--port", str(port)]
        command += ["--reasoning-parser", "deepseek_r1", "--tool-call-parser", "deepseek_v31"]
        with server(Launch("octile serve", command, {}, Path(made) / "serve.log"), port) as url:
            load, sending = Load(url), drawn_requests()
            asyncio.run(Load(url, wrong=load.wrong).run(sending, n_clients, FIRST))
            freeze_loaded()
            asyncio.run(load.run(sending, n_clients, seconds, folder))
    return load
