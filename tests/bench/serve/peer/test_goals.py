"""The goals of octile vs. vLLM: the better of its settings counts."""

import pytest

from octile.bench import goals
from octile.bench.goals import BETWEEN_P99, DECODE, THROUGHPUT, arrivals_case, decode_case, prefill_case, weights_case
from octile.bench.rows import Row, compare

FP8, BF16 = (weights_case(goals.V2_LITE, weights) for weights in ("FP8", "BF16"))
STREAMS = arrivals_case(FP8, 64, 90)


def engine(ratios: dict[str, float], case: str, what: str = DECODE) -> list[Row]:
    return [compare(case, what, ratio, "tokens/s", f"vLLM 0.26.0, {setting}", 1.0) for setting, ratio in ratios.items()]


def http(setting: str, speed: float, time: float, case: str = STREAMS) -> list[Row]:
    label = f"vLLM 0.26.0, {setting}"
    return [
        compare(case, THROUGHPUT, speed, "tokens/s", label, 1.0),
        compare(case, "first token, p99", 2.0, "ms", label, 1.0),
        compare(case, BETWEEN_P99, time, "ms", label, 1.0),
    ]


def verdicts(*rows: list[Row], gpu: str | None = "NVIDIA H200") -> list[str]:
    return goals.vllm_verdicts([row for group in rows for row in group], gpu).splitlines()


def test_the_best_setting_is_judged_and_named():
    rows = engine({"triton": 2.0, "deep_gemm": 1.7, "flashinfer": 1.9}, decode_case(FP8, 1))
    expected = "FP8 weights, decode, batch 1, vs. vLLM: 1.700 (vLLM 0.26.0, deep_gemm): floor ≥ 1.8 MISSED"
    assert verdicts(rows) == [expected]


def test_a_setting_that_was_not_measured_misses_the_goal_and_is_named():
    (line,) = verdicts(engine({"triton": 3.0}, decode_case(FP8, 1)))
    assert line.endswith("floor ≥ 1.8 MISSED (not measured: deep_gemm)")
    assert verdicts(engine({"triton": 1.7}, decode_case(FP8, 1)))[0].endswith("floor ≥ 1.8 MISSED")
    assert verdicts(engine({"triton": 3.0}, decode_case(BF16, 1)))[0].endswith("floor ≥ 1 met")  # it has no other


@pytest.mark.parametrize(
    ("case", "what", "floor"),
    [
        (decode_case(FP8, 1), DECODE, 1.8),
        (decode_case(FP8, 32), DECODE, 1.25),
        (decode_case(FP8, 256), DECODE, 1.2),
        (prefill_case(FP8, 8, 1024), THROUGHPUT, 1.4),
        (prefill_case(FP8, 16, 4096), THROUGHPUT, 1.4),
        (decode_case(BF16, 256), DECODE, 1.0),
        (prefill_case(BF16, 16, 4096), THROUGHPUT, 1.0),
    ],
)
def test_a_floor_is_a_bound(case, what, floor):
    settings = ("triton", "deep_gemm")
    for ratio, verdict in ((floor, "met"), (floor - 0.001, "MISSED")):
        assert verdicts(engine(dict.fromkeys(settings, ratio), case, what))[0].endswith(f"floor ≥ {floor:g} {verdict}")


@pytest.mark.parametrize(
    ("speed", "time", "verdict"),
    [
        (1.1, 1.02, "met"),  # more tokens/s at equal times
        (1.1, 1.03, "MISSED"),
        (1.09, 1.0, "MISSED"),  # equal times, but too few tokens/s more
        (1.0, 0.99, "met"),  # lower times at equal tokens/s
        (0.98, 0.99, "met"),
        (0.97, 0.5, "MISSED"),
    ],
)
def test_servers_are_judged_by_tokens_and_by_times(speed, time, verdict):
    (line,) = verdicts(http("triton", speed, time), http("deep_gemm", 2.0, 0.5))
    assert line == (
        f"FP8 weights, 64 streams, arrivals at 90%, vs. vLLM: {speed:.3f} tokens/s, {time:.3f} p99 between tokens "
        f"(vLLM 0.26.0, triton): floor ≥ 1.1 at equal p99, or lower p99 at equal tokens/s {verdict}"
    )


def test_bf16_servers_need_as_many_tokens():
    case = arrivals_case(BF16, 256, 50)
    assert verdicts(http("triton", 1.0, 1.0, case))[0].endswith(
        "floor ≥ 1 at equal p99, or lower p99 at equal tokens/s met"
    )


def test_a_load_that_was_interrupted_is_not_judged():
    assert verdicts(http("triton", 2.0, 0.5)[:1]) == []


def test_a_server_of_which_a_setting_is_missing_misses_the_goal():
    assert verdicts(http("triton", 2.0, 0.5))[0].endswith("tokens/s MISSED (not measured: deep_gemm)")
    assert verdicts(http("triton", 0.9, 0.5))[0].endswith("tokens/s MISSED")


@pytest.mark.parametrize("gpu", [None, "NVIDIA H100 80GB HBM3"])
def test_the_goals_are_for_an_h200(gpu):
    lines = verdicts(engine({"triton": 2.0}, decode_case(FP8, 1)), http("triton", 2.0, 0.5), gpu=gpu)
    assert len(lines) == 2
    assert not any("floor" in line for line in lines)
