"""The speed of prefill and decode units."""

from dataclasses import replace

import pytest

from octile.models.config import ModelConfig
from octile.plan.exchange import busiest_rank, exchange
from octile.plan.hardware import read_cluster
from octile.plan.serving import (
    Decode,
    Prefill,
    decode_step_seconds,
    decode_tokens_per_second,
    prefill_tokens_per_second,
)
from octile.plan.work import Work, attention_work, dense_work, expand_latents, mixture_work
from tests.plan.toy import CLUSTER, EFFICIENCIES, TOY, duration

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


FORWARD = "forward"


def in_forward(work) -> float:
    """Seconds of a forward pass on the SMs that exchanges leave."""
    return sum(duration(piece, 0.8) for piece in work if piece.phase == FORWARD)


@pytest.mark.parametrize(("is_balanced", "bandwidth"), [(True, 10.0), (False, 10.0), (True, 1e4)])
def test_a_prefill_unit_computes_what_no_cache_has_while_the_other_micro_batch_is_exchanged(is_balanced, bandwidth):
    cluster = replace(CLUSTER, network=replace(CLUSTER.network, bandwidth=bandwidth))
    unit, e = Prefill(ep=8, tokens=128, prompt=100, cached=0.6, is_balanced=is_balanced), EFFICIENCIES
    load = 1.0 if is_balanced else busiest_rank(TOY, 8, cluster)
    # 60 of 100 tokens are cached, so 40 attend to 60 to 100 of them: 80 in the mean, as in a causal text of 160
    attention = in_forward(attention_work(TOY, 64, 160, saved=True))
    cached = in_forward(expand_latents(TOY, 64 * 1.5, FORWARD))
    dense, mixture = (in_forward(work) for work in (dense_work(TOY, 64, True), mixture_work(TOY, 64, 8, True, load)))
    computed = 2 * (5 * (attention + cached) + 2 * dense + 3 * mixture)
    exchanged = 2 * 3 * exchange(TOY, 64, 8, cluster, is_balanced).total / e["during_gemm"]
    slowed = (computed + exchanged * (1 - e["during_exchange"])) / e["overlap"]
    assert (slowed > exchanged) == (bandwidth == 1e4)  # both limits are reached
    expected = 4 * 128 / 0.4 / max(slowed, exchanged)  # tokens with the cached ones, of four GPUs
    assert prefill_tokens_per_second(TOY, unit, cluster) == pytest.approx(expected, rel=1e-12)


def test_without_a_cache_no_latents_are_expanded():
    unit = Prefill(ep=1, tokens=128, prompt=100, cached=0.0)
    layers = 5 * in_forward(attention_work(TOY, 64, 100, saved=True))
    layers += 2 * in_forward(dense_work(TOY, 64, True)) + 3 * in_forward(mixture_work(TOY, 64, 1, True))
    expected = 4 * 128 / (2 * layers / EFFICIENCIES["overlap"])
    assert prefill_tokens_per_second(TOY, unit, CLUSTER) == pytest.approx(expected, rel=1e-12)


def fp8(rows: float, n: int, k: int, groups: int = 1) -> Work:
    return Work("fp8_gemm", FORWARD, 2 * rows * n * k, rows * k + groups * n * k + 2 * rows * n)


def bf16(rows: float, n: int, read: int, weights: int) -> Work:
    """A GEMM with n outputs of a row, which reads so many values of it, and weights."""
    return Work("bf16_gemm", FORWARD, 2 * rows * weights, 2 * (rows * n + rows * read + weights))


def decoded(rows_of_experts: float, experts: int) -> float:
    """Seconds of all layers for 12 tokens with a context of 50."""
    t = 12
    attention = [
        fp8(t, 96 + 144, 256),
        fp8(t, 4 * 48, 96),
        bf16(t, 4 * 128, 4 * 32, 4 * 128 * 32),  # queries to the latent
        Work("latent_attention", FORWARD, 2 * t * 50 * 4 * (144 + 128), 2 * t * 50 * 144),
        bf16(t, 4 * 40, 4 * 128, 4 * 40 * 128),  # values from it
        fp8(t, 256, 4 * 40),
        Work("norm", FORWARD, bytes=20 * t * 256, calls=8),
    ]
    dense = [fp8(t, 2 * 320, 256), fp8(t, 256, 320)]
    mixture = [
        fp8(rows_of_experts, 2 * 192, 256, experts),
        fp8(rows_of_experts, 256, 192, experts),
        Work("swiglu", FORWARD, bytes=5 * rows_of_experts * 192),
        fp8(t, 2 * 384, 256),
        fp8(t, 256, 384),
        Work("swiglu", FORWARD, bytes=5 * t * 384),
    ]
    layers, of_dense, of_mixture = (sum(map(duration, work)) for work in (attention, dense, mixture))
    return 5 * layers + 2 * of_dense + 3 * of_mixture


@pytest.mark.parametrize("bandwidth", [100.0, 1e9])
def test_a_decode_step_takes_the_longer_of_both_micro_batches_computation_and_exchange_and_the_head(bandwidth):
    cluster = replace(CLUSTER, network=replace(CLUSTER.network, bandwidth=bandwidth))
    unit = Decode(ep=8, requests=24, context=50, experts=3)
    computed = decoded(busiest_rank(TOY, 8, cluster) * 12 * 4, 3)
    row = (256 + 8) + 2 * 256  # FP8 there, BF16 back
    exchanged = 3 * 12 * 4 * row / (bandwidth * EFFICIENCIES["decoding_network"])
    assert (exchanged > computed) == (bandwidth == 100.0)  # both limits are reached
    expected = 2 * max(computed, exchanged) + duration(bf16(24, 1000, 256, 1000 * 256))
    assert decode_step_seconds(TOY, unit, cluster) == pytest.approx(expected, rel=1e-12)
    assert decode_tokens_per_second(TOY, unit, cluster) == pytest.approx(4 * 24 / expected, rel=1e-12)


def test_without_a_network_decoding_sends_over_nvlink():
    node = replace(CLUSTER, gpus=4, network=None, nvlink=replace(CLUSTER.nvlink, bandwidth=1.0))
    exchanged = 3 * 12 * 4 * (256 + 8 + 512) / EFFICIENCIES["decoding_network"]
    head = duration(bf16(24, 1000, 256, 1000 * 256))
    seconds = decode_step_seconds(TOY, Decode(ep=4, requests=24, context=50), node)
    assert seconds == pytest.approx(2 * exchanged + head, rel=1e-12)


def test_attention_that_computes_longer_than_it_reads_limits_a_decode_step():
    slow = replace(CLUSTER, gpu=replace(CLUSTER.gpu, bf16_peak=1.0, memory_bandwidth=1e12))
    units = [Decode(ep=4, requests=24, context=context) for context in (50, 60)]
    longer = decode_step_seconds(TOY, units[1], slow) - decode_step_seconds(TOY, units[0], slow)
    flops = 5 * 24 * 10 * 2 * 4 * (144 + 128)  # of all layers and requests, for ten more tokens
    assert longer == pytest.approx(flops / EFFICIENCIES["latent_attention"], rel=1e-6)
