"""Tests of attention fused with the layer after it: operands follow the recipe, and the output is saved in E5M6."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from octile.formats import E5M6
from octile.nn.fused.attention_output import attention_linear
from octile.nn.fused.mla import Heads, latent_attention
from octile.nn.fused.pre_norm import norm_block_input
from octile.nn.fused.projections import projections
from octile.nn.linear import Linear
from octile.nn.norm import RMSNorm
from octile.nn.observer import observe_gemms
from octile.nn.rope import Rope
from octile.ops.attention import attention, attention_backward
from octile.recipe import Recipe
from octile.scaled import matmul_nt, quantize
from tests.nn.fused.test_feed_forward import Seen, assert_quantized

B, S, H, X, V, N = 2, 35, 3, 40, 24, 100
RECIPE, SCALE = Recipe.deepseek_v3(), 0.2


def inputs(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v and the weight."""
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(B, S, H, n, generator=generator).to(dtype).requires_grad_() for n in (X, X, V)]
    return [*qkv, (torch.randn(N, H * V, generator=generator) / 8).requires_grad_()]


def test_operands_are_quantized_by_the_recipe():
    q, k, v, w = inputs()
    with observe_gemms(seen := Seen()):
        y = attention_linear(q, k, v, w, SCALE, RECIPE, torch.float32)
    y.backward(dy := torch.randn(B, S, N, generator=torch.Generator().manual_seed(1)))
    fprop, dgrad, wgrad = seen.of(w)
    o, lse = attention(q.detach(), k.detach(), v.detach(), SCALE)
    o_TX, dy_TN = o.flatten(2).flatten(0, 1), dy.flatten(0, 1)
    kept_o = quantize(o_TX, (1, 128), E5M6, "power_of_2").dequantize()

    assert torch.equal(y.flatten(0, 1), matmul_nt(fprop.a, fprop.b, torch.float32))
    assert_quantized(fprop.a, o_TX, (1, 128), RECIPE.formats.x.fmt, "power_of_2")
    assert_quantized(dgrad.a, dy_TN, (1, 128), RECIPE.formats.dy.fmt)
    assert_quantized(wgrad.a.mT, dy_TN, (128, 1), RECIPE.formats.dy.fmt)
    assert_quantized(wgrad.b.mT, kept_o, (128, 1), RECIPE.formats.x.fmt, "power_of_2")
    assert torch.equal(w.grad, matmul_nt(wgrad.a, wgrad.b, torch.float32))
    do = matmul_nt(dgrad.a, dgrad.b, torch.float32).view(v.shape)
    expected = attention_backward(do, q.detach(), k.detach(), v.detach(), kept_o.view(v.shape), lse, SCALE)
    for t, gradient in zip((q, k, v), expected, strict=True):
        assert torch.equal(t.grad, gradient)


def test_it_saves_its_inputs_and_the_output_once():
    q, k, v, w = inputs(torch.bfloat16)
    torch.optim.SGD([w], lr=0.0).step()
    saved: dict[int, int] = {}

    def keep(t: Tensor) -> Tensor:
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with saved_tensors_hooks(keep, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        y = attention_linear(q, k, v, w, SCALE, RECIPE, torch.bfloat16)
    assert saved.pop(w.untyped_storage().data_ptr()) == w.nbytes  # the parameter itself, which dgrad quantizes again
    of_inputs = sum(saved.pop(t.untyped_storage().data_ptr()) for t in (q, k, v))
    assert of_inputs == 2 * B * S * H * (2 * X + V)
    padded_rows = -(-B * S // 4) * 4
    assert sum(saved.values()) == B * S * H * V * 3 // 2 + 4 * padded_rows + 4 * B * S * H
    assert y.dtype == torch.bfloat16


def test_compiled_without_a_graph_break_it_computes_the_same():
    call = lambda q, k, v, w: attention_linear(q, k, v, w, SCALE, RECIPE, torch.float32)  # noqa: E731
    results = []
    for f in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        arguments = inputs()
        y = f(*arguments)
        y.sum().backward()
        results.append([y, *(t.grad for t in arguments)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_block_without_compression_is_built_of_the_same_functions(recomputed: bool):
    """Attention of a dense decoder, its queries, keys and values saved or recomputed."""
    torch.manual_seed(0)
    d, heads, width = 192, 3, 32
    norm, x = RMSNorm(d), torch.randn(B * S, d, requires_grad=True)
    w_q, w_o = (Linear(*sides, bias=False).weight for sides in ((d, heads * width), (heads * width, d)))
    w_kv = Linear(d, 2 * heads * width, bias=False).weight
    _, inside = norm_block_input(x, norm, RECIPE)
    if recomputed:
        shape = Heads(B, heads, width, 0, width, SCALE)
        no_rope = Rope(0).cos_sin(torch.arange(S))
        arguments = (w_q, w_kv, w_o, shape, torch.float32)
        y = latent_attention(inside, inside, x.new_empty(B * S, 0), no_rope, *arguments)
    else:
        q, kv = (t.view(B, S, heads, -1) for t in projections(inside, [w_q, w_kv], [[96], [192]], torch.float32))
        k, v = kv.split(width, dim=-1)
        y = attention_linear(q, k, v, w_o, SCALE, RECIPE, torch.float32).flatten(0, 1)
    y.sum().backward()

    exact_x = x.detach().requires_grad_()
    n = norm(exact_x).view(B, S, d)
    q, kv = ((n @ w.T).view(B, S, heads, -1).transpose(1, 2) for w in (w_q, w_kv))
    o = F.scaled_dot_product_attention(q, *kv.split(width, dim=-1), is_causal=True, scale=SCALE)
    exact = o.transpose(1, 2).flatten(2).flatten(0, 1) @ w_o.T
    exact.sum().backward()
    assert (y - exact).norm() < 0.1 * exact.norm()
    assert (x.grad - exact_x.grad).norm() < 0.2 * exact_x.grad.norm()
