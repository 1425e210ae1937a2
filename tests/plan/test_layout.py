"""What a layout must divide."""

from dataclasses import replace

import pytest

from octile.models.config import ModelConfig
from octile.plan.hardware import read_cluster
from octile.plan.layout import Layout

V3, H800 = ModelConfig.v3_671b(), read_cluster("h800_2048")
PUBLISHED = Layout(pp=16, ep=64, schedule="dualpipe", batch_size=15360)


def test_the_published_layout_is_accepted():
    PUBLISHED.check(V3, H800)
    assert (PUBLISHED.dp(H800), PUBLISHED.micro_batches(H800)) == (128, 120)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pp": 15}, "pp must divide the 2,048 GPUs, not 15"),
        ({"ep": 48}, r"ep must divide the 128 data-parallel ranks \(GPUs / pp\), not 48"),
        ({"pp": 2, "ep": 512}, "ep must divide the 256 experts, not 512"),
        ({"pp": 64, "ep": 32}, "pp must be at most one stage per layer, 61, not 64 stages"),
        ({"pp": 32, "schedule": "dualpipev"}, "pp must be at most one stage per layer, 61, not 64 stages"),
        ({"batch_size": 15000}, r"batch_size must be a multiple of 128 \(dp 128 × micro_batch_size 1\), not 15,000"),
        ({"sequence_length": 2**20}, "sequence_length must be at most the model's 163,840, not 1,048,576"),
    ],
)
def test_a_layout_that_does_not_divide_is_refused_with_the_constraint(change, message):
    with pytest.raises(ValueError, match=message):
        replace(PUBLISHED, **change).check(V3, H800)


def test_sizes_of_a_layout_follow_from_its_fields():
    layout = Layout(pp=4, ep=8, schedule="dualpipev", batch_size=4096, micro_batch_size=2, sequence_length=512)
    assert (layout.stages, replace(layout, schedule="dualpipe").stages) == (8, 4)
    assert layout.micro_batch_tokens == 1024
    assert (layout.dp(H800), layout.micro_batches(H800)) == (512, 4)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "PP16 × EP64, dualpipe"),
        ({"micro_batch_size": 2}, "PP16 × EP64, dualpipe, 2 sequences at a time"),
        ({"recompute": False}, "PP16 × EP64, dualpipe, nothing recomputed"),
    ],
)
def test_a_layout_is_printed_with_what_differs(change, text):
    assert str(replace(PUBLISHED, **change)) == text


@pytest.mark.parametrize(
    "change",
    [{"sequence_length": 163_840}, {"pp": 16, "ep": 8}, {"pp": 1, "ep": 256, "batch_size": 2048}, {"ep": 1}, {"ep": 4}],
)
def test_the_largest_and_the_smallest_sizes_are_accepted(change):
    replace(PUBLISHED, **change).check(V3, H800)


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        (V3, {"sequence_length": 163_841}, "sequence_length must be at most the model's 163,840, not 163,841"),
        (replace(V3, n_routed_experts=264, n_group=11, topk_group=4), {"ep": 4}, "4 ranks must divide the 11 groups"),
        (
            replace(V3, n_routed_experts=240, n_group=5, topk_group=4),
            {"ep": 16},
            "ep 16: 2 nodes must divide the 5 groups of experts",
        ),
        (
            replace(V3, n_routed_experts=192, n_group=3, topk_group=3),
            {"ep": 64},
            "ep 64: the 3 groups of experts must divide 8 nodes",
        ),
        (replace(V3, num_hidden_layers=15), {}, "pp must be at most one stage per layer, 15, not 16 stages"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(model, change, message):
    with pytest.raises(ValueError, match=message):
        replace(PUBLISHED, **change).check(model, H800)


def test_as_many_stages_as_layers_are_accepted():
    PUBLISHED.check(replace(V3, num_hidden_layers=16), H800)


def test_experts_on_more_than_a_node_are_on_whole_nodes():
    model = replace(V3, n_routed_experts=252, n_group=1, topk_group=1)
    cluster = replace(H800, gpus=12 * 16, gpus_per_node=8)
    with pytest.raises(ValueError, match="ep must be whole nodes of 8 GPUs, not 12"):
        replace(PUBLISHED, ep=12, batch_size=1440).check(model, cluster)


@pytest.mark.parametrize("change", [{"pp": 0}, {"schedule": "zbv"}, {"spare_rows": -1.0}])
def test_a_field_outside_its_range_is_refused(change):
    with pytest.raises(ValueError, match=f"{next(iter(change))} must be"):
        replace(PUBLISHED, **change)


def test_a_schedule_refuses_too_few_micro_batches():
    with pytest.raises(ValueError, match="dualpipe needs at least 32 micro-batches, not 30"):
        replace(PUBLISHED, batch_size=30 * 128).make_schedule(H800)
