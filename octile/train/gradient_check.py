"""A recipe's gradients beside BF16's, at the same weights and on the same batch.

At a chosen step of a recipe's run its model is asked for the gradients of that step's batch twice: as the recipe
computes them, and with all products in BF16. Nothing is left behind: the run goes on as if it had not been asked.

Some of the difference is not rounding: a token whose two best experts are nearly alike may be routed differently, and
then the gradients of whole experts differ. And where a recipe keeps gradients in 8 bits (`fp8_lm`), both are kept so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from octile.nn.delayed_scaling import AmaxHistory
from octile.optim.gradient import gradient_of, load
from octile.recipe import Recipe
from octile.report.compare.gradients import GradientCheck, WeightGradient
from octile.train.trainer import Trainer

PLACES = ("start", "middle", "end")


def parse_steps(text: str, steps: int) -> tuple[int, ...]:
    """The steps that a text names: numbers from 1 to steps, or start, middle, end; "none" names none.

    Raises:
        ValueError: text names something else.
    """
    if text.strip() == "none":
        return ()
    places = dict(zip(PLACES, (1, (steps + 1) // 2, steps), strict=True))
    chosen = set()
    for part in map(str.strip, text.split(",")):
        step = places.get(part, int(part) if part.isdecimal() else 0)
        if not 1 <= step <= steps:
            raise ValueError(f"gradient_steps must be from 1 to {steps}, or start, middle, end, or none; not {part!r}")
        chosen.add(step)
    return tuple(sorted(chosen))


def check_gradients(trainer: Trainer) -> GradientCheck:
    """Both gradients of the batch of the next step, at the weights as they are."""
    with _left_as_it_was(trainer):
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
    """Of every parameter that has one, on the CPU; a loss scale is divided out again, where nothing overflowed."""
    trainer.model.train()
    trainer.optimizer.zero_grad(set_to_none=True)
    for piece_BS in trainer.batches.batch(trainer.steps_done).chunk(trainer.config.micro_batches):
        trainer.backward(piece_BS)
    factor = 1 / trainer.loss_scale.value if trainer.loss_scale else 1.0
    found = {name: gradient_of(parameter) for name, parameter in trainer.model.named_parameters()}
    return {name: load(g).detach().float().cpu() * factor for name, g in found.items() if g is not None}


@contextmanager
def _left_as_it_was(trainer: Trainer) -> Iterator[None]:
    """Puts back what a forward and a backward pass in training mode write."""
    histories = [module for module in trainer.model.modules() if isinstance(module, AmaxHistory)]
    seen = [history.amax_OH.clone() for history in histories]
    try:
        yield
    finally:
        for history, amax_OH in zip(histories, seen, strict=True):
            history.amax_OH.copy_(amax_OH)
        trainer.optimizer.zero_grad(set_to_none=True)


@contextmanager
def _in_bf16(model: nn.Module) -> Iterator[None]:
    """All products that a recipe decides are made of BF16 operands."""
    decided: list[Any] = [m for m in model.modules() if isinstance(getattr(m, "recipe", None), Recipe)]
    recipes = [module.recipe for module in decided]
    try:
        for module in decided:
            module.recipe = Recipe.bf16()
        yield
    finally:
        for module, recipe in zip(decided, recipes, strict=True):
            module.recipe = recipe
