"""Small models with every component, and with weights large enough for each component to affect the logits."""

from dataclasses import replace

import pytest
import torch

from octile.models.config import ModelConfig, RopeScaling
from octile.models.deepseek_v3 import DeepseekV3

MINI_V3 = ModelConfig(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=3,
    first_k_dense_replace=1,
    num_attention_heads=4,
    q_lora_rank=24,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    n_routed_experts=16,
    num_experts_per_tok=4,
    n_group=4,
    topk_group=2,
    max_position_embeddings=64,
    rope_scaling=RopeScaling(factor=4.0, original_max_position_embeddings=16),
)
MINI_V2 = replace(
    MINI_V3,
    num_nextn_predict_layers=0,
    q_lora_rank=None,
    n_shared_experts=2,
    topk_method="group_limited_greedy",
    scoring_func="softmax",
    norm_topk_prob=False,
    routed_scaling_factor=16.0,
    rope_scaling=RopeScaling(4.0, 16, mscale=0.707, mscale_all_dim=0.707),
)


def build(config: ModelConfig, seed: int = 0) -> DeepseekV3:
    """A model with random weights, norms and gate biases."""
    torch.manual_seed(seed)
    model = DeepseekV3(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=1.0 if "embed" in name else parameter.shape[-1] ** -0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.1, 0.1)
    return model


@pytest.fixture
def mini() -> DeepseekV3:
    return build(MINI_V3)
