"""How a model is divided into stages."""

from dataclasses import replace
from itertools import chain

import pytest

from octile.models.config import ModelConfig
from octile.models.counts import count_parameters
from octile.plan import stages
from octile.plan.division import divide
from octile.plan.exchange import busiest_rank, exchange
from octile.plan.hardware import read_cluster
from octile.plan.layout import Layout
from octile.plan.stages import make_parts, make_stages, stage_layers
from octile.plan.work import (
    PHASES,
    attention_work,
    dense_work,
    embedding_work,
    head_work,
    mixture_work,
    prediction_work,
)
from tests.plan.toy import CLUSTER, EFFICIENCIES, TOY, duration


def test_every_layer_is_in_one_stage_and_heads_are_in_the_last():
    layout = Layout(pp=16, ep=64, schedule="dualpipe", batch_size=15360)
    stages = make_stages(ModelConfig.v3_671b(), layout, read_cluster("h800_2048"))
    assert sum(part.layers for stage in stages for part in stage.parts) == 62  # with multi-token prediction
    assert sum(stage.mixtures for stage in stages) == 59
    assert [sum(part.heads for part in stage.parts) for stage in stages] == [0] * 15 + [2]
    assert stages[0].parts[0].has_embedding


def test_computation_during_an_exchange_takes_longer_than_alone():
    layout = Layout(pp=16, ep=64, schedule="dualpipe", batch_size=15360)
    stage = make_stages(ModelConfig.v3_671b(), layout, read_cluster("h800_2048"))[5]
    for phase, seconds in stage.alone.items():
        assert seconds < stage.during_exchange[phase] < seconds * 132 / 112


def test_gradients_of_further_micro_batches_are_added_by_kernels_of_their_own_where_weights_are_fp32():
    config = replace(ModelConfig.medium(), num_nextn_predict_layers=0)
    cluster = replace(read_cluster("h200_8"), gpus=1)

    def elementwise(n: int, masters: str) -> float:
        layout = Layout(batch_size=8, micro_batch_size=8 // n, masters=masters)
        return n * sum(stage.kinds["elementwise"] for stage in make_stages(config, layout, cluster))

    kernels = {n: elementwise(n, "replicated") - elementwise(n, "sharded") for n in (1, 2, 4)}
    assert kernels[1] == pytest.approx(0)
    assert kernels[4] == pytest.approx(3 * kernels[2], rel=0.01)
    parameters = sum(count_parameters(config).main.values())
    sums = 12 * parameters / (cluster.gpu.memory_bandwidth * cluster.reached.copy)  # two values read, one written
    assert kernels[2] == pytest.approx(sums, rel=0.05)


def test_the_kinds_of_a_stage_add_up_to_its_phases():
    layout = Layout(pp=4, ep=8, schedule="1f1b", batch_size=4096)
    for stage in make_stages(ModelConfig.v2_lite_16b(), layout, read_cluster("h800_2048")):
        assert sum(stage.kinds.values()) == pytest.approx(sum(stage.alone.values()))


def seconds_of(*work) -> float:
    return sum(duration(piece) for pieces in work for piece in pieces)


@pytest.mark.parametrize("is_balanced", [True, False])
def test_the_parts_of_a_model_have_the_work_of_its_layers_and_heads(is_balanced):
    layout = Layout(ep=4, batch_size=32, micro_batch_size=2, sequence_length=32, is_balanced=is_balanced)
    load = 1.0 if is_balanced else busiest_rank(TOY, 4, CLUSTER)
    attention, dense = attention_work(TOY, 64, 32, False), dense_work(TOY, 64, False)
    mixture, head = list(mixture_work(TOY, 64, 4, False, load)), list(head_work(TOY, 64))
    attention, embedding = list(attention), list(embedding_work(TOY, 64))
    of_dense, of_mixture = seconds_of(attention, dense), seconds_of(attention, mixture)
    parts = make_parts(TOY, layout, CLUSTER)
    expected = [of_dense + seconds_of(embedding), of_dense, *[of_mixture] * 3]
    # multi-token prediction: its layer, and the head and the embedding once more
    expected += [of_mixture + 2 * seconds_of(head) + seconds_of(embedding, prediction_work(TOY, 64))]
    assert [sum(part.alone.values()) for part in parts] == pytest.approx(expected, rel=1e-12)
    assert [(p.layers, p.mixtures, p.heads, p.has_embedding) for p in parts] == [
        (1, 0, 0, True),
        (1, 0, 0, False),
        *[(1, 1, 0, False)] * 3,
        (1, 1, 2, True),
    ]


def test_without_multi_token_prediction_the_end_is_the_head():
    plain = replace(TOY, num_nextn_predict_layers=0)
    end = make_parts(plain, Layout(batch_size=32, sequence_length=32), CLUSTER)[-1]
    assert (end.layers, end.mixtures, end.heads, end.has_embedding) == (0, 0, 1, False)
    assert sum(end.alone.values()) == pytest.approx(seconds_of(head_work(plain, 32)), rel=1e-12)


def test_replicated_masters_add_gradients_of_each_part_over_micro_batches():
    layout = Layout(batch_size=32 * 4, sequence_length=32, recompute=False)
    sharded, replicated = (
        make_parts(TOY, replace(layout, masters=masters), CLUSTER) for masters in ("sharded", "replicated")
    )
    for one, other in zip(sharded, replicated, strict=True):
        weights = [piece.weights for piece in one.work if piece.weights]
        further = 3 / 4  # of four micro-batches
        kernels = further * (len(weights) * 0.125 + 12 * sum(weights) / 1e4 / EFFICIENCIES["copy"])
        assert other.alone["weight_gradient"] - one.alone["weight_gradient"] == pytest.approx(kernels, rel=1e-9)


def test_a_part_computes_on_the_sms_that_exchanges_leave():
    part = make_parts(TOY, Layout(batch_size=32, sequence_length=32), CLUSTER)[2]
    for phase, seconds in part.during_exchange.items():
        expected = sum(duration(piece, 0.8) for piece in part.work if piece.phase == phase)
        assert seconds == pytest.approx(expected, rel=1e-12)


def test_a_stage_adds_up_its_parts_and_the_exchanges_of_its_layers_with_experts():
    layout = Layout(pp=2, ep=4, schedule="dualpipe", batch_size=16 * 8, sequence_length=32)
    of_layer = exchange(TOY, 32, 4, CLUSTER).total
    for stage in make_stages(TOY, layout, CLUSTER):
        assert stage.exchanged == pytest.approx(sum(part.mixtures for part in stage.parts) * of_layer)
        for phase in PHASES:
            assert stage.alone[phase] == pytest.approx(sum(part.alone[phase] for part in stage.parts))
            assert stage.during_exchange[phase] == pytest.approx(sum(p.during_exchange[phase] for p in stage.parts))


LARGE_HEADS = replace(TOY, vocab_size=100_000)  # which alone take longer than all layers
FAST = replace(
    CLUSTER,
    gpu=replace(CLUSTER.gpu, bf16_peak=1e15, fp8_peak=3e15, memory_bandwidth=1e13),
    efficiencies=EFFICIENCIES | {"gemm_latency": 0.0, "operator_latency": 0.0},
)


@pytest.mark.parametrize(("schedule", "mixtures"), [("1f1b", [2, 2]), ("zb1p", [2, 2]), ("dualpipe", [3, 1])])
def test_exchanges_count_in_the_division_unless_computation_hides_them(schedule, mixtures):
    layout = Layout(pp=2, ep=4, schedule=schedule, batch_size=16 * 8, sequence_length=32)
    stages = make_stages(LARGE_HEADS, layout, FAST)  # computation takes much less than an exchange
    assert [stage.mixtures for stage in stages] == mixtures


def test_the_exchanges_of_both_passes_count_in_the_division(monkeypatch):
    divided = []
    monkeypatch.setattr(stages, "divide", lambda costs, n: divided.append(costs) or divide(costs, n))
    layout = Layout(pp=2, ep=4, schedule="1f1b", batch_size=16 * 8, sequence_length=32)
    make_stages(TOY, layout, CLUSTER)
    of_layer = exchange(TOY, 32, 4, CLUSTER).total
    expected = [sum(p.alone.values()) + p.mixtures * 2 * of_layer for p in make_parts(TOY, layout, CLUSTER)]
    assert divided == [pytest.approx(expected, rel=1e-12)]


@pytest.mark.parametrize(
    ("preset", "schedule", "counts"),
    [
        ("small", "1f1b", [5, 3]),
        ("small", "dualpipe", [5, 3]),
        ("small", "dualpipev", [3, 2, 3, 0]),
        ("medium", "1f1b", [6, 3]),
        ("medium", "dualpipev", [3, 3, 3, 0]),
    ],
)
@pytest.mark.parametrize("cluster", ["h100_8", "h200_8"])
def test_the_layers_of_stages(preset: str, schedule, counts: list[int], cluster: str):
    config, length = getattr(ModelConfig, preset)(), {"small": 1024, "medium": 4096}[preset]
    layout = Layout(pp=2, schedule=schedule, batch_size=512, micro_batch_size=8, sequence_length=length)
    layers = stage_layers(config, layout, read_cluster(cluster))
    assert [len(own) for own in layers] == counts
    assert [*chain(*layers)] == [*range(config.num_hidden_layers)]


def test_a_rank_with_two_stages_has_as_much_of_both_as_the_others():
    layout = Layout(pp=2, schedule="dualpipev", batch_size=128, sequence_length=1024)
    first, second, third, last = (
        sum(stage.alone.values()) for stage in make_stages(ModelConfig.small(), layout, read_cluster("h200_8"))
    )
    assert max(first + last, second + third) <= 1.1 * (first + second + third + last) / 2
