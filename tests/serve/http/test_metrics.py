"""What Prometheus reads."""

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from octile.serve.engine.stats import Stats
from octile.serve.http.metrics import Metrics
from tests.serve.http.conftest import wait_until


def values(served) -> dict[str, float]:
    """Name of each sample, with the labels other than the model's: its value."""
    found = {}
    for family in text_string_to_metric_families(httpx.get(f"{served.url}/metrics").text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            assert sample.labels.get("model_name", "micro") == "micro"
            found[" ".join((sample.name, *labels.values()))] = sample.value
    return found


def test_counts_and_times_of_requests(serve):
    served = serve()
    body = {"model": "micro", "prompt": [5, 6, 7], "max_tokens": 10, "n": 2}
    httpx.post(f"{served.url}/v1/completions", json=body)
    httpx.post(f"{served.url}/v1/completions", json={**body, "prompt": 5})
    httpx.get(f"{served.url}/none")
    wait_until(served.is_idle)
    found = values(served)
    assert found["octile_prompt_tokens_total"] == 6
    assert found["octile_generation_tokens_total"] == 20
    assert found["octile_spec_decode_num_draft_tokens_total"] == 40
    assert found["octile_spec_decode_num_accepted_tokens_total"] == 20
    assert found["octile_request_success_total length"] == 2
    assert found["octile_time_to_first_token_seconds_count"] == 2
    assert found["octile_inter_token_latency_seconds_count"] == 18
    assert found["octile_e2e_request_latency_seconds_count"] == 2
    for part in ("queue", "prefill", "decode"):
        assert found[f"octile_request_{part}_time_seconds_count"] == 2
    assert found["octile_num_requests_running"] == found["octile_num_requests_waiting"] == 0
    assert found["octile_kv_cache_usage_perc"] == 0
    assert found["octile_http_responses_total /v1/completions 200"] == 1
    assert found["octile_http_responses_total /v1/completions 400"] == 1
    assert found["octile_http_responses_total other 404"] == 1


def test_a_response_to_a_defect_is_counted(serve, monkeypatch):
    served = serve()
    monkeypatch.setattr(served.service, "why_hung", lambda: 1 / 0)
    assert httpx.get(f"{served.url}/health").status_code == 500
    assert values(served)["octile_http_responses_total /health 500"] == 1


def test_an_error_that_ends_a_stream_is_counted_with_its_status(serve):
    served = serve()
    body = {"model": "micro", "prompt": [5, 6, 7], "max_tokens": 1000, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body) as answer:
        events = answer.iter_lines()
        next(events)
        served.advance(served.service.limits.seconds)
        assert '"code":"timeout"' in [*events][-2]
    found = values(served)
    assert found["octile_http_responses_total /v1/completions 200"] == 1
    assert found["octile_http_stream_errors_total /v1/completions 504"] == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_prompt_that_the_model_does_not_know_is_counted_as_a_response_alone(serve, stream):
    served = serve()
    body = {"model": "micro", "prompt": [[5, 6], [10**6]], "max_tokens": 10, "stream": stream}
    assert httpx.post(f"{served.url}/v1/completions", json=body).status_code == 400
    found = values(served)
    assert found["octile_http_responses_total /v1/completions 400"] == 1
    assert served.engine.added == found["octile_e2e_request_latency_seconds_count"] == 0
    assert [value for name, value in found.items() if name.startswith("octile_request_success_total")] == [0] * 4


def test_what_runs_now(serve):
    served = serve(step_seconds=0.1, n_pages=100)
    body = {"model": "micro", "prompt": "a", "max_tokens": 4000, "n": 3, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json={**body, "max_tokens": 2000}) as response:
        lines = response.iter_lines()
        next(lines)
        found = values(served)
    assert found["octile_num_requests_running"] == 3
    assert found["octile_kv_cache_usage_perc"] == pytest.approx(0.03)
    wait_until(served.is_idle)
    assert values(served)["octile_request_success_total canceled"] == 3


def test_what_alerts_are_about_begins_with_0(serve):
    found = values(serve())
    for reason in ("stop", "length", "canceled", "error"):
        assert found[f"octile_request_success_total {reason}"] == 0
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        for status in (200, 500, 503, 504):
            assert found[f"octile_http_responses_total {path} {status}"] == 0
        for status in (500, 503, 504):
            assert found[f"octile_http_stream_errors_total {path} {status}"] == 0


def test_steps_that_are_launched_ahead_are_counted():
    lines = Metrics("micro", lambda: Stats(steps=5, steps_ahead=3), lambda: 0.0).text()[0].decode().splitlines()
    assert 'octile_engine_steps_total{model_name="micro"} 5.0' in lines
    assert 'octile_engine_steps_ahead_total{model_name="micro"} 3.0' in lines


def test_the_time_to_the_first_token_is_divided_by_the_admission():
    metrics = Metrics("micro", Stats, lambda: 0.0)
    metrics.first_token(5.0, 2.0, "a")
    metrics.decoded(7.0)
    lines = metrics.text()[0].decode().splitlines()
    for part, seconds in (("queue", 3.0), ("prefill", 2.0), ("decode", 7.0)):
        assert f'octile_request_{part}_time_seconds_sum{{model_name="micro"}} {seconds}' in lines


def test_the_age_of_a_step_and_the_silence_of_a_process_are_gauges():
    lines = Metrics("micro", lambda: Stats(silent_seconds=3.5), lambda: 2.5).text()[0].decode().splitlines()
    assert 'octile_engine_step_age_seconds{model_name="micro"} 2.5' in lines
    assert 'octile_engine_process_silent_seconds{model_name="micro"} 3.5' in lines


def test_the_tokens_of_experts_are_gauges_by_layer_and_expert():
    metrics = Metrics("micro", lambda: Stats(expert_tokens={3: (7, 0), 4: (1, 2)}), lambda: 0.0)
    lines = metrics.text()[0].decode().splitlines()
    assert 'octile_expert_tokens{expert="0",layer="3",model_name="micro"} 7.0' in lines
    assert 'octile_expert_tokens{expert="1",layer="4",model_name="micro"} 2.0' in lines


def test_experts_that_are_not_counted_have_no_gauge():
    content, _ = Metrics("micro", Stats, lambda: 0.0).text()
    assert b"expert_tokens" not in content


def test_a_format_of_no_version_is_the_plain_one(served):
    answer = httpx.get(f"{served.url}/metrics", headers={"Accept": "application/openmetrics-text; version=abc"})
    assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, "text/plain")


def test_openmetrics_have_the_ids_of_requests(serve):
    served = serve()
    body = {"model": "micro", "prompt": [5], "max_tokens": 2}
    httpx.post(f"{served.url}/v1/completions", json=body, headers={"X-Request-Id": "trace-1"})
    httpx.post(f"{served.url}/v1/completions", json=body, headers={"X-Request-Id": "a" * 128})  # too long for it
    answer = httpx.get(f"{served.url}/metrics", headers={"Accept": "application/openmetrics-text;version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    families = [*parse_openmetrics(answer.text)]
    found = {
        (family.name, sample.exemplar.labels["request_id"])
        for family in families
        for sample in family.samples
        if sample.exemplar
    }
    names = ("octile_time_to_first_token_seconds", "octile_e2e_request_latency_seconds")
    assert found == {(name, "trace-1") for name in names}
    assert {family.name for family in families} >= {"octile_prompt_tokens", "octile_kv_cache_usage_perc"}
