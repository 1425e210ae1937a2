"""Tests of fused latent attention: operands are quantized by the recipe, and the output is saved once, in E5M6.

Shapes: T tokens, D model, H heads.
"""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from octile.formats import E5M6
from octile.nn.conversion import apply_recipe
from octile.nn.fused.pre_norm import pre_norm
from octile.nn.mla import MLA
from octile.nn.norm import RMSNorm
from octile.nn.observer import observe_gemms
from octile.nn.rope import Rope
from octile.ops.attention import attention, attention_backward
from octile.recipe import Recipe
from octile.scaled import matmul_nt, quantize
from tests.nn.fused.test_feed_forward import Seen, assert_quantized, gradients, same

B, S, D, H = 2, 35, 192, 3
RECIPE = Recipe.deepseek_v3()
COS_SIN = Rope(16).cos_sin(torch.arange(S))

both_forms = pytest.mark.parametrize("q_lora_rank", [96, None], ids=["compressed", "direct"])
every_fused = pytest.mark.parametrize("name", ["deepseek_v3", "hybrid_e5m2", "int8_tiles", "wgrad_x_blocks"])


def mla(q_lora_rank: int | None = 96, recipe: Recipe | None = RECIPE) -> MLA:
    torch.manual_seed(0)
    built = MLA(D, H, q_lora_rank=q_lora_rank, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=24)
    for parameter in built.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        else:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return apply_recipe(built, recipe) if recipe else built


def x_of() -> Tensor:
    return torch.randn(B, S, D, generator=torch.Generator().manual_seed(1)).requires_grad_()


def run(m: MLA, x: Tensor, norm: RMSNorm | None = None, call: Callable[..., Tensor] | None = None) -> list[Tensor]:
    return gradients(m, x, call or (lambda x: after_norm(m, x, norm)))


def after_norm(m: MLA, x: Tensor, norm: RMSNorm | None) -> Tensor:
    return m(x if norm is None else pre_norm(x, norm, m)[1], COS_SIN)


def observed(m: MLA) -> MLA:
    """Add a hook to one layer, so that the layers are called one after the other."""
    m.kv_b_proj.register_forward_hook(lambda *_: None)
    return m


def heads(t: Tensor) -> Tensor:
    return t.unflatten(0, (B, S)).unflatten(-1, (H, -1))


@both_forms
@every_fused
def test_the_forward_pass_equals_the_unfused_one(q_lora_rank, name):
    recipe = Recipe.named(name)
    found, expected = mla(q_lora_rank, recipe)(x_of(), COS_SIN), observed(mla(q_lora_rank, recipe))(x_of(), COS_SIN)
    assert (found - expected).norm() < 1e-3 * expected.norm()  # torch's own attention and norm sum in another order


@pytest.mark.one_case
@both_forms
@every_fused
def test_gradients_are_close_to_those_of_unfused_layers(q_lora_rank, name):
    recipe = Recipe.named(name)
    found, expected = run(mla(q_lora_rank, recipe), x_of()), run(observed(mla(q_lora_rank, recipe)), x_of())
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() < 0.08 * theirs.norm()


@both_forms
def test_gradients_approximate_the_exact_ones(q_lora_rank):
    for ours, theirs in zip(run(mla(q_lora_rank), x_of()), run(mla(q_lora_rank, None), x_of()), strict=True):
        assert (ours - theirs).norm() < 0.2 * theirs.norm()


@both_forms
def test_operands_are_quantized_by_the_recipe(q_lora_rank):
    m, x = mla(q_lora_rank), x_of()
    with observe_gemms(seen := Seen()):
        y = m(x, COS_SIN)
    y.backward(dy := torch.randn(B, S, D, generator=torch.Generator().manual_seed(2)))
    w_q = m.q_b_proj.weight if q_lora_rank else m.q_proj.weight
    of_q, of_kv, of_o = (seen.of(w) for w in (w_q, m.kv_b_proj.weight, m.o_proj.weight))

    dy_TD = dy.flatten(0, 1)
    assert torch.equal(y.flatten(0, 1), matmul_nt(of_o[0].a, of_o[0].b, torch.float32))
    assert_quantized(of_o[0].a, of_o[0].before, (1, 128), RECIPE.formats.x.fmt, "power_of_2")
    assert_quantized(of_o[1].a, dy_TD, (1, 128), RECIPE.formats.dy.fmt)
    assert_quantized(of_o[2].a.mT, dy_TD, (128, 1), RECIPE.formats.dy.fmt)
    kept_o = quantize(of_o[0].before, (1, 128), E5M6, "power_of_2").dequantize()
    assert_quantized(of_o[2].b.mT, kept_o, (128, 1), RECIPE.formats.x.fmt, "power_of_2")
    assert torch.equal(m.o_proj.weight.grad, matmul_nt(of_o[2].a, of_o[2].b, torch.float32))
    for operands, weight in ((of_q, w_q), (of_kv, m.kv_b_proj.weight)):
        assert_quantized(operands[2].b.mT, operands[0].a.dequantize(), (128, 1), RECIPE.formats.x.fmt, "power_of_2")
        assert_quantized(operands[1].a, operands[1].before, (1, 128), RECIPE.formats.dy.fmt)
        assert_quantized(operands[2].a.mT, operands[1].before, (128, 1), RECIPE.formats.dy.fmt)
        assert torch.equal(weight.grad, matmul_nt(operands[2].a, operands[2].b, torch.float32))


def test_attention_backward_reads_the_saved_output(monkeypatch):
    read = []

    def spy(do, q, k, v, o, lse, scale):
        read.append((q, k, v, o))
        return attention_backward(do, q, k, v, o, lse, scale)

    monkeypatch.setattr("octile.nn.fused.text_attention.attention_backward", spy)
    m, x = mla(), x_of()
    with observe_gemms(seen := Seen()):
        y = m(x, COS_SIN)
    y.sum().backward()
    ((q, k, v, o),) = read
    exact, _ = attention(q, k, v, m.softmax_scale)
    o_TX = exact.flatten(2).flatten(0, 1)
    assert torch.equal(seen.of(m.o_proj.weight)[0].before, o_TX)
    saved = quantize(o_TX, (1, 128), E5M6, "power_of_2").dequantize()
    assert torch.equal(o.flatten(2).flatten(0, 1), saved)
    assert not torch.equal(saved, o_TX)


@both_forms
def test_neither_heads_nor_outputs_are_saved_in_high_precision(q_lora_rank):
    m, saved = mla(q_lora_rank), []
    torch.optim.SGD(m.parameters(), lr=0.0).step()
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        after_norm(m, x_of().bfloat16(), RMSNorm(D))
    wide, weights = {H * 48, H * 56, H * 24, 48, 56, 24}, {p.data_ptr() for p in m.parameters()}
    saved = [t for t in saved if t.data_ptr() not in weights]
    assert [(t.dtype, t.shape) for t in saved if t.shape[-1] in wide and t.itemsize > 1] == []
    assert sum(t.dtype == torch.uint8 for t in saved) == 1


@both_forms
def test_a_fused_norm_equals_a_separate_one(q_lora_rank):
    m, norm, x = mla(q_lora_rank), RMSNorm(D), x_of()
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    found = run(m, x, norm)
    of_norm, norm.weight.grad = norm.weight.grad, None
    expected = run(m, x, call=lambda x: m(norm(x), COS_SIN))
    for ours, theirs in zip([*found, of_norm], [*expected, norm.weight.grad], strict=True):
        assert (ours - theirs).norm() < 0.03 * theirs.norm()


@both_forms
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputing_activations_changes_no_bit(q_lora_rank, use_reentrant):
    m, x = mla(q_lora_rank), x_of()
    again = lambda x: checkpoint(m, x, COS_SIN, use_reentrant=use_reentrant)  # noqa: E731
    assert same(run(m, x, call=again), run(m, x))


@pytest.mark.oldest_torch
@pytest.mark.exhaustive  # the whole model is compiled in tests/models
@both_forms
def test_compiled_without_a_graph_break_it_computes_the_same(q_lora_rank):
    m, x, norm = mla(q_lora_rank), x_of(), RMSNorm(D)
    own = copy.deepcopy(m)
    compiled = torch.compile(lambda x: after_norm(own, x, norm), fullgraph=True, backend="aot_eager")
    assert same(run(own, x, call=compiled), run(m, x, norm))


@both_forms
def test_main_grad_accumulates_what_grad_would_be(q_lora_rank):
    m, x = mla(q_lora_rank), x_of()
    run(m, x)
    weights = [p for p in m.parameters() if p.dim() == 2]
    expected = [p.grad for p in weights]
    for p in weights:
        p.main_grad = torch.ones(p.shape)
    m.zero_grad()
    m(x, COS_SIN).backward(torch.randn(B, S, D, generator=torch.Generator().manual_seed(2)))
    for p, grad in zip(weights, expected, strict=True):
        assert p.grad is None
        torch.testing.assert_close(p.main_grad, 1 + grad, rtol=1e-6, atol=1e-6)


@both_forms
def test_a_frozen_weight_gets_no_gradient_and_changes_no_other(q_lora_rank):
    m, x = mla(q_lora_rank), x_of()
    expected = dict(zip([n for n, _ in m.named_parameters()], run(m, x)[2:], strict=True))
    for frozen in ("kv_b_proj.weight", "kv_a_proj_with_mqa.weight", "o_proj.weight"):
        for n, p in m.named_parameters():
            p.requires_grad_(n != frozen)
        m.zero_grad()
        m(x, COS_SIN).backward(torch.randn(B, S, D, generator=torch.Generator().manual_seed(2)))
        for n, p in m.named_parameters():
            assert p.grad is None if n == frozen else torch.equal(p.grad, expected[n])


def test_half_precision_inputs_give_half_precision_results():
    m, x = mla(), x_of().detach().bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = m(x, COS_SIN)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype) == (torch.bfloat16, torch.bfloat16)


def test_a_sequence_of_one_token():
    m, x = mla(), torch.randn(3, 1, D, requires_grad=True)
    y = m(x, Rope(16).cos_sin(torch.arange(1)))
    y.sum().backward()
    assert y.shape == x.grad.shape == (3, 1, D)
    assert all(p.grad.isfinite().all() for p in m.parameters())
