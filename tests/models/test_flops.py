"""Tests of the counted operations: against PaLM's formula, against torch's counter, and against published sizes."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from octile.models.config import PRESETS
from octile.models.counts import count_parameters
from octile.models.deepseek_v3 import DeepseekV3
from octile.models.flops import bf16_peak, multiply_adds, train_flops_per_token
from tests.models.conftest import MINI_V3


def test_the_formula_of_palm():
    config, length = PRESETS["v2_lite_16b"](), 4096  # has no layer of multi-token prediction
    used = count_parameters(config).main_active
    n = sum(numel for kind, numel in used.items() if kind not in ("embedding", "norms"))
    q = (config.qk_head_dim + config.v_head_dim) / 2
    expected = 6 * n + 12 * config.num_hidden_layers * config.num_attention_heads * q * length
    assert train_flops_per_token(config, length) == pytest.approx(expected, rel=1e-12)


def test_multi_token_prediction_adds_its_layer_and_the_head_once_more():
    config, length = MINI_V3, 64
    main = 6 * sum(multiply_adds(config, length).values())
    used = count_parameters(config).mtp_active
    layer = sum(numel for kind, numel in used.items() if kind != "norms") + count_parameters(config).main["head"]
    channels = config.num_attention_heads * (config.qk_head_dim + config.v_head_dim)
    assert train_flops_per_token(config, length) - main == pytest.approx(6 * (layer + channels * length))


def test_a_dense_model_has_the_operations_that_torch_counts():
    config = replace(MINI_V3, first_k_dense_replace=MINI_V3.num_hidden_layers, num_nextn_predict_layers=0)
    batch, length = 2, 16
    with torch.device("meta"):
        model = DeepseekV3(config)
        tokens = torch.zeros(batch, length, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(tokens)
    assert counter.get_total_flops() == 2 * batch * length * sum(multiply_adds(config, length).values())


def test_only_the_chosen_experts_count():
    dense = replace(MINI_V3, first_k_dense_replace=MINI_V3.num_hidden_layers)
    c = replace(dense, first_k_dense_replace=MINI_V3.num_hidden_layers - 1)
    expert = 3 * c.hidden_size * c.moe_intermediate_size
    moe = (c.num_experts_per_tok + c.n_shared_experts) * expert + c.n_routed_experts * c.hidden_size
    difference = train_flops_per_token(c, 100) - train_flops_per_token(dense, 100)
    assert difference == 6 * (moe - 3 * c.hidden_size * c.intermediate_size)


@pytest.mark.parametrize(
    ("gpu", "peak"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_peak_of_a_gpu(gpu, peak):
    assert bf16_peak(gpu) == peak


def test_sparse_attention_counts_the_chosen_keys_and_the_logits_of_all():
    dense = PRESETS["tiny"]()
    sparse = replace(dense, index_n_heads=4, index_head_dim=32, index_topk=64)
    d, s = multiply_adds(dense, 1000), multiply_adds(sparse, 1000)
    assert s["attention"] * 1000 == d["attention"] * 64
    weights = dense.q_lora_rank * 4 * 32 + dense.hidden_size * 32 + dense.hidden_size * 4
    assert s["indexer"] == dense.num_hidden_layers * (weights + 4 * 33 * 1000)
    assert (d["indexer"], d["layers"]) == (0, s["layers"])
