"""How far attention's roundings move the gradients of a block with an FP8 or BF16 recipe, on a CPU.

python benchmarks/history/flash-attn-4/block.py deepseek_v3 > block.txt
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import Block
from octile.nn.conversion import apply_recipe
from octile.nn.fused import text_attention
from octile.nn.rope import Rope
from octile.recipe import Recipe

TOKENS, RUNS = 1024, 12
ROUNDING_OF_O, ERROR_OF_GRADIENTS = 2.0**-9, 0.0025
HEADS = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 128}
CONFIG = replace(ModelConfig.tiny(), hidden_size=384, **HEADS)
COS_SIN = Rope(CONFIG.qk_rope_head_dim).cos_sin(torch.arange(TOKENS))
Change = Callable[..., tuple[Tensor, ...]]  # of o, or of dq, dk and dv


def run(block: Block, x: Tensor, dy: Tensor) -> list[Tensor]:
    block.zero_grad()
    leaf = x.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.bfloat16):
        y = block(leaf, COS_SIN)
    y.backward(dy)
    return [y.detach(), leaf.grad, *(p.grad.clone() for p in block.parameters())]


def run_with(change_o: Change | None, change_gradients: Change | None) -> list[Tensor]:
    forward, backward = text_attention.attention, text_attention.attention_backward

    def changed_forward(*operands):
        o, lse = forward(*operands)
        return (change_o(o)[0] if change_o else o), lse

    def changed_backward(*operands):
        gradients = backward(*operands)
        return change_gradients(*gradients) if change_gradients else gradients

    text_attention.attention, text_attention.attention_backward = changed_forward, changed_backward
    try:
        return run(block, x, dy)
    finally:
        text_attention.attention, text_attention.attention_backward = forward, backward


def noise(size: float) -> Change:
    return lambda *tensors: tuple((t * (1 + size * torch.randn(t.shape))).to(t.dtype) for t in tensors)


def scaled(factor: float, which: int) -> Change:
    return lambda *tensors: tuple(t * factor if i == which else t for i, t in enumerate(tensors))


def zeros(which: int) -> Change:
    """64 of the tokens, in the middle."""
    middle = slice(TOKENS // 2, TOKENS // 2 + 64)
    return lambda *tensors: tuple(
        t.index_fill(1, torch.arange(TOKENS)[middle], 0) if i == which else t for i, t in enumerate(tensors)
    )


def distances(found: list[Tensor], expected: list[Tensor]) -> Tensor:
    return torch.stack([(a - b).norm() / b.norm() for a, b in zip(found, expected, strict=True)])


text_attention.flash_attn_4.why_not = lambda *given, **named: None  # BF16 calls the operators, too
torch.manual_seed(0)
block = Block(CONFIG, 0)
for parameter in block.parameters():
    if parameter.dim() > 1:
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
x, dy = torch.randn(2, 1, TOKENS, CONFIG.hidden_size).bfloat16()
exact = run(copy.deepcopy(block), x.float(), dy.float())
block = apply_recipe(block, Recipe.named(sys.argv[1]))
base = run(block, x, dy)
of_o, of_gradients = noise(ROUNDING_OF_O), noise(ERROR_OF_GRADIENTS)
both = [run_with(of_o, of_gradients) for _ in range(RUNS)]
errors = torch.stack([distances(found, exact) for found in both])
columns = {
    "error": distances(base, exact),
    "o": distances(run_with(of_o, None), base),
    "dqkv": distances(run_with(None, of_gradients), base),
    "both": torch.stack([distances(found, base) for found in both]).amax(0),
    "ratio": errors.amax(0) / errors.amin(0),
}

names = ["y", "dx", *(name for name, _ in block.named_parameters())]
print(f"torch {torch.__version__}, {sys.argv[1]}, {TOKENS} tokens, relative to each tensor's norm")
print("error: of the block, from an FP32 block")
print(f"o, dqkv: change by noise of 2^-9 in o, by {ERROR_OF_GRADIENTS} in dq, dk and dv; both: most of {RUNS} runs")
print("ratio: largest error of these runs over the smallest\n")
print(f"{'':38}" + "".join(f"{name:>8}" for name in columns))
for i, name in enumerate(names):
    print(f"{name:38}" + "".join(f"{float(column[i]):8.4f}" for column in columns.values()))

print("\nlargest ratio of a wrong result's error to the error above: matrices, norms")
wrong = {"o · 1.05": (scaled(1.05, 0), None), "o without 64 tokens": (zeros(0), None)}
for i, gradient in enumerate(("dq", "dk", "dv")):
    wrong[f"{gradient} · 1.06"] = None, scaled(1.06, i)
    wrong[f"{gradient} without 64 tokens"] = None, zeros(i)
is_matrix = torch.tensor([t.dim() > 1 for t in exact])
for name, changes in wrong.items():
    ratio = distances(run_with(*changes), exact) / columns["error"]
    print(f"{name:24}{ratio[is_matrix].max():8.3f}{ratio[~is_matrix].max():8.3f}")
