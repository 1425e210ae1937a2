"""A block saves for backward what docs/data_flow.md says, byte by byte."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import Block
from octile.nn.conversion import apply_recipe
from octile.nn.rope import Rope
from octile.recipe import Recipe
from tests.saved_bytes import saved_bytes

DOCS = Path(__file__).parents[2] / "docs" / "data_flow.md"
BATCH, SEQUENCE = 2, 32
BASE = replace(ModelConfig.tiny(), hidden_size=200, moe_intermediate_size=128, v_head_dim=24, qk_nope_head_dim=20)
CONFIGS = {
    "V3": BASE,
    "queries not compressed": replace(BASE, q_lora_rank=None),
    "wider": replace(BASE, num_attention_heads=6, v_head_dim=32, intermediate_size=384, n_shared_experts=2),
    "more experts": replace(BASE, n_routed_experts=32, num_experts_per_tok=6, moe_intermediate_size=256),
}


@pytest.fixture(scope="module")
def formula() -> dict[str, Any]:
    code = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.S)[0]
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def bytes_of_a_block(block: Block, config: ModelConfig) -> int:
    """Bytes that autograd saves in a forward pass, each memory once, without the parameters."""
    torch.optim.SGD(block.parameters(), lr=0.0).step()  # as in training: quantized weights live in the cache
    device = next(block.parameters()).device
    x = torch.randn(BATCH, SEQUENCE, config.hidden_size, dtype=torch.bfloat16, device=device, requires_grad=True)
    cos_sin = Rope(config.qk_rope_head_dim).cos_sin(torch.arange(SEQUENCE, device=device))

    def forward() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            y = block(x, cos_sin)
        assert y.dtype == torch.bfloat16
        return y

    return saved_bytes(forward, [*block.parameters(), *block.buffers()])


@pytest.mark.parametrize("recomputed", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", ["dense", "mixture"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_block_saves_the_bytes_of_the_formula(formula: dict[str, Any], name: str, kind: str, recomputed: bool):
    c = CONFIGS[name]
    recipe = Recipe.deepseek_v3()
    recipe = replace(recipe, swiglu_inputs="recomputed") if recomputed else recipe
    block = apply_recipe(Block(c, layer=c.first_k_dense_replace if kind == "mixture" else 0), recipe)
    assert bytes_of_a_block(block, c) == predicted_bytes(formula, c, kind, recomputed)


@pytest.mark.parametrize("kind", ["dense", "mixture"])
@pytest.mark.parametrize("name", CONFIGS)
def test_kept_activations_take_the_bytes_of_the_formula(formula: dict[str, Any], name: str, kind: str):
    c = CONFIGS[name]
    recipe = replace(Recipe.deepseek_v3(), norms="kept", latent_attention_inputs="kept")
    block = apply_recipe(Block(c, layer=c.first_k_dense_replace if kind == "mixture" else 0), recipe)
    heads = (c.num_attention_heads, c.v_head_dim, c.qk_nope_head_dim, c.qk_rope_head_dim)
    kept = formula["kept"](c.hidden_size, *heads, c.kv_lora_rank, c.q_lora_rank, kind == "mixture")
    assert bytes_of_a_block(block, c) == predicted_bytes(formula, c, kind, False) + BATCH * SEQUENCE * kept


def predicted_bytes(formula: dict[str, Any], c: ModelConfig, kind: str, recomputed: bool) -> int:
    a_token = formula["attention"](
        c.hidden_size, c.num_attention_heads, c.v_head_dim, c.kv_lora_rank, c.qk_rope_head_dim, c.q_lora_rank
    )
    rest = 4 * c.qk_rope_head_dim * SEQUENCE  # cosines and sines
    if kind == "dense":
        a_token += formula["dense"](c.hidden_size, c.intermediate_size, recomputed)
    else:
        shared, e = c.n_shared_experts * c.moe_intermediate_size, c.n_routed_experts
        sizes = (c.hidden_size, c.moe_intermediate_size, shared, e, c.num_experts_per_tok)
        a_token += formula["mixture"](*sizes, recomputed)
        rest += 4 * e * BATCH + 4 * e  # how often a sequence chose each expert; where their rows end
    return BATCH * SEQUENCE * a_token + rest


def test_other_recipes_save_more(formula: dict[str, Any]):
    c = BASE
    ours, bf16, single = (
        bytes_of_a_block(apply_recipe(Block(c, layer=1), recipe), c)
        for recipe in (Recipe.deepseek_v3(), Recipe.bf16(), Recipe.per_tensor())
    )
    assert ours < 0.3 * single < 0.3 * bf16
