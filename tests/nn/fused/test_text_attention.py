"""Tests of attention of whole sequences and of packed texts: which operators compute it, and what they get.

Shapes: B batch, S sequence, D model, H heads.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from octile.nn import MHA, MLA
from octile.nn.conversion import apply_recipe
from octile.nn.fused import text_attention
from octile.nn.fused.text_attention import causal_attention
from octile.nn.packed_texts import TextBorders
from octile.nn.rope import Rope
from octile.recipe import Recipe

B, S, D, H = 2, 24, 32, 2
COS_SIN = Rope(8).cos_sin(torch.arange(S))


def mla() -> MLA:
    return MLA(D, H, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=12)


LAYERS = {"MLA": mla, "MHA": lambda: MHA(D, H, 8)}
each_layer = pytest.mark.parametrize("name", LAYERS)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators for whole sequences that have been called, in the place of flash-attn-4, which is used if asked."""
    names: list[str] = []
    for name in ("attention", "attention_backward"):
        operator = getattr(text_attention, name)

        def spy(*given: Tensor, name: str = name, operator: Callable = operator):
            names.append(name)
            return operator(*given)

        monkeypatch.setattr(text_attention, name, spy)
    return names


@pytest.fixture
def flash_attn_4_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_attention.flash_attn_4, "why_not", lambda q, v, causal: None)


def computed(layer: nn.Module) -> list[Tensor]:
    """The output, and the gradients of the input and the weights."""
    x, dy = torch.randn(2, B, S, D, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    layer.zero_grad()
    y = layer(x, COS_SIN)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


def operands(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(B, S, H, width).to(dtype).requires_grad_() for width in (8, 8, 12)]


@each_layer
def test_layers_that_are_not_fused_call_the_operators_where_these_call_flash_attn_4(
    name: str, called: list[str], monkeypatch: pytest.MonkeyPatch
):
    torch.manual_seed(0)
    layer = apply_recipe(LAYERS[name](), Recipe.bf16())
    expected = computed(layer)
    assert not called
    monkeypatch.setattr(text_attention.flash_attn_4, "why_not", lambda q, v, causal: None if causal else "")
    found = computed(layer)
    assert called == ["attention", "attention_backward"]
    torch.testing.assert_close(found, expected)


@pytest.mark.oldest_torch
@pytest.mark.parametrize("used", [False, True], ids=["torch's attention", "the operators"])
def test_the_compiler_chooses_without_a_graph_break(used: bool, monkeypatch: pytest.MonkeyPatch):
    q, k, v = (torch.randn(1, 1024, 1, 128).bfloat16().requires_grad_() for _ in range(3))
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    if used:
        monkeypatch.setattr(text_attention.flash_attn_4, "why_not_on", lambda device: None)
    torch._dynamo.reset()
    compiled = torch.compile(causal_attention, fullgraph=True, backend=backend)
    found, expected = (call(q, k, v, 0.1) for call in (compiled, causal_attention))
    torch.testing.assert_close(found, expected)
    gradients, expected = (torch.autograd.grad(y.sum(), (q, k, v)) for y in (found, expected))
    torch.testing.assert_close(gradients, expected)
    assert [("octile.attention" in graph, "scaled_dot_product" in graph) for graph in graphs] == [(used, not used)]


def test_operands_of_two_dtypes_are_left_to_torchs_attention(flash_attn_4_is_used: None, called: list[str]):
    q, k, v = operands()
    with torch.autocast("cpu", torch.bfloat16):
        causal_attention(q.bfloat16(), k, v, 0.3).sum().backward()
    assert not called


def test_transforms_are_left_to_torchs_attention(flash_attn_4_is_used: None, called: list[str]):
    q, k, v = operands()
    torch.func.vmap(lambda q, k, v: causal_attention(q[None], k[None], v[None], 0.3)[0])(q, k, v)
    assert not called


def test_second_derivatives_are_those_of_torchs_attention(called: list[str], monkeypatch: pytest.MonkeyPatch):
    def derivatives() -> list[Tensor]:
        inputs = operands(torch.float32)
        first = torch.autograd.grad(causal_attention(*inputs, 0.3).square().sum(), inputs, create_graph=True)
        return [*first, *torch.autograd.grad(sum(d.square().sum() for d in first), inputs)]

    expected = derivatives()
    monkeypatch.setattr(text_attention.flash_attn_4, "why_not", lambda q, v, causal: None)
    found = derivatives()
    assert called == ["attention", "attention_backward"]  # the latter for the loss of the first derivatives
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("recipe", ["deepseek_v3", "bf16"])
def test_both_passes_get_the_mean_length_of_texts(recipe: str, monkeypatch: pytest.MonkeyPatch):
    means = []
    for name in ("packed_attention", "packed_attention_backward"):
        operator = getattr(text_attention, name)

        def spy(*given, operator=operator):
            means.append((operator.name, given[-1]))
            return operator(*given)

        monkeypatch.setattr(text_attention, name, spy)
    layer = mla()
    texts = TextBorders(torch.tensor([0, 9, S, S], dtype=torch.int32), 12)
    x = torch.randn(1, S, D, requires_grad=True)
    apply_recipe(layer, Recipe.named(recipe))(x, COS_SIN, texts).sum().backward()
    assert means == [("packed_attention", 12), ("packed_attention_backward", 12)]
