"""Tests of multi-head attention: equal to torch's, close to it under a recipe, with the documented saved bytes."""

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from octile.nn import MHA, RMSNorm, pre_norm
from octile.nn.conversion import apply_recipe
from octile.nn.rope import Rope
from octile.recipe import Recipe
from tests.models.test_saved_bytes import formula  # noqa: F401  (a fixture)
from tests.saved_bytes import saved_bytes

B, S, D, H = 2, 24, 256, 2
SAVED = Recipe.deepseek_v3()
RECOMPUTED = replace(SAVED, attention_inputs="recomputed")


def parts(heads=H, head_dim=None):
    torch.manual_seed(0)
    attention, norm = MHA(D, heads, head_dim), RMSNorm(D)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    x, dy = torch.randn(2, B, S, D)
    return attention, norm, x.requires_grad_(), dy


def cos_sin(attention):
    return Rope(attention.head_dim).cos_sin(torch.arange(S))


def gradients(attention, norm, x, dy):
    x.grad = None
    norm.zero_grad()
    attention.zero_grad()
    y = attention(pre_norm(x, norm, attention)[1], cos_sin(attention))
    y.backward(dy)
    return [y.detach(), x.grad, norm.weight.grad.clone(), *(p.grad for p in attention.parameters())]


def test_a_token_sees_itself_and_those_before():
    attention, _, x, _ = parts()
    y = attention(x, cos_sin(attention))
    changed = x.detach().clone()
    changed[:, S // 2] += 1.0
    z = attention(changed, cos_sin(attention))
    assert torch.equal(y[:, : S // 2], z[:, : S // 2])
    assert not torch.equal(y[:, S // 2 :], z[:, S // 2 :])


def test_without_rotation_it_equals_torchs_attention():
    attention, _, x, _ = parts()
    cos, sin = cos_sin(attention)
    ours = attention(x, (torch.ones_like(cos), torch.zeros_like(sin)))
    theirs, _ = F.multi_head_attention_forward(
        x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1), D, H,
        torch.cat([p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj)]), None, None, None,
        False, 0.0, attention.o_proj.weight, None, attn_mask=nn.Transformer.generate_square_subsequent_mask(S),
        is_causal=True, need_weights=False,
    )  # fmt: skip
    assert torch.allclose(ours, theirs.transpose(0, 1), atol=1e-5)


@pytest.mark.parametrize("recipe", [SAVED, RECOMPUTED, Recipe.hybrid_e5m2(), Recipe.per_tensor()], ids=lambda r: r.name)
@pytest.mark.parametrize("shape", [(2, None), (3, 40)], ids=str)
def test_a_recipe_computes_nearly_the_same(recipe, shape):
    attention, norm, x, dy = parts(*shape)
    expected = gradients(attention, norm, x, dy)
    found = gradients(apply_recipe(copy.deepcopy(attention), recipe), norm, x, dy)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= 0.15 * theirs.norm()


def test_recomputed_queries_are_the_saved_ones():
    attention, norm, x, dy = parts()
    saved, made = (
        gradients(apply_recipe(copy.deepcopy(attention), recipe), norm, x, dy) for recipe in (SAVED, RECOMPUTED)
    )
    assert all(torch.equal(a, b) for a, b in zip(saved, made, strict=True))


def test_a_layer_with_a_hook_is_called():
    attention, norm, x, dy = parts()
    apply_recipe(attention, SAVED)
    seen = []
    attention.k_proj.register_forward_hook(lambda module, args, y: seen.append(y.shape))
    gradients(attention, norm, x, dy)
    assert seen == [(B, S, D)]


@pytest.mark.parametrize("recipe", [SAVED, RECOMPUTED], ids=["saved", "recomputed"])
def test_it_saves_the_bytes_of_the_formula(formula, recipe):  # noqa: F811
    attention, norm, x, _ = parts()
    apply_recipe(attention, recipe)
    x = x.detach().bfloat16().requires_grad_()
    torch.optim.SGD(attention.parameters(), lr=0.0).step()  # as in training: quantized weights live in the cache
    angles = cos_sin(attention)

    @torch.autocast("cpu", torch.bfloat16)
    def forward():
        result = attention(pre_norm(x, norm, attention)[1], angles)
        assert result.dtype == torch.bfloat16
        return result

    saved = saved_bytes(forward, [*attention.parameters(), *norm.parameters()])
    a_token = formula["multi_head_attention"](D, H, D // H, recipe.attention_inputs == "recomputed")
    assert saved == B * S * a_token + sum(t.nbytes for t in angles)
