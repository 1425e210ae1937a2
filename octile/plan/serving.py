"""The speed of serving: prefill and decode units, in tokens per second of a node.

Prefill computes the tokens of a prompt that no cache has, as a forward pass of training does, in two micro-batches: one
computes while the other is exchanged. Decode computes one token of each request with the absorbed form of latent
attention, in two micro-batches, and its exchange needs no SM. A unit always has as many requests as it can hold: the
speeds are those of full load, not the mean of a service whose load varies.

Sources: DeepSeek-V3 (arXiv 2412.19437) §3.4; the overview of its inference system (open-infra-index, day 6); DeepEP's
docs/legacy.md; FlashMLA.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from octile.models.config import ModelConfig
from octile.plan.durations import seconds
from octile.plan.exchange import busiest_rank, exchange
from octile.plan.hardware import Cluster
from octile.plan.work import Phase, Work, attention_work, dense_work, expand_latents, gemm, mixture_work, tiles
from octile.validation import Range, check_fields

Count = Annotated[int, Range(at_least=1, at_most=2**24)]
FORWARD: Phase = "forward"
SMALL_OPERATORS = 8  # of a decoded layer: norms, rotations, quantizations, gate


@dataclass(frozen=True)
class Prefill:
    """A prefill unit.

    Attributes:
        ep: GPUs of the unit, which are the ranks of expert parallelism.
        tokens: tokens of both micro-batches of a GPU together.
        prompt: tokens of a prompt, cached ones included.
        cached: share of a prompt's tokens that a cache has; their keys and values are computed from the cached latents.
        is_balanced: whether all ranks' experts get as many tokens; otherwise loads differ as measured in training.
    """

    ep: Count = 32
    tokens: Count = 16384
    prompt: Count = 4989
    cached: Annotated[float, Range(at_least=0, below=1)] = 0.563
    is_balanced: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Decode:
    """A decode unit.

    Attributes:
        ep: GPUs of the unit, which are the ranks of expert parallelism.
        requests: requests of a GPU, in two micro-batches.
        context: tokens to which a new one attends.
        experts: routed experts on a GPU, copies included; the shared one is on every GPU.
    """

    ep: Count = 144
    requests: Count = 128
    context: Count = 4989
    experts: Count = 2

    def __post_init__(self) -> None:
        check_fields(self)


def prefill_tokens_per_second(c: ModelConfig, unit: Prefill, cluster: Cluster) -> float:
    """Input tokens per second of a node, cached ones included."""
    tokens, e = unit.tokens // 2, cluster.reached
    keys = unit.prompt * (1 + unit.cached) / 2  # of a token that is computed, in the mean
    load = 1.0 if unit.is_balanced else busiest_rank(c, unit.ep, cluster)
    work: list[Work] = []
    for layer in range(c.num_hidden_layers):
        work += attention_work(c, tokens, round(2 * keys), saved=True)
        if unit.cached:
            work += expand_latents(c, tokens * unit.cached / (1 - unit.cached), FORWARD)
        work += mixture_work(c, tokens, unit.ep, True, load) if c.is_moe(layer) else dense_work(c, tokens, True)
    multiprocessors = cluster.gpu.multiprocessors - cluster.exchange_multiprocessors
    computed = 2 * sum(seconds(piece, cluster, multiprocessors) for piece in work if piece.phase == FORWARD)
    mixtures = c.num_hidden_layers - c.first_k_dense_replace
    exchanged = 2 * mixtures * exchange(c, tokens, unit.ep, cluster, unit.is_balanced).total / e.during_gemm
    passed = max((computed + exchanged * (1 - e.during_exchange)) / e.overlap, exchanged)
    return cluster.gpus_per_node * unit.tokens / passed / (1 - unit.cached)


def decode_step_seconds(c: ModelConfig, unit: Decode, cluster: Cluster) -> float:
    """Seconds in which every request of a unit gets a token."""
    tokens, e = unit.requests / 2, cluster.reached
    computed = sum(seconds(work, cluster) for work in _decoded_layers(c, unit, tokens, cluster))
    head = seconds(_bf16(unit.requests, c.vocab_size, c.hidden_size), cluster)
    mixtures = c.num_hidden_layers - c.first_k_dense_replace
    link = cluster.network or cluster.nvlink
    row = tiles(c.hidden_size) + 2 * c.hidden_size  # there and back
    exchanged = mixtures * tokens * c.num_experts_per_tok * row / (link.bandwidth * e.decoding_network)
    return 2 * max(computed, exchanged) + head


def decode_tokens_per_second(c: ModelConfig, unit: Decode, cluster: Cluster) -> float:
    """Output tokens per second of a node."""
    return cluster.gpus_per_node * unit.requests / decode_step_seconds(c, unit, cluster)


def _decoded_layers(c: ModelConfig, unit: Decode, tokens: float, cluster: Cluster) -> Iterator[Work]:
    """The work of all layers for a micro-batch of one token per request."""
    d, h, latent = c.hidden_size, c.num_attention_heads, c.latent_dim
    rows = busiest_rank(c, unit.ep, cluster) * tokens * c.num_experts_per_tok
    for layer in range(c.num_hidden_layers):
        yield gemm(tokens, latent + (c.q_lora_rank or 0), d, FORWARD)
        yield gemm(tokens, h * c.qk_head_dim, c.q_lora_rank or d, FORWARD)
        yield _bf16(tokens, h * c.kv_lora_rank, c.qk_nope_head_dim, h)  # queries to the latent
        flops = 2 * tokens * unit.context * h * (latent + c.kv_lora_rank)
        yield Work("latent_attention", FORWARD, flops, 2 * tokens * unit.context * latent)
        yield _bf16(tokens, h * c.v_head_dim, c.kv_lora_rank, h)  # values from the latent
        yield gemm(tokens, d, h * c.v_head_dim, FORWARD)
        yield Work("norm", FORWARD, bytes=20 * tokens * d, calls=SMALL_OPERATORS)
        if not c.is_moe(layer):
            yield gemm(tokens, 2 * c.intermediate_size, d, FORWARD)
            yield gemm(tokens, d, c.intermediate_size, FORWARD)
            continue
        for n_rows, width, experts in (
            (rows, c.moe_intermediate_size, unit.experts),
            (tokens, c.n_shared_experts * c.moe_intermediate_size, 1),
        ):
            yield gemm(n_rows, 2 * width, d, FORWARD, experts)
            yield gemm(n_rows, d, width, FORWARD, experts)
            yield Work("swiglu", FORWARD, bytes=5 * n_rows * width)


def _bf16(rows: float, n: int, k: int, groups: int = 1) -> Work:
    """A BF16 GEMM; n are the outputs of all groups, each of which reads k channels of its own."""
    return Work("bf16_gemm", FORWARD, 2 * rows * n * k, 2 * (rows * (n + groups * k) + n * k))
