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


@pytest.mark.parametrize("change", [{"pp": 0}, {"schedule": "zbv"}, {"spare_rows": -1.0}])
def test_a_field_outside_its_range_is_refused(change):
    with pytest.raises(ValueError, match=f"{next(iter(change))} must be"):
        replace(PUBLISHED, **change)


def test_a_schedule_refuses_too_few_micro_batches():
    with pytest.raises(ValueError, match="dualpipe needs at least 32 micro-batches, not 30"):
        replace(PUBLISHED, batch_size=30 * 128).make_schedule(H800)
