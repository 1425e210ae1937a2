"""The bytes of each kind of memory, written out for a small model; see toy.py for its sizes."""

from dataclasses import replace

import pytest

from octile.models.config import PRESETS, ModelConfig
from octile.models.counts import count_parameters
from octile.models.meta import meta_model
from octile.optim import Muon, muon_groups, muon_update
from octile.plan.hardware import read_cluster
from octile.plan.layout import Layout
from octile.plan.memory import (
    memory_by_kind,
    memory_of_rank,
    usable_memory,
)
from octile.plan.muon import held_projection, update_bytes
from octile.plan.parameters import held_parameters
from octile.plan.pass_memory import pass_bytes
from octile.plan.stages import make_stages
from octile.plan.step import plan_step
from tests.plan.toy import CLUSTER, EFFICIENCIES, TOY

LAYOUT = Layout(batch_size=256, micro_batch_size=2, sequence_length=32)
ONE = replace(CLUSTER, gpus=1, network=None)
FP8, BF16, FP32 = 1, 2, 4
ATTENTION = 96 * 256 + 4 * 48 * 96 + 144 * 256 + 4 * 72 * 128 + 256 * 4 * 40  # parameters
EXPERT = 3 * 256 * 192
DENSE = 3 * 256 * 320


def held(layout: Layout, cluster, model: ModelConfig = TOY) -> list[tuple[float, float, float]]:
    return [held_parameters(model, layout, [stage]) for stage in make_stages(model, layout, cluster)]


NORM = 2 * 256 + 96 + 128  # of a layer
GATE = 16 * 256  # its bias is no parameter
TABLE = 1000 * 256


def test_the_parameters_of_one_rank_are_those_of_the_model():
    routed, quantized, rest = held(LAYOUT, ONE)[0]
    assert routed == 4 * 16 * EXPERT
    assert quantized == 6 * ATTENTION + 2 * DENSE + 4 * 2 * EXPERT
    assert rest == 2 * TABLE + 2 * 256 * 256 + 6 * NORM + 4 * 256 + 4 * GATE  # two last norms, two of the prediction
    counts = count_parameters(TOY)
    assert routed + quantized + rest == counts.total + sum(counts.mtp.values())


def test_a_stage_has_its_layers_and_the_first_and_the_last_one_a_table():
    plain = replace(TOY, num_nextn_predict_layers=0)
    layout = Layout(pp=4, ep=8, schedule="1f1b", batch_size=256, sequence_length=32)
    stages = make_stages(plain, layout, CLUSTER)
    found = held(layout, CLUSTER, plain)
    for stage, (routed, quantized, rest) in zip(stages, found, strict=True):
        layers, mixtures = (sum(getattr(p, name) for p in stage.parts) for name in ("layers", "mixtures"))
        tables, heads = (sum(getattr(p, name) for p in stage.parts) for name in ("has_embedding", "heads"))
        assert routed == mixtures * 16 * EXPERT / 8
        assert quantized == layers * ATTENTION + (layers - mixtures) * DENSE + mixtures * 2 * EXPERT
        assert rest == layers * NORM + mixtures * GATE + heads * 256 + (tables + heads) * TABLE
    assert [stage.parts[0].has_embedding for stage in stages] == [True, False, False, False]
    assert [stage.parts[-1].heads for stage in stages] == [0, 0, 0, 1]


@pytest.mark.parametrize(("masters", "everywhere", "shared"), [("sharded", BF16, FP32), ("replicated", FP32, 0)])
def test_each_kind_of_memory_of_data_parallel_ranks(masters, everywhere, shared):
    layout = replace(LAYOUT, ep=4, batch_size=64, masters=masters)
    cluster = replace(CLUSTER, gpus=16)
    stages = make_stages(TOY, layout, cluster)
    routed, quantized, rest = held_parameters(TOY, layout, stages)
    assert routed == 4 * 16 * EXPERT / 4
    stores = masters == "replicated"  # gradients of the second micro-batch
    backward = pass_bytes(TOY, layout, stages[0], stores).backward
    activations, in_all = backward.activations, sum(backward)
    found = memory_by_kind(TOY, layout, cluster, layout.make_schedule(cluster), stages)
    assert found == pytest.approx(
        {
            "weights": everywhere * (routed + quantized + rest),
            "FP8 weights": (1 + 1) * FP8 * (routed + quantized),
            "gradients": FP32 * (routed + quantized + rest),
            "moments": (2 * BF16 + shared) * (routed / 4 + (quantized + rest) / 16),  # over replicas and over ranks
            "activations": activations,
            "working": in_all - activations,
        }
    )


@pytest.mark.parametrize("masters", ["sharded", "replicated"])
def test_muon_has_one_moment_of_each_matrix_and_two_of_the_others(masters):
    layout = replace(LAYOUT, ep=4, batch_size=64, masters=masters)
    cluster = replace(CLUSTER, gpus=16)
    stages = make_stages(TOY, layout, cluster)
    routed, quantized, _ = held_parameters(TOY, layout, stages)
    matrices = routed / 4 + (quantized + 2 * 256 * 256) / 16  # multi-token prediction projects pairs
    adamw, muon = (
        memory_by_kind(TOY, replace(layout, optimizer=name), cluster, layout.make_schedule(cluster), stages)
        for name in ("adamw", "muon")
    )
    assert adamw["moments"] - muon["moments"] == pytest.approx(BF16 * matrices)
    assert all(adamw[kind] == muon[kind] for kind in ("weights", "FP8 weights", "gradients", "activations"))


@pytest.mark.parametrize("micro_batch_size", [2, 256], ids=["an update takes more", "a pass takes more"])
def test_the_tensors_of_a_pass_or_of_an_update_by_muon_are_counted_whichever_take_more(micro_batch_size):
    layout = replace(LAYOUT, micro_batch_size=micro_batch_size, optimizer="muon")
    found, adamw = (
        memory_by_kind(TOY, each, ONE, each.make_schedule(ONE), make_stages(TOY, each, ONE))
        for each in (layout, replace(layout, optimizer="adamw"))
    )
    update = 16 * (4 * 16 * 2) * 192 * 256  # of a batch of all experts' gates and projections up
    of_pass = adamw["activations"] + adamw["working"]
    assert (update > of_pass) == (micro_batch_size == 2)
    assert found["activations"] + found["working"] == pytest.approx(max(update, of_pass))


def test_an_update_by_muon_is_that_of_the_matrices_of_a_ranks_stages(monkeypatch):
    monkeypatch.setattr(muon_update, "temporary_bytes", lambda whole, divided, ranks: (whole, divided, ranks))
    layout = Layout(pp=2, ep=4, batch_size=16 * 8, sequence_length=32)
    for stage in make_stages(TOY, layout, CLUSTER):
        routed, quantized, _ = held_parameters(TOY, layout, [stage])
        *shapes, ranks = update_bytes(TOY, [stage], layout.ep, 16)
        whole, divided = (sum(count * n * k for (n, k), count in matrices.items()) for matrices in shapes)
        assert (whole, divided, ranks) == (routed, quantized + held_projection(TOY, [stage]), 16)


@pytest.mark.one_case
@pytest.mark.parametrize("preset", ["tiny", "v2_lite_16b", "v3_671b"])
def test_the_moments_of_muon_on_one_gpu_are_those_of_the_optimizer(preset):
    model = PRESETS[preset]()
    layout = Layout(batch_size=1, sequence_length=32, masters="replicated", optimizer="muon")
    stages = make_stages(model, layout, ONE)
    found = memory_by_kind(model, layout, ONE, layout.make_schedule(ONE), stages)
    assert found["moments"] == Muon(muon_groups(meta_model(model), 0.1), lr=1e-3).state_bytes()


def test_the_rank_that_needs_most_counts():
    layout = Layout(pp=2, ep=4, schedule="1f1b", batch_size=16 * 8, sequence_length=32)
    plain = replace(TOY, num_nextn_predict_layers=0)
    stages, schedule = make_stages(plain, layout, CLUSTER), layout.make_schedule(CLUSTER)
    totals = []
    for rank, stage in enumerate(stages):
        routed, quantized, rest = held_parameters(plain, layout, [stage])
        weights = (BF16 + FP32) * (routed + quantized + rest) + 2 * FP8 * (routed + quantized)
        moments = 8 * (routed / 4 + (quantized + rest) / 16)
        passes = pass_bytes(plain, layout, stage, stores_gradients=False)
        messages = 2 * 32 * BF16 * 256  # rank 0 sends activations, rank 1 gradients
        earlier = passes.saved + passes.logits if rank == 0 else 0  # rank 0 has two micro-batches
        totals.append(weights + moments + earlier + sum(passes.backward) + messages)
        found = memory_of_rank(plain, layout, CLUSTER, schedule, stages, rank)
        assert sum(found.values()) == pytest.approx(totals[-1])
    assert sum(memory_by_kind(plain, layout, CLUSTER, schedule, stages).values()) == pytest.approx(max(totals))


def test_all_but_6_percent_of_a_gpus_memory_are_usable():
    assert usable_memory(CLUSTER) == 0.94e9


def test_torch_reserves_more_than_tensors_have():
    plan = plan_step(TOY, replace(LAYOUT, ep=4, batch_size=64), CLUSTER)
    assert plan.reserved == pytest.approx(sum(plan.memory.values()) / EFFICIENCIES["allocated"])


def test_tensors_of_medium_take_what_they_take_on_an_h200():
    # benchmarks/history/plan/memory.txt, GiB: weights, gradients and moments 8.11 each, FP8 weights 2 × 1.893, logits 6
    layout = Layout(batch_size=32, micro_batch_size=8, recompute=False, masters="replicated")
    found = plan_step(ModelConfig.medium(), layout, replace(read_cluster("h200_8"), gpus=1)).memory
    expected = {"weights": 8.11, "FP8 weights": 3.786, "gradients": 8.11, "moments": 8.11, "working": 6.0}
    assert {kind: found[kind] / 2**30 for kind in expected} == pytest.approx(expected, rel=0.005)
    assert found["activations"] / 2**30 == pytest.approx(51.72 - sum(expected.values()), rel=0.02)
