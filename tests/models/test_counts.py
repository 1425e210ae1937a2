import pytest

from octile.models.config import PRESETS
from octile.models.counts import count_parameters
from octile.models.deepseek_v3 import DeepseekV3
from tests.models.conftest import MINI_V3


@pytest.mark.parametrize(
    ("preset", "total", "active"), [("v3_671b", 671.0, 37.6), ("v2_236b", 235.7, 21.4), ("v2_lite_16b", 15.7, 2.7)]
)
def test_published_sizes(preset, total, active):
    count = count_parameters(PRESETS[preset]())
    assert (round(count.total / 1e9, 1), round(count.active / 1e9, 1)) == (total, active)


@pytest.mark.parametrize(
    ("preset", "least", "most"), [("tiny", 4e6, 6e6), ("small", 90e6, 110e6), ("medium", 1.9e9, 2.1e9)]
)
def test_sizes_of_the_small_presets(preset, least, most):
    assert least < count_parameters(PRESETS[preset]()).total < most


def test_main_and_mtp_are_the_whole_model():
    count = count_parameters(MINI_V3)
    assert count.total + sum(count.mtp.values()) == sum(p.numel() for p in DeepseekV3(MINI_V3).parameters())
