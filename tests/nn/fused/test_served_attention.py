"""Latent attention with the forward pass of serving: its gradients, and the bits of a text.

Shapes: B texts, S tokens of each, D model, H heads.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from octile.nn.conversion import apply_recipe
from octile.nn.fused import served_attention
from octile.nn.fused.pre_norm import pre_norm
from octile.nn.linear import Linear
from octile.nn.mla import MLA
from octile.nn.norm import RMSNorm
from octile.nn.observer import observe_gemms
from octile.nn.rope import Rope
from octile.nn.tables import tables_once
from octile.recipe import Recipe
from tests.nn.fused.test_feed_forward import Seen, gradients
from tests.nn.fused.test_mla import COS_SIN, B, D, S, both_forms, mla, x_of

EXACT = Recipe.exact()


def served(q_lora_rank: int | None = 96, recipe: Recipe = EXACT) -> MLA:
    """A layer with a batch-invariant recipe, which is otherwise applied to whole models."""
    module = mla(q_lora_rank)
    for layer in module.modules():
        if isinstance(layer, Linear):
            layer.use_recipe(recipe)
    return module


def run(module: MLA, x: Tensor) -> list[Tensor]:
    return gradients(module, x, lambda x: module(x, COS_SIN))


@both_forms
def test_the_forward_pass_is_the_usual_one_but_for_rounding(q_lora_rank):
    found, expected = served(q_lora_rank)(x_of(), COS_SIN), mla(q_lora_rank)(x_of(), COS_SIN)
    exact = mla(q_lora_rank, None)(x_of(), COS_SIN)
    assert (found - exact).norm() < 1.05 * (expected - exact).norm()


@both_forms
@pytest.mark.parametrize("latents", ["activations", "fp8"])
def test_gradients_are_as_near_to_the_exact_ones_as_the_usual_ones(q_lora_rank, latents):
    exact = run(mla(q_lora_rank, None), x_of())
    usual = run(mla(q_lora_rank), x_of())
    found = run(served(q_lora_rank, replace(EXACT, latents=latents)), x_of())
    for ours, theirs, expected in zip(found, usual, exact, strict=True):
        assert (ours - expected).norm() < 1.1 * (theirs - expected).norm()


@both_forms
def test_kept_queries_change_no_bit_of_a_gradient(q_lora_rank):
    kept = replace(EXACT, latent_attention_inputs="kept")
    found, expected = run(served(q_lora_rank, kept), x_of()), run(served(q_lora_rank), x_of())
    assert all(map(torch.equal, found, expected))


def test_queries_that_are_kept_are_not_computed_again(monkeypatch: pytest.MonkeyPatch):
    computed, queries = [], served_attention._queries
    monkeypatch.setattr(served_attention, "_queries", lambda *arguments: computed.append(1) or queries(*arguments))
    run(served(recipe=replace(EXACT, latent_attention_inputs="kept")), x_of())
    assert len(computed) == 1


def test_layers_of_a_step_share_tables_of_rows():
    """Texts of two lengths have tables of their own."""
    module, x = served(), x_of()
    shorter = [x[:, :-1].clone(), (COS_SIN[0][:-1], COS_SIN[1][:-1])]
    with torch.no_grad(), tables_once():
        found = [module(*inputs) for inputs in [(x, COS_SIN), shorter, (x, COS_SIN)]]
    with torch.no_grad():
        expected = [module(*inputs) for inputs in [(x, COS_SIN), shorter, (x, COS_SIN)]]
    assert all(map(torch.equal, found, expected))


def test_observers_see_no_gemm_of_the_weight_of_keys_and_values():
    module, x = served(), x_of()
    with observe_gemms(seen := Seen()):
        module(x, COS_SIN).sum().backward()
    observed = {weight for weight, _ in seen}
    assert id(module.kv_b_proj.weight) not in observed
    assert {id(module.q_b_proj.weight), id(module.o_proj.weight)} <= observed


def test_a_text_has_the_same_bits_in_any_batch_and_of_any_length():
    module, x = served(), x_of()
    with torch.no_grad():
        together = module(x, COS_SIN)
        for text in range(B):
            assert torch.equal(module(x[text : text + 1], COS_SIN)[0], together[text])
        for n in (1, 2, 7, 16, S - 1):
            assert torch.equal(module(x[:, :n], (COS_SIN[0][:n], COS_SIN[1][:n])), together[:, :n])


def test_more_positions_than_a_page():
    module, x = served(), torch.randn(1, 150, D, generator=torch.Generator().manual_seed(3))
    cos, sin = Rope(16).cos_sin(torch.arange(150))
    with torch.no_grad():
        whole = module(x, (cos, sin))
        assert torch.equal(module(x[:, :70], (cos[:70], sin[:70])), whole[:, :70])


def test_a_hook_is_refused_since_layers_would_be_called_one_by_one():
    module = served()
    module.kv_b_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="'exact' computes the layers of a block together"):
        module(x_of(), COS_SIN)


def test_a_hook_of_the_norm_before_is_refused():
    module, norm = served(), RMSNorm(D)
    norm.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="'exact' computes the layers of a block together"):
        pre_norm(x_of(), norm, module)


def test_a_single_layer_cannot_be_converted():
    with pytest.raises(ValueError, match=r"'exact' needs an octile\.models\.DeepseekV3, not MLA"):
        apply_recipe(mla(recipe=None), EXACT)


def test_parameters_of_the_norm_get_gradients():
    module = served()
    module(x_of(), COS_SIN).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
    assert isinstance(module.kv_a_layernorm, nn.Module)
