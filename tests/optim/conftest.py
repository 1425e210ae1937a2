"""Shared by the tests of optimizers: parameters and random gradients."""

import pytest
import torch
from torch import Tensor, nn

from octile.recipe import OptimizerFormats, Recipe

FP32_MOMENTS = OptimizerFormats(exp_avg="float32", exp_avg_sq="float32")
FP8_LM = Recipe.fp8_lm().optimizer
ALL_FORMATS = pytest.mark.parametrize(
    "formats", [OptimizerFormats(), FP32_MOMENTS, FP8_LM], ids=["bf16_moments", "fp32_moments", "fp8_lm"]
)
SHAPES = [(33, 17), (64,), (), (2, 5, 8), (1, 1), (300, 70)]


def parameters(dtype: torch.dtype = torch.float32, shapes: list[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter((torch.randn(shape, generator=generator) * 0.02).to(dtype)) for shape in shapes]


def backward(params: list[nn.Parameter], step: int) -> None:
    """Compute random gradients by autograd; they depend on the step only."""
    generator = torch.Generator().manual_seed(step)
    loss = sum((p * torch.randn(p.shape, generator=generator).to(p.dtype)).sum() for p in params)
    assert isinstance(loss, Tensor)
    loss.backward()


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(params, step)
        optimizer.step()


def bits(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def same_bits(a: list[nn.Parameter], b: list[nn.Parameter]) -> bool:
    return all(torch.equal(bits(x), bits(y)) for x, y in zip(a, b, strict=True))
