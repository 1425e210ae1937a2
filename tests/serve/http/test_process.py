"""The process of the HTTP server, with an engine in this one."""

import io
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import psutil
import pytest

from octile.serve.http.address import bind, url_of
from octile.serve.http.config import HttpConfig, Limits
from octile.serve.http.process import HttpProcess
from octile.serve.http.worker import Start
from octile.serve.process.messages import ProcessEndedError
from octile.tokenizer import Tokenizer
from tests.fresh_python import run_python
from tests.serve.fake_engine import FakeEngine
from tests.serve.http.conftest import request_bytes, wait_until
from tests.worlds import forked_context

pytestmark = pytest.mark.usefixtures("forked_processes")
SPAWN = multiprocessing.get_context("spawn")
COMPLETION = {"model": "micro", "prompt": "a", "max_tokens": 5}


@pytest.fixture(scope="module")
def saved(tokenizer, tmp_path_factory):
    """A folder with the tokenizer and nothing else."""
    folder = tmp_path_factory.mktemp("http")
    tokenizer.save(folder)
    return folder


@contextmanager
def serving(saved, engine: FakeEngine, client: Callable[[str, int], object] | None) -> Iterator[HttpProcess]:
    """An HTTP process that listens; when it answers, a thread calls the client, if any, with its URL and its number."""
    with bind("127.0.0.1", 0) as bound:
        url, http = url_of(bound), HttpProcess(bound)

    def run() -> None:
        if client is not None:
            httpx.get(f"{url}/health", timeout=60)
            client(url, http.pid)

    thread = threading.Thread(target=run)
    try:
        http.listen(start(saved, engine))
        thread.start()
        yield http
    finally:
        http.close()
        thread.join(30)


def start(saved, engine: FakeEngine) -> Start:
    return Start(saved, engine.tokenizer.vocab_size, 4096, engine.stats(), {}, None, HttpConfig("micro", Limits()))


def end(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


@contextmanager
def asked(url: str, is_there: Callable[[], object], max_tokens: int = 5) -> Iterator[Future[httpx.Response]]:
    """The answer to a completion, asked for by another thread, once a condition holds."""
    with ThreadPoolExecutor(1) as pool:
        body = {**COMPLETION, "max_tokens": max_tokens}
        answer = pool.submit(httpx.post, f"{url}/v1/completions", json=body)
        wait_until(is_there)
        yield answer


def end_twice(capfd) -> None:
    """Send two signals, the second when the server drains."""
    end()
    wait_until(lambda: "answering 1 choice in flight" in capfd.readouterr().err)
    end()


@pytest.mark.slow
def test_it_imports_no_torch():
    imports = "octile.serve.http.worker, octile.serve.http.server, octile.serve.process.client, octile.tokenizer"
    program = f"import sys, {imports}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.slow
def test_the_process_of_the_engine_imports_no_fastapi():
    program = "import sys, octile.serve.http.serve_folder; sys.exit(not {'fastapi', 'uvicorn'}.isdisjoint(sys.modules))"
    assert run_python(program).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_requests_in_flight_are_answered_after_a_signal(tokenizer, saved, number):
    engine, answers = FakeEngine(tokenizer, step_seconds=0.01), []

    def client(url: str, _: int) -> None:
        with asked(url, lambda: engine.steps >= 3, max_tokens=50) as answer:
            end(number)
            answers.append(answer.result().json()["usage"]["completion_tokens"])

    with serving(saved, engine, client) as http:
        assert http.serve(engine, "ready") == [number]
    assert answers == [50]


def test_a_signal_counts_as_soon_as_the_address_is_printed(tokenizer, saved, monkeypatch):
    class Reader(io.StringIO):
        def flush(self) -> None:
            end(signal.SIGINT)

    engine = FakeEngine(tokenizer)
    with serving(saved, engine, None) as http, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Reader())
        assert http.serve(engine, "ready") == [signal.SIGINT]


def test_a_second_signal_ends_what_is_in_flight(tokenizer, saved, capfd):
    engine, answers = FakeEngine(tokenizer, step_seconds=0.01), []

    def client(url: str, _: int) -> None:
        with asked(url, lambda: engine.steps >= 3, max_tokens=4000) as answer:
            end_twice(capfd)
            answers.append(answer.result())

    with serving(saved, engine, client) as http:
        assert http.serve(engine, "ready") == [signal.SIGTERM] * 2
    assert answers[0].status_code == 503
    assert "the server has ended before the request was finished" in answers[0].text


def test_signals_of_the_whole_group_count_once(tokenizer, saved):
    engine, answers = FakeEngine(tokenizer), []

    def client(url: str, pid: int) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(pid, number)
        answers.append(httpx.post(f"{url}/v1/completions", json=COMPLETION).status_code)
        end()

    with serving(saved, engine, client) as http:
        assert http.serve(engine, "ready") == [signal.SIGTERM]
    assert answers == [200]


def test_what_ends_the_engine_is_raised_and_answered(tokenizer, saved):
    engine, answers = FakeEngine(tokenizer, fails_after=2), []

    def client(url: str, _: int) -> None:
        answers.append(httpx.post(f"{url}/v1/completions", json=COMPLETION))

    with serving(saved, engine, client) as http, pytest.raises(RuntimeError, match="a kernel has failed"):
        http.serve(engine, "ready")
    assert answers[0].status_code == 500
    assert "the engine has failed: RuntimeError: a kernel has failed" in answers[0].text
    assert str(http.engine_failure) == "a kernel has failed"


def test_a_failure_that_another_thread_finds_ends_an_engine_that_hangs_in_a_step(tokenizer, saved):
    engine, answers = FakeEngine(tokenizer), []
    engine.may_step.clear()

    def client(url: str, _: int) -> None:
        with asked(url, lambda: engine.requests) as answer:
            http.fail(RuntimeError("another rank has ended"))
            http.fail(RuntimeError("a later failure"))
            answers.append(answer.result())

    with serving(saved, engine, client) as http, pytest.raises(RuntimeError, match="another rank has ended"):
        http.serve(engine, "ready")
    engine.may_step.set()
    assert "the engine has failed: RuntimeError: another rank has ended" in answers[0].text


def test_a_failure_before_it_serves_is_raised(tokenizer, saved):
    engine = FakeEngine(tokenizer)
    with serving(saved, engine, None) as http:
        http.fail(RuntimeError("another rank has ended"))
        with pytest.raises(RuntimeError, match="another rank has ended"):
            http.serve(engine, "ready")


def test_a_failure_ends_the_wait_for_the_last_step(tokenizer, saved, monkeypatch, capfd):
    monkeypatch.setattr("octile.serve.http.process.STOP_SECONDS", 3600.0)
    engine = FakeEngine(tokenizer)
    engine.may_step.clear()

    def client(url: str, pid: int) -> None:
        with asked(url, lambda: engine.requests):
            end_twice(capfd)
        wait_until(lambda: not psutil.pid_exists(pid))  # from now on `serve` waits for the engine
        http.fail(RuntimeError("another rank has ended"))

    with serving(saved, engine, client) as http, pytest.raises(RuntimeError, match="another rank has ended"):
        http.serve(engine, "ready")
    engine.may_step.set()


@pytest.mark.timeout(60)
def test_a_process_that_hangs_is_killed_when_it_is_closed():
    with bind("127.0.0.1", 0) as bound:
        http = HttpProcess(bound)
    os.kill(http.pid, signal.SIGSTOP)
    http.close()
    assert not psutil.pid_exists(http.pid)


def test_a_process_that_dies_ends_the_engine(tokenizer, saved):
    engine = FakeEngine(tokenizer)
    with (
        serving(saved, engine, lambda _, pid: os.kill(pid, signal.SIGKILL)) as http,
        pytest.raises(ProcessEndedError, match="the HTTP process has ended with exit status -9"),
    ):
        http.serve(engine, "ready")
    assert http.engine_failure is None


def serve_until_killed(saved: Path, log: Path, started: Connection) -> None:
    """Serve, and send the number of the HTTP process when it has answered; standard error is a file."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    engine = FakeEngine(Tokenizer.load(saved))
    with serving(saved, engine, lambda _, pid: started.send(pid)) as http:
        http.serve(engine, "ready")


@pytest.mark.slow
def test_nothing_is_left_of_a_server_that_is_killed(saved, tmp_path):
    context = forked_context()
    here, there = context.Pipe()
    server = context.Process(target=serve_until_killed, args=(saved, tmp_path / "stderr", there))
    server.start()
    http = psutil.Process(here.recv())
    server.kill()
    http.wait(30)
    assert (tmp_path / "stderr").read_text() == "octile: the process of the engine has ended\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_signals_of_the_whole_group_do_not_end_it_while_it_imports(monkeypatch, number):
    monkeypatch.setattr("multiprocessing.get_context", lambda method: SPAWN)  # it imports
    with bind("127.0.0.1", 0) as bound:
        http = HttpProcess(bound)
    os.kill(http.pid, number)
    status = Path(f"/proc/{http.pid}/status").read_text()
    http.close()
    blocked = int(re.search(r"^SigBlk:\t(.+)$", status, re.MULTILINE)[1], 16)
    assert blocked >> (number - 1) & 1


@pytest.mark.slow
def test_nothing_is_left_if_a_signal_comes_while_it_starts():
    program = """
import os, signal
from multiprocessing.process import BaseProcess
from octile.serve.http.process import HttpProcess
from octile.serve.http.address import bind

def interrupted(process, start=BaseProcess.start):
    start(process)
    print(process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGINT)

BaseProcess.start = interrupted
try:
    HttpProcess(bind("127.0.0.1", 0))
except KeyboardInterrupt as error:
    interrupt = error  # its traceback refers to what was begun
"""
    ended = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=60, check=True)
    assert not psutil.pid_exists(int(ended.stdout))


def test_connections_are_refused_until_it_listens(tokenizer, saved):
    with bind("127.0.0.1", 0) as bound:
        address, http = bound.getsockname(), HttpProcess(bound)
    try:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        http.listen(start(saved, FakeEngine(tokenizer)))
        socket.create_connection(address).close()
    finally:
        http.close()


def test_an_address_at_which_another_server_listens_is_refused(tokenizer, saved):
    with bind("127.0.0.1", 0) as other, bind("127.0.0.1", port := other.getsockname()[1]) as bound:
        http = HttpProcess(bound)
        other.listen()
        with pytest.raises(ValueError, match=f"port {port} of 127.0.0.1 cannot be used: Address already in use"):
            http.listen(start(saved, FakeEngine(tokenizer)))
    http.close()


def test_a_process_that_dies_before_it_listens_is_named(tokenizer, saved):
    with bind("127.0.0.1", 0) as bound:
        http = HttpProcess(bound)
    os.kill(http.pid, signal.SIGKILL)
    with pytest.raises(ProcessEndedError, match="the HTTP process has ended with exit status -9"):
        http.listen(start(saved, FakeEngine(tokenizer)))
    http.close()


def test_it_ends_at_once_if_nothing_is_served(saved):
    with bind("127.0.0.1", 0) as bound:
        http = HttpProcess(bound)
    http.close()
    assert not psutil.pid_exists(http.pid)


@pytest.mark.slow
def test_the_age_of_a_step_that_hangs_is_a_metric_though_its_request_is_canceled(tokenizer, saved):
    engine, has_worked = FakeEngine(tokenizer), []
    engine.may_step.clear()

    def client(url: str, _: int) -> None:
        def age() -> float:
            return float(
                re.search(r"^octile_engine_step_age_seconds{.*} (.+)$", httpx.get(f"{url}/metrics").text, re.M)[1]
            )

        try:
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as leaving:
                leaving.sendall(request_bytes(COMPLETION))
                wait_until(lambda: engine.requests)
            wait_until(lambda: age() > 0.6)  # the client has left, and the step goes on
            engine.may_step.set()
            wait_until(lambda: age() == 0)
            has_worked.append(True)
        finally:
            end()

    with serving(saved, engine, client) as http:
        assert http.serve(engine, "ready") == [signal.SIGTERM]
    assert has_worked
