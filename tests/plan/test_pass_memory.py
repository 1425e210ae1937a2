"""What passes take, written out for a small model (see toy.py), and compared with passes on the meta device."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from math import comb
from typing import Any, cast

import pytest
import torch
from torch.utils._pytree import tree_leaves

from octile.kernels.cuda.gemm.cost_model import Chip
from octile.models.config import ModelConfig
from octile.models.meta import meta_model
from octile.models.stages import split_stages
from octile.nn.conversion import apply_recipe
from octile.nn.deferred_wgrad import DeferrableLinears, DeferredWgrads, defer_wgrads
from octile.ops.planning import planned_kernels
from octile.optim.gradient import added_in_place
from octile.parallel.schedules import make_schedule
from octile.plan import pass_memory
from octile.plan.hardware import read_cluster
from octile.plan.layout import Layout
from octile.plan.parameters import held_parameters
from octile.plan.pass_memory import (
    MostBytes,
    PassBytes,
    attention_bytes,
    feed_forward_bytes,
    message_bytes,
    most_in_passes,
    pass_bytes,
    saved_bytes,
    saved_bytes_of_heads,
)
from octile.plan.stages import make_stages
from octile.recipe import Recipe
from octile.train.memory.cpu import LiveTensors
from octile.train.memory.saved_activations import saving_activations
from tests.plan.toy import CLUSTER, TOY

LAYOUT = Layout(batch_size=256, micro_batch_size=2, sequence_length=32)
FP8, BF16, FP32, SCALE = 1, 2, 4, 4
TOKENS, ROWS = 64, 64 * 4  # of a micro-batch, and of its experts


def tile(n: int) -> int:
    """Bytes of values in FP8 with a scale for each 128."""
    return FP8 * n + SCALE * (n // 128 + (n % 128 > 0))


# the input of each norm and the reciprocal of its root mean square: attention, both latents, feed-forward part
NORMS = (BF16 * 256 + FP32) + (BF16 * 144 + FP32) + (BF16 * 96 + FP32) + (BF16 * 256 + FP32)
RESULT = 1.5 * 160 + SCALE * 2 + FP32 * 4  # attention's, in E5M6, and the logarithm of each head's sum
SAVED = NORMS + RESULT
SWIGLU = 2 * tile(2 * 192) + 4 * 2 * tile(192)  # gate and up, of the shared experts and of four routed ones
CHOICE = FP32 * 16 + 4 * 20  # affinities, and places, weights and numbers of the chosen experts


def test_a_dense_layer_saves_inputs_of_norms_and_of_swiglu():
    assert saved_bytes(TOY, LAYOUT, is_moe=False) == SAVED + 2 * tile(320)


def test_a_layer_with_experts_saves_gate_and_up_of_those_that_are_chosen():
    assert saved_bytes(TOY, LAYOUT, is_moe=True) == SAVED + SWIGLU + CHOICE


def test_rows_that_no_token_has_are_saved_for_routed_experts_alone():
    spare = saved_bytes(TOY, replace(LAYOUT, spare_rows=0.5), is_moe=True)
    assert spare == SAVED + 2 * tile(2 * 192) + 1.5 * 4 * 2 * tile(192) + CHOICE


def test_rows_that_came_from_other_ranks_are_saved():
    # a token chooses 4 of 16 experts, all of 2 of 4 groups; a rank has one group, which is chosen in half of the cases
    hit = 0.5 * (1 - comb(4, 4) / comb(8, 4))
    received = saved_bytes(TOY, replace(LAYOUT, ep=4), is_moe=True) - saved_bytes(TOY, LAYOUT, is_moe=True)
    assert received == pytest.approx(4 * hit * tile(256))


def test_without_recomputation_norms_queries_keys_and_values_are_saved_in_addition():
    model = replace(TOY, num_nextn_predict_layers=0, num_hidden_layers=4, first_k_dense_replace=0)
    norms = 2 * tile(256) + tile(128) + tile(96) + BF16 * 256  # that which the gate reads in BF16, too
    heads = BF16 * 4 * ((32 + 16) + (32 + 16) + (32 + 40))  # queries, keys, and the projection of both
    more = saved_bytes(model, replace(LAYOUT, recompute=False), is_moe=True) - saved_bytes(model, LAYOUT, is_moe=True)
    assert more == norms + heads


def test_queries_that_are_not_compressed_have_no_norm():
    without = replace(TOY, q_lora_rank=None)
    assert saved_bytes(TOY, LAYOUT, False) - saved_bytes(without, LAYOUT, False) == BF16 * 96 + FP32


def test_a_head_saves_the_input_and_the_result_of_its_norm():
    assert saved_bytes_of_heads(TOY, 0) == 0
    assert saved_bytes_of_heads(TOY, 1) == BF16 * 256 + FP32 + BF16 * 256 + FP32


def test_multi_token_prediction_saves_pairs_before_and_after_their_norms():
    pairs = (BF16 * 2 * 256 + 2 * FP32) + BF16 * 2 * 256
    assert saved_bytes_of_heads(TOY, 2) == pytest.approx(2 * saved_bytes_of_heads(TOY, 1) + pairs)


def test_a_saved_layer_of_deepseek_v3_takes_the_bytes_of_data_flow():
    assert saved_bytes(ModelConfig.v3_671b(), Layout(), is_moe=True) == 44_172 + 53_540  # docs/data_flow.md


GATE_AND_UP_GRADIENTS = 2 * tile(2 * 192)  # quantized both ways, with a scale for each 128 values of both


def test_experts_take_rows_both_operands_of_wgrad_and_gradients_of_gate_and_up():
    rows = ROWS * (BF16 * 256 + 3 * tile(256) + BF16 * 192 + GATE_AND_UP_GRADIENTS + tile(192))
    tokens = TOKENS * (2 * BF16 * 256 + tile(256))
    assert feed_forward_bytes(TOY, LAYOUT, is_moe=True, stores_gradients=False) == rows + tokens
    spare = feed_forward_bytes(TOY, replace(LAYOUT, spare_rows=0.5), is_moe=True, stores_gradients=False)
    assert spare == 1.5 * rows + tokens


def test_a_dense_part_takes_the_same_of_each_token():
    rows = TOKENS * (BF16 * 256 + 3 * tile(256) + BF16 * 320 + 2 * tile(2 * 320) + tile(320))
    tokens = TOKENS * (BF16 * 256 + tile(256))
    assert feed_forward_bytes(TOY, LAYOUT, is_moe=False, stores_gradients=False) == rows + tokens


def test_gradients_of_a_layers_experts_that_are_stored_alone_are_counted():
    stored, added = (feed_forward_bytes(TOY, replace(LAYOUT, ep=4), True, stores) for stores in (True, False))
    assert stored - added == FP32 * 16 / 4 * 3 * 256 * 192


def test_attention_takes_its_result_gradients_and_recomputed_queries_keys_and_values():
    gradients = 256 + 4 * (40 + 40 + 48 + 48 + 40 + 72)  # the layer's, of result, queries, keys, values and latents
    quantized = 2 * tile(4 * 48) + 2 * tile(4 * 72)
    kept = TOKENS * (BF16 * gradients + quantized)
    assert attention_bytes(TOY, replace(LAYOUT, recompute=False)) == kept
    assert attention_bytes(TOY, LAYOUT) == kept + TOKENS * BF16 * 4 * (48 + 48 + 72)


STAGE = PassBytes(  # of each stage
    saved=10,
    logits=3,
    backward=MostBytes(10, 0, 18 - 10),
    first_backward=MostBytes(10, 0, 18 - 10),
    input_gradient=MostBytes(12, 0, 19 - 12),
    deferred=4,
)


@pytest.mark.parametrize(
    ("schedule", "most"),
    [
        ("gpipe", (40, 0, 3 * 3 + 8)),  # logits of four micro-batches, of which the last one's backward pass begins
        ("1f1b", (20, 1, 3 + 8)),  # rank 0 has two
        ("zb1p", (10 + 12, 1, 3 + 7)),  # two, of which one defers its weight gradients
    ],
)
def test_a_rank_holds_activations_and_logits_of_several_micro_batches(schedule, most):
    made = make_schedule(schedule, 2, 4)
    assert most_in_passes(made, 0, {0: STAGE, 1: STAGE}, len, exchanges=False) == most


def test_gradients_that_a_first_backward_pass_has_computed_are_counted_within_it():
    stage = STAGE._replace(
        first_backward=MostBytes(6, 7, 30 - 6 - 7)
    )  # where 6 of the saved are left, and 7 of the gradients are there
    schedule = make_schedule("gpipe", 2, 4)
    most = most_in_passes(schedule, 0, {0: stage}, lambda begun: 9.0 * len(begun), exchanges=False)
    assert most == (3 * 10 + 6, 7, 3 * 3 + 30 - 6 - 7)


def test_the_first_backward_pass_has_all_gradients_but_the_embeddings_in_the_end():
    layout, (stage,) = replace(LAYOUT, pp=1), make_stages(TOY, replace(LAYOUT, pp=1), CLUSTER)
    steps = [step for part in stage.parts for step in pass_memory._steps(TOY, layout, part, False)]
    table = FP32 * TOY.vocab_size * TOY.hidden_size
    counted = sum(step.gradients for step in steps)
    assert counted == pytest.approx(FP32 * sum(held_parameters(TOY, layout, [stage])) - table, rel=1e-3)


def test_operands_of_deferred_weight_gradients_stay_until_these_are_computed():
    large = STAGE._replace(deferred=100)  # rank 1 has passed two micro-batches back when it computes those of the first
    assert most_in_passes(make_schedule("zb1p", 2, 4), 1, {1: large}, len, exchanges=False) == (2 * 100, 1, 0)


def test_gradients_of_a_stage_are_there_after_its_first_backward_pass():
    schedule, large = make_schedule("1f1b", 2, 4), {0: 100.0, 1: 1000.0}
    found = [most_in_passes(schedule, r, {r: STAGE}, lambda begun: sum(large[s] for s in begun), False) for r in (0, 1)]
    assert [most.gradients for most in found] == [100, 1000]
    before = most_in_passes(make_schedule("gpipe", 2, 4), 0, {0: STAGE}, lambda begun: 5.0 * len(begun), False)
    assert before.gradients == 0  # four micro-batches without gradients are more than three with them


def test_passes_of_a_pair_run_at_the_same_time_only_where_they_exchange_rows():
    schedule, stages = make_schedule("dualpipev", 4, 8), dict.fromkeys((0, 3), STAGE)
    together, in_turn = (
        sum(most_in_passes(schedule, 0, stages, lambda begun: 0, exchanges)) for exchanges in (True, False)
    )
    assert together == 4 * (10 + 3) + 18  # four micro-batches of stage 0, while stage 3 passes one back
    assert in_turn == 3 * (10 + 3) + 19  # three, before the first pair


@pytest.mark.parametrize(
    ("schedule", "stages", "kinds"),
    [("1f1b", 4, (1, 2, 2, 1)), ("dualpipev", 4, (2, 2)), ("dualpipe", 2, (2, 2)), ("dualpipev", 2, (0,))],
)
def test_two_messages_of_each_kind_may_be_under_way(schedule, stages, kinds):
    made = make_schedule(schedule, stages, 16)
    found = [message_bytes(TOY, LAYOUT, made, rank) for rank in range(made.n_ranks)]
    assert found == [2 * kind * TOKENS * BF16 * 256 for kind in kinds]


class TensorsOnGpu(LiveTensors):
    """The tensors that live, without those of a CPU's references."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `octile.ops.planning`

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(returned):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return returned


def run_stage(
    c: ModelConfig,
    layout: Layout,
    layers: list[range],
    number: int,
    stores: bool,
    defers: bool,
    is_first: bool = False,
) -> tuple[float, float, float, float]:
    """Pass a micro-batch through a stage on the meta device, as on an H100.

    Args:
        stores: whether its weight gradients are stored alone, and then added.
        defers: whether they are computed after the backward pass.
        is_first: whether there are no gradients of earlier micro-batches.

    Returns:
        Bytes between both passes, at most in the backward pass, after it, and at most in the weight gradients besides
        gradients that stay.
    """
    recipe = Recipe.deepseek_v3() if layout.recompute else saving_activations(Recipe.deepseek_v3())
    model = meta_model(c)
    apply_recipe(model, recipe)
    torch.optim.SGD(model.parameters()).step()  # weights in FP8 are cached from the first step on
    stage = split_stages(model.train(), layers)[number]
    tokens_BS = torch.empty(layout.micro_batch_size, layout.sequence_length, dtype=torch.int64, device="meta")

    def forward() -> list[Any]:
        h_BSD = torch.empty(*tokens_BS.shape, c.hidden_size, dtype=torch.bfloat16, device="meta", requires_grad=True)
        inputs = [tokens_BS] if stage.is_first else [h_BSD, torch.empty((), device="meta", requires_grad=True)]
        with DeferrableLinears() if defers else nullcontext():
            outputs = stage(*inputs)
            ends = [stage.loss(*outputs, tokens_BS)] if stage.is_last else outputs
        return [torch.autograd.graph.get_gradient_edge(t) for t in ends if t.requires_grad]

    deferring: Callable[[], AbstractContextManager[DeferredWgrads | None]] = defer_wgrads if defers else nullcontext
    with planned_kernels(Chip(132, name="NVIDIA H100 80GB HBM3"), recipe.compute) as kernels:
        for _ in range(2):  # the second time gradients, and weights in FP8, are there, and kernels are planned
            if is_first:
                model.zero_grad()
                forward()  # caches weights in FP8 again, since gradients that are removed end those that were cached
            stored = [p.grad for p in model.parameters() if p.grad is not None]
            gradient = torch.empty(*tokens_BS.shape, c.hidden_size, dtype=torch.bfloat16, device="meta")
            with TensorsOnGpu([*model.state_dict().values(), *stored]) as live:
                edges = forward()
                saved = live.now
                adds: Callable[[], AbstractContextManager[None]] = nullcontext
                if not stores:
                    adds = partial(added_in_place, list(stage.parameters()))
                with deferring() as deferred, adds():
                    torch.autograd.backward(
                        edges, None if stage.is_last else [gradient, torch.empty((), device="meta")]
                    )
                del edges
                peak, after = live.peak, live.now
                live.peak = after
                if deferred is not None:
                    with adds():
                        deferred.compute()
                found = sum(p.grad.nbytes for p in stage.parameters() if p.grad is not None)
                in_wgrads = live.peak - (found - sum(grad.nbytes for grad in stored))
            cast("dict[Any, Any]", kernels).clear()
    return saved, peak, after, in_wgrads


MIXED = replace(ModelConfig.small(), num_hidden_layers=3)


@pytest.mark.one_case
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("number", [0, 1], ids=["first", "last"])
@pytest.mark.parametrize(
    ("stores", "defers"), [(True, False), (False, False), (False, True)], ids=["stored", "added", "deferred"]
)
def test_passes_take_what_their_tensors_take_within_8_percent(number, recompute, stores, defers):
    layout = Layout(pp=2, batch_size=256, micro_batch_size=16, sequence_length=1024, recompute=recompute)
    layers = [range(2), range(2, 3)]
    stages = make_stages(MIXED, layout, replace(read_cluster("h100_8"), gpus=2), layers)
    saved, peak, after, _ = run_stage(MIXED, layout, layers, number, stores, defers)
    found = pass_bytes(MIXED, layout, stages[number], stores)
    assert found.saved + found.logits == pytest.approx(saved, rel=0.08)
    assert sum(found.input_gradient if defers else found.backward) == pytest.approx(peak, rel=0.08)
    if defers:
        assert found.deferred == pytest.approx(after, rel=0.08)


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "later"])
def test_weight_gradients_that_are_computed_later_take_no_more_than_their_operands(is_first):
    """Of so few tokens that a second copy of the gradients would take more."""
    model = replace(MIXED, first_k_dense_replace=2)
    layout, layers = Layout(pp=2, batch_size=64, micro_batch_size=1, sequence_length=512), [range(2), range(2, 3)]
    stage, _ = make_stages(model, layout, replace(read_cluster("h100_8"), gpus=2), layers)
    *_, taken = run_stage(model, layout, layers, 0, stores=False, defers=True, is_first=is_first)
    operands = pass_bytes(model, layout, stage, stores_gradients=False).deferred
    if is_first:
        assert taken <= operands
    else:
        assert taken == pytest.approx(operands, rel=0.08)
