import torch

from octile.models.names import to_hf
from tests.models.conftest import MINI_V3, build

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


def test_names_equal_those_of_the_published_weights():
    layers = [DENSE, MIXTURE, MIXTURE, MIXTURE | MTP]
    expected = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    expected |= {f"model.layers.{i}.{name}" for i, mlp in enumerate(layers) for name in BLOCK | ATTENTION | mlp}
    assert set(to_hf(build(MINI_V3).state_dict(), MINI_V3)) == expected


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
