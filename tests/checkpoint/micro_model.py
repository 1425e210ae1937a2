"""The smallest model with everything that a checkpoint has: latent attention, experts, an MTP layer, odd shapes."""

import torch

from octile.models.config import ModelConfig, RopeScaling
from octile.models.deepseek_v3 import DeepseekV3

MICRO = ModelConfig(
    vocab_size=64,
    hidden_size=96,
    intermediate_size=256,  # transformers dequantizes two blocks of 128, but takes 160 for two of 80
    moe_intermediate_size=48,
    num_hidden_layers=2,
    first_k_dense_replace=1,
    num_attention_heads=2,
    q_lora_rank=40,
    kv_lora_rank=32,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=8,
    num_experts_per_tok=2,
    n_group=4,
    topk_group=2,
    max_position_embeddings=64,
    rope_scaling=RopeScaling(factor=4.0, original_max_position_embeddings=16),
    initializer_range=0.05,
)


def micro_model() -> DeepseekV3:
    """The same weights at each call."""
    torch.manual_seed(0)
    model = DeepseekV3(MICRO).eval()
    for moe in model.moe_layers().values():
        moe.gate.e_score_correction_bias.normal_()
    return model
