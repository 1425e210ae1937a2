"""Heads and experts of a `config.json` are checked against the shapes of the weights, by the layout of each model.

That no configuration which transformers writes is refused, `tests/compatibility/test_fp8_folders.py` shows.
"""

import pytest
import torch

from octile.checkpoint.convert.config_check import check_config
from octile.checkpoint.tensor_file import TensorSpec

LAYER = "model.layers.0."
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64}
Q_K = {"self_attn.q_proj.weight": (64, 64), "self_attn.k_proj.weight": (32, 64)}
GATED = {"self_attn.q_proj.weight": (128, 64), "self_attn.k_proj.weight": (32, 64)}
QKV = {"self_attn.qkv_proj.weight": (128, 64)}
STACKED = {"mlp.experts.gate_up_proj": (8, 64, 192), "mlp.experts.down_proj": (8, 96, 64)}


def check(config, shapes, prefix=LAYER):
    check_config(config, {prefix + name: TensorSpec.of(torch.bfloat16, shape) for name, shape in shapes.items()})


@pytest.mark.parametrize(
    ("config", "shapes", "changes", "message"),
    [
        (
            {"model_type": "gpt_oss", "head_dim": 16},
            Q_K,
            {"num_attention_heads": 99},
            r"num_attention_heads, head_dim: .*self_attn.q_proj.weight must have 1584 rows, but is \[64, 64\]",
        ),
        ({"model_type": "qwen3_next", "head_dim": 16}, GATED, {"num_attention_heads": 99}, "must have 3168 rows"),
        ({"model_type": "qwen3_next", "head_dim": 16}, GATED, {"num_key_value_heads": 4}, "must have 64 rows"),
        ({"model_type": "phi3"}, QKV, {"num_attention_heads": 7}, "qkv_proj.weight must have 99 rows"),
        (
            {"model_type": "phi3"},
            QKV,
            {"num_attention_heads": 99},
            "hidden_size must be at least num_attention_heads, 99",
        ),
        ({"model_type": "phi3"}, QKV, {"num_attention_heads": "4"}, "num_attention_heads must be a whole number"),
        (
            {"model_type": "gpt_oss", "num_local_experts": 8},
            STACKED,
            {"num_local_experts": 99},
            r"num_local_experts is 99, but .*gate_up_proj, which is \[8, 64, 192\], has 8 experts",
        ),
        (
            {"model_type": "ernie4_5_moe", "moe_num_experts": 3},
            {f"mlp.experts.{i}.up_proj.weight": (96, 64) for i in range(3)},
            {"moe_num_experts": 99},
            "moe_num_experts is 99, but there are weights of 3 experts",
        ),
    ],
)
def test_heads_and_experts_that_do_not_match_the_weights_are_refused(config, shapes, changes, message):
    check({**HEADS, **config}, shapes)
    with pytest.raises(ValueError, match=message):
        check({**HEADS, **config, **changes}, shapes)


def test_heads_of_the_text_model_of_a_multimodal_one_are_checked():
    text = {**HEADS, "model_type": "gemma3_text", "head_dim": 16}
    shapes = {"model.language_model.layers.0." + name: shape for name, shape in Q_K.items()}
    tower = {"vision_tower.layers.0.self_attn.q_proj.weight": (48, 48)}
    check({"model_type": "gemma3", "text_config": text}, shapes | tower, "")
    with pytest.raises(
        ValueError, match=r"^config.json: text_config.num_attention_heads, text_config.head_dim: model.language_model"
    ):
        check({"model_type": "gemma3", "text_config": text | {"num_attention_heads": 8}}, shapes | tower, "")


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64}
LLAMA |= {"intermediate_size": 96, "tie_word_embeddings": False}
BLOCK = {
    "input_layernorm.weight": (64,),
    "self_attn.q_proj.weight": (64, 64),
    "self_attn.o_proj.weight": (64, 64),
    "post_attention_layernorm.weight": (64,),
}
DENSE = {"mlp.gate_proj.weight": (96, 64), "mlp.up_proj.weight": (96, 64), "mlp.down_proj.weight": (64, 96)}
MIXTURE = {"mlp.gate.weight": (2, 64)}
MIXTURE |= {
    f"mlp.experts.{e}.{name}_proj.weight": shape
    for e in range(2)
    for name, shape in (("gate", (32, 64)), ("up", (32, 64)), ("down", (64, 32)))
}
OUTSIDE = {"model.embed_tokens.weight": (160, 64), "model.norm.weight": (64,), "lm_head.weight": (160, 64)}
DEEPSEEK = LLAMA | {"model_type": "deepseek_v3", "first_k_dense_replace": 1, "n_routed_experts": 2}
DEEPSEEK |= {"moe_intermediate_size": 32, "num_nextn_predict_layers": 1}
INDEXER = {"self_attn.indexer.wk.weight": (16, 64), "self_attn.indexer.wq_b.weight": (32, 64)}
DRAFTING = {"eh_proj.weight": (64, 128), "enorm.weight": (64,)}


def of_layers(*layers):
    inside = {f"model.layers.{i}.{name}": shape for i, layer in enumerate(layers) for name, shape in layer.items()}
    return OUTSIDE | inside


WHOLE = {
    "llama": (LLAMA, of_layers(BLOCK | DENSE, BLOCK | DENSE)),
    "deepseek": (DEEPSEEK, of_layers(BLOCK | DENSE, BLOCK | MIXTURE, BLOCK | MIXTURE | DRAFTING)),
    "shared indexer": (DEEPSEEK, of_layers(BLOCK | DENSE | INDEXER, BLOCK | MIXTURE)),
    "draft model alone": (DEEPSEEK | {"num_hidden_layers": 1}, {"model.layers.0.eh_proj.weight": (64, 128), **OUTSIDE}),
    "experts every other layer": (
        LLAMA | {"model_type": "qwen3_moe", "num_experts": 2, "moe_intermediate_size": 32, "num_hidden_layers": 4},
        of_layers(BLOCK | DENSE, BLOCK | MIXTURE, BLOCK | DENSE, BLOCK | MIXTURE),
    ),
}


@pytest.mark.parametrize(("config", "shapes"), WHOLE.values(), ids=WHOLE)
def test_layers_of_several_kinds_may_alternate(config, shapes):
    check(config, shapes, "")


@pytest.mark.parametrize(
    ("name", "missing", "message"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight", "is missing among .*, which hold model.layers.0.mlp.up_proj"),
        ("llama", "model.layers.0.input_layernorm.weight", "is missing .*, which hold model.layers.1.input_layernorm"),
        ("deepseek", "model.layers.1.mlp.experts.1.down_proj.weight", "is missing .*experts.0.down_proj.weight"),
        ("llama", "model.norm.weight", "is missing among the weights, which hold model.embed_tokens.weight"),
        ("llama", "model.embed_tokens.weight", "is missing among the weights, which hold model.norm.weight"),
        ("llama", "lm_head.weight", "is missing among the weights"),
    ],
)
def test_a_single_weight_that_is_missing_is_named(name, missing, message):
    config, shapes = WHOLE[name]
    with pytest.raises(ValueError, match=f"{missing} {message}"):
        check(config, {each: shape for each, shape in shapes.items() if each != missing}, "")


@pytest.mark.parametrize("shape", [(0, 64), (64, 64, 1), (4096,)])
def test_a_weight_of_another_shape_than_that_of_other_layers_is_named(shape):
    config, shapes = WHOLE["llama"]
    name = "model.layers.1.self_attn.o_proj.weight"
    with pytest.raises(ValueError, match=r"layers\.\d.*o_proj\.weight is \[.*\], but .* is \[.*\]: both must have one"):
        check(config, shapes | {name: shape}, "")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"num_hidden_layers": 1}, "num_hidden_layers is 1, but there are weights of model.layers.1$"),
        ("llama", {"num_hidden_layers": 3}, "num_hidden_layers is 3, but there are no weights of model.layers.2$"),
        (
            "llama",
            {"intermediate_size": 192},
            r"intermediate_size: model.layers.0.mlp.gate_proj.weight must have 192 rows, but is \[96, 64\]",
        ),
        ("deepseek", {"moe_intermediate_size": 64}, r"moe_intermediate_size: .*gate_proj.weight must have 64 rows"),
    ],
)
def test_layers_and_intermediate_sizes_are_those_of_the_weights(name, changes, message):
    config, shapes = WHOLE[name]
    with pytest.raises(ValueError, match=f"^config.json: {message}"):
        check(config | changes, shapes, "")
