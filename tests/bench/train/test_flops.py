"""Tests of the model FLOPs of a training step."""

from dataclasses import replace

import pytest

from octile.bench.train.flops import BF16_PEAK, flops_per_token, peak
from octile.models.config import ModelConfig

DENSE = replace(ModelConfig.tiny(), num_hidden_layers=2, first_k_dense_replace=2, num_nextn_predict_layers=0)


def attention_parameters(c: ModelConfig) -> int:
    heads, nope, v = c.num_attention_heads, c.qk_nope_head_dim, c.v_head_dim
    q = c.hidden_size * c.q_lora_rank + c.q_lora_rank * heads * c.qk_head_dim
    kv = c.hidden_size * c.latent_dim + c.kv_lora_rank * heads * (nope + v)
    return q + kv + heads * v * c.hidden_size


def norms(c: ModelConfig) -> int:
    return 2 * c.hidden_size + c.q_lora_rank + c.kv_lora_rank


def test_a_dense_model():
    layer = attention_parameters(DENSE) + norms(DENSE) + 3 * DENSE.hidden_size * DENSE.intermediate_size
    parameters = 2 * layer + DENSE.hidden_size * (1 + DENSE.vocab_size)
    attention = 2 * DENSE.num_attention_heads * (DENSE.qk_head_dim + DENSE.v_head_dim) * 100
    assert flops_per_token(DENSE, 100) == 6 * (parameters + attention)


def test_only_the_chosen_experts_count():
    c = replace(DENSE, first_k_dense_replace=1)
    expert = 3 * c.hidden_size * c.moe_intermediate_size
    dense = 3 * c.hidden_size * c.intermediate_size
    gate = c.n_routed_experts * c.hidden_size
    moe = (c.num_experts_per_tok + c.n_shared_experts) * expert + gate
    assert flops_per_token(c, 100) - flops_per_token(DENSE, 100) == 6 * (moe - dense)


def test_multi_token_prediction_counts_a_layer_its_projection_and_the_head():
    c = replace(DENSE, first_k_dense_replace=0)
    layer = flops_per_token(replace(c, num_hidden_layers=3), 100) - flops_per_token(c, 100)
    extra = flops_per_token(replace(c, num_nextn_predict_layers=1), 100) - flops_per_token(c, 100) - layer
    projection = 2 * c.hidden_size**2
    assert extra == 6 * (projection + c.hidden_size * c.vocab_size + 3 * c.hidden_size)  # and three norms


@pytest.mark.parametrize(("gpu", "found"), [("NVIDIA H200", BF16_PEAK), ("NVIDIA H100 PCIe", None), ("Tesla T4", None)])
def test_peaks_are_listed_by_name(gpu, found):
    assert peak(gpu) == found
