"""Clients that leave, do not read, or come all at once: nothing of them is left, and others are served."""

import asyncio
import json
import socket
from collections import Counter

import httpx
import pytest

from octile.serve.http import app, connection
from octile.serve.http.config import Limits
from octile.serve.http.server import allow_files
from tests.serve.http.conftest import Served, connect, request_bytes, wait_until

COMPLETION = {"model": "micro", "prompt": "a", "max_tokens": 4000}


def answers(served: Served) -> bool:
    body = {**COMPLETION, "max_tokens": 2}
    return httpx.post(f"{served.url}/v1/completions", json=body).json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_cancels_its_request(serve, stream):
    served = serve(step_seconds=0.005)
    client = connect(served)
    client.sendall(request_bytes({**COMPLETION, "stream": stream, "n": 3}))
    wait_until(lambda: served.service.engine.stats.used_pages > 0)
    if stream:
        client.recv(100)
    client.close()
    wait_until(served.is_idle)
    assert served.engine.canceled == 3
    assert answers(served)


def test_a_client_that_leaves_before_its_first_token(serve):
    served = serve(step_seconds=0.3)
    client = connect(served)
    client.sendall(request_bytes({**COMPLETION, "stream": True}))
    wait_until(lambda: served.service.in_flight == 1)
    client.close()
    wait_until(served.is_idle)


@pytest.mark.slow
@pytest.mark.parametrize(("stream", "tokens"), [(False, 400), (True, 4000)], ids=["whole", "stream"])
def test_a_client_that_does_not_read_holds_nobody_back_and_loses_its_connection(serve, monkeypatch, stream, tokens):
    monkeypatch.setattr(app, "WRITE_SECONDS", 0.2)
    served = serve(Limits(seconds=600.0, in_flight=200))
    served.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)  # connections inherit it
    client = connect(served, receive_buffer=4096)
    # far more than the system's buffers hold
    body = {**COMPLETION, "max_tokens": tokens, "stream": stream, "n": 100, "logprobs": 1}
    client.sendall(request_bytes(body))
    wait_until(lambda: served.service.in_flight == 100)
    assert answers(served)
    if not stream:
        wait_until(lambda: served.engine.finished == 101)
    state = served.server.server_state
    wait_until(lambda: any(open_to.flow.write_paused for open_to in list(state.connections)))
    n_steps = served.engine.steps + 20 * stream
    wait_until(lambda: served.engine.steps >= n_steps)
    wait_until(lambda: served.service.in_flight == 100)  # the other client's place is free soon after its answer
    assert max(open_to.transport.get_write_buffer_size() for open_to in state.connections) < 2**17
    served.advance(600.0)
    wait_until(served.is_idle)
    wait_until(lambda: not state.connections)
    assert answers(served)
    client.close()


@pytest.mark.slow
def test_a_client_that_reads_slowly_gets_everything(serve):
    served = serve()
    body = {**COMPLETION, "stream": True, "n": 4, "logprobs": 1}
    client, received = connect(served, receive_buffer=4096), bytearray()
    client.sendall(request_bytes(body))
    wait_until(lambda: served.engine.finished == 4)  # long before the client has read
    while b"[DONE]" not in received[-100:]:
        received += client.recv(1 << 16)
    client.close()
    events = [line for line in received.decode().splitlines() if line.startswith("data: {")]
    tokens = Counter[int]()
    for line in events:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            tokens[choice["index"]] += len(choice["logprobs"]["tokens"])
    assert tokens == dict.fromkeys(range(4), 4000)
    assert len(events) < 4 * 4000  # what it had not read was joined
    wait_until(served.is_idle)


@pytest.mark.parametrize("begin", [b"", b"POST /v1/compl"], ids=["nothing", "half a head"])
def test_a_client_that_sends_no_request_loses_its_connection(serve, monkeypatch, begin):
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.2)
    served = serve()
    client = connect(served)
    client.sendall(begin)
    client.settimeout(10)
    assert client.recv(100) == b""
    assert answers(served)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
    ],
    ids=["TLS", "no host", "length"],
)
def test_what_is_not_http_is_refused_in_openais_format_and_not_printed(serve, capfd, sent):
    served = serve()
    client = connect(served)
    client.sendall(sent)
    head, _, body = b"".join(iter(lambda: client.recv(1000), b"")).partition(b"\r\n\r\n")
    client.close()
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["message"].startswith("the request is not valid HTTP: ")
    assert answers(served)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("sent", "wrong"),
    [
        (b"GET /\r\n\r\n", "illegal request line"),
        (b"GET / HTTP/1.1\r\nno header\r\n\r\n", "illegal header line"),
    ],
)
def test_a_line_that_is_not_http_is_not_quoted(serve, sent, wrong):
    client = connect(serve())
    client.sendall(sent)
    _, _, body = b"".join(iter(lambda: client.recv(1000), b"")).partition(b"\r\n\r\n")
    client.close()
    assert json.loads(body)["error"]["message"] == f"the request is not valid HTTP: {wrong}"


def test_a_client_that_sends_half_a_body(serve, monkeypatch):
    monkeypatch.setattr("octile.serve.http.service.BODY_SECONDS", 0.2)
    served = serve()
    client = connect(served)
    client.sendall(request_bytes(COMPLETION)[:-5])
    assert client.recv(100).startswith(b"HTTP/1.1 408 ")
    client.close()
    assert answers(served)


@pytest.mark.slow
def test_a_thousand_clients_at_once(serve, monkeypatch):
    if allow_files() < 2500:
        pytest.skip("the system allows this process too few open files for 1,000 clients and the server")
    monkeypatch.setattr(connection, "HEAD_SECONDS", 300.0)  # all connect before any sends
    served = serve(Limits(in_flight=256))
    served.engine.may_step.clear()
    assert asyncio.run(statuses(served, 1000, n_refused=744)) == {200: 256, 503: 744}
    wait_until(served.is_idle)
    assert answers(served)


async def statuses(served: Served, n_clients: int, n_refused: int) -> Counter:
    """The statuses of clients that connect before any of them sends. The engine steps when so many are refused."""
    host, _, port = served.url.removeprefix("http://").rpartition(":")
    connections = await asyncio.gather(*(asyncio.open_connection(host, int(port)) for _ in range(n_clients)))
    content, counts = request_bytes({**COMPLETION, "max_tokens": 20, "stream": True}), Counter[int]()

    async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(content)
        line = await reader.readline()
        code = int(line.split()[1])
        counts[code] += 1
        if counts[503] == n_refused:
            served.engine.may_step.set()
        if code == 200:
            assert b"[DONE]" in await reader.readuntil(b"0\r\n\r\n")
        writer.close()

    await asyncio.gather(*(ask(*connected) for connected in connections))
    return counts


def test_bodies_that_arrive_slowly_count_as_in_flight(serve):
    served = serve(Limits(in_flight=2))
    clients = [connect(served) for _ in range(2)]
    for client in clients:
        client.sendall(request_bytes(COMPLETION)[:-5])
    wait_until(lambda: served.service.in_flight == 2)
    assert httpx.post(f"{served.url}/v1/completions", json=COMPLETION).status_code == 503
    for client in clients:
        client.close()
    wait_until(served.is_idle)
    assert answers(served)
