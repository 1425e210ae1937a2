"""Tests of the heads of attention that a rank has."""

from dataclasses import replace

import pytest
import torch

from octile.scaled import ScaledTensor, quantize
from octile.serve.weights.block_weights import Part
from octile.serve.weights.head_share import HeadShare, check_heads, is_of_heads
from tests.serve.models import CONFIG

LAYER = "model.layers.0.self_attn"


@pytest.mark.parametrize(
    ("layer", "part"),
    [
        ("q_proj", Part(0, 32, 64)),
        ("q_b_proj", Part(0, 32, 64)),
        ("kv_b_proj", Part(0, 32, 64)),
        ("o_proj", Part(1, 24, 48)),
        ("q_a_proj", None),
        ("kv_a_proj_with_mqa", None),
        ("indexer.wq_b", None),
    ],
)
def test_the_part_of_a_rank(layer, part):
    assert HeadShare(1, 3).part_of(f"{LAYER}.{layer}.weight", (96, 72)) == part
    assert HeadShare().part_of(f"{LAYER}.{layer}.weight", (96, 72)) is None
    assert is_of_heads(f"{LAYER}.{layer}") == is_of_heads(f"{LAYER}.{layer}.weight") == (part is not None)


@pytest.mark.parametrize(("layer", "dim"), [("q_b_proj", 0), ("o_proj", 1)])
def test_the_parts_of_all_ranks_are_the_weight(layer, dim):
    weight = torch.randn(256, 256)
    for whole in (weight, quantize(weight, (128, 128))):
        parts = [HeadShare(rank, 2).take(f"{LAYER}.{layer}.weight", whole) for rank in range(2)]
        values = [part.dequantize() if isinstance(part, ScaledTensor) else part for part in parts]
        expected = whole.dequantize() if isinstance(whole, ScaledTensor) else whole
        assert torch.equal(torch.cat(values, dim=dim), expected)


def test_heads_that_ranks_do_not_divide_are_refused():
    with pytest.raises(ValueError, match=r"parallel.tp must divide the model's 4 heads, but is 3"):
        check_heads(CONFIG, 3, is_fp8=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {},
            "FP8 weights, but is 2: 2 heads × 48 channels of queries = 96, which is no multiple of 128",
        ),
        ({"qk_nope_head_dim": 48}, "2 heads × 72 channels of keys and values = 144, which"),
        ({"qk_nope_head_dim": 48, "v_head_dim": 16}, "2 heads × 16 channels of results = 32, which"),
    ],
)
def test_heads_whose_fp8_blocks_would_be_divided_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        check_heads(replace(CONFIG, **change), 2, is_fp8=True)


def test_one_rank_has_all_heads_whatever_their_blocks():
    check_heads(CONFIG, 1, is_fp8=True)
    check_heads(CONFIG, 2, is_fp8=False)
