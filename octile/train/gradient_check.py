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

from torch import Tensor, nn

from octile.optim.gradient import gradient_of, load
from octile.recipe import Recipe
from octile.report.compare.gradients import GradientCheck, WeightGradient
from octile.train.trainer import Trainer

NAMED_STEPS = ("start", "middle", "end")


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
    """Compare the gradients of the next step's batch, at the current weights."""
    with trainer.preserved():
        recipe = _gradients(trainer)
        with _in_bf16(trainer.model):
            bf16 = _gradients(trainer)
    weights = tuple(_compare(name, recipe[name], bf16[name]) for name in recipe if name in bf16)
    return GradientCheck(trainer.config.recipe, trainer.config.seed, trainer.steps_done + 1, weights)


def _compare(name: str, a: Tensor, b: Tensor) -> WeightGradient:
    a, b = a.flatten().double(), b.flatten().double()
    norm, bf16_norm = a.norm().item(), b.norm().item()
    cosine = (a @ b).item() / (norm * bf16_norm) if norm and bf16_norm else math.nan
    return WeightGradient(name, cosine, norm, bf16_norm)


def _gradients(trainer: Trainer) -> dict[str, Tensor]:
    """The gradient of every parameter that has one, float32 on the CPU, without the loss scale."""
    trainer.model.train()
    trainer.optimizer.zero_grad(set_to_none=True)
    tokens_BS = trainer.batches.batch(trainer.steps_done)
    for micro_batch_BS in tokens_BS.chunk(trainer.config.micro_batches):
        trainer.backward(micro_batch_BS, len(tokens_BS) / len(micro_batch_BS))
    factor = 1 / trainer.loss_scale.value if trainer.loss_scale else 1.0
    found = {name: gradient_of(parameter) for name, parameter in trainer.model.named_parameters()}
    return {name: load(g).detach().float().cpu() * factor for name, g in found.items() if g is not None}


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
