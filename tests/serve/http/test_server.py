"""The server: it answers, and drains when it is to end."""

import json
import os
import resource
import socket
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import pytest

import octile
from octile.serve.http import service
from octile.serve.http.config import Limits
from octile.serve.http.server import max_connections
from octile.tokenizer import Tokenizer
from tests.serve.fake_engine import FakeEngine
from tests.serve.http.conftest import Served, connect, wait_until
from tests.worlds import forked_context

COMPLETION = {"model": "micro", "prompt": "a", "max_tokens": 100}


def ask(served: Served, body: dict, timeout: float = 5) -> Future[httpx.Response]:
    """Ask for a completion in a thread."""
    return ThreadPoolExecutor(1).submit(httpx.post, f"{served.url}/v1/completions", json=body, timeout=timeout)


def test_health(served):
    response = httpx.get(f"{served.url}/health")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})


@pytest.mark.parametrize("path", ["/health/", "/v1/models/", "/v1/models/micro//", "/metrics/"])
def test_a_path_with_slashes_at_its_end_is_that_without_them(served, path):
    response = httpx.get(f"{served.url}{path}")  # which follows no redirect
    assert response.status_code == 200
    assert response.headers["content-type"] == httpx.get(f"{served.url}{path.rstrip('/')}").headers["content-type"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize(
    ("defaults", "given", "expected"),
    [
        (None, {}, (1.0, 1.0, 0)),
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, {}, (0.6, 0.95, 20)),
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, {"temperature": None, "top_k": None}, (0.6, 0.95, 20)),
        ({"temperature": 0.0, "top_k": 20}, {"temperature": 0.5, "top_p": 0.5, "top_k": -1}, (0.5, 0.5, 0)),
    ],
)
def test_the_models_sampling_values_are_those_of_requests_that_give_none(serve, path, defaults, given, expected):
    served = serve(defaults=defaults)
    body = {"model": "micro", "prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **given}
    del body["messages" if path == "completions" else "prompt"]
    assert httpx.post(f"{served.url}/v1/{path}", json=body).status_code == 200
    (sampling,) = served.engine.samplings
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == expected


def health(served) -> tuple[int, str]:
    response = httpx.get(f"{served.url}/health", timeout=30)
    return response.status_code, response.json()["status"]


def step_age(served) -> float:
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("octile_engine_step_age_seconds{")).split()[1])


def test_an_engine_that_hangs_is_unhealthy_until_its_step_ends(serve, monkeypatch):
    monkeypatch.setattr(service, "HUNG_SECONDS", 0.1)
    served = serve()
    ask(served, COMPLETION).result()
    wait_until(served.is_idle)
    served.engine.may_step.clear()
    time.sleep(0.2)  # nothing runs
    assert (step_age(served), health(served)) == (0, (200, "ok"))
    asking = ask(served, COMPLETION, timeout=60)
    wait_until(lambda: step_age(served) > 0.1)
    status, why = health(served)
    assert status == 503
    assert why.startswith("the engine hangs: it has requests, and no step has ended for ")
    served.engine.may_step.set()
    assert asking.result().status_code == 200
    wait_until(lambda: health(served) == (200, "ok"))


def test_the_first_step_may_take_longer(serve, monkeypatch):
    monkeypatch.setattr(service, "HUNG_SECONDS", 0.0)
    served = serve()
    served.engine.may_step.clear()
    asking = ask(served, COMPLETION, timeout=60)
    wait_until(lambda: step_age(served) > 0)
    assert health(served) == (200, "ok")
    monkeypatch.setattr(service, "FIRST_STEP_SECONDS", 0.0)
    assert health(served)[0] == 503
    served.engine.may_step.set()
    asking.result()


@pytest.mark.parametrize("path", ["", "health", "ping", "load", "version", "metrics", "v1/models", "v1/models/micro"])
def test_monitors_may_ask_with_head(served, path):
    response = httpx.head(f"{served.url}/{path}")
    assert (response.status_code, response.content) == (200, b"")


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("health", {"GET", "HEAD", "OPTIONS"}),
        ("v1/models", {"GET", "HEAD", "OPTIONS"}),
        ("ping", {"GET", "HEAD", "POST", "OPTIONS"}),
        ("v1/completions", {"POST", "OPTIONS"}),
        ("update_weights_from_disk", {"POST", "OPTIONS"}),
    ],
)
def test_options_has_the_methods_of_a_path(served, path, methods):
    response = httpx.options(f"{served.url}/{path}")
    assert (response.status_code, response.content) == (204, b"")
    assert set(response.headers["allow"].split(", ")) == methods


def test_options_of_a_path_that_does_not_exist_is_an_error(served):
    assert httpx.options(f"{served.url}/none").status_code == 404


def test_the_version_is_that_of_the_package(served):
    assert httpx.get(f"{served.url}/version").json() == {"version": octile.__version__}


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_ping_is_answered_as_health_is(served, method, monkeypatch):
    assert httpx.request(method, f"{served.url}/ping").status_code == 200
    monkeypatch.setattr(served.service, "why_hung", lambda: "the engine hangs")
    assert httpx.request(method, f"{served.url}/ping").status_code == 503


def test_the_load_is_that_of_choices_in_flight(serve):
    served = serve(step_seconds=0.01)
    assert httpx.get(f"{served.url}/load").json() == {"server_load": 0}
    body = {"model": "micro", "prompt": "a", "max_tokens": 4000, "n": 3, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body):
        assert httpx.get(f"{served.url}/load").json() == {"server_load": 3}
    wait_until(served.is_idle)
    assert httpx.get(f"{served.url}/load").json() == {"server_load": 0}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_requests_in_flight_are_answered_before_the_server_ends(serve, stream):
    served = serve(Limits(drain=30.0), step_seconds=0.003)
    body = {**COMPLETION, "stream": stream}
    asking = ask(served, body)
    wait_until(lambda: served.engine.steps > 3)
    served.stop()
    answer = asking.result()
    assert answer.status_code == 200
    assert served.engine.finished == 1
    assert "[DONE]" in answer.text if stream else answer.json()["usage"]["completion_tokens"] == 100
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{served.url}/health")


def test_requests_are_answered_though_nobody_reads_standard_error(serve, monkeypatch):
    served = serve(Limits(drain=30.0), step_seconds=0.003)
    asking = ask(served, COMPLETION)
    wait_until(lambda: served.engine.steps > 3)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", closefd=False) as closed:
        monkeypatch.setattr(sys, "stderr", closed)
        served.stop()
        monkeypatch.undo()
        assert asking.result().status_code == 200
        with suppress(OSError):  # what could not be written
            closed.close()
    os.close(writer)


def test_a_request_whose_prompt_is_encoded_when_the_server_is_to_end_is_answered(serve, monkeypatch):
    served = serve(Limits(drain=30.0))
    is_encoding, may_encode = threading.Event(), threading.Event()
    encode = served.service.tokenizer.encode

    def wait(text: str) -> list[int]:
        is_encoding.set()
        may_encode.wait()
        return encode(text)

    monkeypatch.setattr(served.service.tokenizer, "encode", wait)
    asking = ask(served, COMPLETION, timeout=60)
    is_encoding.wait()
    served.server.should_exit = True
    wait_until(lambda: served.service.is_draining)
    may_encode.set()
    answer = asking.result()
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_what_is_not_finished_when_the_time_to_drain_is_over_is_said_to_be_cut_off(serve, stream):
    served = serve(Limits(drain=0.2), step_seconds=0.01)
    body = {**COMPLETION, "max_tokens": 4000, "stream": stream}
    asking = ask(served, body)
    wait_until(lambda: served.engine.steps > 3)
    served.stop()
    answer = asking.result()
    assert "the server has ended before the request was finished" in answer.text
    assert answer.status_code == (200 if stream else 503)
    assert "[DONE]" not in answer.text
    assert not served.engine.requests


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_second_signal_ends_what_is_in_flight_with_an_error(serve, capfd, stream):
    served = serve(Limits(drain=600.0), step_seconds=0.01)
    body = {**COMPLETION, "max_tokens": 4000, "stream": stream}
    asking = ask(served, body)
    wait_until(lambda: served.engine.steps > 3)
    served.server.drain()
    wait_until(lambda: served.service.is_draining)
    served.server.drain()
    served.thread.join(30)
    answer = asking.result()
    assert "the server has ended before the request was finished" in answer.text
    assert answer.status_code == (200 if stream else 503)
    (line,) = capfd.readouterr().err.splitlines()
    assert line == "octile: answering 1 choice in flight, for at most 600 seconds; a second signal ends them now"


def test_an_engine_that_fails_with_requests_in_flight_prints_nothing_of_signals(serve, monkeypatch, capfd):
    served = serve(Limits(drain=600.0), fails_after=1)
    is_encoding, may_encode = threading.Event(), threading.Event()

    def wait(text: str) -> list[int]:
        is_encoding.set()
        may_encode.wait()
        return [2]

    monkeypatch.setattr(served.service.tokenizer, "encode", wait)
    asking = ask(served, COMPLETION, timeout=60)
    is_encoding.wait()
    httpx.post(f"{served.url}/v1/completions", json={**COMPLETION, "prompt": [2]})
    wait_until(lambda: served.service.is_draining)
    may_encode.set()
    assert "the engine has failed: RuntimeError: a kernel has failed" in asking.result().text
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_a_third_signal_ends_connections_that_are_not_read(serve, monkeypatch):
    monkeypatch.setattr("octile.serve.http.server.WRITE_SECONDS", 600.0)
    served = serve(Limits(drain=600.0, in_flight=200))
    client = socket.create_connection(served.url.removeprefix("http://").split(":"))
    body = json.dumps({**COMPLETION, "max_tokens": 4000, "stream": True, "n": 100, "logprobs": 1}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: "
    client.sendall(f"{head}{len(body)}\r\n\r\n".encode() + body)
    state = served.server.server_state
    wait_until(lambda: any(connection.flow.write_paused for connection in list(state.connections)))
    for _ in range(3):
        served.server.drain()
    served.thread.join(30)
    assert not served.thread.is_alive()
    client.close()


def test_a_server_that_is_ending_takes_no_more_requests(served):
    served.service.is_draining = True
    try:
        response = httpx.post(f"{served.url}/v1/completions", json=COMPLETION)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert "the server is ending" in response.json()["error"]["message"]
        assert httpx.get(f"{served.url}/health").status_code == 503
    finally:
        served.service.is_draining = False


class FewFiles:
    """A server in a process that may have FILES files, of which it can be told to take all that are left.

    Its clock can be told to go forward by a second.
    """

    FILES = 128

    def __init__(self, folder):
        self._log = folder / "log"
        context = forked_context()
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=self.run, args=(folder, self._log, other))
        self.process.start()
        other.close()
        self.url, self.started = self._pipe.recv(), time.monotonic()

    @classmethod
    def run(cls, folder: Path, log: Path, pipe: Connection) -> None:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
        resource.setrlimit(resource.RLIMIT_NOFILE, (cls.FILES, cls.FILES))
        served = Served(FakeEngine(Tokenizer.load(folder)), Limits(), (), None)
        pipe.send(served.url)
        taken: list[int] = []
        while (command := pipe.recv()) != "end":
            if command == "advance":
                served.advance(1.0)
                pipe.send("done")
                continue
            wait_until(lambda: not served.server.server_state.connections or command != "take")
            time.sleep(0.1)  # for the last one to close its file
            while taken:
                os.close(taken.pop())
            with suppress(OSError):
                while command == "take":
                    taken.append(os.open("/dev/null", os.O_RDONLY))
            pipe.send("done")
        served.stop()

    def tell(self, command: str) -> None:
        self._pipe.send(command)
        assert self._pipe.recv() == "done"

    def advance(self) -> None:
        """Set its clock forward by a second."""
        self.started -= 1
        self.tell("advance")

    def end(self) -> None:
        self._pipe.send("end")
        self.process.join(30)
        assert self.process.exitcode == 0

    def lines(self) -> list[str]:
        """What it has printed, at most a line a second."""
        lines = self._log.read_text().splitlines()
        assert len(lines) <= 1 + time.monotonic() - self.started
        return lines


@pytest.fixture(scope="module")
def few_files(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("few")
    tokenizer.save(folder)
    running = FewFiles(folder)
    yield running
    running.end()


def test_connections_beyond_the_limit_wait_until_others_end(few_files):
    limit = max_connections(FewFiles.FILES)
    others = [connect(few_files) for _ in range(limit)]
    waiting = [connect(few_files) for _ in range(100)]
    for client in waiting:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
    why = f"octile: connections wait to be accepted: {limit} are open, the most that this process takes"
    wait_until(lambda: why in few_files.lines())
    for client in others:
        client.close()
    for client in waiting:
        client.settimeout(30)
        assert client.recv(12) == b"HTTP/1.1 200"
        client.close()
    assert set(few_files.lines()) == {why}


def test_a_connection_that_the_system_does_not_accept_is_a_line_a_second(few_files):
    before = len(few_files.lines())
    few_files.tell("take")
    client = connect(few_files)
    client.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
    for n in (1, 2):
        few_files.advance()
        wait_until(lambda n=n: len(few_files.lines()) >= before + n)
    few_files.tell("give")
    few_files.advance()
    client.settimeout(30)
    assert client.recv(12) == b"HTTP/1.1 200"
    client.close()
    why = "octile: connections wait to be accepted: [Errno 24] Too many open files"
    assert set(few_files.lines()[before:]) == {why}
