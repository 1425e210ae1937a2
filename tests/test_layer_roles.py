"""One table decides what stays in high precision, for `octile.convert` and for `octile convert`."""

import re

import pytest
from torch import nn

from octile.checkpoint.convert.plan import ConversionPlan
from octile.checkpoint.shards import Shards
from octile.layer_roles import ROLES, check_keep, is_kept, role_of, why_high_precision
from octile.nn.conversion import convert
from octile.nn.linear import Linear
from octile.validation import read_json
from tests.models_of_transformers import STACKED_EXPERTS, every_architecture, falcon, gpt2, small_model


def plan_of(model, folder, **options) -> ConversionPlan:
    """The plan of `octile convert` for the checkpoint that transformers writes of a model."""
    model.save_pretrained(folder)
    return ConversionPlan.make(Shards(folder), read_json(folder / "config.json"), "fp8", **options)


def without_details(tensor: str) -> str:
    """The layer of a tensor, with the same name in checkpoints and modules, and experts of a layer as one."""
    layer = re.sub(r"^((model|language_model|bert|roberta)\.)+", "", tensor.removesuffix(".weight"))
    layer = layer.replace("block_sparse_moe", "mlp")  # as Mixtral's checkpoints call it
    return re.sub(r"\.experts\.\d+\..*", ".experts", layer)


def converted_modules(model: nn.Module) -> set[str]:
    """The layers and experts that `octile.convert` converts."""
    convert(model)
    linear = {name for name, module in model.named_modules() if isinstance(module, Linear)}
    experts = {name for name, module in model.named_modules() if "octile" in module._modules}
    return {without_details(name) for name in linear | experts}


@every_architecture
def test_modules_and_checkpoints_of_a_model_agree(name, tmp_path):
    model = small_model(name)
    stored = {without_details(tensor) for tensor in plan_of(model, tmp_path).converted}
    made = converted_modules(model)
    assert stored == {layer for layer in made if not (name in STACKED_EXPERTS and layer.endswith(".experts"))}


@pytest.mark.one_case
@every_architecture
def test_nothing_but_layers_of_the_body_is_converted(name, tmp_path):
    model = small_model(name)
    special = (model.get_input_embeddings(), model.get_output_embeddings())
    names = {name for name, module in model.named_modules() if module in special or isinstance(module, nn.Embedding)}
    assert {without_details(name) for name in names}.isdisjoint(
        {without_details(tensor) for tensor in plan_of(model, tmp_path).converted}
    )


@pytest.mark.parametrize(
    "name",
    ["qwen3_next", "qwen3_5", "qwen3_5_moe, vision", "qwen3_vl", "llama4, vision", "mistral3, vision"],
)
def test_encoders_of_images_and_gates_of_gated_delta_net_stay_in_high_precision(name, tmp_path):
    """vLLM has no FP8 for GatedDeltaNet's gates and Llama-4's encoder; Mistral publishes its encoders without."""
    converted = " ".join(plan_of(small_model(name), tmp_path).converted)
    assert not re.search(r"vision|visual|multi_modal|in_proj_(ba|a|b)\b", converted)


def test_keep_is_the_same_for_modules_and_checkpoints(tmp_path):
    model, keep = small_model("deepseek_v3"), ["*.down_proj", "model.layers.0.self_attn", "*.experts"]
    stored = {without_details(tensor) for tensor in plan_of(model, tmp_path, keep=keep).converted}
    convert(model, keep=keep)
    made = {without_details(name) for name, module in model.named_modules() if isinstance(module, Linear)}
    assert stored == made
    assert any("up_proj" in layer for layer in made)


# Modules that are recognized but cannot be converted


def test_a_model_of_conv1d_is_refused_as_a_module():
    message = r"GPT2LMHeadModel has no linear layer that could be converted: 8 × Conv1D \(a weight .*, 1 × tied"
    with pytest.raises(ValueError, match=message):
        convert(gpt2())


def test_a_model_of_conv1d_is_refused_as_a_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="no weight of a gpt2 model can become FP8: its layers are Conv1D"):
        plan_of(gpt2(), tmp_path)


def test_a_falcon_is_refused_as_a_module():
    message = r"no linear layer that could be converted: 8 × FalconLinear \(a subclass of nn.Linear\), 1 × output head"
    with pytest.raises(ValueError, match=message):
        convert(falcon())


def test_a_falcon_is_refused_as_a_checkpoint(tmp_path):
    with pytest.raises(ValueError, match="no weight of a falcon model can become FP8: its layers are FalconLinear"):
        plan_of(falcon(), tmp_path)


def test_conv1d_beside_linear_layers_is_counted_as_skipped():
    model = nn.ModuleList([gpt2(), nn.Linear(64, 64)])
    assert "converted 1 of 10 linear layers" in convert(model).conversion_summary
    assert "8 × Conv1D (a weight that is stored transposed)" in model.conversion_summary


# The table


@pytest.mark.parametrize(
    ("layer", "role"),
    [
        ("lm_head", "output head"),
        ("output", "output head"),
        ("model.layers.61.shared_head.head", "output head"),
        ("classifier.out_proj", "output head"),
        ("qa_outputs", "output head"),
        ("cls.predictions.transform.dense", "output head"),
        ("base_model.model.lm_head.base_layer", "output head"),
        ("model.layers.3.mlp.gate", "gate"),
        ("model.layers.3.mlp.gate.wg", "gate"),
        ("model.layers.3.mlp.shared_expert_gate", "gate"),
        ("model.layers.3.mlp.experts.router", "gate"),
        ("model.layers.3.self_attn.q_proj.lora_A.default", "adapter"),
        ("model.layers.3.self_attn.q_proj.lora_B", "adapter"),
        ("proj_out", "output head"),
        ("model.layers.61.eh_proj", "MTP projection"),
        ("model.layers.0.linear_attn.in_proj_ba", "gate of GatedDeltaNet"),
        ("model.layers.0.linear_attn.in_proj_a", "gate of GatedDeltaNet"),
        ("model.layers.0.mamba.dt_proj", "Mamba's projection of step sizes"),
        ("bert.pooler.dense", "pooler"),
        ("model.visual.blocks.0.attn.qkv", "encoder of images or audio"),
        ("multi_modal_projector.linear_1", "encoder of images or audio"),
        ("model.layers.3.self_attn.indexer.weights_proj", "indexer weights"),
        ("model.embed_tokens", "embedding"),
        ("transformer.wte", "embedding"),
        ("shared", "embedding"),
        ("model.norm", "norm"),
    ],
)
def test_a_role_is_known_by_the_name(layer, role):
    assert why_high_precision(layer) == role


@pytest.mark.parametrize(
    "layer",
    [
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.shared_expert.gate_proj",
        "model.layers.0.self_attn.q_proj.base_layer",
        "bert.encoder.layer.0.output.dense",
        "head_proj",
        "model.layers.0.linear_attn.in_proj_qkvz",
        "decoder.block.0.proj_out",
        "multihead",
        "members",
        "blocks.0.heads.0.query",
    ],
)
def test_a_similar_name_has_no_role(layer):
    assert role_of(layer) is None


def test_a_linear_layer_with_the_name_of_a_table_of_rows_is_converted():
    assert why_high_precision("shared", is_linear=True) is None


@pytest.mark.parametrize("pattern", ["a.b.c", "a.b", "a", "*.c", "a.?.c", "*", "a.[ab].*"])
def test_a_pattern_matches_a_layer_or_what_contains_it(pattern):
    assert is_kept("a.b.c", [pattern])


@pytest.mark.parametrize("pattern", ["b", "b.c", "a.b.c.d", "a.b.", "A.b.c", ""])
def test_a_pattern_matches_whole_names(pattern):
    assert not is_kept("a.b.c", [pattern])


def test_a_pattern_that_matches_nothing_is_refused():
    with pytest.raises(
        ValueError, match=r"keep has '\*\.dwon_proj', which matches no layer that would be .* such as a"
    ):
        check_keep(["*.down_proj", "*.dwon_proj"], ["a.down_proj"])


@pytest.mark.parametrize("keep", ["*.down_proj", [3]])
def test_what_is_no_list_of_patterns_is_refused(keep):
    with pytest.raises(TypeError, match="keep must be a list of patterns, not"):
        check_keep(keep, ["a.down_proj"])


def test_no_role_depends_on_a_digit():
    """Roles are looked up by names without numbers."""
    names = [name for role in ROLES for name in (*role.parts, *role.ends, role.contains)]
    assert not any(map(str.isdigit, "".join(names)))
