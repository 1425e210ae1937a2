"""Request ids: in the header of each response, and in the ids of answers."""

import httpx
import pytest

pytest.importorskip("fastapi", reason="octile[serve] is not installed")

BODY = {"model": "micro", "prompt": "abc", "max_tokens": 2}


def complete(served, headers=None, **fields):
    return httpx.post(f"{served.url}/v1/completions", json={**BODY, **fields}, headers=headers)


def test_a_clients_id_is_that_of_the_response_and_of_the_answer(served):
    response = complete(served, {"X-Request-Id": "trace-7"})
    assert response.headers["x-request-id"] == "trace-7"
    assert response.json()["id"] == "cmpl-trace-7"


def test_requests_without_an_id_get_different_ones(served):
    ids = [complete(served).headers["x-request-id"] for _ in range(2)]
    assert len(set(ids)) == 2
    assert complete(served).json()["id"].startswith("cmpl-")


@pytest.mark.parametrize("given", ["", "a b", "a" * 129, "\u00e9".encode()])
def test_a_header_that_is_no_id_is_ignored(served, given):
    found = complete(served, {"X-Request-Id": given}).headers["x-request-id"]
    assert len(found) == 32


def test_the_field_of_a_body_names_the_answer(served):
    assert complete(served, {"X-Request-Id": "outer"}, request_id="inner").json()["id"] == "cmpl-inner"


def test_all_chunks_of_a_stream_have_the_id(served):
    text = complete(served, {"X-Request-Id": "trace-8"}, stream=True, n=3).text
    assert text.count('"id":"cmpl-trace-8"') == text.count('"id":') > 1


@pytest.mark.parametrize(("path", "status"), [("/health", 200), ("/nowhere", 404), ("/v1/completions", 405)])
def test_every_response_has_an_id(served, path, status):
    response = httpx.get(f"{served.url}{path}", headers={"X-Request-Id": "q"})
    assert (response.status_code, response.headers["x-request-id"]) == (status, "q")


def test_an_id_that_is_too_long_is_refused(served):
    error = complete(served, request_id="a" * 129).json()["error"]
    assert error["message"].startswith("request_id must be a text of at most 128 characters, not ")
