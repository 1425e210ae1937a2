"""What Prometheus reads at /metrics.

Names after the prefix `octile_` and units are vLLM's, so that a dashboard changes its prefix only. (Prometheus reserves
the colon of `vllm:` for recording rules.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from octile.serve.engine.request import FinishReason
from octile.serve.engine.stats import Stats
from octile.serve.process.client import Observer

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)  # seconds
LONG = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 600)

COUNTERS = {  # a field of Stats: its name at /metrics and what it counts
    "prompt_tokens": ("prompt_tokens", "Tokens of the prompts of admitted requests."),
    "generated_tokens": ("generation_tokens", "Tokens generated."),
    "preemptions": ("num_preemptions", "How often a running request was preempted because pages ran out."),
    "drafted_tokens": ("spec_decode_num_draft_tokens", "Draft tokens that were verified."),
    "accepted_tokens": ("spec_decode_num_accepted_tokens", "Draft tokens that were accepted."),
    "steps": ("engine_steps", "Forward passes of the model."),
    "steps_ahead": (
        "engine_steps_ahead",
        "Forward passes that were launched before the last one's tokens were known.",
    ),
}

# Prometheus sees no increase in a counter that begins with 1, so those of alerts begin with 0
ALERT_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses")
ALERT_STATUSES = (200, 500, 503, 504)
STREAM_ERRORS = (500, 503, 504)

EXEMPLAR_CHARACTERS = 128  # of all names and values, in OpenMetrics


class Metrics(Observer):
    """Counts and times of one server.

    Args:
        model: the name under which the model is served, the label of everything.
        stats: returns the engine's newest counts.
        step_age: returns the seconds since its last step; 0 while it has no request.
    """

    def __init__(self, model: str, stats: Callable[[], Stats], step_age: Callable[[], float]):
        self._model, self._stats, self._step_age = model, stats, step_age
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._first = self._histogram("time_to_first_token_seconds", "Time from a request to its first token.", LONG)
        text = "Time from a request to its admission, in which it waits for pages or for a slot."
        self._queued = self._histogram("request_queue_time_seconds", text, LONG)
        text = "Time from a request's admission to its first token."
        self._prefilled = self._histogram("request_prefill_time_seconds", text, LONG)
        text = "Time from the first token of a choice to its last."
        self._decoded = self._histogram("request_decode_time_seconds", text, LONG)
        self._next = self._histogram("inter_token_latency_seconds", "Time between two tokens of a choice.", SHORT)
        self._whole = self._histogram("e2e_request_latency_seconds", "Time from a request to its last token.", LONG)
        labels = ("model_name", "finished_reason")
        self._ended = Counter("octile_request_success", "Choices that have ended.", labels, registry=self._registry)
        for reason in FinishReason:
            self._ended.labels(model, str(reason))
        text = "Time of an update of the weights, with what it waits for."
        self._updates = self._histogram("weights_update_seconds", text, LONG)
        labels = ("path", "status")
        self._responses = Counter("octile_http_responses", "Responses.", labels, registry=self._registry)
        for path, status in product(ALERT_PATHS, ALERT_STATUSES):
            self._responses.labels(path, str(status))
        text = "Errors that have ended a stream whose head said 200, by the status that they would have had."
        self._stream_errors = Counter("octile_http_stream_errors", text, labels, registry=self._registry)
        for path, status in product(ALERT_PATHS, STREAM_ERRORS):
            self._stream_errors.labels(path, str(status))

    def first_token(self, seconds: float, prefill_seconds: float, name: str) -> None:  # noqa: D102
        self._first.observe(seconds, _exemplar(name))
        self._queued.observe(seconds - prefill_seconds)
        self._prefilled.observe(prefill_seconds)

    def next_tokens(self, seconds: float, count: int) -> None:  # noqa: D102
        for _ in range(count):
            self._next.observe(seconds / count)

    def decoded(self, seconds: float) -> None:  # noqa: D102
        self._decoded.observe(seconds)

    def ended(self, seconds: float, reason: FinishReason, name: str) -> None:  # noqa: D102
        self._ended.labels(self._model, str(reason)).inc()
        self._whole.observe(seconds, _exemplar(name))

    def responded(self, path: str, status: int) -> None:
        """Count a response with its status."""
        self._responses.labels(path, str(status)).inc()

    def stream_failed(self, path: str, status: int) -> None:
        """Count an error that has ended a stream, with the status that its response would have had."""
        self._stream_errors.labels(path, str(status)).inc()

    def updated(self, seconds: float) -> None:
        """Count an update of the weights."""
        self._updates.observe(seconds)

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """Everything in Prometheus's text format, and its content type.

        Args:
            accept: the formats that the reader takes, as HTTP has them. OpenMetrics has request ids, too: those of one
                request in each bucket of the times to the first and to the last token.
        """
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # its version is none
            encode, content_type = choose_encoder("")
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """The engine's counts, for the registry."""
        stats = self._stats()
        used = stats.used_pages / stats.n_pages if stats.n_pages else 0.0
        yield self._gauge("num_requests_running", "Choices that run now.", stats.running)
        yield self._gauge("num_requests_waiting", "Choices that wait for pages or for a slot.", stats.waiting)
        yield self._gauge("kv_cache_usage_perc", "Share of the cache's pages that requests hold, from 0 to 1.", used)
        text = "Seconds since the last step ended; 0 while the engine has no request."
        yield self._gauge("engine_step_age_seconds", text, self._step_age())
        text = "Seconds for which a prefill or decode process has not answered."
        yield self._gauge("engine_process_silent_seconds", text, stats.silent_seconds)
        yield self._gauge("weights_version", "How often the weights were updated.", stats.weights_version)
        for field, (name, text) in COUNTERS.items():
            yield self._counter(name, text, getattr(stats, field))
        yield self._counter("prefix_cache_queries", "Tokens looked up in the cache.", stats.prompt_tokens)
        yield self._counter("prefix_cache_hits", "Tokens of prompts found in the cache.", stats.shared_tokens)
        if stats.expert_tokens is not None:
            text, labels = "Tokens of each expert in the last steps.", ["model_name", "layer", "expert"]
            family = GaugeMetricFamily("octile_expert_tokens", text, labels=labels)
            for layer, tokens in stats.expert_tokens.items():
                for expert, count in enumerate(tokens):
                    family.add_metric([self._model, str(layer), str(expert)], count)
            yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"octile_{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"octile_{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        labels = ("model_name",)
        return Histogram(f"octile_{name}", text, labels, buckets=buckets, registry=self._registry).labels(self._model)


def _exemplar(request_id: str) -> dict[str, str] | None:
    """The request that an observation is of, as OpenMetrics has it; None if it has no id, or too long a one."""
    exemplar = {"request_id": request_id}
    return exemplar if request_id and len("request_id" + request_id) <= EXEMPLAR_CHARACTERS else None
