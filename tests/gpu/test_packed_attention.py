"""Tests of attention within packed texts on a GPU: close to the reference, and not dependent on other texts."""

import pytest
import torch
from torch import Tensor

from octile.models.config import PRESETS
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import convert
from octile.nn.packed_texts import PackedTexts, TextStatistics
from octile.ops.packed_attention import packed_attention, packed_attention_backward
from octile.recipe import Recipe

LENGTHS = [300, 1, 211, 512, 0]
SCALE = 0.1
widths = pytest.mark.parametrize("widths", [(192, 128), (24, 16), (64, 64)], ids=str)


def inputs(widths: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> tuple[list[Tensor], Tensor]:
    """q, k, v and the gradient of o; the first row of each text, and the end."""
    torch.manual_seed(0)
    x, v = widths
    tensors = [torch.randn(sum(LENGTHS), 2, width, device="cuda").to(dtype) for width in (x, x, v, v)]
    return tensors, torch.tensor([0, *LENGTHS]).cumsum(0).int().cuda()


def forward_and_backward(q: Tensor, k: Tensor, v: Tensor, do: Tensor, starts: Tensor) -> list[Tensor]:
    o, lse = packed_attention(q, k, v, starts, SCALE)
    return [o, lse, *packed_attention_backward(do, q, k, v, o, lse, starts, SCALE)]


@widths
def test_results_and_gradients_are_close_to_the_reference(widths: tuple[int, int]):
    tensors, starts = inputs(widths)
    exact = forward_and_backward(*(t.float() for t in tensors), starts)
    for ours, expected in zip(forward_and_backward(*tensors, starts), exact, strict=True):
        assert (ours.float() - expected).norm() < 0.01 * expected.norm()


@widths
def test_a_text_has_the_bits_that_it_has_among_other_texts(widths: tuple[int, int]):
    (q, k, v, _), starts = inputs(widths)
    o, lse = packed_attention(q, k, v, starts, SCALE)
    for t in (q, k, v):
        t[300:] = torch.randn_like(t[300:])
    found, found_lse = packed_attention(q, k, v, starts, SCALE)
    assert torch.equal(found[:300], o[:300])
    assert torch.equal(found_lse[:, :300], lse[:, :300])


@pytest.mark.parametrize("recipe", ["deepseek_v3", "bf16"])
def test_a_step_on_packed_texts_is_captured_and_close_to_the_texts_alone(recipe: str):
    torch.manual_seed(0)
    model = convert(DeepseekV3(PRESETS["tiny"]()), Recipe.named(recipe)).cuda()
    tokens = torch.randint(model.config.vocab_size, (1, 128), device="cuda")
    is_first = torch.zeros(1, 128, dtype=torch.bool, device="cuda")
    is_first[0, 50] = True

    def loss() -> Tensor:
        with model.training_precision():
            return model(tokens, tokens, PackedTexts(is_first, TextStatistics(4, 64)))

    for _ in range(3):
        loss().backward()
    with model.training_precision(), torch.no_grad():
        logits = model.eval()(tokens, None, PackedTexts(is_first, TextStatistics(4, 64)))
        alone = torch.cat([model(part) for part in (tokens[:, :50], tokens[:, 50:])], dim=1)
    assert (logits - alone).norm() < 0.05 * alone.norm()
    model.train()
    graph = torch.cuda.CUDAGraph()
    expected = loss().detach()
    with torch.cuda.graph(graph):
        captured = loss()
    graph.replay()
    torch.testing.assert_close(captured.detach(), expected, rtol=1e-3, atol=0)
