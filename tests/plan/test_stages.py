"""How a model is divided into stages."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octile.models.config import ModelConfig
from octile.models.counts import count_parameters
from octile.plan.hardware import read_cluster
from octile.plan.layout import Layout
from octile.plan.stages import divide, make_stages

COSTS = st.lists(st.integers(1, 50), min_size=1, max_size=8)


@given(COSTS, st.data())
def test_a_division_has_the_smallest_largest_part(costs, data):
    n = data.draw(st.integers(1, len(costs)))
    bounds = divide(tuple(map(float, costs)), n)
    assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == len(costs)
    assert all(begin < end for begin, end in bounds)
    all_cuts = ([0, *cuts, len(costs)] for cuts in combinations(range(1, len(costs)), n - 1))
    best = min(max(sum(costs[a:b]) for a, b in pairwise(cuts)) for cuts in all_cuts)
    assert max(sum(costs[begin:end]) for begin, end in bounds) == best


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
