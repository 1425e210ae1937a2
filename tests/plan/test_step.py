"""A planned training step."""

from dataclasses import replace

import pytest

from octile.models.config import ModelConfig
from octile.plan.hardware import read_cluster
from octile.plan.layout import Layout
from octile.plan.memory import memory_by_kind, saved_bytes, why_not_fitting
from octile.plan.step import plan_step

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


def test_a_saved_layer_takes_the_bytes_of_data_flow():
    v3 = ModelConfig.v3_671b()
    assert saved_bytes(v3, Layout(), is_moe=True) == 44_172 + 53_540  # docs/data_flow.md


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
