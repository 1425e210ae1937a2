"""Tests of convert: which layers are converted, and what is reported about the others."""

import copy
import functools
import logging
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from octile.nn.conversion import convert
from octile.nn.delayed_scaling import end_step
from octile.nn.linear import Linear
from octile.nn.mlp import MLP
from octile.nn.moe import Experts
from octile.recipe import Recipe


def names_of(model: nn.Module, kind: type[nn.Module] = Linear) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, kind)]


def layers(model: nn.Module) -> str:
    """The summary up to the shares of parameters and FLOPs."""
    return model.conversion_summary.partition("; quantized")[0]


class Block(nn.Module):
    """One of everything that a transformer has."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.gate = nn.Linear(8, 4)
        self.norm = nn.LayerNorm(8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.ModuleDict({"up": nn.Linear(8, 8)})])
        self.lm_head = nn.Linear(8, 11, bias=False)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.body = nn.Linear(8, 8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight


# Which layers


def test_linear_layers_at_any_depth_are_converted():
    assert names_of(convert(Block())) == ["layers.0.0", "layers.1.up"]


def test_heads_and_gates_are_not_converted():
    model = convert(Block())
    assert (type(model.lm_head), type(model.gate)) == (nn.Linear, nn.Linear)


@pytest.mark.parametrize("name", ["lm_head", "head", "classifier", "score", "gate", "router", "eh_proj"])
def test_a_layer_is_excluded_by_its_name(name):
    model = convert(nn.ModuleDict({name: nn.Linear(3, 2), "other": nn.Linear(3, 2)}))
    assert names_of(model) == ["other"]


@pytest.mark.parametrize("name", ["gate_proj", "head_proj", "multihead"])
def test_a_layer_with_a_similar_name_is_converted(name):
    assert names_of(convert(nn.ModuleDict({name: nn.Linear(3, 2)}))) == [name]


def test_a_model_that_is_one_linear_layer_is_replaced():
    linear = nn.Linear(3, 2)
    layer = convert(linear)
    assert isinstance(layer, Linear)
    assert layer.weight is linear.weight


def test_a_weight_tied_to_an_embedding_is_not_converted_and_stays_tied():
    model = convert(Tied())
    assert names_of(model) == ["body"]
    assert model.out.weight is model.embed.weight


def test_a_layer_at_two_places_stays_one_layer():
    shared = nn.Linear(3, 3)
    model = convert(nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)}))
    assert model["a"] is model["b"][0]
    assert isinstance(model["a"], Linear)


def test_a_layer_at_two_places_counts_once():
    shared = nn.Linear(3, 3)
    assert convert(nn.ModuleList([shared, shared])).conversion_summary.startswith("converted 1 of 1 ")


def test_a_parameter_of_two_layers_stays_one_parameter():
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    model[1].weight = model[0].weight
    convert(model)
    assert model[0].weight is model[1].weight


def test_subclasses_of_linear_are_not_converted():
    model = convert(nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2), "mlp": nn.Linear(8, 8)}))
    assert names_of(model) == ["mlp"]
    assert "1 × NonDynamicallyQuantizableLinear (a subclass of nn.Linear)" in model.conversion_summary


def test_a_layer_whose_forward_pass_was_replaced_is_not_converted():
    """accelerate does so to move weights; the layer's own forward pass would be called, in high precision."""
    model = nn.ModuleDict({"moved": nn.Linear(8, 8), "other": nn.Linear(8, 8)})
    model["moved"].forward = functools.partial(nn.Linear.forward, model["moved"])
    assert names_of(convert(model)) == ["other"]
    assert "1 × a forward pass that another library has replaced" in model.conversion_summary


def test_a_filter_leaves_layers_out():
    model = convert(Block(), filter=lambda name, layer: name != "layers.0.0")
    assert names_of(model) == ["layers.1.up"]


def test_a_filter_is_asked_about_names_and_layers():
    asked = []
    convert(Block(), filter=lambda name, layer: bool(asked.append((name, type(layer)))) or True)
    assert asked == [("layers.0.0", nn.Linear), ("layers.1.up", nn.Linear)]


def test_patterns_leave_layers_out():
    model = convert(Block(), keep=["layers.0"])
    assert names_of(model) == ["layers.1.up"]
    assert "1 × left out by keep" in model.conversion_summary


def test_adapters_are_not_converted():
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base_layer = nn.Linear(8, 8)
            self.lora_A = nn.ModuleDict({"default": nn.Linear(8, 2)})
            self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 8)})

    assert names_of(convert(nn.ModuleDict({"q_proj": Adapted()}))) == ["q_proj.base_layer"]


# Experts


@pytest.fixture
def experts() -> nn.ModuleDict:
    return nn.ModuleDict({"experts": Experts(4, 8, 6), "shared": nn.Linear(8, 8)})


def test_experts_get_the_recipe(experts):
    assert convert(experts, Recipe.per_tensor())["experts"].recipe == Recipe.per_tensor()


def test_experts_count_as_the_layers_that_they_stack(experts):
    assert layers(convert(experts)) == "converted 13 of 13 linear layers to deepseek_v3, skipped 0"


def test_a_filter_leaves_experts_out(experts):
    model = convert(experts, filter=lambda name, layer: name != "experts")
    assert model["experts"].recipe is None
    assert layers(model) == ("converted 1 of 13 linear layers to deepseek_v3, skipped 12: 12 × left out by filter")


@pytest.mark.parametrize("pattern", ["*.down_proj", "experts.*", "experts.0.up_proj", "*.w2"])
def test_a_pattern_of_single_layers_of_experts_is_refused_before_any_change(experts, pattern):
    layer = {"*.down_proj": "down_proj", "experts.0.up_proj": "up_proj", "*.w2": "w2"}.get(pattern, "gate_proj")
    with pytest.raises(ValueError, match=rf"keep has '.*', which matches {layer} of the experts experts: they are one"):
        convert(experts, keep=[pattern])
    assert experts["experts"].recipe is None


def test_a_pattern_leaves_experts_out_as_a_whole(experts):
    model = convert(experts, keep=["experts"])
    assert (model["experts"].recipe, "12 × left out by keep" in model.conversion_summary) == (None, True)


def test_experts_that_a_filter_leaves_out_keep_their_history(experts):
    convert(experts, Recipe.delayed())
    history = experts["experts"].down_history
    convert(experts, Recipe.deepseek_v3(), filter=lambda name, layer: name != "experts")
    assert experts["experts"].down_history is history


# What is not changed


def test_parameters_are_the_same_objects_under_the_same_names():
    model = Block()
    before = dict(model.named_parameters())
    after = dict(convert(model).named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)


def test_the_state_dict_has_the_same_names():
    assert convert(Block(), Recipe.delayed()).state_dict().keys() == Block().state_dict().keys()


def test_the_model_is_converted_in_place():
    model = Block()
    assert convert(model) is model


def test_layers_in_eval_mode_stay_in_it():
    assert not convert(Block().eval()).layers[0][0].training


# Conversion to another recipe


def test_a_converted_model_is_converted_to_another_recipe():
    model = convert(convert(Block(), Recipe.deepseek_v3()), Recipe.delayed())
    assert {model.get_submodule(name).recipe.name for name in names_of(model)} == {"delayed"}


def test_a_model_converted_back_computes_as_before():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(5, 8)
    before = model(x)
    for recipe in (Recipe.delayed(), Recipe.deepseek_v3(), Recipe.float32()):
        convert(model, recipe)
    torch.testing.assert_close(model(x), before)


# The summary


def test_the_summary_lists_skipped_layers_with_reasons():
    assert layers(convert(Block())) == (
        "converted 2 of 4 linear layers to deepseek_v3, skipped 2: 1 × gate, 1 × output head"
    )


def test_the_summary_counts_each_reason():
    model = nn.ModuleList([Tied(), Block()])
    assert layers(convert(model, Recipe.bf16(), lambda name, layer: "up" in name)) == (
        "converted 1 of 6 linear layers to bf16, skipped 5: "
        "2 × left out by filter, 1 × tied to an embedding, 1 × gate, 1 × output head"
    )


def test_the_summary_is_logged(caplog):
    with caplog.at_level(logging.INFO, logger="octile"):
        model = convert(Block())
    assert [record.getMessage() for record in caplog.records] == [model.conversion_summary]


# A model of another library


@pytest.fixture
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


def test_a_transformers_model_is_converted_but_for_its_head(llama):
    assert layers(convert(llama)) == ("converted 14 of 15 linear layers to deepseek_v3, skipped 1: 1 × output head")


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["deepseek_v3", "delayed"])
def test_a_converted_transformers_model_trains(name, llama):
    model, tokens = convert(llama, Recipe.named(name)), torch.randint(64, (2, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        end_step(model)
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


def test_stacked_weights_of_an_unknown_module_are_counted_as_skipped():
    stacked = nn.ParameterDict({"up": torch.zeros(4, 6, 8), "down": torch.zeros(4, 8, 6)})
    assert layers(convert(nn.ModuleDict({"experts": stacked, "other": nn.Linear(8, 8)}))) == (
        "converted 1 of 9 linear layers to deepseek_v3, skipped 8: 8 × stacked weights that octile cannot convert"
    )


@pytest.mark.parametrize(
    "module", [nn.Conv1d(4, 4, 3), nn.Bilinear(3, 3, 3), nn.ParameterDict({"position": torch.zeros(1, 7, 8)})]
)
def test_three_dimensions_alone_are_no_stack_of_layers(module):
    model = convert(nn.ModuleList([nn.Linear(8, 8), module]))
    assert model.conversion_summary.startswith("converted 1 of 1 linear layers")


@pytest.mark.parametrize(
    ("model", "reported"), [(nn.Sequential(nn.Linear(4, 4)), True), (MLP(4, 4), False)], ids=["Sequential", "MLP"]
)
def test_a_model_with_nothing_to_smooth_is_reported(model, reported):
    assert ("nothing is smoothed" in convert(model, Recipe.smooth_swiglu()).conversion_summary) == reported


# Refusals


def test_only_modules_are_converted():
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, not str"):
        convert("model")


def test_a_name_in_place_of_a_recipe_is_refused():
    with pytest.raises(TypeError, match=r"recipe must be an octile\.Recipe, not str"):
        convert(Block(), "deepseek_v3")


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ValueError, match="model LayerNorm has no linear layer to convert"):
        convert(nn.LayerNorm(3))


def test_a_model_of_which_nothing_could_be_converted_is_refused_and_unchanged():
    model = Block()
    with pytest.raises(
        ValueError, match="Block has no linear layer that could be converted: 2 × left out by filter, 1"
    ):
        convert(model, filter=lambda name, layer: False)
    assert names_of(model) == []
    assert not hasattr(model, "conversion_summary")


def test_weights_in_float64_are_refused_before_any_change():
    model = Block().double()
    with pytest.raises(TypeError, match=r"model has weights in float64, in layers\.0\.0: octile computes with float32"):
        convert(model)
    assert names_of(model) == []


@pytest.mark.parametrize(
    ("recipe", "see"),
    [(Recipe.deepseek_v3, r"call it, Recipe\.deepseek_v3\(\)"), ("bf16", r"see Recipe\.named\('bf16'\)")],
)
def test_what_is_no_recipe_is_refused_with_what_would_be(recipe, see):
    with pytest.raises(TypeError, match=rf"^recipe must be an octile\.Recipe, not \w+: {see}$"):
        convert(Block(), recipe)


def test_a_pattern_in_place_of_a_filter_is_refused():
    with pytest.raises(TypeError, match=r"filter must be a function .*, not '\*\.up': keep takes patterns"):
        convert(nn.Sequential(nn.Linear(4, 4)), filter="*.up")


def test_a_pattern_that_matches_no_layer_is_refused_before_any_change():
    model = Block()
    with pytest.raises(ValueError, match=r"keep has 'layers\.2', which matches no layer that .*, such as layers\.0\.0"):
        convert(model, keep=["layers.2"])
    assert names_of(model) == []


def test_the_summary_is_printed_to_stderr_without_a_logging_setup(capsys, caplog):
    with caplog.at_level(logging.WARNING), caplog.at_level(logging.NOTSET, logger="octile"):
        model = convert(nn.Sequential(nn.Linear(4, 4)))
    assert capsys.readouterr().err == model.conversion_summary + "\n"


def test_the_level_of_the_logger_is_respected(capsys, caplog):
    with caplog.at_level(logging.ERROR, logger="octile"):
        convert(nn.Sequential(nn.Linear(4, 4)))
    assert capsys.readouterr().err == ""


def test_layers_get_the_recipes_exceptions():
    recipe = replace(Recipe.deepseek_v3(), exceptions=(("layers.0.*", frozenset({"wgrad"})),))
    model = convert(Block(), recipe)
    assert model.layers[0][0].recipe.high_precision == {"wgrad"}
    assert model.layers[1]["up"].recipe == Recipe.deepseek_v3()
    assert "to deepseek_v3 (exceptions: 1), skipped" in model.conversion_summary


def test_an_exception_for_no_layer_is_refused():
    recipe = replace(Recipe.deepseek_v3(), exceptions=(("gate", frozenset({"wgrad"})),))  # which is not converted
    model = Block()
    with pytest.raises(ValueError, match="has an exception for 'gate', which matches no converted layer"):
        convert(model, recipe)
    assert not any(isinstance(module, Linear) for module in model.modules())


def test_patterns_may_come_from_an_iterator():
    with pytest.raises(ValueError, match="keep has 'other', which matches no layer"):
        convert(Block(), keep=(pattern for pattern in ["other"]))


def test_a_model_with_a_lazy_layer_is_refused():
    with pytest.raises(ValueError, match=r"model has 1\.weight, which is not initialized: call the model once before"):
        convert(nn.Sequential(nn.Linear(128, 128), nn.LazyLinear(4)))


def test_a_model_is_converted_whatever_the_default_dtype(llama):
    expected = str(convert(copy.deepcopy(llama)).conversion_summary)
    torch.set_default_dtype(torch.float64)
    try:
        convert(llama)
    finally:
        torch.set_default_dtype(torch.float32)
    assert str(llama.conversion_summary) == expected


def test_an_exception_for_the_second_name_of_a_layer_is_refused():
    layer = nn.Linear(128, 128)
    recipe = replace(Recipe.deepseek_v3(), exceptions=(("second", frozenset({"wgrad"})),))
    with pytest.raises(ValueError, match="has an exception for 'second', which matches no converted layer"):
        convert(nn.ModuleDict({"first": layer, "second": layer}), recipe)


@pytest.mark.parametrize("is_padded", [False, True])
def test_encoders_of_torch_compute_converted_layers_in_inference(is_padded):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 2, 128, batch_first=True), 1).eval()
    x, is_padding = torch.randn(2, 4, 64), torch.tensor([[False] * 4, [False, False, True, True]])
    mask = is_padding if is_padded else None
    high_precision = encoder(x, src_key_padding_mask=mask)[~is_padding]
    expected = convert(encoder)(x, src_key_padding_mask=mask)[~is_padding]  # with gradients torch calls the layers
    with torch.no_grad():
        found = encoder(x, src_key_padding_mask=mask)[~is_padding]
    assert (found - expected).norm() < 0.1 * (high_precision - expected).norm()


def test_encoders_of_torch_that_are_not_converted_stay_as_they_are():
    layers = {name: nn.TransformerEncoderLayer(64, 2, 128, batch_first=True) for name in ("encoder", "other")}
    model = nn.ModuleDict({name: nn.TransformerEncoder(layer, 1) for name, layer in layers.items()})
    convert(model, keep=["other"])
    assert not model["encoder"].use_nested_tensor
    assert model["other"].use_nested_tensor
    assert model["other"].layers[0].activation_relu_or_gelu


NEEDS = {
    "delayed": ["octile.nn.end_step(model) after each optimizer step"],
    "global_scale": ["a loss scale, octile.optim.DynamicLossScale"],
    "fp8_lm": [
        "octile.nn.end_step(model) after each optimizer step",
        "octile.optim.AdamW with formats=recipe.optimizer",
    ],
    "deepseek_v3": [],
}


@pytest.mark.parametrize("name", NEEDS)
def test_a_warning_names_what_a_recipe_needs_of_a_training_loop(name, recwarn):
    convert(nn.Linear(8, 8), Recipe.named(name))
    found = [str(warning.message) for warning in recwarn]
    assert len(found) == len(NEEDS[name])
    for message, need in zip(found, NEEDS[name], strict=True):
        assert message.startswith(f"in training, recipe {name!r} needs {need}")
