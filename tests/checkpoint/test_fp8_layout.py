import math

import pytest
import torch
from safetensors.torch import save_file

from octile.checkpoint.fp8_layout import (
    QUANTIZATION_CONFIG,
    check_scale_values,
    check_scales,
    fp8_specs,
    is_fp8_config,
    is_stored_in_fp8,
    quantize_weight,
    with_quantization,
    with_scales_as_announced,
)
from octile.checkpoint.shards import Shards
from octile.checkpoint.tensor_file import TensorSpec
from octile.recipe import Recipe

PROJECTIONS = [
    "model.layers.3.self_attn.q_a_proj.weight",
    "model.layers.3.self_attn.kv_a_proj_with_mqa.weight",
    "model.layers.3.mlp.experts.17.down_proj.weight",
    "model.layers.3.mlp.shared_experts.gate_proj.weight",
    "model.layers.61.mlp.experts.0.up_proj.weight",
    "model.layers.0.block_sparse_moe.experts.1.w2.weight",  # Mixtral
    "language_model.model.layers.0.self_attn.o_proj.weight",
    "bert.encoder.layer.0.attention.self.query.weight",
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


def announced(*high_precision: str, **config: object) -> dict[str, object]:
    """The quantization that is announced where these 2-D tensors are not FP8."""
    specs = dict.fromkeys(high_precision, TensorSpec("BF16", (4, 4), 32))
    return with_quantization(config, specs)["quantization_config"]


def test_deepseeks_configuration_is_the_published_one_and_names_the_heads():
    heads = ["lm_head", "model.layers.61.shared_head.head"]
    assert announced(*OTHERS[:5], model_type="deepseek_v3") == {**QUANTIZATION_CONFIG, "modules_to_not_convert": heads}


def test_gates_of_other_models_are_listed():
    listed = announced("lm_head.weight", "l.0.mlp.gate.weight", model_type="qwen3_moe")["modules_to_not_convert"]
    assert listed == ["l.0.mlp.gate", "lm_head"]


def test_an_encoder_of_images_is_listed_as_a_whole_besides_its_layers():
    listed = announced("lm_head.weight", "model.visual.blocks.0.attn.qkv.weight")["modules_to_not_convert"]
    assert listed == ["lm_head", "model.visual.blocks.0.attn.qkv", "visual"]


def test_layers_that_engines_would_take_for_fp8_are_listed():
    listed = announced("lm_head.weight", "h.0.mlp.down_proj.weight")["modules_to_not_convert"]
    assert listed == ["h.0.mlp.down_proj", "lm_head"]


@pytest.mark.parametrize(
    ("tensor", "shape", "module"),
    [
        ("l.0.mlp.experts.gate_up_proj", (4, 8, 8), "l.0.mlp.experts"),
        ("l.0.block_sparse_moe.input_linear.weight", (4, 8, 8), "l.0.block_sparse_moe.experts"),
        ("l.0.ffn.experts.mlp.w1", (32, 8), "l.0.ffn.experts"),
        ("l.0.mlp.experts.0.up_proj.weight", (8, 8), "l.0.mlp.experts"),
    ],
    ids=["stacked", "GraniteMoE", "stacked in two dimensions", "left out by a pattern"],
)
def test_the_module_of_experts_in_high_precision_is_listed(tensor, shape, module):
    specs = {"lm_head.weight": TensorSpec("BF16", (4, 4), 32), tensor: TensorSpec("BF16", shape, 2 * math.prod(shape))}
    assert module in with_quantization({}, specs)["quantization_config"]["modules_to_not_convert"]


@pytest.mark.parametrize(("tensor", "shape"), [("router.weight", (4, 8)), ("0.up_proj.bias", (8,))])
def test_a_gate_or_a_bias_in_high_precision_does_not_list_the_experts(tensor, shape):
    specs = {f"l.0.mlp.experts.{tensor}": TensorSpec("BF16", shape, 2 * math.prod(shape))}
    assert "l.0.mlp.experts" not in with_quantization({}, specs)["quantization_config"]["modules_to_not_convert"]


@pytest.mark.parametrize("kind", ["whisper", "moonshine"])
def test_the_tied_head_of_speech_models_is_called_proj_out(kind):
    listed = announced("model.decoder.embed_tokens.weight", model_type=kind)["modules_to_not_convert"]
    assert listed == ["proj_out"]


@pytest.mark.parametrize(
    ("tensors", "tied", "listed"),
    [
        (["model.embed_tokens.weight"], True, ["lm_head"]),
        (["model.embed_tokens.weight", "l.0.shared_expert_gate.weight"], True,
         ["l.0.shared_expert_gate", "lm_head", "model.embed_tokens"]),
        (["score.weight"], False, ["score"]),
        (["bert.embeddings.word_embeddings.weight", "cls.predictions.bias", "cls.predictions.transform.dense.weight"],
         True, ["cls.predictions", "cls.predictions.transform.dense", "lm_head"]),
    ],
    ids=["tied", "tied, with a list", "classification", "BERT"],
)  # fmt: skip
def test_the_output_head_is_always_listed(tensors, tied, listed):
    assert announced(*tensors, tie_word_embeddings=tied)["modules_to_not_convert"] == listed


@pytest.mark.parametrize(
    "other",
    [{"quant_method": "awq"}, {"quant_method": "fp8"}, {"quant_method": "fp8", "weight_block_size": [64, 64]}],
)
def test_another_quantization_is_refused(other):
    with pytest.raises(ValueError, match="quantization_config must be 'fp8' with weight_block_size"):
        is_fp8_config({"quantization_config": other})


@pytest.mark.parametrize(
    ("key", "value", "needed"),
    [
        ("fmt", 4, "text or null, not 4"),
        ("fmt", "e5m2", "'e4m3' or absent, not 'e5m2'"),
        ("activation_scheme", ["dynamic"], r"text or null, not \['dynamic'\]"),
        ("activation_scheme", "static", "'dynamic' or absent, not 'static'"),
        ("modules_to_not_convert", "lm_head", "null or a list, each text, not 'lm_head'"),
        ("modules_to_not_convert", [1], "text, not 1"),
        ("scale_fmt", 8, "text or null, not 8"),
        ("quant_method", 8, "text or null, not 8"),
        ("weight_block_size", 128, "null or a list, each a whole number, not 128"),
    ],
)
def test_a_key_of_the_quantization_of_another_type_is_refused(key, value, needed):
    announced = {**QUANTIZATION_CONFIG, key: value}
    with pytest.raises(ValueError, match=rf"^quantization_config\.{key} must be {needed}$"):
        is_fp8_config({"quantization_config": announced})


FP8 = torch.zeros(200, 130).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x": FP8}, "model.safetensors: x is FP8, but the checkpoint has no x_scale_inv"),
        ({"x": FP8, "x_scale_inv": torch.ones(1, 2)}, r"x_scale_inv must be \[2, 2\] for \[200, 130\], not \[1, 2\]"),
        ({"x": FP8, "x_scale_inv": torch.ones(2, 2).int()}, "x_scale_inv must be F32 or .* or F8_E8M0, not I32"),
        ({"x_scale_inv": torch.ones(2, 2)}, "model.safetensors: x_scale_inv is the scale of x, which is missing"),
        (
            {"x": FP8.float(), "x_scale_inv": torch.ones(2, 2)},
            "x_scale_inv is the scale of x, which is F32, not F8_E4M3",
        ),
    ],
    ids=["missing", "shape", "dtype", "orphan", "of a weight that is not FP8"],
)
def test_a_weight_and_its_scale_must_fit(tmp_path, tensors, message):
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        check_scales(Shards(tmp_path))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_must_be_positive_numbers(tmp_path, value):
    scale = torch.ones(2, 2)
    scale[1, 0] = value
    save_file({"x": FP8, "x_scale_inv": scale}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"x_scale_inv must hold positive numbers, but {value} is in"):
        check_scale_values(Shards(tmp_path))


@pytest.mark.parametrize(("scale_fmt", "scale"), [("ue8m0", "power_of_2"), ("float32", "float32"), (None, "float32")])
def test_a_recipe_has_powers_of_two_if_they_are_announced(scale_fmt, scale):
    found = with_scales_as_announced(Recipe.deepseek_v3(), {"quantization_config": {"scale_fmt": scale_fmt}})
    assert found.formats.w.scale == scale


def test_a_recipe_keeps_its_powers_of_two_if_none_are_announced():
    recipe = Recipe.deepseek_v3().with_weight_scale("power_of_2")
    assert with_scales_as_announced(recipe, {}) == recipe
