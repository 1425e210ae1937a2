"""Captures of a model that is small enough to be checked by hand."""

from pathlib import Path

import torch
from torch import Tensor, nn

from octile.lab.capture import capturing
from octile.nn.conversion import apply_recipe
from octile.nn.moe import Experts
from octile.recipe import Recipe

TOKENS = 24
D = 160  # a whole tile and a partial one
OFFS = torch.tensor([4, 4, 24], dtype=torch.int32)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(D, 72, bias=False), nn.Linear(72, 40, bias=False)
        self.experts = Experts(3, 40, 24)
        for weight in self.experts.parameters():
            nn.init.normal_(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.second(self.first(x).relu()), OFFS)


def batch(seed: int = 0) -> Tensor:
    x = torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(seed))
    x[0, 5] = 3000.0  # the first token's massive value
    return x.requires_grad_()


def write_capture(path: Path, step: int = 3, seed: int = 0, change: Tensor | None = None) -> Path:
    """Write a capture of two sequences of twelve tokens; `change` is added to the input."""
    model = apply_recipe(Block(), Recipe.deepseek_v3())
    with capturing(model) as recorder:
        model(
            batch(seed) if change is None else (batch(seed).detach() + change).requires_grad_()
        ).square().sum().backward()
    return recorder.save(path, step, "deepseek_v3", "toy", torch.arange(TOKENS).view(2, 12))
