"""Tests of transformers' stacked experts in a recipe's formats: gradients, routing, what is converted and what is not.

Shapes: T tokens, D model, E experts, K chosen experts, I intermediate.
"""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from octile.integrations.transformers import NAME
from octile.nn.conversion import apply_recipe
from octile.nn.delayed_scaling import end_step
from octile.nn.mlp import SwiGLU
from octile.nn.observer import observe_quantization
from octile.recipe import Recipe
from tests.saved_bytes import saved_bytes

T, D, E, K, I = 37, 64, 4, 2, 128

SIZES = {
    "vocab_size": 64,
    "hidden_size": D,
    "intermediate_size": 96,
    "moe_intermediate_size": I,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": K,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
GROUPS = {"n_routed_experts": E, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
MODELS = {
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, head_dim=32, num_experts=E)),
    "deepseek_v3": (DeepseekV3ForCausalLM, DeepseekV3Config(**SIZES, **LATENT, **GROUPS)),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**{**SIZES, "intermediate_size": I}, num_local_experts=E)),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig(**{**SIZES, "intermediate_size": I}, num_experts=E)),
    "glm4_moe": (Glm4MoeForCausalLM, Glm4MoeConfig(**SIZES, head_dim=32, **GROUPS)),
    "llama4": (
        Llama4ForCausalLM,
        Llama4TextConfig(
            **{**SIZES, "intermediate_size": I}, head_dim=32, num_local_experts=E, intermediate_size_mlp=96
        ),
    ),
    "gpt_oss": (GptOssForCausalLM, GptOssConfig(**{**SIZES, "intermediate_size": I}, head_dim=32, num_local_experts=E)),
}
EXACT = Recipe.float32()
every_model = pytest.mark.parametrize("name", MODELS)


def make(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    kind, config = MODELS[name]
    return kind(copy.deepcopy(config))


def layers(model: nn.Module) -> str:
    """The summary up to the shares of parameters and FLOPs."""
    return model.conversion_summary.partition("; quantized")[0]


def experts(intermediate: int = I, kind: type[nn.Module] = Qwen3MoeExperts) -> nn.Module:
    """An experts module alone."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**{**SIZES, "moe_intermediate_size": intermediate}, num_experts=E)
    config._experts_implementation = "eager"
    module = kind(config)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return module


def routing(seed: int = 0, tokens: int = T, chosen: int = E) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their experts among the first `chosen`, and the weights of these."""
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(tokens, D, generator=generator)
    index_TK = torch.rand(tokens, chosen, generator=generator).argsort(dim=1)[:, :K]
    return x_TD, index_TK, torch.rand(tokens, K, generator=generator)


def results(module: nn.Module, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of all inputs and stacked weights."""
    x_TD, weights_TK = x_TD.clone().requires_grad_(), weights_TK.clone().requires_grad_()
    y_TD = module(x_TD, index_TK, weights_TK)
    module.zero_grad()
    y_TD.backward(torch.randn(y_TD.shape, generator=torch.Generator().manual_seed(7)).to(y_TD))
    of_weights = {name: p.grad for name, p in module.named_parameters()}
    return {"y": y_TD.detach(), "x": x_TD.grad, "weights": weights_TK.grad, **of_weights}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], of_norm: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert (value - expected[name]).norm() <= of_norm * expected[name].norm(), name


# One experts module vs. transformers' own function


@pytest.mark.slow
@pytest.mark.parametrize("intermediate", [I, 96], ids=["fused", "grouped GEMMs"])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**16), tokens=st.integers(1, 40), chosen=st.integers(K, E))
def test_in_high_precision_results_are_those_of_transformers(intermediate, seed, tokens, chosen):
    module, batch = experts(intermediate), routing(seed, tokens, chosen)
    expected = results(module, *batch)
    assert_close(results(apply_recipe(module, EXACT), *batch), expected, 1e-5)


@pytest.mark.parametrize("name", ["deepseek_v3", "per_tensor", "delayed", "smooth_swiglu", "mxfp8"])
@pytest.mark.parametrize("intermediate", [I, 96], ids=["128 channels", "96 channels"])
def test_in_8_bits_results_and_gradients_are_near_those_of_transformers(name, intermediate):
    module, batch = experts(intermediate), routing()
    expected = results(module, *batch)
    assert_close(results(apply_recipe(module, Recipe.named(name)), *batch), expected, 0.12)


def gpt_oss_experts() -> nn.Module:
    """Experts with transposed weights, interleaved gates, biases and a clamped activation."""
    torch.manual_seed(0)
    module = GptOssExperts(make("gpt_oss").config)
    module.config._experts_implementation = "eager"
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    return module


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**16), tokens=st.integers(1, 40), chosen=st.integers(K, E))
def test_transposed_experts_with_biases_compute_in_high_precision_what_transformers_does(seed, tokens, chosen):
    module, batch = gpt_oss_experts(), routing(seed, tokens, chosen)
    expected = results(module, *batch)
    assert_close(results(apply_recipe(module, EXACT), *batch), expected, 1e-5)


@pytest.mark.parametrize("name", ["deepseek_v3", "delayed", "smooth_swiglu"])
def test_transposed_experts_with_biases_are_near_those_of_transformers_in_8_bits(name):
    module, batch = gpt_oss_experts(), routing()
    expected = results(module, *batch)
    assert_close(results(apply_recipe(module, Recipe.named(name)), *batch), expected, 0.12)


def llama4_experts() -> nn.Module:
    torch.manual_seed(0)
    module = Llama4TextExperts(make("llama4").config)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
    return module


def transposed_swiglu_experts() -> nn.Module:
    """Experts with transposed weights that are computed by the fused function."""

    @use_experts_implementation(is_transposed=True)
    class Transposed(Qwen3MoeExperts):
        pass

    module = experts(kind=Transposed)
    for parameter in module.parameters():
        parameter.data = parameter.data.mT.contiguous()
    return module


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("make_experts", "recipe"),
    [
        (gpt_oss_experts, "deepseek_v3"),
        (gpt_oss_experts, "smooth_swiglu"),
        (llama4_experts, "deepseek_v3"),
        (transposed_swiglu_experts, "deepseek_v3"),
        (experts, "deepseek_v3"),
    ],
)
def test_main_grad_of_bf16_experts_sums_micro_batches_in_fp32(make_experts, recipe):
    module = apply_recipe(make_experts().bfloat16(), Recipe.named(recipe))
    of_fp32_weights = copy.deepcopy(module).float()  # with the same values, autograd sums their gradients in FP32
    weights = "gate_up_proj", "down_proj"
    for name in weights:
        weight = getattr(module, name)
        weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    for seed in range(3):
        for each in (module, of_fp32_weights):
            arguments = [torch.randn(E * 9, D, generator=torch.Generator().manual_seed(seed))]
            if make_experts is not llama4_experts:
                arguments = routing(seed)
            y = each(*arguments)
            y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)))
    for name in weights:
        assert getattr(module, name).grad is None
        torch.testing.assert_close(getattr(module, name).main_grad, getattr(of_fp32_weights, name).grad)


@pytest.mark.parametrize(("recipe", "of_norm"), [("float32", 1e-5), ("deepseek_v3", 0.12)])
def test_llama4s_experts_compute_the_rows_of_each_expert(recipe, of_norm):
    module, x_RD = llama4_experts(), torch.randn(E * 9, D)

    def results_of(module: nn.Module) -> dict[str, Tensor]:
        x, module.gate_up_proj.grad, module.down_proj.grad = x_RD.clone().requires_grad_(), None, None
        y = module(x)
        y.backward(x_RD)
        grads = {name: p.grad for name, p in module.named_parameters()}
        return {"y": y.detach(), "x": x.grad, **grads}

    expected = results_of(module)
    assert_close(results_of(apply_recipe(module, Recipe.named(recipe))), expected, of_norm)
    assert isinstance(pickle.loads(pickle.dumps(module)), Llama4TextExperts)


def test_experts_without_tokens_get_gradients_of_zeros():
    found = results(apply_recipe(experts()), *routing(chosen=K))
    for name in ("gate_up_proj", "down_proj"):
        assert found[name][:K].abs().amax(dim=(1, 2)).all()
        assert not found[name][K:].any()


def test_under_autocast_the_result_has_the_dtype_of_the_input():
    module, batch = apply_recipe(experts()), routing()
    with torch.autocast("cpu", torch.bfloat16):
        found = results(module, *batch)
    assert {t.dtype for t in found.values()} == {torch.float32}
    assert_close(found, results(module, *batch), 0.05)


def test_a_bf16_module_gets_bf16_gradients():
    module, (x, index, weights) = apply_recipe(experts()).bfloat16(), routing()
    found = results(module, x.bfloat16(), index, weights.bfloat16())
    assert {t.dtype for t in found.values()} == {torch.bfloat16}


def test_gradients_are_added_to_main_grad():
    module, batch = apply_recipe(experts()), routing()
    expected = results(module, *batch)
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    found = results(module, *batch)
    assert found["gate_up_proj"] is None
    torch.testing.assert_close(module.down_proj.main_grad, expected["down_proj"])


def test_an_activation_of_the_models_own_is_used():
    @use_experts_implementation
    class Clamped(Qwen3MoeExperts):
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return torch.nn.functional.silu(gate).clamp(max=0.1) * up.clamp(-0.1, 0.1)

    module, plain, batch = experts(kind=Clamped), experts(), routing()
    assert not apply_recipe(module)._modules[NAME].has_swiglu
    assert results(module, *batch)["y"].norm() < 0.5 * results(plain, *batch)["y"].norm()


@pytest.mark.parametrize("intermediate", [I, 96], ids=["fused", "grouped GEMMs"])
def test_an_activation_that_is_replaced_after_the_conversion_is_used(intermediate):
    module, expected, batch = apply_recipe(experts(intermediate)), experts(intermediate), routing()
    for each in (module, expected):
        each.act_fn = nn.Tanh()
    assert_close(results(module, *batch), results(expected, *batch), 0.12)


def test_an_activation_of_llama4s_experts_that_is_replaced_after_the_conversion_is_used():
    module, expected, x_RD = llama4_experts(), llama4_experts(), torch.randn(E * 9, D)
    apply_recipe(module, EXACT)
    for each in (module, expected):
        each.act_fn = nn.GELU()
    torch.testing.assert_close(module(x_RD), expected(x_RD), rtol=1e-4, atol=1e-4)


def test_the_fused_function_saves_less_than_half_of_what_transformers_saves():
    def saved(module: nn.Module) -> int:
        x, index, weights = routing(tokens=512)
        x, weights = x.bfloat16().requires_grad_(), weights.bfloat16().requires_grad_()
        return saved_bytes(lambda: module(x, index, weights), module.parameters())

    module = experts().bfloat16()
    module.config._experts_implementation = "grouped_mm"
    before = saved(module)
    torch.optim.SGD(module.parameters(), lr=0.0).step()  # from now on the weights are cached, and not saved
    assert saved(apply_recipe(module)) < 0.5 * before


# Whole models


@every_model
def test_all_but_heads_gates_and_embeddings_are_converted(name):
    skipped = {reason: n for reason, n in apply_recipe(make(name)).conversion_summary.skipped.items() if n}
    assert skipped.pop("Llama4Router (a subclass of nn.Linear)", 0) == 2 * (name == "llama4")
    assert skipped == {"output head": 1}


@pytest.mark.one_case
@every_model
def test_a_converted_model_is_near_the_model(name):
    model, tokens = make(name), torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        found = apply_recipe(model)(input_ids=tokens).logits
    assert 0 < (found - expected).norm() < 0.15 * expected.norm()


@pytest.mark.one_case
@pytest.mark.each_value
@every_model
@pytest.mark.parametrize("recipe", ["deepseek_v3", "delayed"])
def test_a_converted_model_trains(name, recipe):
    model = apply_recipe(make(name), Recipe.named(recipe))
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
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


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradients_with_checkpointing_are_the_same(reentrant):
    model, tokens = apply_recipe(make("qwen3_moe")), torch.randint(64, (2, 16))
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train()
        model.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.one_case
@every_model
def test_a_saved_model_loads_in_transformers_and_computes_the_same_when_converted(name, tmp_path):
    model, tokens = apply_recipe(make(name)), torch.randint(64, (2, 16))
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config._experts_implementation != NAME
    with torch.no_grad():
        torch.testing.assert_close(apply_recipe(loaded)(input_ids=tokens).logits, expected, rtol=0, atol=0)


def test_parameters_and_their_names_stay():
    model = make("qwen3_moe")
    before, names = dict(model.named_parameters()), set(model.state_dict())
    after = dict(apply_recipe(model, Recipe.delayed()).named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)
    assert set(model.state_dict()) == names


def test_a_copy_of_a_converted_model_computes_the_same():
    model, tokens = apply_recipe(make("qwen3_moe")), torch.randint(64, (2, 16))
    with torch.no_grad():
        expected, found = model(input_ids=tokens).logits, copy.deepcopy(model)(input_ids=tokens).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_delayed_scaling_moves_on_at_the_end_of_a_step():
    model, tokens = apply_recipe(make("qwen3_moe"), Recipe.delayed()).train(), torch.randint(64, (2, 16))
    model(input_ids=tokens, labels=tokens).loss.backward()
    end_step(model)
    histories = model.model.layers[0].mlp.experts._modules[NAME]
    assert (histories.down_history.amax_OH[:, 1] > 0).all()


def test_another_experts_function_can_be_set_afterwards():
    model, x_TD = make("qwen3_moe"), torch.ones(1, 3, D)
    model.set_experts_implementation("eager")
    layer = model.model.layers[0].mlp
    with torch.no_grad():
        expected = layer(x_TD)
        apply_recipe(model).set_experts_implementation("eager")
        with pytest.warns(RuntimeWarning, match=r"Qwen3MoeExperts are computed by transformers' 'eager' instead"):
            torch.testing.assert_close(layer(x_TD), expected, rtol=0, atol=0)
        model.set_experts_implementation(NAME)
        assert not torch.equal(layer(x_TD), expected)


@pytest.fixture
def called(monkeypatch) -> list[nn.Module]:
    """The modules that another experts function of transformers, "recorded", has computed."""
    modules: list[nn.Module] = []

    def record(experts: nn.Module, *args: Tensor) -> Tensor:
        modules.append(experts)
        return type(experts).forward.__wrapped__(experts, *args)

    monkeypatch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "recorded", record)
    return modules


def test_a_model_that_shares_its_configuration_with_a_converted_one_is_computed_as_before(called):
    model, x_TD = make("qwen3_moe"), torch.ones(1, 3, D)
    model.set_experts_implementation("recorded")
    apply_recipe(type(model)(model.config))
    with torch.no_grad():
        model.model.layers[0].mlp(x_TD)
    assert called == [model.model.layers[0].mlp.experts]


def test_experts_that_a_filter_leaves_out_are_computed_by_the_function_that_they_had(called):
    model, x_TD = make("qwen3_moe"), torch.ones(1, 3, D)
    model.set_experts_implementation("recorded")
    apply_recipe(model, filter=lambda name, module: not name.startswith("model.layers.0."))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp(x_TD)
    assert called == [model.model.layers[0].mlp.experts]


def test_experts_that_a_filter_leaves_out_are_computed_as_before():
    model, x_TD = make("qwen3_moe"), torch.ones(1, 3, D)
    with torch.no_grad():
        before = [layer.mlp(x_TD) for layer in model.model.layers]
        apply_recipe(model, filter=lambda name, module: not name.startswith("model.layers.0."))
        after = [layer.mlp(x_TD) for layer in model.model.layers]
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0)
    assert not torch.equal(after[1], before[1])
    assert f"{3 * E + 4} × left out by filter" in model.conversion_summary


def test_a_model_is_converted_to_another_recipe():
    model = apply_recipe(apply_recipe(make("qwen3_moe")), Recipe.per_tensor())
    assert layers(model) == "converted 32 of 33 linear layers to per_tensor, skipped 1: 1 × output head"


@pytest.mark.oldest_torch
@pytest.mark.slow
def test_torch_compile_has_the_same_results_without_graph_breaks():
    module, batch = apply_recipe(experts()), routing()
    expected = results(module, *batch)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert_close({name.removeprefix("_orig_mod."): t for name, t in results(compiled, *batch).items()}, expected, 1e-6)


# SwiGLU and attention's inputs

DENSE_SIZES = {**SIZES, "intermediate_size": I, "pad_token_id": 0}
DENSE = {
    "llama": LlamaForCausalLM(LlamaConfig(**DENSE_SIZES)),
    "qwen2": Qwen2ForCausalLM(Qwen2Config(**DENSE_SIZES)),
    "qwen3": Qwen3ForCausalLM(Qwen3Config(**DENSE_SIZES, head_dim=32)),
    "mistral": MistralForCausalLM(MistralConfig(**DENSE_SIZES)),
    "olmo2": Olmo2ForCausalLM(Olmo2Config(**DENSE_SIZES)),
    "glm": GlmForCausalLM(GlmConfig(**DENSE_SIZES, head_dim=32)),
    "phi3": Phi3ForCausalLM(Phi3Config(**DENSE_SIZES)),
}
every_dense_model = pytest.mark.parametrize("name", DENSE)


def step(model: PreTrainedModel) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and all gradients of one step."""
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.one_case
@every_dense_model
def test_swiglu_is_fused(name):
    model = apply_recipe(copy.deepcopy(DENSE[name]))
    feed_forward = [layer.mlp for layer in model.model.layers]
    assert all(isinstance(layer, SwiGLU) and layer.fusion() is not None for layer in feed_forward)


@pytest.mark.one_case
@every_dense_model
def test_a_fused_model_has_the_names_and_parameters_of_the_model(name):
    model = copy.deepcopy(DENSE[name])
    before = dict(model.named_parameters())
    after = dict(apply_recipe(model).named_parameters())
    assert list(after) == list(before)
    assert all(after[key] is before[key] for key in before)


@pytest.mark.one_case
@every_dense_model
def test_in_high_precision_a_converted_model_computes_the_same(name):
    model = copy.deepcopy(DENSE[name])
    expected_loss, expected = step(model)
    loss, found = step(apply_recipe(model, EXACT))
    torch.testing.assert_close(loss, expected_loss)
    assert_close(found, expected, 1e-4)


@pytest.mark.one_case
@every_dense_model
def test_in_fp8_gradients_are_near_those_of_the_model(name):
    model = copy.deepcopy(DENSE[name])
    expected_loss, expected = step(model)
    loss, found = step(apply_recipe(model))
    torch.testing.assert_close(loss, expected_loss, rtol=0.01, atol=0)
    assert_close(found, expected, 0.35)  # of the first layer's weights: errors of all layers add up


@pytest.mark.one_case
@every_dense_model
def test_a_block_quantizes_each_input_once(name):
    """Attention's input, its output, the input of SwiGLU; SwiGLU's output is quantized as it is computed."""
    model, operands = apply_recipe(copy.deepcopy(DENSE[name])), []
    with torch.no_grad(), observe_quantization(lambda operand, q: operands.append(operand)):
        model(input_ids=torch.zeros(1, 8, dtype=torch.int64))
    assert operands.count("x") == 4 * len(model.model.layers)


def test_the_inputs_of_latent_attention_are_quantized_once():
    """Of both compressions together, of both expansions, of the output, of SwiGLU or of experts, and its output."""
    model, operands = apply_recipe(make("deepseek_v3")), []
    with torch.no_grad(), observe_quantization(lambda operand, q: operands.append(operand)):
        model(input_ids=torch.zeros(1, 8, dtype=torch.int64))
    dense, mixture = 6, 8  # which has a shared expert, too
    assert operands.count("x") == dense + mixture


@pytest.mark.oldest_torch
@pytest.mark.slow
@torch._dynamo.config.patch(specialize_float=True)  # torch makes them inputs, finds no use for that, and traces again
@pytest.mark.parametrize("name", [pytest.param("llama", marks=pytest.mark.exhaustive), "qwen3_moe"])
def test_a_converted_model_compiles_without_graph_breaks_for_any_length(name):
    model = copy.deepcopy(DENSE[name]) if name in DENSE else make(name)
    model.model.layers = model.model.layers[:1]  # all have the same code, and a trace of each takes seconds
    model.config.num_hidden_layers = 1
    model = apply_recipe(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (16, 24):
        tokens = torch.randint(64, (2, length))
        loss = compiled(input_ids=tokens, labels=tokens).loss
        torch.testing.assert_close(loss, model(input_ids=tokens, labels=tokens).loss, rtol=1e-4, atol=0)
        loss.backward()


# Memory


def llama(layers: int) -> LlamaModel:
    """Blocks with the proportions of Llama 8B, in BF16."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1792,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=1,
        vocab_size=16,
    )
    return LlamaModel(config).bfloat16()


def bytes_of_a_block(convert, compiled: bool = False) -> float:
    """What one block saves per token: the difference of two blocks and one."""
    x = torch.randn(2, 128, 512, dtype=torch.bfloat16, requires_grad=True)
    found = []
    for layers in (1, 2):
        model = convert(llama(layers))
        torch._dynamo.reset()
        call = torch.compile(model, backend="aot_eager_decomp_partition", dynamic=False) if compiled else model

        def forward(call=call) -> Tensor:
            return call(inputs_embeds=x, use_cache=False).last_hidden_state

        found.append(saved_bytes(forward, model.parameters()))
    return (found[1] - found[0]) / x.shape[:2].numel()


def with_cached_weights(model: LlamaModel) -> LlamaModel:
    """In training the weight cache holds quantized weights from the first step of an optimizer on."""
    model = apply_recipe(model)
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    return model


@pytest.mark.oldest_torch
@pytest.mark.slow
def test_a_converted_llama_block_saves_at_most_three_fifths_of_bf16():
    assert bytes_of_a_block(with_cached_weights) <= 0.6 * bytes_of_a_block(lambda model: model)


@pytest.mark.oldest_torch
@pytest.mark.slow
@pytest.mark.parametrize(
    "compiled",
    [pytest.param(False, id="eager"), pytest.param(True, id="compiled", marks=pytest.mark.exhaustive)],
)
def test_with_recomputed_transposes_no_weights_are_saved(compiled):
    """Under torch.compile no weights are cached, so that what is saved of them counts."""
    recipe = replace(Recipe.deepseek_v3(), transposed_weights="recomputed")
    found = bytes_of_a_block(lambda model: apply_recipe(model, recipe), compiled)
    assert found <= 0.65 * bytes_of_a_block(lambda model: model, compiled)


def test_gradients_are_those_that_gemms_have_written():
    """No gradient of a weight passes through a second copy."""
    model = apply_recipe(make("qwen3_moe"))
    model.train()
    tokens = torch.randint(64, (2, 16))
    written = {}
    for name, p in model.named_parameters():
        p.register_hook(lambda dw, name=name: written.update({name: dw.data_ptr()}))
    model(input_ids=tokens, labels=tokens).loss.backward()
    converted = [name for name in written if "_proj" in name]
    assert len(converted) == 2 * 6
    assert all(model.get_parameter(name).grad.data_ptr() == written[name] for name in converted)


# What cannot be converted


def refusal(module: nn.Module) -> str:
    """Why an experts module is not converted, beside a layer that is."""
    return apply_recipe(nn.ModuleDict({"experts": module, "other": nn.Linear(D, D)})).conversion_summary


def test_experts_that_are_quantized_already_are_left_as_they_are_and_named():
    """As transformers loads a checkpoint with FP8 weights."""
    module = experts()
    module.down_proj = nn.Parameter(module.down_proj.detach().to(torch.float8_e4m3fn), requires_grad=False)
    assert f"{3 * E} × stacked experts that are quantized already" in refusal(module)


def test_experts_with_weights_of_another_layout_are_left_as_they_are_and_named():
    module = experts()
    module.gate_up_proj = nn.Parameter(module.gate_up_proj.detach().mT.contiguous())
    assert f"{3 * E} × stacked experts with weights of another layout" in refusal(module)


def test_experts_of_expert_parallelism_are_left_as_they_are_and_named():
    module = experts()
    module._is_expert_parallel = True
    assert f"{3 * E} × stacked experts that expert parallelism has split" in refusal(module)


def test_without_the_registry_stacked_experts_are_skipped_and_named():
    """What transformers before version 5 has: a module with stacked weights, and no function that takes their place."""

    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(E, 2 * I, D))
            self.down_proj = nn.Parameter(torch.zeros(E, D, I))

    model = apply_recipe(nn.ModuleDict({"experts": Stacked(), "other": nn.Linear(D, D)}))
    assert "8 × stacked weights that octile cannot convert" in model.conversion_summary


def test_all_layers_of_a_qwen3_30b_a3b_but_the_head_are_converted():
    """The shape of Qwen3-30B-A3B with 4 of its 48 layers, without memory."""
    config = Qwen3MoeConfig(
        hidden_size=2048,
        moe_intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=512,
    )
    with torch.device("meta"):
        model = apply_recipe(Qwen3MoeForCausalLM(config))
    assert layers(model) == ("converted 1552 of 1553 linear layers to deepseek_v3, skipped 1: 1 × output head")
    assert model.conversion_summary.quantized.parameters >= 0.95
