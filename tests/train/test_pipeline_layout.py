"""Which layers the stages of a run's pipeline have."""

from dataclasses import replace

import pytest

from octile.parallel.schedules import make_schedule
from octile.train.config import ParallelConfig, preset
from octile.train.pipeline_layout import describe_pipeline, make_pipeline_schedule, pipeline_layers


@pytest.mark.parametrize(
    ("parallel", "counts"),
    [
        (ParallelConfig(pp=2), [5, 3]),
        (ParallelConfig(dp=4, ep=4, pp=2), [5, 3]),
        (ParallelConfig(pp=2, schedule="dualpipev"), [3, 2, 3, 0]),
        (ParallelConfig(pp=2, schedule="dualpipe"), [5, 3]),
        (ParallelConfig(dp=3, pp=8), [2, 1, 1, 1, 1, 1, 1, 0]),
    ],
    ids=["1f1b", "spread experts", "dualpipev", "dualpipe", "a stage a layer"],
)
def test_the_layers_of_small(parallel: ParallelConfig, counts: list[int]):
    small = preset("small")
    batch = 16 * parallel.dp * small.micro_batch_size
    config = replace(small, batch_size=batch, micro_batches=16, parallel=parallel)
    schedule = make_pipeline_schedule(config)
    assert schedule is not None
    assert [len(layers) for layers in pipeline_layers(config, schedule)] == counts


@pytest.mark.parametrize(
    ("schedule", "layers", "says"),
    [
        ("1f1b", [range(3), range(3, 4)], "1F1B, 2 stages of 3 and 1 layers on 2 ranks, 4 micro-batches"),
        (
            "dualpipev",
            [range(2), range(2, 3), range(3, 5), range(5, 5)],
            "DualPipeV, 4 stages of 2, 1, 2 and 0 layers on 2 ranks (layers of each rank: 2 + 0, 1 + 2), 4",
        ),
        ("dualpipe", [range(1), range(1, 2)], "2 stages of 1 layer on 2 ranks (layers of each rank: 1 + 1, 1 + 1), 4"),
    ],
)
def test_a_run_says_which_rank_has_how_many_layers(schedule: str, layers: list[range], says: str):
    assert says in describe_pipeline(make_schedule(schedule, len(layers), 4), layers)


def test_a_rank_that_has_both_stages_divides_the_layers_too():
    config = replace(preset("small"), batch_size=512, micro_batches=16)
    layers = pipeline_layers(config, make_schedule("dualpipev", 2, 16))
    assert [layer for own in layers for layer in own] == [*range(8)]
    assert len(layers) == 2
