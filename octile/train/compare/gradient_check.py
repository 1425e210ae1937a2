"""Compares a recipe's gradients with BF16's, at the same weights and on the same batch.

At a chosen step of a recipe's run the gradients of that step's batch are computed twice: with the recipe, and with all
GEMMs in BF16. The state of the run is restored, so that the comparison does not change the run.

A part of the difference is not rounding: a token whose two best experts have nearly equal scores may be routed to
another expert, which changes the gradients of both. If a recipe stores gradients in FP8 (`fp8_lm`), both are in FP8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from octile.optim.gradient import Gradient, gradient_of, load
from octile.optim.storage import Scaled
from octile.recipe import Recipe
from octile.report.compare.gradients import GradientCheck, WeightGradient
from octile.train.trainer import Trainer

NAMED_STEPS = ("start", "middle", "end")
PART = 2**20  # elements of a gradient that are converted to FP64 at a time


def parse_steps(text: str, steps: int) -> tuple[int, ...]:
    """Parse --gradient-steps: numbers from 1 to steps, or start, middle, end, separated by commas; or "none".

    Raises:
        ValueError: text names something else.
    """
    if text.strip() == "none":
        return ()
    named = dict(zip(NAMED_STEPS, (1, (steps + 1) // 2, steps), strict=True))
    chosen = set()
    for part in map(str.strip, text.split(",")):
        step = named.get(part, int(part) if part.isdecimal() else 0)
        if not 1 <= step <= steps:
            raise ValueError(f"gradient_steps must be from 1 to {steps}, or start, middle, end, or none; not {part!r}")
        chosen.add(step)
    return tuple(sorted(chosen))


def check_gradients(trainer: Trainer) -> GradientCheck:
    """Compare the gradients of the next step's batch, at the current weights.

    The recipe's gradients are on the CPU, in their stored formats, while BF16's are computed. Only one gradient
    at a time is converted to FP32.
    """
    with trainer.evaluator.preserved():
        recipe = {name: _on_cpu(gradient) for name, gradient in _gradients(trainer)}
        with _in_bf16(trainer.model):
            bf16 = _gradients(trainer)
            factor = 1 / trainer.loss_scale.value if trainer.loss_scale else 1.0
            weights = tuple(_compare(name, recipe[name], _on_cpu(b), factor) for name, b in bf16 if name in recipe)
    return GradientCheck(trainer.config.recipe, trainer.config.seed, trainer.steps_done + 1, weights)


def _gradients(trainer: Trainer) -> Iterator[tuple[str, Gradient]]:
    """Compute the gradients of all parameters, times the loss scale, and yield those that there are, as stored."""
    trainer.model.train()
    trainer.optimizer.zero_grad(set_to_none=True)
    tokens_BS = trainer.batches.batch(trainer.steps_done)
    for micro_batch_BS in tokens_BS.chunk(trainer.config.micro_batches):
        trainer.passes.backward(micro_batch_BS, len(tokens_BS) / len(micro_batch_BS))
    for name, parameter in trainer.model.named_parameters():
        if (gradient := gradient_of(parameter)) is not None:
            yield name, gradient


def _on_cpu(gradient: Gradient) -> Gradient:
    if isinstance(gradient, Scaled):
        return Scaled(gradient.data.cpu(), gradient.scale.cpu())
    return gradient.detach().cpu()


def _compare(name: str, recipe: Gradient, bf16: Gradient, factor: float) -> WeightGradient:
    """Compare two gradients on the CPU, in FP64, a part at a time.

    Args:
        name: the name of the parameter.
        recipe, bf16: its gradients under both.
        factor: a factor of both norms, which takes the loss scale out of them.
    """
    parts = (load(gradient).flatten().split(PART) for gradient in (recipe, bf16))
    sums_3 = torch.zeros(3, dtype=torch.float64)
    for a, b in ((a.double(), b.double()) for a, b in zip(*parts, strict=True)):
        sums_3 += torch.stack((a @ a, b @ b, a @ b))
    norm, bf16_norm = sums_3[:2].sqrt().tolist()
    cosine = sums_3[2].item() / (norm * bf16_norm) if norm and bf16_norm else math.nan
    return WeightGradient(name, cosine, factor * norm, factor * bf16_norm)


@contextmanager
def _in_bf16(model: nn.Module) -> Iterator[None]:
    """Compute all GEMMs of a model in BF16 inside the context, whatever its recipe."""
    modules: list[Any] = [m for m in model.modules() if isinstance(getattr(m, "recipe", None), Recipe)]
    recipes = [module.recipe for module in modules]
    try:
        for module in modules:
            module.recipe = Recipe.bf16()
        yield
    finally:
        for module, recipe in zip(modules, recipes, strict=True):
            module.recipe = recipe
