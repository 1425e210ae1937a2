import pytest
import torch

from octile.checkpoint.fp8_layout import (
    QUANTIZATION_CONFIG,
    check_scales,
    fp8_specs,
    is_fp8_config,
    is_stored_in_fp8,
    quantize_weight,
    with_quantization,
)
from octile.checkpoint.tensor_file import TensorSpec

PROJECTIONS = [
    "model.layers.3.self_attn.q_a_proj.weight",
    "model.layers.3.self_attn.kv_a_proj_with_mqa.weight",
    "model.layers.3.mlp.experts.17.down_proj.weight",
    "model.layers.3.mlp.shared_experts.gate_proj.weight",
    "model.layers.61.mlp.experts.0.up_proj.weight",
    "model.layers.0.block_sparse_moe.experts.1.w2.weight",  # Mixtral
    "language_model.model.layers.0.self_attn.o_proj.weight",
]
OTHERS = [
    "model.embed_tokens.weight",
    "lm_head.weight",
    "model.layers.61.shared_head.head.weight",
    "model.layers.61.eh_proj.weight",
    "model.layers.3.mlp.gate.weight",
    "model.layers.3.mlp.shared_expert_gate.weight",  # Qwen
    "model.layers.3.mlp.experts.router.weight",
    "model.layers.3.self_attn.indexer.weights_proj.weight",  # DeepSeek-V3.2
    "transformer.h.0.attn.c_attn.weight",  # GPT-2 keeps it transposed
    "model.layers.3.self_attn.q_proj.bias",
    "weight",
]


@pytest.mark.parametrize("name", PROJECTIONS)
def test_projections_become_fp8(name):
    assert is_stored_in_fp8(name, (256, 128))


@pytest.mark.parametrize("name", OTHERS)
def test_everything_else_stays(name):
    assert not is_stored_in_fp8(name, (256, 128))


@pytest.mark.parametrize("shape", [(), (128,), (2, 128, 128)])
def test_only_matrices_become_fp8(shape):
    assert not is_stored_in_fp8(PROJECTIONS[0], shape)


def test_partial_blocks_have_scales_of_their_own():
    specs = fp8_specs("x.weight", (576, 7168))
    assert specs["x.weight"] == TensorSpec("F8_E4M3", (576, 7168), 576 * 7168)
    assert specs["x.weight_scale_inv"] == TensorSpec("F32", (5, 56), 5 * 56 * 4)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_weight_that_is_no_number_is_named(value):
    weight = torch.ones(130, 5)
    weight[129, 2] = value
    with pytest.raises(ValueError, match=r"x\.weight holds NaN or Inf"):
        quantize_weight("x.weight", weight)


def test_deepseeks_configuration_is_the_published_one():
    high_precision = dict.fromkeys(OTHERS[:5], TensorSpec("BF16", (4, 4), 32))
    assert with_quantization({"a": 1}, high_precision) == {"a": 1, "quantization_config": QUANTIZATION_CONFIG}


def test_layers_that_engines_would_take_for_fp8_are_listed():
    high_precision = {name: TensorSpec("BF16", (4, 4), 32) for name in ("lm_head.weight", "h.0.attn.c_attn.weight")}
    listed = with_quantization({}, high_precision)["quantization_config"]["modules_to_not_convert"]
    assert listed == ["h.0.attn.c_attn", "lm_head"]


@pytest.mark.parametrize(
    "announced",
    [{"quant_method": "awq"}, {"quant_method": "fp8"}, {"quant_method": "fp8", "weight_block_size": [64, 64]}],
)
def test_another_quantization_is_refused(announced):
    with pytest.raises(ValueError, match="quantization_config must be 'fp8' with weight_block_size"):
        is_fp8_config({"quantization_config": announced})


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        ({}, "x is FP8, but the checkpoint has no x_scale_inv"),
        ({"x_scale_inv": (1, 2)}, r"x_scale_inv must be \[2, 2\] for \[200, 130\], not \[1, 2\]"),
    ],
)
def test_an_fp8_weight_needs_its_scale(scale, message):
    specs = {"x": TensorSpec.of(torch.float8_e4m3fn, (200, 130))}
    specs |= {name: TensorSpec.of(torch.float32, shape) for name, shape in scale.items()}
    with pytest.raises(ValueError, match=message):
        check_scales(specs)
