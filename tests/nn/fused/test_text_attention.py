"""Tests of attention of whole sequences and of packed texts: what the operators get, in both passes.

Shapes: B batch, S sequence, D model, H heads.
"""

import pytest
import torch

from octile.nn import MLA
from octile.nn.conversion import apply_recipe
from octile.nn.fused import text_attention
from octile.nn.packed_texts import TextBorders
from octile.nn.rope import Rope
from octile.recipe import Recipe

S, D, H = 24, 32, 2


@pytest.mark.parametrize("recipe", ["deepseek_v3", "bf16"])
def test_both_passes_get_the_mean_length_of_texts(recipe: str, monkeypatch: pytest.MonkeyPatch):
    means = []
    for name in ("packed_attention", "packed_attention_backward"):
        operator = getattr(text_attention, name)

        def spy(*given, operator=operator):
            means.append((operator.name, given[-1]))
            return operator(*given)

        monkeypatch.setattr(text_attention, name, spy)
    layer = MLA(D, H, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8)
    texts = TextBorders(torch.tensor([0, 9, S, S], dtype=torch.int32), 12)
    x = torch.randn(1, S, D, requires_grad=True)
    apply_recipe(layer, Recipe.named(recipe))(x, Rope(8).cos_sin(torch.arange(S)), texts).sum().backward()
    assert means == [("packed_attention", 12), ("packed_attention_backward", 12)]
