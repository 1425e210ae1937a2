"""The rows of what clients of a server have waited."""

from __future__ import annotations

from collections.abc import Iterator

from octile.bench.rows import Row
from octile.serve.http.stress import StressResult, percentile


def latency_rows(case: str, result: StressResult) -> Iterator[Row]:
    """Yield the median and the 99th percentile of the time to the first token and between tokens."""
    for what, seconds in (("first token", result.first_token), ("between tokens", result.between_tokens)):
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            yield Row(case, f"{what}, {name}", 1e3 * percentile(seconds, share), "ms")
