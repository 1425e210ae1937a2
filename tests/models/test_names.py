import pytest
import torch

from octile.models.names import from_hf, to_hf
from tests.models.conftest import MINI_V2, MINI_V3, build

BLOCK = {"input_layernorm.weight", "post_attention_layernorm.weight"}
ATTENTION = {
    f"self_attn.{name}.weight"
    for name in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
DENSE = {f"mlp.{name}.weight" for name in PROJECTIONS}
MIXTURE = (
    {"mlp.gate.weight", "mlp.gate.e_score_correction_bias"}
    | {f"mlp.shared_experts.{name}.weight" for name in PROJECTIONS}
    | {f"mlp.experts.{e}.{name}.weight" for e in range(16) for name in PROJECTIONS}
)
MTP = {
    f"{name}.weight" for name in ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")
}


def test_names_are_those_of_the_published_weights():
    layers = [DENSE, MIXTURE, MIXTURE, MIXTURE | MTP]
    expected = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    expected |= {f"model.layers.{i}.{name}" for i, mlp in enumerate(layers) for name in BLOCK | ATTENTION | mlp}
    assert set(to_hf(build(MINI_V3).state_dict(), MINI_V3)) == expected


@pytest.mark.parametrize("config", [MINI_V3, MINI_V2], ids=["V3", "V2"])
def test_there_and_back_is_the_same(config):
    state = build(config).state_dict()
    again = from_hf(to_hf(state, config), config)
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], state[name]) for name in state)


def test_gate_and_up_keep_their_order():
    state = build(MINI_V3).state_dict()
    tensors = to_hf(state, MINI_V3)
    stacked = state["model.layers.1.mlp.experts.gate_up"]
    assert torch.equal(tensors["model.layers.1.mlp.experts.5.gate_proj.weight"], stacked[5, :32])
    assert torch.equal(tensors["model.layers.1.mlp.experts.5.up_proj.weight"], stacked[5, 32:])


def test_to_hf_copies_nothing():
    state = build(MINI_V3).state_dict()
    storages = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
    assert {tensor.untyped_storage().data_ptr() for tensor in to_hf(state, MINI_V3).values()} == storages


def test_a_missing_expert_is_named():
    tensors = to_hf(build(MINI_V3).state_dict(), MINI_V3)
    del tensors["model.layers.2.mlp.experts.7.up_proj.weight"]
    with pytest.raises(ValueError, match=r"lacks model\.layers\.2\.mlp\.experts\.7\.up_proj\.weight"):
        from_hf(tensors, MINI_V3)


def test_an_expert_too_many_is_named():
    tensors = to_hf(build(MINI_V3).state_dict(), MINI_V3)
    tensors["model.layers.2.mlp.experts.16.up_proj.weight"] = torch.zeros(32, 64)
    with pytest.raises(ValueError, match=r"has, beyond 16 experts, model\.layers\.2\.mlp\.experts\.16\.up_proj"):
        from_hf(tensors, MINI_V3)
