"""The load test counts what its clients see."""

import asyncio
from dataclasses import replace

import pytest

pytest.importorskip("fastapi", reason="octile[serve] is not installed")

from octile.serve.http.config import Limits
from octile.serve.http.stress import Stress, StressResult, percentile, stress_test
from tests.serve.http.conftest import serve, wait_until  # noqa: F401

STRESS = Stress(clients=8, requests=20, prompt_words=5, new_tokens=10)


def run(served, stress=STRESS, **options) -> StressResult:
    return asyncio.run(stress_test(served.url, stress, **options))


def test_answers_are_counted_and_timed(serve):  # noqa: F811
    served = serve(step_seconds=0.001)
    result = run(served)
    assert (result.completed, result.canceled, result.new_tokens) == (20, 0, 200)
    assert result.prompt_tokens == served.engine.prompt_tokens
    assert (result.refused, result.broken) == ({}, {})
    assert len(result.first_token) == 20
    assert len(result.between_tokens) <= 9 * 20
    assert result.tokens_per_second == 200 / result.seconds
    assert "8 clients, 20 of 20 requests answered" in result.report()
    assert "refused          none" in result.report()


def test_refusals_are_counted_by_status(serve):  # noqa: F811
    result = run(serve(Limits(in_flight=2), step_seconds=0.02), replace(STRESS, clients=10, requests=10))
    assert result.completed >= 2
    assert result.completed + result.refused[503] == 10
    assert f"{result.refused[503]} with status 503" in result.report()


def test_a_key_is_sent(serve):  # noqa: F811
    served = serve(api_keys=("secret",))
    assert run(served, api_key="secret").completed == 20
    with pytest.raises(ConnectionError, match="answers with status 401"):
        run(served)


def test_it_ends_in_time_and_cancels_what_runs(serve):  # noqa: F811
    served = serve(step_seconds=0.05)
    result = run(served, replace(STRESS, new_tokens=1000, seconds=0.5))
    assert (result.completed, result.canceled) == (0, 8)
    assert "canceled         8, when 0.5 s were over" in result.report()
    wait_until(served.is_idle)


def test_a_broken_stream_is_counted(serve):  # noqa: F811
    result = run(serve(fails_after=3, step_seconds=0.05), replace(STRESS, requests=8))
    assert result.completed == 0
    assert sum(result.broken.values()) + result.refused.total() == 8


def test_a_server_that_is_not_there():
    with pytest.raises(ConnectionError):
        asyncio.run(stress_test("http://127.0.0.1:9", STRESS))


@pytest.mark.parametrize("url", ["https://host", "localhost:8000", "http://host/v1"])
def test_a_url_that_is_none(url):
    with pytest.raises(ValueError, match="url must be http://HOST:PORT, not"):
        asyncio.run(stress_test(url, STRESS))


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([3.0, 1.0, 2.0], 0.5, 2.0), ([1.0, 2.0], 0.5, 1.0), (list(range(1, 201)), 0.99, 198)],
)
def test_percentiles_are_the_nearest_rank(values, share, expected):
    assert percentile(values, share) == expected
