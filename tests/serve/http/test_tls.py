"""HTTPS: the files of a certificate, requests, and connections that end in all ways."""

import json
import socket
import ssl
import struct

import httpx
import pytest

from octile.serve.http.address import bind, url_of
from octile.serve.http.config import Limits
from octile.serve.http.tls import TlsFiles
from tests.serve.http.certificates import make_certificate
from tests.serve.http.conftest import request_bytes, wait_until

COMPLETION = {"model": "micro", "prompt": "a", "max_tokens": 5}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> TlsFiles:
    return make_certificate(tmp_path_factory.mktemp("tls"), "server")


@pytest.fixture(scope="module")
def trusting(files) -> ssl.SSLContext:
    """The context of a client that knows the certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(files.certfile)
    return context


def connect(served, context: ssl.SSLContext, receive_buffer: int | None = None) -> ssl.SSLSocket:
    client = socket.socket()
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.connect(("127.0.0.1", int(served.url.rpartition(":")[2])))
    return context.wrap_socket(client, server_hostname="127.0.0.1")


def test_the_url_of_an_address_with_tls():
    with bind("127.0.0.1", 0) as bound:
        assert url_of(bound, is_tls=True) == f"https://127.0.0.1:{bound.getsockname()[1]}"


def test_a_request_is_answered(serve, files, trusting):
    answer = httpx.post(f"{serve(tls=files).url}/v1/completions", json=COMPLETION, verify=trusting)
    assert answer.json()["usage"]["completion_tokens"] == 5


def test_a_connection_that_is_kept_too_long_ends_without_an_error(serve, files, trusting, monkeypatch, caplog):
    monkeypatch.setattr("octile.serve.http.server.KEEP_ALIVE_SECONDS", 0.1)
    with connect(serve(tls=files), trusting) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        client.settimeout(10)
        received = b"".join(iter(lambda: client.recv(2**16), b""))
    assert received.startswith(b"HTTP/1.1 200 ")
    assert not caplog.records


def test_a_stream_comes_while_it_is_written(serve, files, trusting):
    served = serve(tls=files)
    body = {**COMPLETION, "max_tokens": 400, "stream": True}
    with (
        httpx.Client(verify=trusting) as client,
        client.stream("POST", f"{served.url}/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith("data: {")
        *_, last = filter(None, lines)
    assert last == "data: [DONE]"


def test_a_client_that_does_not_know_the_certificate_refuses_it(serve, files):
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        httpx.get(f"{serve(tls=files).url}/health", verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))


def test_a_request_without_tls_is_not_answered(serve, files, trusting, capfd):
    served = serve(tls=files)
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(served.url.replace("https", "http"))
    assert httpx.get(f"{served.url}/health", verify=trusting).status_code == 200
    assert capfd.readouterr().err == ""


def test_two_requests_go_over_one_connection(serve, files, trusting):
    served = serve(tls=files)
    with httpx.Client(verify=trusting) as client:
        for _ in range(2):
            assert client.post(f"{served.url}/v1/completions", json=COMPLETION).status_code == 200
        assert len(served.server.server_state.connections) == 1


@pytest.mark.parametrize("how", ["close_notify", "FIN", "reset"])
def test_a_client_that_leaves_cancels_its_request(serve, files, trusting, capfd, how):
    served = serve(step_seconds=0.01, tls=files)
    client = connect(served, trusting)
    client.sendall(request_bytes({**COMPLETION, "max_tokens": 4000}))
    wait_until(lambda: served.engine.requests)
    if how == "close_notify":
        client.setblocking(False)
        with pytest.raises(ssl.SSLWantReadError):
            client.unwrap()
    elif how == "reset":
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how != "close_notify":
        client.close()
    wait_until(served.is_idle)
    wait_until(lambda: not served.server.server_state.connections)
    client.close()
    assert capfd.readouterr().err == ""


def test_an_answer_before_the_body_is_complete_is_read(serve, files, trusting):
    served = serve(Limits(body=1024), tls=files)
    with connect(served, trusting) as client:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: 300000\r\n\r\n".encode() + b"a" * 200_000)
        answer = b""
        while not answer.endswith(b"}}"):
            piece = client.recv(2**16)
            assert piece, answer
            answer += piece
        client.sendall(b"a" * 1000)  # the connection is still there
    assert b" 413 " in answer
    assert b"connection: close" in answer
    wait_until(lambda: not served.server.server_state.connections)


@pytest.mark.slow
def test_a_slow_client_gets_all_of_its_stream(serve, files, trusting):
    served = serve(tls=files)
    with connect(served, trusting, receive_buffer=4096) as client:
        client.sendall(request_bytes({**COMPLETION, "max_tokens": 4000, "n": 4, "logprobs": 1, "stream": True}))
        wait_until(lambda: served.engine.finished == 4)  # long before the client has read
        received = bytearray()
        while b"[DONE]" not in received[-100:]:
            received += client.recv(2**16)
    events = [json.loads(line[6:]) for line in received.split(b"\n") if line.startswith(b"data: {")]
    assert sum(len(choice["logprobs"]["tokens"]) for event in events for choice in event["choices"]) == 16_000
    wait_until(served.is_idle)


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_does_not_read_fills_no_memory_and_loses_its_connection(
    serve, files, trusting, monkeypatch, capfd, stream
):
    monkeypatch.setattr("octile.serve.http.app.WRITE_SECONDS", 0.2)
    served = serve(Limits(seconds=600.0, in_flight=200), tls=files)
    served.server.servers[0].sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
    state = served.server.server_state
    with connect(served, trusting, receive_buffer=4096) as client:
        body = {**COMPLETION, "max_tokens": 2000 if stream else 200, "n": 100, "logprobs": 1, "stream": stream}
        client.sendall(request_bytes(body))
        wait_until(lambda: any(open_to.flow.write_paused for open_to in list(state.connections)))
        assert served.service.in_flight == 100
        assert max(open_to.transport.get_write_buffer_size() for open_to in state.connections) < 2**18
        served.advance(600.0)
        wait_until(served.is_idle)
        wait_until(lambda: not state.connections)
    assert capfd.readouterr().err == ""


def test_a_handshake_has_a_time_limit(serve, files, monkeypatch, capfd):
    monkeypatch.setattr("octile.serve.http.server.HEAD_SECONDS", 0.1)
    served = serve(tls=files)
    with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as client:
        client.settimeout(30)
        assert client.recv(1) == b""
    assert capfd.readouterr().err == ""


def test_a_handshake_that_is_not_complete_does_not_hold_the_end_of_the_server(serve, files):
    served = serve(tls=files)
    with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as client:
        (listener,) = served.server.servers
        wait_until(lambda: listener._starting)
        served.stop()
        client.settimeout(30)
        assert client.recv(1) == b""


def test_the_head_of_a_request_has_a_time_limit(serve, files, trusting, monkeypatch):
    monkeypatch.setattr("octile.serve.http.connection.HEAD_SECONDS", 0.1)
    with connect(serve(tls=files), trusting) as client:
        client.settimeout(30)
        client.sendall(b"GET / HTTP/1.1\r\n")
        assert client.recv(1) == b""


def test_a_server_drains_its_streams(serve, files, trusting):
    served = serve(Limits(drain=20.0), step_seconds=0.005, tls=files)
    body = {**COMPLETION, "max_tokens": 100, "stream": True}
    with (
        httpx.Client(verify=trusting) as client,
        client.stream("POST", f"{served.url}/v1/completions", json=body) as response,
    ):
        lines = response.iter_lines()
        next(lines)
        served.server.drain()
        assert [line for line in lines if line][-1] == "data: [DONE]"
    served.thread.join(30)
    assert not served.thread.is_alive()


@pytest.fixture
def others(tmp_path):
    return make_certificate(tmp_path, "other")


def test_a_key_of_another_certificate_is_refused(files, others):
    with pytest.raises(ValueError, match=r"^ssl_keyfile '.*other.key' does not belong to ssl_certfile '.*server.crt'$"):
        TlsFiles(files.certfile, others.keyfile).context()


def test_a_file_that_does_not_exist_is_named(files, tmp_path):
    with pytest.raises(ValueError, match=r"^ssl_certfile '.*none' cannot be read: No such file or directory$"):
        TlsFiles(tmp_path / "none", files.keyfile).context()
    with pytest.raises(ValueError, match=r"^ssl_keyfile '.*none' cannot be read: No such file or directory$"):
        TlsFiles(files.certfile, tmp_path / "none").context()


def test_files_in_the_wrong_order_are_refused(files):
    with pytest.raises(ValueError, match=r"^ssl_certfile '.*server.key' is no certificate in PEM$"):
        TlsFiles(files.keyfile, files.certfile).context()


def test_a_certificate_is_no_key(files):
    with pytest.raises(ValueError, match=r"^ssl_keyfile '.*server.crt' cannot be used: it is no private key in PEM"):
        TlsFiles(files.certfile, files.certfile).context()


def test_a_reason_that_openssl_does_not_give_is_left_out(files):
    with pytest.raises(ValueError, match=r"too weak$"):
        TlsFiles(files.certfile, files.certfile).context()


def test_a_key_with_a_password_is_refused_without_asking_for_it(tmp_path):
    encrypted = make_certificate(tmp_path, "encrypted", "-passout", "pass:secret")
    with pytest.raises(ValueError, match=r"^ssl_keyfile '.*encrypted.key' is encrypted: a key without a password"):
        encrypted.context()
