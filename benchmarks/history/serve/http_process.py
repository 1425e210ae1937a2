"""CPU time of the HTTP process for a token, with an engine that steps at a fixed pace and computes nothing.

python http_process.py --streams 64 256 --step-ms 30 12 0 --paths completions chat

Engine, HTTP process and clients are processes of their own. The clients receive and count, and parse nothing. A step
gives each stream one token. If the HTTP process needs less time for all streams than a step takes, each token is an
event of its own. With a step of 0 ms tokens come as fast as they are read. `whole` are completions that are not
streamed.
"""

import argparse
import inspect
import json
import os
import select
import signal
import socket
import tempfile
import time
import urllib.request
from multiprocessing import Pipe, Process
from pathlib import Path

from octile.serve.engine.request import Output
from octile.serve.engine.stats import Stats
from octile.serve.http.address import bind
from octile.serve.http.config import HttpConfig, Limits
from octile.serve.http.process import HttpProcess
from octile.serve.http.worker import Start
from octile.tokenizer import Tokenizer

CONTEXT = 10**6
TEXTS = [" the", " of", " model", " a", " token", " is", " computed", ' "quoted"', " é"]  # a blank each


class Engine:
    """A token for each request and step; what real engines send, and nothing is computed."""

    idle_seconds = None

    def __init__(self, step_seconds: float):
        self.step_seconds, self.next_step = step_seconds, 0.0
        self.requests: dict[int, int] = {}
        self.steps = self.generated = 0

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def submit(self, request) -> None:
        self.requests[request.id] = 0

    def cancel(self, request_id: int) -> bool:
        return self.requests.pop(request_id, None) is not None

    def step(self) -> list[Output]:
        now = time.perf_counter()
        self.next_step = max(self.next_step + self.step_seconds, now)
        time.sleep(self.next_step - now)
        self.steps += 1
        self.generated += len(self.requests)
        text, token = TEXTS[self.steps % len(TEXTS)], 100 + self.steps % 150
        return [Output(request_id, (token,), text, cached_tokens=0) for request_id in self.requests]

    def stats(self) -> Stats:
        return Stats(running=len(self.requests), n_pages=4096, steps=self.steps, generated_tokens=self.generated)

    def wake(self) -> None:
        pass

    def close(self) -> None:
        self.requests.clear()


def serve(connection, step_seconds: float) -> None:
    """The process of the engine."""
    with tempfile.TemporaryDirectory() as folder:
        Tokenizer.train([inspect.getsource(argparse)], 320).save(folder)
        with bind("127.0.0.1", 0) as bound:
            port = bound.getsockname()[1]
            http = HttpProcess(bound)
        engine = Engine(step_seconds)
        config = HttpConfig("model", Limits(in_flight=1024, new_tokens=CONTEXT))
        http.listen(Start(Path(folder), 320, CONTEXT, engine.stats(), {}, None, config))
        connection.send((port, http.pid))
        http.serve(engine, f"a step of {1e3 * step_seconds:g} ms")


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int(Path(task, "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def generated(port: int) -> int:
    """Tokens that the engine has generated."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as response:
        lines = response.read().decode().splitlines()
    return int(next(float(line.split()[-1]) for line in lines if line.startswith("octile_generation_tokens_total")))


def request(port: int, path: str) -> socket.socket:
    body = {"model": "model", "max_tokens": CONTEXT // 2, "stream": path != "whole", "temperature": 0}
    if path == "chat":
        body["messages"] = [{"role": "user", "content": "Hello"}]
    else:
        body["prompt"] = "Hello"
    content = json.dumps(body).encode()
    url = "/v1/chat/completions" if path == "chat" else "/v1/completions"
    head = f"POST {url} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(head.encode() + content)
    client.setblocking(False)
    return client


def load(port: int, http: int, engine: int, streams: int, path: str, seconds: float, wait: float) -> dict:
    """Open streams, and count what arrives while all of them are open."""
    clients = {client.fileno(): client for client in (request(port, path) for _ in range(streams))}
    poll = select.epoll()
    for number in clients:
        poll.register(number, select.EPOLLIN)

    def receive(until: float) -> tuple[int, int, int, list[float]]:
        n_bytes = events = blanks = 0
        last: dict[int, float] = {}
        gaps = []
        while (now := time.perf_counter()) < until:
            for number, _ in poll.poll(until - now, 1024):
                data = clients[number].recv(2**20)
                if not data:
                    raise EOFError("a stream has ended")
                n_bytes += len(data)
                events += data.count(b"data: ")
                blanks += data.count(b" ")
                now = time.perf_counter()
                if number in last:
                    gaps.append(now - last[number])
                last[number] = now
        return n_bytes, events, blanks - events, gaps

    receive(time.perf_counter() + wait)
    n_before = generated(port)
    begin, before = time.perf_counter(), (cpu_seconds(http), cpu_seconds(engine), time.process_time())
    n_bytes, events, tokens, gaps = receive(begin + seconds)
    taken, after = time.perf_counter() - begin, (cpu_seconds(http), cpu_seconds(engine), time.process_time())
    if path == "whole":
        tokens = generated(port) - n_before
    for client in clients.values():
        client.close()
    cpu = [1e6 * (b - a) / max(tokens, 1) for a, b in zip(before, after, strict=True)]
    gaps.sort()
    return {
        "path": path,
        "streams": streams,
        "tokens_per_second": round(tokens / taken),
        "tokens_per_event": round(tokens / events, 2) if events else None,
        "http_us_per_token": round(cpu[0], 2),
        "http_us_per_event": round(cpu[0] * tokens / events, 2) if events else None,
        "http_share_of_core": round(cpu[0] * tokens / taken / 1e6, 2),
        "engine_us_per_token": round(cpu[1], 2),
        "client_us_per_token": round(cpu[2], 2),
        "bytes_per_token": round(n_bytes / max(tokens, 1)),
        "gap_ms_p50_p99": [round(1e3 * gaps[int(len(gaps) * share)], 2) for share in (0.5, 0.99)] if gaps else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--step-ms", type=float, nargs="+", default=[30.0, 12.0, 0.0])
    parser.add_argument("--paths", nargs="+", default=["completions", "chat"], choices=["completions", "chat", "whole"])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--wait", type=float, default=2.0, help="seconds before the counting begins")
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    for step_ms in args.step_ms:
        ours, other = Pipe()
        server = Process(target=serve, args=(other, step_ms / 1e3))
        server.start()
        port, http = ours.recv()
        for path in args.paths:
            for streams in args.streams:
                for _ in range(args.repeat):
                    found = load(port, http, server.pid, streams, path, args.seconds, args.wait)
                    print(json.dumps({"step_ms": step_ms, **found}), flush=True)
                    time.sleep(1)
        os.kill(server.pid, signal.SIGTERM)
        server.join()


if __name__ == "__main__":
    main()
