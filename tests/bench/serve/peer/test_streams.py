"""What the clients of a server send, and what becomes of it."""

import pytest

pytest.importorskip("fastapi", reason="octile[serve] is not installed")

from octile.bench.serve.peer import streams
from octile.bench.serve.peer.streams import Traffic, measure_server
from octile.serve.http.stress import Stress, StressResult, _prompts


@pytest.fixture
def sent(monkeypatch) -> list[Stress]:
    """The loads that a server gets, which answers 10 requests per second when it is always busy."""
    loads = []

    async def stress_test(url: str, stress: Stress) -> StressResult:
        loads.append(stress)
        n = stress.requests
        return StressResult(stress, n / 10, n, 0, 8 * n, stress.new_tokens * n, [0.2] * n, [0.1, 0.3] * n)

    monkeypatch.setattr(streams, "stress_test", stress_test)
    return loads


def rows(capacity: dict[int, float]):
    return list(measure_server("http://server", "m", Traffic(((2, 4), (4, 6)), 5, 9), 1000, capacity))


def test_arrivals_are_shares_of_the_capacity_that_was_measured(sent):
    capacity = {}
    rows(capacity)
    assert capacity == {2: 10.0, 4: 10.0}
    assert [stress.rate for stress in sent] == 2 * [None, None, 5.0, 9.0]
    assert [stress.requests for stress in sent] == [2, 4, 4, 4, 4, 6, 6, 6]


def test_another_server_gets_the_same_loads(sent):
    capacity = {2: 20.0, 4: 30.0}
    rows(capacity)
    assert capacity == {2: 20.0, 4: 30.0}
    assert [stress.rate for stress in sent] == [None, None, 10.0, 18.0, None, None, 15.0, 27.0]


def test_no_prompt_comes_twice(sent):
    rows({})
    prompts = [tuple(prompt) for stress in sent for prompt in _prompts(stress)]
    assert len(prompts) == 2 + 3 * 4 + 4 + 3 * 6
    assert len(set(prompts)) == len(prompts)


def test_rows_are_what_clients_saw(sent):
    found = {(row.case, row.what): (row.value, row.unit) for row in rows({})}
    case = "m, 2 streams, arrivals at 50%"
    assert {what: value for (where, what), value in found.items() if where == case} == {
        "throughput": (90.0, "tokens/s"),
        "arrivals": (5.0, "requests/s"),
        "first token, p50": (pytest.approx(200), "ms"),
        "first token, p99": (pytest.approx(200), "ms"),
        "between tokens, p50": (pytest.approx(100), "ms"),
        "between tokens, p99": (pytest.approx(300), "ms"),
        "tokens of an event": (3.0, "tokens"),
    }


def test_a_request_that_is_not_answered_is_no_measurement(monkeypatch):
    async def stress_test(url: str, stress: Stress) -> StressResult:
        return StressResult(stress, 1.0, stress.requests - 1)

    monkeypatch.setattr(streams, "stress_test", stress_test)
    with pytest.raises(
        RuntimeError, match="the server did not answer as it should: 2 clients, 1 of 2 requests answered"
    ):
        rows({})
