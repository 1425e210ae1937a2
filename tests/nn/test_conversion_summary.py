"""Tests of what a conversion reports: which shares of the parameters and of the FLOPs are quantized."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from octile.models.config import ModelConfig
from octile.models.counts import count_parameters
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import apply_recipe
from octile.recipe import Recipe


class Model(nn.Module):
    """An embedding of 10 · 8 values, a layer of 8 · 8 and biases, and a head of 10 · 8."""

    def __init__(self, tied: bool = False):
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.body = nn.Linear(8, 8)
        self.lm_head = nn.Linear(8, 10, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight


def shares(model: nn.Module, recipe: Recipe | None = None):
    return apply_recipe(model, recipe).conversion_summary.quantized


def test_shares_are_of_all_parameters_and_of_the_gemms_that_a_token_passes():
    assert shares(Model()) == (64 / (80 + 64 + 8 + 80), 64 / (64 + 80))


def test_a_tied_weight_is_a_parameter_once_and_a_gemm_of_the_head():
    assert shares(Model(tied=True)) == (64 / (80 + 64 + 8), 64 / (64 + 80))


def test_a_layer_at_two_places_is_a_parameter_once_and_two_gemms():
    shared = nn.Linear(8, 8, bias=False)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "lm_head": nn.Linear(8, 8, bias=False)})
    assert shares(model) == (0.5, 2 / 3)


def test_the_text_ends_with_the_shares_and_with_what_is_recomputed():
    cached = replace(Recipe.deepseek_v3(), transposed_weights="cached")
    shares = "; quantized: 27.6% of the parameters, 44.4% of the FLOPs"
    assert apply_recipe(Model(), cached).conversion_summary.endswith(shares)
    assert apply_recipe(Model()).conversion_summary.endswith(f"{shares}; transposed weights: recomputed")


class LayerAndParameter(nn.Module):
    """A linear layer of 8 · 8 beside another parameter."""

    def __init__(self, *shape: int):
        super().__init__()
        self.proj = nn.Linear(8, 8, bias=False)
        self.other = nn.Parameter(torch.zeros(shape))


def test_stacked_weights_beside_a_converted_layer_are_not_quantized():
    assert shares(LayerAndParameter(3, 8, 8)) == (0.25, 0.25)


def test_an_embedding_of_positions_beside_a_converted_layer_is_neither_quantized_nor_a_gemm():
    assert shares(LayerAndParameter(1, 24, 8)) == (0.25, 1.0)


@pytest.mark.parametrize("name", ["bf16", "float32"])
def test_a_recipe_in_high_precision_quantizes_nothing(name):
    summary = apply_recipe(Model(), Recipe.named(name)).conversion_summary
    assert summary.quantized == (0.0, 0.0)
    assert "quantized" not in summary


def test_gemms_in_high_precision_have_no_quantized_flops():
    exceptions = ("a", frozenset({"fprop", "dgrad", "wgrad"})), ("b", frozenset({"wgrad"}))
    model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in ("a", "b")})
    assert shares(model, replace(Recipe.deepseek_v3(), exceptions=exceptions)) == (1.0, pytest.approx(1 / 3))


def test_the_counts_are_attributes():
    summary = apply_recipe(Model()).conversion_summary
    assert (summary.converted, dict(summary.skipped)) == (1, {"output head": 1})


def test_a_copy_of_a_model_has_the_summary():
    model = apply_recipe(Model())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.conversion_summary == model.conversion_summary
        assert other.conversion_summary.quantized == model.conversion_summary.quantized


def test_of_experts_those_count_that_a_token_is_sent_to():
    config = ModelConfig.tiny()
    with torch.device("meta"):
        model = DeepseekV3(replace(config, num_nextn_predict_layers=0))
    found, counts = shares(model), count_parameters(config)
    in_high_precision = ("embedding", "head", "norms", "gate")
    quantized = sum(n for kind, n in counts.main.items() if kind not in in_high_precision)
    active = sum(n for kind, n in counts.main_active.items() if kind not in in_high_precision)
    gates = config.n_routed_experts * config.hidden_size * len(model.moe_layers())
    head = config.vocab_size * config.hidden_size
    assert found.parameters == pytest.approx(quantized / sum(p.numel() for p in model.parameters()))
    assert found.flops == pytest.approx(active / (active + gates + head))


class Mixture(nn.Module):
    """Experts that are no stack, as in transformers before version 5."""

    def __init__(self) -> None:
        super().__init__()
        self.top_k = 1
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))


def test_experts_in_a_list_count_as_often_as_a_token_is_sent_to_them():
    assert shares(nn.ModuleDict({"mlp": Mixture()})) == (256 / 288, 64 / (64 + 32))


def test_a_gate_that_is_no_linear_layer_counts():
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(8, 8))

    assert shares(nn.ModuleDict({"router": Router(), "body": nn.Linear(8, 8, bias=False)})) == (0.5, 0.5)


def test_stacked_weights_of_an_unknown_module_count_as_all_used():
    stacked = nn.ParameterDict({"up": torch.zeros(4, 8, 8)})
    assert shares(nn.ModuleDict({"experts": stacked, "body": nn.Linear(8, 8, bias=False)})) == (0.2, 0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (
            Qwen3MoeForCausalLM,
            Qwen3MoeConfig(
                hidden_size=2048,
                moe_intermediate_size=768,
                num_hidden_layers=48,
                num_attention_heads=32,
                num_key_value_heads=4,
                head_dim=128,
                num_experts=128,
                num_experts_per_tok=8,
                vocab_size=151936,
            ),
        ),
        (LlamaForCausalLM, LlamaConfig(num_hidden_layers=32, num_key_value_heads=8, intermediate_size=14336)),
    ],
    ids=["Qwen3-30B-A3B", "Llama-8B"],
)
def test_of_published_models_at_least_95_percent_is_quantized(kind, config):
    with torch.device("meta"):
        model = kind(config)
    found = shares(model)
    assert found.parameters >= 0.95
    assert 0.85 <= found.flops <= 1
