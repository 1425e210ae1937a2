"""The speed of prefill and decode units."""

from dataclasses import replace

import pytest

from octile.models.config import ModelConfig
from octile.plan.hardware import read_cluster
from octile.plan.serving import (
    Decode,
    Prefill,
    decode_step_seconds,
    decode_tokens_per_second,
    prefill_tokens_per_second,
)
from octile.plan.work import expand_latents

V3, H800 = ModelConfig.v3_671b(), read_cluster("h800_2048")


def test_cached_tokens_count_as_input_and_are_not_computed():
    half, none = (prefill_tokens_per_second(V3, Prefill(cached=cached), H800) for cached in (0.5, 0.0))
    assert 1.7 * none < half < 2 * none  # the others attend to the cached ones, whose keys are computed again


def test_keys_and_values_of_cached_tokens_are_computed_from_their_latents():
    layer = list(expand_latents(V3, 1000, "forward"))
    assert [work.unit for work in layer] == ["fp8_gemm", "latent_keys"]
    assert layer[0].flops == 2 * 1000 * 128 * (128 + 128) * 512
    cached, longer = Prefill(prompt=4096, cached=0.5), Prefill(prompt=6144, cached=0.0)  # the same mean of keys
    computed = [(1 - unit.cached) * prefill_tokens_per_second(V3, unit, H800) for unit in (cached, longer)]
    assert computed[0] < computed[1]


def test_equal_loads_of_experts_are_computed_faster():
    equal, as_measured = (prefill_tokens_per_second(V3, Prefill(is_balanced=b), H800) for b in (True, False))
    assert equal > as_measured


def test_a_longer_prompt_is_computed_more_slowly():
    short, long = (prefill_tokens_per_second(V3, Prefill(prompt=n), H800) for n in (2000, 8000))
    assert long < short


def test_more_requests_give_more_tokens_to_all_and_fewer_to_each():
    few, many = Decode(requests=32), Decode(requests=128)
    assert decode_tokens_per_second(V3, many, H800) > decode_tokens_per_second(V3, few, H800)
    assert decode_step_seconds(V3, many, H800) > decode_step_seconds(V3, few, H800)


def test_a_slow_network_limits_decoding():
    slow = replace(H800, network=replace(H800.network, bandwidth=5e9))
    assert decode_step_seconds(V3, Decode(), slow) > 2 * decode_step_seconds(V3, Decode(), H800)


@pytest.mark.parametrize(
    ("kind", "field"), [(Prefill, {"cached": 1.0}), (Prefill, {"ep": 0}), (Decode, {"context": 0})]
)
def test_a_unit_outside_its_range_is_refused(kind, field):
    with pytest.raises(ValueError, match=f"{next(iter(field))} must be"):
        kind(**field)
