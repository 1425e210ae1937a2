import pytest

from octile.checkpoint.convert.share import share_of
from octile.checkpoint.tensor_file import TensorSpec


def specs(**shapes):
    return {name.replace("__", "."): TensorSpec("BF16", shape, 0) for name, shape in shapes.items()}


DENSE = specs(model__embed_tokens__weight=(100, 8), model__q_proj__weight=(10, 8), model__norm__weight=(8,))
MOE = specs(mlp__gate__weight=(4, 5)) | {
    f"mlp.experts.{e}.up_proj.weight": TensorSpec("BF16", (10, 2), 0) for e in range(4)
}


def test_parameters_count_everything():
    share = share_of(["model.q_proj.weight"], DENSE, {})
    assert (share.parameters, share.part, share.parameter_share) == (888, 80, 80 / 888)


def test_look_ups_and_norms_are_no_gemms():
    assert share_of(["model.q_proj.weight"], DENSE, {}).flops == 1.0


def test_a_tied_embedding_is_the_heads_gemm():
    assert share_of(["model.q_proj.weight"], DENSE, {"tie_word_embeddings": True}).flops == 80 / 880


def test_a_tied_embedding_of_a_model_without_a_head_is_a_look_up():
    config = {"tie_word_embeddings": True, "architectures": ["BertForQuestionAnswering"]}
    assert share_of(["model.q_proj.weight"], DENSE, config).flops == 1.0


def test_position_embeddings_are_no_gemms():
    weights = DENSE | specs(model__position_embeddings__weight=(64, 8))
    config = {"tie_word_embeddings": True, "architectures": ["BertLMHeadModel"]}
    assert share_of(["model.q_proj.weight"], weights, config).flops == 80 / 880


@pytest.mark.parametrize("key", ["n_routed_experts", "num_experts", "num_local_experts"])
def test_only_active_experts_are_counted(key):
    experts = [name for name in MOE if "experts" in name]
    assert share_of(experts, MOE, {key: 4, "num_experts_per_tok": 1}).flops == 20 / 40


def test_the_language_models_configuration_may_be_nested():
    experts = [name for name in MOE if "experts" in name]
    assert share_of(experts, MOE, {"text_config": {"num_experts": 4, "num_experts_per_tok": 2}}).flops == 40 / 60


def test_unknown_activity_is_reported_and_not_guessed():
    assert share_of([], MOE, {}).flops is None


def test_experts_in_one_tensor_are_gemms():
    stacked = specs(mlp__gate__weight=(4, 5), mlp__experts__gate_up_proj=(4, 10, 2))
    assert share_of(["mlp.gate.weight"], stacked, {"num_experts": 4, "num_experts_per_tok": 1}).flops == 20 / 40


def test_scales_are_no_parameters():
    fp8 = {"a.weight": TensorSpec("F8_E4M3", (4, 4), 16), "a.weight_scale_inv": TensorSpec("F32", (1, 1), 4)}
    assert share_of(["a.weight"], fp8, {}).parameter_share == 1.0
