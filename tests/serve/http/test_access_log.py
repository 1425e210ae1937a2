"""The access log: a line for each response."""

import re

import httpx
import pytest

pytest.importorskip("fastapi", reason="octile[serve] is not installed")

from tests.serve.http.conftest import connect, request_bytes, wait_until

BODY = {"model": "micro", "prompt": [5, 6, 7], "max_tokens": 4}
TIMES = r"time=\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z client=127\.0\.0\.1 "


@pytest.fixture
def logged(serve, capfd):
    """A server with a log, and what waits for its lines."""
    served = serve(has_access_log=True, step_seconds=0.005)
    found: list[str] = []

    def lines(count: int) -> list[str]:
        def have_come() -> bool:
            found.extend(capfd.readouterr().err.splitlines())
            return len(found) >= count

        wait_until(have_come)
        return found

    return served, lines


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answer_is_a_line_with_its_tokens_and_its_request(logged, stream):
    served, lines = logged
    headers = {"X-Request-Id": "trace-1"}
    httpx.post(f"{served.url}/v1/completions", json={**BODY, "n": 2, "stream": stream}, headers=headers)
    (line,) = lines(1)
    rest = r"status=200 seconds=0\.\d{3} prompt_tokens=3 new_tokens=8 request_id=trace-1"
    assert re.fullmatch(f"{TIMES}method=POST path=/v1/completions {rest}", line)


def test_a_refused_request_has_a_line(logged):
    served, lines = logged
    httpx.post(f"{served.url}/v1/completions", json={**BODY, "max_tokens": -1}, headers={"X-Request-Id": "trace-2"})
    (line,) = lines(1)
    rest = r"status=400 seconds=0\.\d{3} request_id=trace-2"
    assert re.fullmatch(f"{TIMES}method=POST path=/v1/completions {rest}", line)


def test_a_path_cannot_forge_a_line(logged):
    served, lines = logged
    httpx.get(f"{served.url}/a%0Atime=b%20c")
    (line,) = lines(1)
    assert " method=GET path=/a%0Atime%3Db%20c status=404 " in line


def test_an_id_with_quotes_is_one_value(logged):
    served, lines = logged
    httpx.get(f"{served.url}/health", headers={"X-Request-Id": 'a="b'})
    (line,) = lines(1)
    assert line.endswith(' request_id="a=\\"b"')


def test_the_field_of_a_body_is_the_id(logged):
    served, lines = logged
    httpx.post(f"{served.url}/v1/completions", json={**BODY, "request_id": "own id"})
    (line,) = lines(1)
    assert line.endswith(' request_id="own id"')


def test_a_client_that_has_left_has_a_line(logged):
    served, lines = logged
    with connect(served) as client:
        client.sendall(request_bytes({**BODY, "max_tokens": 1000}))
        wait_until(lambda: served.engine.requests)
    (line,) = lines(1)
    assert " status=499 " in line


def test_a_client_that_has_left_a_stream_has_a_line_that_says_so(logged):
    served, lines = logged
    with connect(served) as client:
        client.sendall(request_bytes({**BODY, "max_tokens": 1000, "stream": True}))
        client.recv(1000)
    (line,) = lines(1)
    assert re.search(r" status=200 .* new_tokens=\d+ error=499 request_id=", line)


def test_a_stream_that_an_error_has_ended_has_its_status(logged):
    served, lines = logged
    body = {**BODY, "max_tokens": 1000, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body) as answer:
        events = answer.iter_lines()
        next(events)
        served.advance(served.service.limits.seconds)
        assert '"code":"timeout"' in [*events][-2]
    (line,) = lines(1)
    assert re.search(r" status=200 .* new_tokens=\d+ error=504 request_id=", line)


def test_without_the_option_nothing_is_printed(serve, capfd):
    served = serve()
    httpx.post(f"{served.url}/v1/completions", json=BODY)
    served.stop()
    assert capfd.readouterr().err == ""
