"""The work of a rank in a training step: the GEMMs and operators of layers, with their FLOPs and bytes.

They are those of octile's recipe `deepseek_v3` (docs/data_flow.md), in the order of a profile of a layer
(benchmarks/history/training-step/one_layer.txt). The bytes of an operator are those of its inputs and outputs, once
each, as in `octile bench casts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from octile.models.config import ModelConfig

Phase = Literal["forward", "input_gradient", "weight_gradient"]
PHASES: tuple[Phase, ...] = ("forward", "input_gradient", "weight_gradient")
Unit = Literal[
    "fp8_gemm",
    "fp8_wgrad",
    "bf16_gemm",
    "attention_forward",
    "attention_backward",
    "latent_attention",
    "copy",
    "quantize",
    "requantize",
    "norm",
    "norm_backward",
    "swiglu",
    "swiglu_backward",
    "permute",
    "unpermute",
    "rotate",
    "latent_keys",
    "latent_keys_backward",
    "cross_entropy",
    "optimizer",
]
KINDS: dict[Unit, str] = {
    "fp8_gemm": "FP8 GEMMs",
    "fp8_wgrad": "FP8 weight gradients",
    "bf16_gemm": "BF16 GEMMs",
    "attention_forward": "attention",
    "attention_backward": "attention",
    "latent_attention": "attention",
    "permute": "routing",
    "unpermute": "routing",
    "copy": "elementwise",
    "cross_entropy": "loss",
    "optimizer": "optimizer",
}
GATE_TERMS = 3  # BF16 terms of an FP32 value: the gate multiplies three
BACKWARD_ATTENTION = 2.5  # FLOPs of attention's backward pass, of its forward pass
SUM_BYTES = 12  # of a sum of two FP32 values: both are read, and it is written
SMALL_ROUTING_KERNELS = 8  # a layer and pass: counts, rows, balance, and sums of them


@dataclass(frozen=True)
class Work:
    """Calls of one kind of kernel.

    Attributes:
        unit: which efficiency holds for it.
        phase: phase of the schedule.
        flops, bytes: sums over all calls.
        calls: how often it is launched, in the mean of micro-batches.
        keys: to which a query attends on average, if it is attention.
        weights: whose gradient it computes.
    """

    unit: Unit
    phase: Phase
    flops: float = 0
    bytes: float = 0
    calls: float = 1
    keys: float = 1
    weights: float = 0

    @property
    def kind(self) -> str:
        """The kind under which a report counts it."""
        return KINDS.get(self.unit, "quantization and norms")


def tiles(n: int) -> int:
    """Bytes of n values in 8 bits with an FP32 scale for each 128."""
    from octile.formats import TILE  # late: it loads torch

    return n + 4 * -(-n // TILE[1])


def gemm(m: float, n: float, k: float, phase: Phase, groups: int = 1) -> Work:
    """An FP8 GEMM with a BF16 result; m are the rows of all groups."""
    return Work("fp8_gemm", phase, 2 * m * n * k, m * k + groups * n * k + 2 * m * n)


def wgrad(rows: float, n: int, k: int, groups: int = 1) -> Work:
    """The weight gradient of FP8 operands, added to an FP32 one; rows are those of all groups."""
    moved, weights = rows * (n + k) + 8 * groups * n * k, groups * n * k
    return Work("fp8_wgrad", "weight_gradient", 2 * rows * n * k, moved, weights=weights)


def linear(rows: float, n: int, k: int, groups: int = 1) -> Iterator[Work]:
    """The three GEMMs of a layer from k to n channels."""
    yield gemm(rows, n, k, "forward", groups)
    yield gemm(rows, k, n, "input_gradient", groups)
    yield wgrad(rows, n, k, groups)


def bf16_linear(rows: float, n: int, k: int, terms: int = 1) -> Iterator[Work]:
    """The three GEMMs of a layer that stays in BF16."""
    for phase in PHASES:
        weights = n * k if phase == "weight_gradient" else 0
        yield Work("bf16_gemm", phase, 2 * terms * rows * n * k, 2 * (rows * (n + k) + n * k), weights=weights)


def gradient_sums(work: Iterable[Work], micro_batches: int) -> Iterator[Work]:
    """Weight gradients of all micro-batches added in FP32, as torch's autograd does.

    That of the first micro-batch stays as it is, and every further one is added to it by a kernel of its own.
    """
    weights = [piece.weights for piece in work if piece.weights]
    further = 1 - 1 / micro_batches
    yield Work("copy", "weight_gradient", bytes=SUM_BYTES * further * sum(weights), calls=further * len(weights))


def attention_work(c: ModelConfig, tokens: int, sequence_length: int, saved: bool) -> Iterator[Work]:
    """Latent attention with its norm and its residual sum.

    Args:
        c: the model.
        tokens: tokens of a micro-batch.
        sequence_length: over which attention is causal.
        saved: whether norms, queries, keys and values are saved for backward; recomputed otherwise.
    """
    d, h, latent = c.hidden_size, c.num_attention_heads, c.latent_dim
    q, v, q_in = c.qk_head_dim, c.v_head_dim, c.q_lora_rank or c.hidden_size
    compressed = latent + (c.q_lora_rank or 0)

    def per_token(unit: Unit, phase: Phase, n_bytes: float, calls: int = 1) -> Work:
        return Work(unit, phase, bytes=tokens * n_bytes, calls=calls)

    yield from linear(tokens, compressed, d)
    yield from linear(tokens, h * q, q_in)
    yield from linear(tokens, h * (c.qk_nope_head_dim + v), c.kv_lora_rank)
    yield from linear(tokens, d, h * v)
    keys = sequence_length / 2
    flops = 2 * tokens * keys * h * (q + v)
    yield Work("attention_forward", "forward", flops, keys=keys)
    yield Work("attention_backward", "input_gradient", BACKWARD_ATTENTION * flops, keys=keys)
    up = [
        per_token("norm", "forward", 3 * compressed, 2),  # and quantized
        per_token("rotate", "forward", 4 * h * c.qk_rope_head_dim),
    ]
    yield per_token("norm", "forward", 3 * d)
    yield from up
    yield per_token("latent_keys", "forward", 2 * h * (c.qk_nope_head_dim + q))
    yield per_token("quantize", "forward", (2 + 1 + 2 + 1.5) * h * v, 2)  # 1×128 and E5M6
    yield per_token("copy", "forward", 6 * d)  # the residual sum
    if not saved:
        yield _norm_again(d, tokens)
        yield gemm(tokens, h * q, q_in, "input_gradient")
        yield from expand_latents(c, tokens, "input_gradient")
        for work in up:
            yield Work(work.unit, "input_gradient", bytes=work.bytes, calls=work.calls)
    yield per_token("quantize", "input_gradient", 4 * d)  # dy in rows and columns
    yield per_token("requantize", "input_gradient", (1.5 + 2) * h * v + (1.5 + 1) * h * v, 2)
    yield per_token("rotate", "input_gradient", 4 * h * c.qk_rope_head_dim)
    yield per_token("latent_keys_backward", "input_gradient", 2 * h * (q + v + c.qk_nope_head_dim + v))
    yield per_token("quantize", "input_gradient", 4 * h * (q + c.qk_nope_head_dim + v) + 4 * compressed, 4)
    yield per_token("requantize", "input_gradient", 2 * (d + compressed), 3)
    yield per_token("norm_backward", "input_gradient", 8 * (d + compressed), 3)
    yield per_token("copy", "input_gradient", 4 * compressed)  # both gradients in one


def expand_latents(c: ModelConfig, tokens: float, phase: Phase) -> Iterator[Work]:
    """Keys and values of all heads, computed once more from the latents that are saved or cached."""
    h, n, v = c.num_attention_heads, c.qk_nope_head_dim, c.v_head_dim
    yield gemm(tokens, h * (n + v), c.kv_lora_rank, phase)
    yield Work("latent_keys", phase, bytes=tokens * 2 * h * (n + c.qk_head_dim))


def swiglu_work(channels: int, rows: float) -> Iterator[Work]:
    """SwiGLU of rows with so many channels each; its result is quantized, its inputs are saved in FP8.

    Forward it reads two BF16 values, and writes one in FP8 and the two that are saved. Backward it reads the gradient
    in BF16 and the saved ones, and writes two gradients along rows and columns and the recomputed result along columns.
    """
    yield Work("swiglu", "forward", bytes=rows * channels * (4 + 1 + 2))
    yield Work("swiglu_backward", "input_gradient", bytes=rows * channels * (2 + 2 + 4 + 1))


def dense_work(c: ModelConfig, tokens: int, saved: bool) -> Iterator[Work]:
    """The feed-forward part of a layer without experts."""
    d, i = c.hidden_size, c.intermediate_size
    yield from _norm_before(d, tokens, bytes_per_channel=3)
    if not saved:
        yield _norm_again(d, tokens)
    yield from _shared(d, i, tokens)


def mixture_work(
    c: ModelConfig, tokens: int, ep: int, saved: bool, load: float = 1, spare_rows: float = 0
) -> Iterator[Work]:
    """The feed-forward part of a layer with experts.

    Args:
        c: the model.
        tokens: tokens of a micro-batch.
        ep: ranks of expert parallelism.
        saved: whether norms are saved for backward.
        load: rows of the rank's experts, of the mean over ranks.
        spare_rows: rows that operators pass although no token has them, of those that tokens have. Tensors of the
            experts' rows have a fixed size on octile's symmetric memory.
    """
    d, f, k = c.hidden_size, c.moe_intermediate_size, c.num_experts_per_tok
    local = c.n_routed_experts // ep
    rows = load * tokens * k + local * 128 / 2  # an expert's rows begin at a multiple of 128
    passed = rows * (1 + spare_rows)
    # forward high precision for the gate, too; backward also the gradients of gate, experts and shared experts
    yield from _norm_before(d, tokens, bytes_per_channel=5, backward_bytes_per_channel=12)
    if not saved:
        yield Work("norm", "input_gradient", bytes=5 * tokens * d)  # of the gate, in high precision, too
        yield _norm_again(d, tokens)  # of the shared experts
        if ep == 1:  # of the experts; on several ranks they save the rows that they were sent
            yield _norm_again(d, tokens)
    yield from bf16_linear(tokens, c.n_routed_experts, d, GATE_TERMS)
    for phase in PHASES[:2]:
        yield Work("copy", phase, bytes=8 * tokens * c.n_routed_experts, calls=SMALL_ROUTING_KERNELS)
    yield from linear(rows, 2 * f, d, local)
    yield from linear(rows, d, f, local)
    yield from swiglu_work(f, passed)
    yield Work("permute", "forward", bytes=tokens * d + passed * d)
    yield Work("unpermute", "forward", bytes=2 * rows * d + 4 * tokens * d)  # adds the shared experts' result
    yield Work("quantize", "input_gradient", bytes=3 * tokens * d)  # dy, before it is dispatched
    yield Work("permute", "input_gradient", bytes=tokens * d + passed * d)  # dy
    yield Work("requantize", "input_gradient", bytes=2 * 2 * passed * d, calls=2)  # dy, and x by row, along tokens
    yield Work("unpermute", "input_gradient", bytes=2 * rows * d + 2 * tokens * d)
    yield from _shared(d, c.n_shared_experts * f, tokens)


def head_work(c: ModelConfig, tokens: int) -> Iterator[Work]:
    """The head with its norm and its loss, in BF16."""
    d, vocabulary = c.hidden_size, c.vocab_size
    yield from bf16_linear(tokens, vocabulary, d)
    yield Work("norm", "forward", bytes=4 * tokens * d)
    yield Work("norm_backward", "input_gradient", bytes=8 * tokens * d)
    yield Work("cross_entropy", "forward", bytes=2 * tokens * vocabulary)
    yield Work("cross_entropy", "input_gradient", bytes=4 * tokens * vocabulary)


def embedding_work(c: ModelConfig, tokens: int) -> Iterator[Work]:
    """The embedding: a row is read for each token, and its FP32 gradient added."""
    yield Work("copy", "forward", bytes=6 * tokens * c.hidden_size)
    yield Work("copy", "weight_gradient", bytes=10 * tokens * c.hidden_size, weights=c.vocab_size * c.hidden_size)


def prediction_work(c: ModelConfig, tokens: int) -> Iterator[Work]:
    """What multi-token prediction has in addition to its layer: two norms, and the projection of both in BF16."""
    d = c.hidden_size
    yield from bf16_linear(tokens, d, 2 * d)
    yield Work("norm", "forward", bytes=8 * tokens * d, calls=2)
    yield Work("norm_backward", "input_gradient", bytes=16 * tokens * d, calls=2)
    yield Work("copy", "forward", bytes=8 * tokens * d)
    yield Work("copy", "input_gradient", bytes=8 * tokens * d)


def _norm_before(d: int, tokens: int, bytes_per_channel: int, backward_bytes_per_channel: int = 8) -> Iterator[Work]:
    """The norm that quantizes a feed-forward part's input, and the residual sum."""
    yield Work("norm", "forward", bytes=bytes_per_channel * tokens * d)
    yield Work("copy", "forward", bytes=6 * tokens * d)
    yield Work("norm_backward", "input_gradient", bytes=backward_bytes_per_channel * tokens * d)


def _norm_again(d: int, tokens: int) -> Work:
    """The norm recomputed in the backward pass of a function that reads it quantized."""
    return Work("norm", "input_gradient", bytes=3 * tokens * d)


def _shared(d: int, i: int, tokens: int) -> Iterator[Work]:
    """A feed-forward part that every token passes: gate and up as one GEMM, SwiGLU, down."""
    yield from linear(tokens, 2 * i, d)
    yield from linear(tokens, d, i)
    yield from swiglu_work(i, tokens)
    yield Work("quantize", "input_gradient", bytes=4 * tokens * d)
    yield Work("requantize", "input_gradient", bytes=2 * tokens * d)
