"""A planned training step."""

from dataclasses import replace

import pytest

from octile.models.config import ModelConfig
from octile.models.flops import train_flops_per_token
from octile.models.meta import meta_model
from octile.parallel.schedules import ActionType
from octile.plan.hardware import read_cluster
from octile.plan.layout import Layout
from octile.plan.memory import memory_by_kind, why_not_fitting
from octile.plan.parameters import held_parameters
from octile.plan.stages import make_stages
from octile.plan.step import overlapped, plan_step, stage_costs
from tests.plan.toy import CLUSTER, EFFICIENCIES, TOY

H800 = read_cluster("h800_2048")
LITE = ModelConfig.v2_lite_16b()
LAYOUT = Layout(pp=4, ep=8, schedule="1f1b", batch_size=8192)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb1p", "dualpipe", "dualpipev", "chimera"])
def test_the_kinds_of_time_add_up_to_the_step(schedule):
    plan = plan_step(LITE, replace(LAYOUT, schedule=schedule), H800)
    assert sum(plan.seconds_by_kind.values()) == pytest.approx(plan.seconds)
    assert all(seconds >= 0 for seconds in plan.seconds_by_kind.values())


def test_dualpipe_exposes_less_of_the_exchanges_than_1f1b():
    exposed = [
        plan_step(LITE, replace(LAYOUT, schedule=schedule), H800).seconds_by_kind["exposed exchanges"]
        for schedule in ("dualpipe", "1f1b")
    ]
    assert exposed[0] < exposed[1]


def test_one_gpu_has_no_bubble_and_no_communication():
    plan = plan_step(
        ModelConfig.small(), Layout(batch_size=4, sequence_length=1024), replace(read_cluster("h200_8"), gpus=1)
    )
    kinds = plan.seconds_by_kind
    assert (kinds["bubble"], kinds["exposed exchanges"], kinds["gradients and weights"]) == (0, 0, 0)


def test_cost_and_gpu_hours_follow_from_the_tokens_of_a_second():
    plan = plan_step(LITE, LAYOUT, H800)
    assert plan.tokens_per_second_per_gpu == plan.tokens / plan.seconds / 2048
    assert plan.gpu_hours_per_trillion_tokens == pytest.approx(1e12 / plan.tokens_per_second_per_gpu / 3600)
    assert plan.dollars_per_trillion_tokens == 2 * plan.gpu_hours_per_trillion_tokens


def test_a_cluster_without_a_price_has_no_cost():
    assert plan_step(LITE, LAYOUT, replace(H800, dollars_per_gpu_hour=None)).dollars_per_trillion_tokens is None


def test_the_moments_are_shared_and_replicated_masters_are_not():
    def memory(layout):
        plan = plan_step(LITE, layout, H800)
        return memory_by_kind(LITE, layout, H800, plan.simulation.schedule, plan.stages)

    sharded, replicated = memory(LAYOUT), memory(replace(LAYOUT, masters="replicated"))
    assert replicated["weights"] == 2 * sharded["weights"]
    assert replicated["moments"] < sharded["moments"]


def test_memory_that_does_not_suffice_is_explained():
    assert why_not_fitting({"weights": 10e9, "activations": 90e9}, H800) == (
        "a rank needs 100 GB, 90 of them for activations, and 80 of the H800's 85 GB are usable"
    )
    assert why_not_fitting({"weights": 10e9}, H800) is None


def test_the_rounding_of_sums_is_no_time():
    layout = Layout(ep=4, batch_size=64, micro_batch_size=4, recompute=False)
    assert plan_step(LITE, layout, read_cluster("h200_8")).seconds_by_kind["SMs for exchanges"] == 0


TOY_LAYOUT = Layout(pp=2, ep=4, schedule="dualpipe", batch_size=16 * 8, sequence_length=32)
BANDWIDTH = CLUSTER.gpu.memory_bandwidth


def test_gradients_and_weights_cross_nvlink_in_a_node_and_then_the_network():
    plan = plan_step(TOY, replace(TOY_LAYOUT, schedule="1f1b"), CLUSTER)
    nvlink, network = 1000 * EFFICIENCIES["nvlink_collective"], 100 * EFFICIENCIES["network"]
    ends = []
    for stage in plan.stages:
        routed, quantized, rest = held_parameters(TOY, plan.layout, [stage])
        others, sent = quantized + rest, 4 + 2  # bytes: FP32 gradients out, BF16 weights back
        # 16 ranks have the other parameters, 4 in each of 4 nodes; 4 ranks have the same experts, each in its node
        reduction = sent * others * 3 / 4 / nvlink + sent * others / 4 * 3 / 4 / network
        reduction += sent * routed * 3 / 4 / network
        adamw = 28 * (routed / 4 + others / 16) / (BANDWIDTH * EFFICIENCIES["optimizer"])
        quantize = 6 * (routed + quantized) / (BANDWIDTH * EFFICIENCIES["quantize"])
        ends.append((reduction, adamw + quantize))
    assert (plan.reduction, plan.optimizer) == pytest.approx(max(ends, key=sum), rel=1e-12)
    assert plan.seconds == pytest.approx(plan.simulation.makespan + sum(max(ends, key=sum)), rel=1e-12)


def test_muon_multiplies_matrices_and_reads_them_more_often_than_adamw():
    layout, node = (
        Layout(batch_size=8, sequence_length=32, masters="replicated", optimizer="muon"),
        replace(CLUSTER, gpus=2, network=None),
    )
    plan, adamw = plan_step(TOY, layout, node), plan_step(TOY, replace(layout, optimizer="adamw"), node)
    routed, quantized, _ = held_parameters(TOY, layout, plan.stages)
    matrices = (routed + quantized + 2 * 256 * 256) / 2
    flops = sum(
        5 * (4 * min(m) ** 2 * max(m) + 2 * min(m) ** 3)
        for p in meta_model(TOY).parameters()
        for m in ([(192, 256)] * 2 * 16 if p.shape == (16, 384, 256) else [p.shape[-2:]] * (16 if p.dim() == 3 else 1))
        if p.dim() > 1 and p.shape not in ((1000, 256), (16, 256))  # embedding and head, gates
    )
    gemms = flops / 2 / (CLUSTER.gpu.bf16_peak * EFFICIENCIES["bf16_gemm"] * EFFICIENCIES["gemm_in_step"])
    moved = matrices / BANDWIDTH * (94 / EFFICIENCIES["copy"] - 24 / EFFICIENCIES["optimizer"])
    assert plan.optimizer - adamw.optimizer == pytest.approx(gemms + moved)
    assert plan.reduction == adamw.reduction


def test_replicated_masters_are_gathered_in_fp32_and_updated_with_fewer_bytes():
    layout, node = (
        Layout(batch_size=8, sequence_length=32, masters="replicated"),
        replace(CLUSTER, gpus=2, network=None),
    )
    plan = plan_step(TOY, layout, node)
    routed, quantized, rest = held_parameters(TOY, layout, plan.stages)
    parameters = routed + quantized + rest
    assert plan.reduction == pytest.approx((4 + 4) * parameters / 2 / (1000 * EFFICIENCIES["nvlink_collective"]))
    adamw = 24 * parameters / 2 / (BANDWIDTH * EFFICIENCIES["optimizer"])
    quantize = 6 * (routed + quantized) / (BANDWIDTH * EFFICIENCIES["quantize"])
    assert plan.optimizer == pytest.approx(adamw + quantize, rel=1e-12)


def test_the_copies_of_a_bidirectional_pipeline_are_data_parallel_ranks_more():
    plan = plan_step(TOY, TOY_LAYOUT, CLUSTER)  # both ranks have both stages
    routed, quantized, rest = held_parameters(TOY, TOY_LAYOUT, plan.stages)
    network = 6 / (100 * EFFICIENCIES["network"])
    nvlink = 6 * (quantized + rest) * 3 / 4 / (1000 * EFFICIENCIES["nvlink_collective"])
    expected = nvlink + network * ((quantized + rest) / 4 * 7 / 8 + routed * 7 / 8)  # 8 nodes, 8 replicas
    assert plan.reduction == pytest.approx(expected, rel=1e-12)
    adamw = 28 * (routed / 8 + (quantized + rest) / 32) / (BANDWIDTH * EFFICIENCIES["optimizer"])
    quantize = 6 * (routed + quantized) / (BANDWIDTH * EFFICIENCIES["quantize"])
    assert plan.optimizer == pytest.approx(adamw + quantize, rel=1e-12)


def test_experts_on_fewer_ranks_than_a_node_has_are_summed_within_nodes_first():
    layout = Layout(ep=2, batch_size=32, sequence_length=32)
    plan = plan_step(TOY, layout, CLUSTER)
    routed, quantized, rest = held_parameters(TOY, layout, plan.stages)
    nvlink, network = 1000 * EFFICIENCIES["nvlink_collective"], 100 * EFFICIENCIES["network"]
    others = (quantized + rest) * (3 / 4 / nvlink + 1 / 4 * 7 / 8 / network)  # 32 ranks in 8 nodes
    experts = routed * (1 / 2 / nvlink + 1 / 2 * 7 / 8 / network)  # 16 replicas, two in each node
    assert plan.reduction == pytest.approx(6 * (others + experts), rel=1e-12)


@pytest.mark.parametrize("has_network", [True, False])
def test_a_rank_of_a_pipeline_sends_a_micro_batch_in_bf16(has_network):
    cluster = CLUSTER if has_network else replace(CLUSTER, gpus=4, network=None)
    layout = replace(TOY_LAYOUT, ep=1, schedule="1f1b", batch_size=16 * 8, micro_batch_size=2)
    costs = stage_costs(TOY, layout, cluster, make_stages(TOY, layout, cluster))
    size = 2 * 64 * 256
    slow, fast = 0.75 + size / (100 * EFFICIENCIES["network"]), 0.5 + size / (1000 * EFFICIENCIES["nvlink"])
    assert costs.communication == pytest.approx(slow if has_network else fast, rel=1e-12)


def test_a_single_stage_sends_nothing():
    layout = Layout(batch_size=32, sequence_length=32)
    assert stage_costs(TOY, layout, CLUSTER, make_stages(TOY, layout, CLUSTER)).communication == 0


def test_passes_alone_wait_for_their_exchanges_and_weight_gradients_have_none():
    stages = make_stages(TOY, TOY_LAYOUT, CLUSTER)
    costs = stage_costs(TOY, TOY_LAYOUT, CLUSTER, stages)
    for stage, cost in zip(stages, costs.stages, strict=True):
        exchanged = stage.mixtures * stage.exchange_seconds
        assert cost.forward == pytest.approx(stage.alone["forward"] + exchanged)
        assert cost.input_gradient == pytest.approx(stage.alone["input_gradient"] + exchanged)
        assert cost.weight_gradient == pytest.approx(stage.alone["weight_gradient"])
    assert costs.pairs[0, 1] == overlapped(stages[0], stages[1])
    assert costs.pairs[1, 0] == overlapped(stages[1], stages[0])


def in_pair(forward, backward, of: str) -> float:
    seconds, of_backward = getattr(forward, of), getattr(backward, of)
    return seconds["forward"] + of_backward["input_gradient"] + of_backward["weight_gradient"]


def pair(exchange_seconds: float, **reached: float):
    """A forward and a backward pass whose exchanges take so long for each layer with experts, and all exchanges."""
    cluster = replace(CLUSTER, efficiencies=EFFICIENCIES | reached)
    stages = make_stages(TOY, TOY_LAYOUT, cluster)
    forward, backward = (replace(stage, exchange_seconds=exchange_seconds) for stage in stages)
    return forward, backward, (forward.mixtures + backward.mixtures) * exchange_seconds


def test_a_pair_without_exchanges_takes_its_computation():
    forward, backward, _ = pair(0.0)
    assert overlapped(forward, backward) == pytest.approx(in_pair(forward, backward, "alone"), rel=1e-12)


def test_computation_that_takes_longer_than_the_exchanges_is_slowed_down_by_them():
    forward, backward, exchanged = pair(1000.0, overlap=0.95, during_gemm=0.8, during_exchange=0.9)
    computed = in_pair(forward, backward, "during_exchange") + 0.1 * exchanged / 0.8
    assert exchanged / 0.8 < computed / 0.95 < in_pair(forward, backward, "alone") + exchanged
    assert overlapped(forward, backward) == pytest.approx(computed / 0.95, rel=1e-12)


def test_exchanges_that_take_longer_than_the_computation_limit_a_pair():
    forward, backward, exchanged = pair(10_000.0, overlap=0.95, during_gemm=0.9, during_exchange=0.9)
    assert exchanged / 0.9 < in_pair(forward, backward, "alone") + exchanged
    assert overlapped(forward, backward) == pytest.approx(exchanged / 0.9, rel=1e-12)


def test_passes_in_turn_are_taken_where_that_is_faster():
    forward, backward, exchanged = pair(1.0, overlap=0.7)
    assert overlapped(forward, backward) == pytest.approx(in_pair(forward, backward, "alone") + exchanged, rel=1e-12)


def test_what_the_computation_of_a_pair_does_not_hide_is_exposed():
    plan = plan_step(TOY, TOY_LAYOUT, CLUSTER)
    rank = min((0, 1), key=lambda rank: plan.simulation.bubbles[rank])
    exposed = 0.0
    for span in plan.simulation.spans[rank]:
        if span.action.sub_actions is not None:
            forward, backward = (plan.stages[part.stage_index] for part in span.action.sub_actions)
            hidden = in_pair(forward, backward, "during_exchange")
            exposed += max(overlapped(forward, backward) - hidden, 0.0)
        elif span.action.computation_type != ActionType.BACKWARD_WEIGHT:
            exposed += plan.stages[span.action.stage_index].exchanged
    assert plan.seconds_by_kind["exposed exchanges"] == pytest.approx(exposed, rel=1e-12)


def test_mfu_counts_the_models_flops_and_the_causal_one_half_of_attention_without_mtp():
    plan = plan_step(TOY, TOY_LAYOUT, CLUSTER)
    speed = 128 * 32 / plan.seconds / 32  # tokens a second of a GPU
    assert plan.mfu == pytest.approx(train_flops_per_token(TOY, 32) * speed / 1e6, rel=1e-12)
    projections = 96 * 256 + 4 * 48 * 96 + 144 * 256 + 4 * 72 * 128 + 256 * 160
    attended = 16 * 4 * (48 + 40)  # multiplications and additions over half of 32 tokens
    mixture = (4 + 2) * 3 * 256 * 192 + 16 * 256
    per_token = 5 * (projections + attended) + 2 * 3 * 256 * 320 + 3 * mixture + 1000 * 256
    assert plan.causal_mfu == pytest.approx(6 * per_token * speed / 1e6, rel=1e-12)


def test_speed_and_cost_are_those_of_a_trillion_tokens():
    plan = plan_step(TOY, TOY_LAYOUT, CLUSTER)
    assert plan.tokens == 128 * 32
    hours = 1e12 / (128 * 32) * plan.seconds * 32 / 3600
    assert plan.gpu_hours_per_trillion_tokens == pytest.approx(hours, rel=1e-12)
    assert plan.dollars_per_trillion_tokens == pytest.approx(3 * hours, rel=1e-12)


def test_the_kinds_of_time_of_a_pipeline_without_overlap_are_those_of_its_micro_batches():
    layout = replace(TOY_LAYOUT, schedule="1f1b")
    plan = plan_step(TOY, layout, CLUSTER)
    kinds, bubbles = plan.seconds_by_kind, plan.simulation.bubbles
    stage = plan.stages[min((0, 1), key=lambda rank: bubbles[rank])]
    for kind, seconds in stage.kinds.items():
        assert kinds[kind] == pytest.approx(8 * seconds, rel=1e-12)  # of 8 micro-batches
    assert kinds["exposed exchanges"] == pytest.approx(8 * 2 * stage.exchanged, rel=1e-12)  # forward and backward
    assert kinds["bubble"] == min(bubbles)
    assert (kinds["gradients and weights"], kinds["optimizer"]) == (plan.reduction, plan.optimizer)


def test_the_longest_pair_is_reported():
    plan = plan_step(TOY, TOY_LAYOUT, CLUSTER)
    assert plan.pair_seconds == max(overlapped(stage, stage) for stage in plan.stages)
