"""What the passes of a rank take when they take most, in bytes: activations, logits, and tensors of the pass that runs.

A stage's passes are steps: attention, feed-forward parts, heads. Their forward pass saves activations, of which the
backward pass frees those of one step after the other. If it defers weight gradients, their operands stay instead. A
schedule says of which other micro-batches a rank has activations while a pass runs.

The tensors are those of octile's recipe `deepseek_v3` on a GPU (docs/data_flow.md).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from octile.models.config import ModelConfig
from octile.parallel.schedules import SENDS_IN_FLIGHT, WITH_WEIGHT_GRADIENTS, ActionType, Schedule, parts
from octile.plan.exchange import hit_probability
from octile.plan.layout import Layout
from octile.plan.parameters import parameters_of_parts
from octile.plan.stages import Part, Stage
from octile.plan.work import tiles

GRADIENT_BYTES = 4  # FP32


class MostBytes(NamedTuple):
    """What passes take when they take most, in bytes.

    Attributes:
        activations: what is saved for backward passes, and operands of weight gradients that are deferred.
        gradients: those of the stages of which a micro-batch's gradients have been computed.
        others: logits, and tensors of the pass that runs.
    """

    activations: float
    gradients: float
    others: float


class PassBytes(NamedTuple):
    """A stage's passes of a micro-batch, in bytes.

    Attributes:
        saved, logits: between the forward and the backward pass.
        backward: at most during a backward pass, without weight gradients, which are there.
        first_backward: the same of a stage's first one, with the weight gradients, which begin in it.
        input_gradient: at most during a backward pass that defers weight gradients.
        deferred: between the input gradient and the weight gradients, whose operands are freed one after the other.
    """

    saved: float
    logits: float
    backward: MostBytes
    first_backward: MostBytes
    input_gradient: MostBytes
    deferred: float


def pass_bytes(c: ModelConfig, layout: Layout, stage: Stage, stores_gradients: bool) -> PassBytes:
    """The bytes of a stage's passes.

    Args:
        c, layout, stage: what is planned.
        stores_gradients: whether a micro-batch's weight gradients, those of octile's linear layers and experts, are
            stored alone, and then added; otherwise GEMMs add to those of the micro-batches before. Those of torch's
            layers, such as the head, are stored alone in either case, and not counted.
    """
    alike = {(part.layers, part.mixtures, part.heads): part for part in stage.parts}  # whose steps are the same
    own = {key: tuple(_steps(c, layout, part, stores_gradients)) for key, part in alike.items()}
    steps = [step for part in stage.parts for step in own[part.layers, part.mixtures, part.heads]]
    return PassBytes(
        sum(step.saved for step in steps),
        sum(step.logits for step in steps),
        _most_in_backward(steps),
        _most_in_backward(steps, begins_gradients=True),
        _most_in_backward(steps, defers=True),
        sum(step.deferred for step in steps),
    )


def most_in_passes(
    schedule: Schedule,
    rank: int,
    passes: Mapping[int, PassBytes],
    gradients: Callable[[Collection[int]], float],
    exchanges: bool,
    has_gradients: bool = False,
) -> MostBytes:
    """The bytes of a rank's passes when they are most.

    The weight gradients of a stage begin with its first micro-batch: they are allocated layer by layer while
    activations are freed.

    Args:
        schedule, rank: say in which order passes run.
        passes: those of each stage of the rank.
        gradients: returns the bytes of the weight gradients of stages.
        exchanges: whether passes exchange rows of experts. Those of a pair then run at the same time; otherwise the
            backward pass runs first (`octile.nn.interleave`).
        has_gradients: whether all stages have gradients from the beginning.
    """
    held = logits = 0.0
    begun = set(passes if has_gradients else ())  # the stages that have gradients
    there = gradients(begun)
    most = MostBytes(0.0, 0.0, 0.0)
    for action in schedule.actions[rank]:
        both = parts(action)
        for part in both if exchanges else reversed(both):
            stage, kind = part.stage_index, part.computation_type
            own = passes[stage]
            if kind == ActionType.FORWARD:
                held, logits = held + own.saved, logits + own.logits
                now = MostBytes(held, there, logits)
            elif kind == ActionType.BACKWARD_WEIGHT:
                now = MostBytes(held, there, logits)
                held -= own.deferred
            else:
                held, logits = held - own.saved, logits - own.logits
                is_full = kind == ActionType.FULL_BACKWARD
                whole = own.backward if stage in begun else own.first_backward
                own_most = whole if is_full else own.input_gradient
                now = MostBytes(held + own_most.activations, there + own_most.gradients, logits + own_most.others)
                held += 0.0 if is_full else own.deferred
            if kind in WITH_WEIGHT_GRADIENTS and stage not in begun:
                begun.add(stage)
                there = gradients(begun)
            after = MostBytes(held, there, logits)
            most = max(most, now, after, key=sum)
    return most


def message_bytes(c: ModelConfig, layout: Layout, schedule: Schedule, rank: int) -> float:
    """The bytes of what a rank has sent, and perhaps has not arrived: activations and gradients of its stages."""
    sent = {
        (stage, to > stage)
        for ranks in schedule.placement
        for stage, holder in enumerate(ranks)
        for to in (stage - 1, stage + 1)
        if holder == rank and 0 <= to < len(ranks) and ranks[to] != rank
    }
    return SENDS_IN_FLIGHT * len(sent) * 2 * layout.micro_batch_tokens * c.hidden_size


def saved_bytes(c: ModelConfig, layout: Layout, is_moe: bool) -> float:
    """The bytes that a layer saves of each token for its backward pass (docs/data_flow.md).

    With experts on several ranks the rows that a rank was sent are saved, too.
    """
    d, h = c.hidden_size, c.num_attention_heads
    saved = 2 * d + 4 + 2 * c.latent_dim + 4 + (2 * c.q_lora_rank + 4 if c.q_lora_rank else 0)
    saved += 3 * h * c.v_head_dim // 2 + 4 * -(-h * c.v_head_dim // 128) + 4 * h
    saved += 2 * d + 4
    if not layout.recompute:
        saved += recomputable_bytes(c) // (c.num_hidden_layers + c.num_nextn_predict_layers)
    return saved + _saved_bytes_of_swiglu(c, layout, is_moe)


def recomputable_bytes(c: ModelConfig) -> int:
    """The bytes of each token that the layers save although they could be recomputed, if a run saves them.

    Norms in 1×128 tiles, those that a gate reads in BF16, too; queries, keys and values in BF16.
    """
    norms = 2 * tiles(c.hidden_size) + tiles(c.kv_lora_rank) + tiles(c.q_lora_rank or 0)
    a_head = 3 * c.qk_nope_head_dim + 2 * c.qk_rope_head_dim + c.v_head_dim
    layers = c.num_hidden_layers + c.num_nextn_predict_layers
    gates = sum(c.is_moe(layer) for layer in range(layers))
    return layers * (norms + 2 * c.num_attention_heads * a_head) + gates * 2 * c.hidden_size


def saved_bytes_of_heads(c: ModelConfig, heads: int) -> float:
    """The bytes that so many heads save of each token: the input and the result of the norm, and the loss's sum.

    The second head is that of multi-token prediction, which also saves the pairs that its layer projects: the
    embeddings and the states, before and after a norm each. Logits are counted as working memory.
    """
    d = c.hidden_size
    return heads * (2 * d + 4 + 2 * d + 4) + (2 * (4 * d + 4) if heads > 1 else 0)


def feed_forward_bytes(c: ModelConfig, layout: Layout, is_moe: bool, stores_gradients: bool) -> float:
    """The bytes that the backward pass of a layer's feed-forward part takes at most besides what is saved.

    They are those of routed experts, or of a dense part, while weight gradients are computed. In BF16: the gradients of
    its rows and of what SwiGLU returns. In FP8: its rows, the operands of wgrad, and the gradients of gate and up. In
    addition the layer's gradient, with experts also that of the norm's result, which is there in FP8.

    Args:
        c, layout: what is planned.
        is_moe: whether the layer has experts.
        stores_gradients: whether a micro-batch's weight gradients are stored alone, and then added.
    """
    d, tokens = c.hidden_size, layout.micro_batch_tokens
    rows, f, experts = float(tokens), c.intermediate_size, 1
    if is_moe:
        rows *= c.num_experts_per_tok * (1 + layout.spare_rows)
        f, experts = c.moe_intermediate_size, c.n_routed_experts // layout.ep
    taken = rows * (2 * d + 3 * tiles(d) + 2 * f + 2 * tiles(2 * f) + tiles(f))
    taken += tokens * (2 * d * (1 + is_moe) + tiles(d))
    return taken + stores_gradients * GRADIENT_BYTES * experts * 3 * f * d


def attention_bytes(c: ModelConfig, layout: Layout) -> float:
    """The bytes that the backward pass of a layer's attention takes at most besides what is saved.

    Its result, the gradients of that, of queries, keys, values and latents, and of the layer, in BF16; those of queries
    and latents' projection in FP8 in both forms; and queries, keys and values in BF16 if they are recomputed.
    """
    key, value = c.qk_nope_head_dim + c.qk_rope_head_dim, c.v_head_dim
    latent = c.qk_nope_head_dim + value
    a_head = 2 * 2 * value + 2 * (2 * key + value) + 2 * latent
    if layout.recompute:
        a_head += 2 * (2 * key + latent)
    h = c.num_attention_heads
    return layout.micro_batch_tokens * (2 * c.hidden_size + h * a_head + 2 * tiles(h * key) + 2 * tiles(h * latent))


class _Step(NamedTuple):
    """A step of a stage's passes of a micro-batch: attention, a feed-forward part, a projection, a head; in bytes.

    Attributes:
        saved: activations that are saved for the backward pass.
        logits: logits that are saved, too.
        transient: what the backward pass takes besides.
        deferred: operands of weight gradients that are computed later.
        gradients: weight gradients, without those of the embedding.
    """

    saved: float
    logits: float
    transient: float
    deferred: float
    gradients: float


def _most_in_backward(steps: Sequence[_Step], defers: bool = False, begins_gradients: bool = False) -> MostBytes:
    """The bytes of a backward pass when they are most; activations include deferred operands."""
    held, logits, gradients = sum(step.saved for step in steps), sum(step.logits for step in steps), 0.0
    most = MostBytes(held, gradients, logits)
    for step in reversed(steps):
        gradients += step.gradients * begins_gradients
        most = max(most, MostBytes(held, gradients, logits + step.transient), key=sum)
        held += step.deferred * defers - step.saved
        logits -= step.logits
    return most


def _steps(c: ModelConfig, layout: Layout, part: Part, stores_gradients: bool) -> Iterator[_Step]:
    """The steps of a part of the model, in the order of the forward pass."""
    tokens, d, each = layout.micro_batch_tokens, c.hidden_size, parameters_of_parts(c)
    if part.heads:
        yield _head(c, layout, each.table if part.heads == 1 else 0)
    if part.heads > 1:
        pairs = saved_bytes_of_heads(c, 2) - 2 * saved_bytes_of_heads(c, 1)
        # operands in BF16: pairs, and a gradient
        yield _Step(tokens * pairs, 0, 0, tokens * 3 * 2 * d, GRADIENT_BYTES * each.prediction)
    for number in range(part.layers):
        is_moe = number < part.mixtures
        swiglu = tokens * _saved_bytes_of_swiglu(c, layout, is_moe)
        saved = tokens * saved_bytes(c, layout, is_moe) - swiglu
        attention = GRADIENT_BYTES * (each.attention + each.norms)
        yield _Step(saved, 0, attention_bytes(c, layout), tokens * _operands_of_attention(c), attention)
        transient = feed_forward_bytes(c, layout, is_moe, stores_gradients)
        weights = each.experts / layout.ep + each.shared + each.gate if is_moe else each.dense
        operands = tokens * _operands_of_feed_forward(c, layout, is_moe)
        yield _Step(swiglu, 0, transient, operands, GRADIENT_BYTES * weights)
    if part.heads > 1:
        yield _head(c, layout, each.table)  # the same weight, whose gradient begins here


def _head(c: ModelConfig, layout: Layout, weights: float) -> _Step:
    """The step of a head, whose logits, and their gradient, are in BF16."""
    tokens = layout.micro_batch_tokens
    logits = 2 * tokens * c.vocab_size
    deferred = logits + 2 * tokens * c.hidden_size
    return _Step(tokens * saved_bytes_of_heads(c, 1), logits, logits, deferred, GRADIENT_BYTES * weights)


def _operands_of_attention(c: ModelConfig) -> float:
    """The bytes of both operands of the wgrad GEMMs of attention, of each token, in FP8 with scales."""
    h, key = c.num_attention_heads, c.qk_nope_head_dim + c.qk_rope_head_dim
    down = [c.hidden_size, c.latent_dim + (c.q_lora_rank or h * key)]
    queries = [c.q_lora_rank, h * key] if c.q_lora_rank else []
    up = [c.kv_lora_rank, h * (c.qk_nope_head_dim + c.v_head_dim)]
    return sum(map(tiles, [*down, *queries, *up, h * c.v_head_dim, c.hidden_size]))


def _operands_of_feed_forward(c: ModelConfig, layout: Layout, is_moe: bool) -> float:
    """The bytes of both operands of the wgrad GEMMs of a feed-forward part, of each token, in FP8 with scales."""

    def operands(f: int) -> int:
        return 2 * tiles(c.hidden_size) + tiles(2 * f) + tiles(f)

    if not is_moe:
        return operands(c.intermediate_size)
    routed = c.num_experts_per_tok * (1 + layout.spare_rows) * operands(c.moe_intermediate_size)
    return routed + operands(c.n_shared_experts * c.moe_intermediate_size)


def _saved_bytes_of_swiglu(c: ModelConfig, layout: Layout, is_moe: bool) -> float:
    """The bytes of each token that a layer's feed-forward part saves after its norm.

    They are the outputs of the gate and up projections, and with experts what routing saves and the rows received from
    other ranks.
    """
    if not is_moe:
        return 2 * tiles(c.intermediate_size)
    k = c.num_experts_per_tok
    swiglu = 2 * tiles(c.n_shared_experts * c.moe_intermediate_size) + k * 2 * tiles(c.moe_intermediate_size) * (
        1 + layout.spare_rows
    )
    received = layout.ep * hit_probability(c, layout.ep) * tiles(c.hidden_size) if layout.ep > 1 else 0
    return swiglu + received + 4 * c.n_routed_experts + 20 * k
