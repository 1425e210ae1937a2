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
        ValueError, match=r"^text_config.num_attention_heads, text_config.head_dim: model.language_model"
    ):
        check({"model_type": "gemma3", "text_config": text | {"num_attention_heads": 8}}, shapes | tower, "")
