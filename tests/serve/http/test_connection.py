"""A connection: each of its states ends in time whatever its client sends; what HTTP forbids is refused."""

import gc
import http.client
import json
import socket
import struct
import time
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import ref

import httpx
import pytest

from octile.serve.http.config import HEAD_BYTES, Limits
from octile.serve.http.connection import Connection
from octile.serve.process.client import EngineClient
from tests.serve.fake_engine import FakeEngine
from tests.serve.http.conftest import Served, connect, request_bytes, wait_until

COMPLETION = {"model": "micro", "prompt": "a", "max_tokens": 20}
POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
SHORT = 0.2


@pytest.fixture(scope="module")
def hurried(tokenizer):
    """A server whose connections end soon."""
    limits = [
        "connection.HEAD_SECONDS",
        "connection.WRITE_SECONDS",
        "service.BODY_SECONDS",
        "server.KEEP_ALIVE_SECONDS",
    ]
    with pytest.MonkeyPatch.context() as patch:
        for limit in limits:
            patch.setattr(f"octile.serve.http.{limit}", SHORT)
        served = Served(FakeEngine(tokenizer), Limits(), ("secret",), None)
        yield served
        served.stop()


def read_to_the_end(client: socket.socket, drip: bytes = b"") -> bytes:
    """Everything that a server sends until it closes the connection, while a few bytes come now and then."""
    received, end = bytearray(), time.monotonic() + 10
    client.settimeout(0.02)
    while time.monotonic() < end:
        try:
            if drip:
                client.send(drip)
            new = client.recv(2**16)
        except TimeoutError:
            continue
        except ConnectionError:
            return bytes(received)
        if not new and not drip:
            return bytes(received)
        received += new
    pytest.fail(f"the connection is open after 10 seconds; received: {bytes(received)!r}")


STATES = {  # what is sent at first, what is sent again and again, and the statuses of the answers
    "nothing is sent": (b"", b"", []),
    "head is unfinished": (b"GET /health HTTP/1.1\r\n", b"", []),
    "head comes slowly": (b"GET /health HTTP/1.1\r\nX: ", b"a", []),
    "answered, body is unfinished": (POST + b"Content-Length: 1000\r\n\r\n{", b"", [401]),
    "answered, body comes slowly": (POST + b"Content-Length: 1000\r\n\r\n{", b" ", [401]),
    "body is unfinished": (POST + b"Authorization: Bearer secret\r\nContent-Length: 1000\r\n\r\n{", b"", [408]),
    "body comes slowly": (POST + b"Authorization: Bearer secret\r\nContent-Length: 1000\r\n\r\n{", b" ", [408]),
    "answered, chunks come slowly": (POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n", [401]),
    "answered, no chunk comes": (POST + b"Transfer-Encoding: chunked\r\n\r\n", b"", [401]),
    "answered, unfinished body of GET": (b"GET /health HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n", b"", [200]),
    "answered, 100 is expected": (POST + b"Expect: 100-continue\r\nContent-Length: 9\r\n\r\n", b"", [401]),
    "idle": (GET, b"", [200]),
    "next head is unfinished": (GET + b"GET /health HTTP/1.1\r\nX: ", b"", [200]),
    "next head comes slowly": (GET + b"GET /health HTTP/1.1\r\nX: ", b"a", [200]),
    "pipelined": (GET * 3, b"", [200, 200, 200]),
    "pipelined, body is unfinished": (GET * 2 + POST + b"Content-Length: 9\r\n\r\n", b"", [200, 200, 401]),
    "refused": (b"\x16\x03\x01\r\n\r\n", b"a", [400]),
    "refused in a body": (POST + b"Transfer-Encoding: chunked\r\n\r\nno chunk\r\n", b"a", [400]),
    "bytes after the last request": (POST + b"Connection: close\r\nContent-Length: 0\r\n\r\n", b"a", [401]),
    "HTTP/1.0": (b"GET /health HTTP/1.0\r\n\r\n", b"", [200]),
}


@pytest.fixture(scope="module")
def ended(hurried) -> dict[str, Future[bytes]]:
    """What clients receive until the server ends their connections, one in each state, all of them at once."""

    def read(begin: bytes, drip: bytes) -> bytes:
        with connect(hurried) as client:
            client.sendall(begin)
            return read_to_the_end(client, drip)

    with ThreadPoolExecutor(len(STATES)) as pool:
        return {state: pool.submit(read, begin, drip) for state, (begin, drip, _) in STATES.items()}


@pytest.mark.parametrize("state", STATES)
def test_a_connection_ends_in_each_state(hurried, ended, state):
    assert [int(part[:3]) for part in ended[state].result().split(b"HTTP/1.1 ")[1:]] == STATES[state][2]
    wait_until(lambda: not hurried.server.server_state.connections)
    assert httpx.get(f"{hurried.url}/health").status_code == 200


def test_a_head_that_begins_in_the_packet_of_the_request_before_has_as_much_time(hurried, monkeypatch):
    monkeypatch.setattr("octile.serve.http.server.KEEP_ALIVE_SECONDS", 30)
    monkeypatch.setattr(hurried.server.config, "timeout_keep_alive", 30)
    client = connect(hurried)
    client.sendall(GET + b"GET /health HT")
    assert read_to_the_end(client).count(b"HTTP/1.1 200") == 1
    client.close()


def test_a_body_has_no_more_time_than_its_request(serve):
    served = serve(limits=Limits(seconds=SHORT))
    client = connect(served)
    client.sendall(POST + b"Content-Length: 1000\r\n\r\n{")
    assert read_to_the_end(client).startswith(b"HTTP/1.1 408 ")
    client.close()


def test_a_single_byte_after_an_answer_does_not_keep_the_connection(hurried):
    client = connect(hurried)
    client.sendall(POST + b"Content-Length: 1000\r\n\r\n")
    assert client.recv(12) == b"HTTP/1.1 401"
    client.sendall(b"a")
    read_to_the_end(client)
    client.close()


@pytest.mark.slow
@pytest.mark.parametrize("header", [b"", b"Connection: close\r\n"], ids=["keep-alive", "close"])
def test_a_connection_whose_last_answer_is_not_read_ends(hurried, monkeypatch, header):
    monkeypatch.setattr(hurried.service.metrics, "text", lambda accept: (b"a" * 10**8, "text/plain"))
    client = connect(hurried, receive_buffer=4096)
    client.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n" + header + b"\r\n")
    connections = hurried.server.server_state.connections
    wait_until(lambda: connections)
    wait_until(lambda: not connections, seconds=10)
    client.close()


def test_an_answer_to_an_unfinished_request_says_that_the_connection_is_closed(served):
    client = connect(served)
    client.sendall(b"POST /none HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n")
    answer = http.client.HTTPResponse(client)
    answer.begin()
    assert (answer.status, answer.getheader("connection")) == (404, "close")
    answer.close()
    client.close()


def test_a_client_that_sends_on_reads_the_answer(served):
    client = connect(served)
    client.sendall(POST + b"Content-Length: 20000000\r\n\r\n")
    for _ in range(20):  # more than the system's buffers hold
        client.sendall(b"a" * 10**6)
    assert client.recv(12) == b"HTTP/1.1 413"
    client.close()


def test_requests_of_one_connection_are_answered_in_turn(served):
    client = connect(served)
    client.sendall((request_bytes(COMPLETION) + GET) * 2 + GET.replace(b"Host", b"Connection: close\r\nHost"))
    answers = read_to_the_end(client).split(b"HTTP/1.1 200 OK\r\n")[1:]
    client.close()
    assert [b'"usage"' in answer for answer in answers] == [True, False, True, False, False]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_next_request_of_a_connection_finds_the_slot_of_the_one_before(serve, stream):
    served = serve(Limits(in_flight=1))
    client = connect(served)
    client.sendall(
        request_bytes({**COMPLETION, "stream": stream}) * 3 + GET.replace(b"Host", b"Connection: close\r\nHost")
    )
    statuses = [int(part[:3]) for part in read_to_the_end(client).split(b"HTTP/1.1 ")[1:]]
    client.close()
    assert statuses == [200, 200, 200, 200]


@pytest.mark.parametrize(
    ("sent", "status", "message"),
    [
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 20_000 + b"\r\n\r\n", 431, "more than 16384 bytes"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 60_000 + b"\r\n\r\n", 431, "more than 16384 bytes"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 500_000, 431, "more than 16384 bytes"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: abc\r\n" * 3500 + b"\r\n", 431, "more than 16384 bytes"),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n", 431, "more than 16384 bytes"),
        (GET.replace(b"1.1", b"9.9"), 505, "the version of HTTP is not supported"),
        (GET.replace(b"1.1", b"2.0"), 505, "the version of HTTP is not supported"),
        (GET.replace(b"GET", b"HEAD").replace(b"1.1", b"0.9"), 505, "the version of HTTP is not supported"),
        (
            POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
            "the body has two lengths",
        ),
        (
            POST + b"Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n0\r\n\r\n" + GET,
            400,
            "the body has two lengths",
        ),
        (POST + b"Transfer-Encoding: gzip\r\n\r\n", 501, "the transfer coding of the body is not supported"),
    ],
    ids=[
        "20 kB header",
        "60 kB header",
        "head that does not end",
        "3,500 headers",
        "long path",
        "HTTP/9.9",
        "HTTP/2.0",
        "HTTP/0.9",
        "two lengths",
        "two lengths, and another request",
        "transfer coding",
    ],
)
def test_what_http_forbids_is_refused_once_and_the_connection_closed(hurried, capfd, sent, status, message):
    client = connect(hurried)
    client.sendall(sent)
    head, _, body = read_to_the_end(client).partition(b"\r\n\r\n")
    client.close()
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"connection: close" in head
    assert message in json.loads(body)["error"]["message"]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("head_bytes", "status"), [(HEAD_BYTES, 200), (HEAD_BYTES + 1, 431)])
@pytest.mark.parametrize("piece", [2**20, 1000], ids=["at once", "in pieces"])
def test_the_limit_of_a_head_is_exact(served, head_bytes, status, piece):
    head = GET[:-2] + b"X: "
    head += b"a" * (head_bytes - len(head) - 4) + b"\r\n\r\n"
    client = connect(served)
    for i in range(0, len(head), piece):
        client.sendall(head[i : i + piece])
        time.sleep(0.001)
    assert client.recv(12) == f"HTTP/1.1 {status}".encode()
    client.close()


def test_a_body_does_not_count_as_a_head(served):
    client = connect(served)
    client.sendall(request_bytes({**COMPLETION, "user": "a" * 10**6}) + GET)
    answer = http.client.HTTPResponse(client)
    answer.begin()
    assert answer.status == 200
    client.close()


@pytest.mark.one_case
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_a_client_that_ends_its_side_after_the_request_is_answered(serve, stream, version):
    served = serve(step_seconds=0.01)  # the connection is probed twice
    client = connect(served)
    content = request_bytes({**COMPLETION, "stream": stream}).replace(b"HTTP/1.1", f"HTTP/{version}".encode())
    client.sendall(content)
    client.shutdown(socket.SHUT_WR)
    answer = http.client.HTTPResponse(client)  # which skips 100 Continue
    answer.begin()
    text = answer.read()
    assert answer.status == 200
    assert b"[DONE]" in text if stream else json.loads(text)["usage"]["completion_tokens"] == 20
    assert b"\r\n" not in text  # the frame of a chunk, which HTTP/1.0 does not have
    assert client.recv(1) == b""
    client.close()


def test_events_are_written_as_they_come_without_waking_their_request(serve, monkeypatch):
    write, were_written = Connection.write, list[bool]()
    monkeypatch.setattr(Connection, "write", lambda *args: were_written.append(write(*args)) or were_written[-1])
    response = httpx.post(f"{serve(step_seconds=0.01).url}/v1/completions", json={**COMPLETION, "stream": True})
    assert any(were_written)
    events = response.text.split("\n\n")
    assert "".join(json.loads(event[6:])["choices"][0]["text"] for event in events[:-2]) == "<|begin|>a" * 10


@pytest.mark.parametrize("kind", ["whole", "stream", "refused", "its client leaves", "its client resets it, idle"])
def test_what_a_connection_holds_is_freed_when_it_ends(serve, monkeypatch, kind):
    """Without the garbage collector, which would stop all that a busy server does for 0.1 s."""
    made, streams, begin, submit = [], [], Connection.connection_made, EngineClient.submit
    monkeypatch.setattr(
        Connection, "connection_made", lambda self, transport: made.append(ref(self)) or begin(self, transport)
    )

    def submitted(*args):
        stream = submit(*args)
        streams.append(ref(stream))
        return stream

    monkeypatch.setattr(EngineClient, "submit", submitted)
    served = serve(step_seconds=0.005)
    gc.disable()
    try:
        if kind == "its client leaves":
            client = connect(served)
            client.sendall(request_bytes({**COMPLETION, "max_tokens": 4000, "stream": True}))
            assert client.recv(1)
            client.close()
        elif kind == "its client resets it, idle":
            client = connect(served)
            client.sendall(request_bytes(COMPLETION))
            wait_until(lambda: client.recv(2**16) and served.is_idle())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
        else:
            body = {**COMPLETION, "stream": kind == "stream"} if kind != "refused" else {"model": "another"}
            httpx.post(f"{served.url}/v1/completions", json=body, headers={"connection": "close"})
        wait_until(lambda: not any(held() for held in (*made, *streams)))
    finally:
        gc.enable()
    assert (len(made), len(streams)) == (1, 0 if kind == "refused" else 1)


def test_a_client_that_ends_its_side_after_several_requests_is_answered_all(serve):
    served = serve(step_seconds=0.005)
    client = connect(served)
    client.sendall(request_bytes(COMPLETION) * 2 + GET + b"GET /heal")
    client.shutdown(socket.SHUT_WR)
    received = read_to_the_end(client)
    client.close()
    assert received.count(b"HTTP/1.1 200 ") == 3


def test_a_client_that_ends_its_side_within_a_request_is_not_answered(serve):
    served = serve()
    client = connect(served)
    client.sendall(request_bytes(COMPLETION)[:-1])
    client.shutdown(socket.SHUT_WR)
    assert read_to_the_end(client) == b""
    client.close()
    wait_until(served.is_idle)


def test_a_client_that_leaves_after_it_ended_its_side_cancels_its_request(serve):
    served = serve(step_seconds=0.01)
    client = connect(served)
    client.sendall(request_bytes({**COMPLETION, "max_tokens": 4000}))
    client.shutdown(socket.SHUT_WR)
    wait_until(lambda: served.engine.requests)
    client.close()
    wait_until(served.is_idle)
    assert served.engine.canceled == 1
