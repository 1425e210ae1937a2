"""The load test counts what its clients see."""

import asyncio
from dataclasses import replace
from itertools import pairwise
from math import exp
from statistics import mean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason="octile[serve] is not installed")

from octile.serve.http import stress
from octile.serve.http.config import Limits
from octile.serve.http.stress import Stress, StressResult, arrivals, percentile, stress_test
from tests.serve.http.conftest import serve, wait_until  # noqa: F401

STRESS = Stress(clients=8, requests=20, prompt_words=5, new_tokens=10)


def run(served, load=STRESS, **options) -> StressResult:
    return asyncio.run(stress_test(served.url, load, **options))


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


def test_requests_arrive_as_a_poisson_process():
    times = arrivals(40.0, 4000, seed=3)
    gaps = [b - a for a, b in pairwise([0.0, *times])]
    assert mean(gaps) == pytest.approx(1 / 40, rel=0.05)
    assert stdev(gaps) == pytest.approx(mean(gaps), rel=0.05)  # as of an exponential distribution
    assert sum(gap > 2 / 40 for gap in gaps) / 4000 == pytest.approx(exp(-2), rel=0.1)


@given(rate=st.floats(0.1, 1e4), n=st.integers(1, 50), seed=st.integers(0, 2**32))
def test_arrivals_of_a_seed_are_the_same_at_any_rate_but_for_their_unit(rate, n, seed):
    times = arrivals(rate, n, seed)
    assert times == sorted(times)
    assert times == arrivals(rate, n, seed)
    assert [time * rate for time in times] == pytest.approx(arrivals(1.0, n, seed))


def test_a_stream_begins_when_its_request_arrives(serve):  # noqa: F811
    result = run(serve(step_seconds=0.001), replace(STRESS, clients=20, rate=50.0))
    assert (result.completed, result.new_tokens, len(result.first_token)) == (20, 200, 20)
    assert result.seconds > arrivals(50.0, 20, STRESS.seed)[-1] - 0.05
    assert "8 clients" not in result.report()
    assert "20 clients, 50 arrivals/s, 20 of 20 requests answered" in result.report()


def test_no_more_streams_are_open_than_there_are_clients_and_the_wait_counts(serve, monkeypatch):  # noqa: F811
    open_streams, counts, answer = set(), [], stress._answer

    async def counted(*arguments) -> None:
        open_streams.add(asyncio.current_task())
        counts.append(len(open_streams))
        await answer(*arguments)
        open_streams.remove(asyncio.current_task())

    monkeypatch.setattr(stress, "_answer", counted)
    result = run(serve(step_seconds=0.005), replace(STRESS, clients=2, requests=10, rate=100_000.0))
    assert (result.completed, max(counts)) == (10, 2)
    assert max(result.first_token) > 4 * 9 * 0.005  # four answers of ten tokens came before


def test_requests_that_arrive_end_in_time_too(serve):  # noqa: F811
    served = serve(step_seconds=0.05)
    result = run(served, replace(STRESS, new_tokens=1000, seconds=0.5, clients=3, rate=100_000.0))
    assert (result.completed, result.canceled) == (0, 3)
    wait_until(served.is_idle)


def test_prompts_can_be_tokens(serve):  # noqa: F811
    served = serve(step_seconds=0.001)
    result = run(served, replace(STRESS, prompt_tokens=7, vocab_size=300))
    assert (result.completed, result.prompt_tokens) == (20, 7 * 20)


@pytest.mark.parametrize(("present", "missing"), [("prompt_tokens", "vocab_size"), ("vocab_size", "prompt_tokens")])
def test_tokens_of_prompts_need_their_number_and_their_range(present, missing):
    with pytest.raises(ValueError, match=f"{missing} is needed, too, with {present}"):
        Stress(**{present: 8})


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
