import pytest

from octile.models.config import PRESETS
from octile.models.counts import count_parameters, forward_flops
from octile.models.deepseek_v3 import DeepseekV3
from tests.models.conftest import MINI_V3


@pytest.mark.parametrize(
    ("preset", "total", "active"), [("v3_671b", 671.0, 37.6), ("v2_236b", 235.7, 21.4), ("v2_lite_16b", 15.7, 2.7)]
)
def test_published_sizes(preset, total, active):
    count = count_parameters(PRESETS[preset]())
    assert (round(count.total / 1e9, 1), round(count.active / 1e9, 1)) == (total, active)


@pytest.mark.parametrize(("preset", "least", "most"), [("tiny", 6e6, 9e6), ("small", 90e6, 110e6)])
def test_sizes_of_the_small_presets(preset, least, most):
    assert least < count_parameters(PRESETS[preset]()).total < most


def test_main_and_mtp_are_the_whole_model():
    count = count_parameters(MINI_V3)
    assert count.total + sum(count.mtp.values()) == sum(p.numel() for p in DeepseekV3(MINI_V3).parameters())


def test_forward_flops_are_two_a_parameter_of_a_product():
    count, flops = count_parameters(MINI_V3), forward_flops(MINI_V3, sequence_length=16)
    products = {kind: n for kind, n in count.main_active.items() if kind not in ("embedding", "norms")}
    assert {kind: flops[kind] for kind in products} == {kind: 2 * n for kind, n in products.items()}


def test_attention_scores_average_over_the_tokens_that_are_seen():
    # 3 layers, 4 heads, keys of 24 and values of 12; the tokens of a sequence of 3 see 1, 2 and 3
    assert forward_flops(MINI_V3, sequence_length=3)["attention scores"] == 2 * 3 * 4 * (24 + 12) * 2


def test_multi_token_prediction_uses_the_head_twice():
    without, with_mtp = (forward_flops(MINI_V3, 16, mtp=mtp) for mtp in (False, True))
    assert with_mtp["head"] == 2 * without["head"]
    assert with_mtp["MTP projection"] == 2 * 2 * 64 * 64
