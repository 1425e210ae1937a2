"""The time of each kind of work, as numbers."""

from dataclasses import replace
from typing import get_args

import pytest

from octile.plan.durations import by_kind, seconds
from octile.plan.work import Unit, Work
from tests.plan.toy import CLUSTER, EFFICIENCIES, duration

ROUND = replace(  # 8e6 and 4e6 FLOP/s are reached, and 8,000 B/s
    CLUSTER,
    gpu=replace(CLUSTER.gpu, fp8_peak=20e6, bf16_peak=10e6, memory_bandwidth=10_000),
    efficiencies=EFFICIENCIES
    | {
        "fp8_gemm": 0.5,
        "fp8_wgrad": 0.25,
        "bf16_gemm": 0.5,
        "gemm_in_step": 0.8,
        "copy": 0.8,
        "fp8_gemm_unhidden": 0.5,
        "fp8_wgrad_unhidden": 0.25,
        "attention_forward": 0.5,
        "attention_backward": 0.4,
        "latent_attention": 0.25,
        "latent_attention_bandwidth": 0.5,
        "quantize": 0.2,
    },
)


@pytest.mark.parametrize(
    ("work", "multiprocessors", "expected"),
    [
        (Work("fp8_gemm", "forward", 80e6, 16_000, calls=2), None, 2 * 0.25 + 10 + 0.5 * 2),
        (Work("fp8_gemm", "forward", 8e6, 32_000), None, 0.25 + 4 + 0.5 * 1),
        (Work("fp8_gemm", "forward", 80e6, 16_000), 50, 0.25 + 20 + 0.5 * 2),
        (Work("fp8_wgrad", "weight_gradient", 40e6, 8_000), None, 0.25 + 10 + 0.25 * 1),
        (Work("fp8_wgrad", "weight_gradient", 4e6, 64_000), 25, 0.25 + 8 + 0.25 * 4),
        (Work("bf16_gemm", "forward", 40e6, 8_000, calls=3), None, 3 * 0.25 + 10),
        (Work("bf16_gemm", "forward", 4e6, 80_000), None, 0.25 + 10),
        (Work("attention_forward", "forward", 40e6, keys=32), None, 8 * (1 + 8 / 32)),
        (Work("attention_forward", "forward", 40e6, keys=8), 50, 16 * 2),
        (Work("attention_backward", "input_gradient", 40e6, keys=32), None, 10 * (1 + 8 / 32)),
        (Work("latent_attention", "forward", 25e6, 10_000), None, 10),
        (Work("latent_attention", "forward", 5e6, 10_000), 50, 4),
        (Work("latent_attention", "forward", 2.5e6, 25_000), None, 5),
        (Work("quantize", "forward", bytes=6_000, calls=4), None, 4 * 0.125 + 3),
        (Work("quantize", "forward", bytes=6_000, calls=4), 50, 4 * 0.125 + 3),
    ],
)
def test_work_takes_the_seconds_that_were_computed_by_hand(work, multiprocessors, expected):
    assert seconds(work, ROUND, multiprocessors) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("unit", get_args(Unit))
def test_every_unit_has_its_own_efficiency(unit):
    work = Work(unit, "forward", 3e5, 7e3, calls=2, keys=5)
    assert seconds(work, CLUSTER, 80) == pytest.approx(duration(work, 0.8), rel=1e-12)


def test_seconds_of_a_kind_are_those_of_its_units():
    work = [Work("permute", "forward", bytes=100), Work("unpermute", "forward", bytes=50), Work("norm", "forward")]
    found = by_kind(work, CLUSTER)
    assert found == pytest.approx(
        {"routing": duration(work[0]) + duration(work[1]), "quantization and norms": duration(work[2])}
    )
    gemm = Work("fp8_gemm", "forward", 1e6, 10)
    assert by_kind([gemm], CLUSTER)["FP8 GEMMs"] == pytest.approx(duration(gemm))
