"""A real server in a thread, with an engine that repeats the prompt."""

import asyncio
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import pytest

pytest.importorskip("fastapi", reason="octile[serve] is not installed")

from octile.chat.template import ChatTemplate
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.http.address import bind, url_of
from octile.serve.http.config import Limits, Parsers
from octile.serve.http.server import Server
from octile.serve.http.service import Service
from octile.serve.runner.model_runner import ModelRunner
from octile.tokenizer import Tokenizer
from tests.serve.fake_engine import FakeEngine, Pair
from tests.serve.models import exact_model

SHORT_DRAIN = Limits(drain=1.0)


@cache
def chat_template(tokenizer: Tokenizer, template: str | None) -> ChatTemplate:
    """Compile a chat template once for all servers: it takes a third of their start."""
    return ChatTemplate(tokenizer, template)


class Served:
    """A running server, its engine and its address."""

    def __init__(
        self,
        engine,
        limits: Limits,
        api_keys: tuple[str, ...],
        template: str | None,
        hosts=None,
        defaults=None,
        weights_key=None,
        updates=None,
        tls=None,
        origins=(),
        parsers=Parsers(),  # noqa: B008
        has_access_log=False,
        name="micro",
    ):
        self.engine, bound = engine, bind("127.0.0.1", 0)
        self.url = url_of(bound, tls is not None)
        self.pair = Pair(engine, updates)
        self.service = Service(
            self.pair.client,
            engine.tokenizer,
            engine.tokenizer.vocab_size,
            engine.max_position,
            chat_template(engine.tokenizer, template),
            limits,
            name,
            defaults,
            parsers,
        )
        self.server = Server(self.service, api_keys, hosts, weights_key, tls and tls.context(), origins, has_access_log)
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run, args=(bound,))
        self.thread.start()
        wait_until(lambda: self.server.started and self.server.servers)  # which it makes last

    def _run(self, bound) -> None:
        try:
            self.server.run([bound])
        except Exception as error:
            self.error = error

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.pair.join()

    def advance(self, seconds: float) -> None:
        """Set the clock of the event loop forward, so that nobody has to wait for what it does at a later time."""
        loop = self.pair.client._loop

        def jump(now: Callable[[], float] = loop.time) -> None:
            loop.time = lambda: now() + seconds

        loop.call_soon_threadsafe(jump)

    def is_idle(self) -> bool:
        """Whether nothing of any request is left."""
        return self.service.in_flight == 0 and not self.engine.requests and self.service.engine.stats.used_pages == 0


def request_bytes(body: dict) -> bytes:
    content = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def connect(served: Served, receive_buffer: int | None = None) -> socket.socket:
    client = socket.socket()
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    host, _, port = served.url.removeprefix("http://").rpartition(":")
    client.connect((host, int(port)))
    return client


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


@pytest.fixture(scope="session", autouse=True)
def one_ssl_context() -> Iterator[None]:
    """Let all clients have one SSL context, which nobody uses here: a client makes its own for each request."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


class ShortSleeps:
    """asyncio for uvicorn, which looks every 0.1 s whether it is to end, and whether connections have ended."""

    def __getattr__(self, name: str) -> object:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(seconds: float) -> None:
        await asyncio.sleep(seconds / 20)


@pytest.fixture(scope="session", autouse=True)
def servers_end_soon() -> Iterator[None]:
    """Have a server end within 0.02 s instead of 0.25 s."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("uvicorn.server.asyncio", ShortSleeps())
        yield


@pytest.fixture
def serve(tokenizer):
    """Start a server with an engine, limits, keys and a chat template; it is stopped at the end of the test."""
    started: list[Served] = []

    def start(
        limits=SHORT_DRAIN,
        api_keys=(),
        template=None,
        hosts=None,
        defaults=None,
        tls=None,
        origins=(),
        parsers=Parsers(),  # noqa: B008
        has_access_log=False,
        **engine,
    ) -> Served:
        made = FakeEngine(**{"tokenizer": tokenizer, **engine})
        more = {"tls": tls, "origins": origins, "parsers": parsers, "has_access_log": has_access_log}
        started.append(Served(made, limits, api_keys, template, hosts, defaults, **more))
        return started[-1]

    yield start
    for served in started:
        served.stop()


@contextmanager
def shared(tokenizer) -> Iterator[Served]:
    served = Served(FakeEngine(tokenizer), Limits(), (), None)
    yield served
    served.stop()


@pytest.fixture(scope="module")
def served(tokenizer):
    """A server that the tests of a file share."""
    with shared(tokenizer) as running:
        yield running


@pytest.fixture(scope="module")
def model():
    return exact_model(vocab_size=320)


@pytest.fixture(scope="module")
def exact(tokenizer, model):
    """A server of a model in exact mode."""
    runner = ModelRunner(model, 64, batch_invariant=True)
    engine = Engine(runner, tokenizer, EngineConfig(max_batch=4, max_step_tokens=40))
    engine.tokenizer, engine.max_position = tokenizer, runner.max_position
    served = Served(engine, Limits(), (), None)
    yield served
    served.stop()
