"""The models have the logits of transformers' DeepseekV3ForCausalLM and DeepseekV2ForCausalLM from the same weights.

The weights are written as a Hugging Face folder and read by `from_pretrained`, as a user does. octile differs on
purpose from older releases of transformers, which mask forbidden groups of experts with 0 instead of −inf; a test in
tests/nn/test_gate.py shows an input where it matters. Here no score is negative, so every release must agree.
"""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from octile.models.config import ModelConfig, RopeScaling
from octile.models.names import to_hf
from tests.models.conftest import MINI_V2, MINI_V3, build

YARN = RopeScaling(8.0, 16, 16.0, 2.0, 1.0, 0.5)
V3 = {
    "V3": MINI_V3,
    "no YaRN": replace(MINI_V3, rope_scaling=None),
    "YaRN, mscale on the rotation": replace(MINI_V3, rope_scaling=YARN),
    "YaRN, attention_factor": replace(MINI_V3, rope_scaling=replace(YARN, attention_factor=1.7)),
    "YaRN, attention_factor alone": replace(MINI_V3, rope_scaling=RopeScaling(8.0, 16, 16.0, 2.0, 1.0, 0.0, 0.6)),
    "YaRN, not truncated": replace(MINI_V3, rope_scaling=replace(YARN, truncate=False)),
    "YaRN, mscale 1 alone": replace(MINI_V3, rope_scaling=replace(YARN, mscale_all_dim=0.0)),
    "queries not compressed": replace(MINI_V3, q_lora_rank=None),
    "one group": replace(MINI_V3, n_group=1, topk_group=1),
    "weights not normalized": replace(MINI_V3, norm_topk_prob=False),
}
V2 = {
    "V2": MINI_V2,
    "V2-Lite": replace(MINI_V2, topk_method="greedy", n_group=1, topk_group=1, routed_scaling_factor=1.0),
    "queries compressed": replace(MINI_V2, q_lora_rank=24),
}


def relative_gap(config, seed, folder):
    """The largest difference between the logits, in units of their RMS."""
    model = build(config, seed).eval()
    config.write(folder / "config.json")
    tensors = {name: tensor.clone() for name, tensor in to_hf(model.state_dict(), config).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    theirs, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not loading["missing_keys"]

    tokens = torch.randint(config.vocab_size, (2, 48), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected, actual = theirs(tokens).logits, model(tokens)
    return ((actual - expected).abs().max() / expected.square().mean().sqrt()).item()


@pytest.mark.one_case
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in (1, 2))])
@pytest.mark.parametrize("name", V3)
def test_logits_equal_transformers_deepseek_v3(name, seed, tmp_path):
    assert relative_gap(V3[name], seed, tmp_path) < 1e-5


@pytest.mark.parametrize("mscales", [(0.5, 0.0), (0.0, 0.5), (0.0, 0.0)])
def test_where_mscales_cause_a_warning_transformers_computes_otherwise(mscales, tmp_path):
    rope = replace(YARN, mscale=mscales[0], mscale_all_dim=mscales[1])
    config = replace(MINI_V3, rope_scaling=rope)
    with pytest.warns(UserWarning, match="transformers ignores both unless both are given and above 0"):
        assert ModelConfig.from_hf(config.to_hf()).rope_scaling == rope
    assert relative_gap(config, 0, tmp_path) > 1e-3


@pytest.mark.one_case
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", V2)
def test_logits_equal_transformers_deepseek_v2(name, seed, tmp_path):
    assert relative_gap(V2[name], seed, tmp_path) < 1e-5
