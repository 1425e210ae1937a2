"""GEMMs drawn by a seed: weights of public models' layers, and numbers of tokens.

Kernels, and the model that chooses among them, were tuned for the list of `octile.bench.shapes`. Here is what other
models get. Half of the numbers of tokens are multiples of 128 (of 8 up to 256), half are any number.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from octile.bench.model_shapes import FAMILIES, Model
from octile.bench.shapes import ALIGNMENT, MASKED_ROWS, Case, aligned

__all__ = ["CLASSES", "default_seed", "drawn_cases"]

MAX_BYTES = 12e9  # of a case with its peers, so that several can be tried at the same time
MAX_FLOPS = 2e13  # some 15 ms on an H200
FEWEST_EXPERTS = 8  # of a weight gradient


@dataclass(frozen=True)
class DrawnClass:
    """GEMMs of one kind.

    Attributes:
        name: as `Case.drawn`.
        number: how many are drawn.
        draw: draws one.
    """

    name: str
    number: int
    draw: Callable[[random.Random], Case]


def default_seed() -> int:
    """The date as a number, such as 20261126."""
    return int(datetime.date.today().strftime("%Y%m%d"))


def drawn_cases(seed: int) -> list[Case]:
    """Draw the cases of all classes. No two are the same."""
    cases: dict[Case, None] = {}
    for drawn in CLASSES:
        generator, end = random.Random(f"{seed}, {drawn.name}"), len(cases) + drawn.number
        while len(cases) < end:
            case = replace(drawn.draw(generator), drawn=drawn.name)
            if case.flops <= MAX_FLOPS and _bytes(case) <= MAX_BYTES:
                cases[case] = None
    return list(cases)


def _dense(least: int, most: int) -> Callable[[random.Random], Case]:
    return lambda generator: Case("dense", _tokens(generator, least, most), *_weight(generator))


def _weight_gradient(generator: random.Random) -> Case:
    n, k = _weight(generator)
    return Case("dense", n, k, aligned(_tokens(generator, 1024, 32768)), tiles=True, accumulate=True)


def _grouped(generator: random.Random) -> Case:
    """Draw a training step's rows of the experts of one of some ranks."""
    model, (n, k) = _expert(generator)
    rows = _tokens(generator, 8192, 65536) * model.per_token // model.n_experts
    return Case("grouped", max(rows, ALIGNMENT), n, k, _experts_of_a_rank(generator, model, (1, 2, 4, 8)))


def _masked(generator: random.Random) -> Case:
    """Draw a decode step's or a short prompt's rows of the experts of one of many ranks."""
    model, (n, k) = _expert(generator)
    groups = _experts_of_a_rank(generator, model, (4, 8, 16, 32))
    return Case("masked", _tokens(generator, 8, MASKED_ROWS // 4), n, k, groups)


def _small_experts(accumulate: bool) -> Callable[[random.Random], Case]:
    def draw(generator: random.Random) -> Case:
        model, (n, k) = _expert(generator)
        groups = _experts_of_a_rank(generator, model, (1, 2, 4, 8))
        tokens = aligned(_tokens(generator, 128, 1024))
        return Case("wgrad", n, k, tokens, max(groups, FEWEST_EXPERTS), tiles=True, accumulate=accumulate)

    return draw


LARGE = DrawnClass("large", 16, _dense(2048, 32768))
MIDDLE = DrawnClass("middle", 6, _dense(257, 2047))
FEW_ROWS = DrawnClass("few rows", 12, _dense(8, 256))
FEWEST_ROWS = DrawnClass("fewest rows", 4, _dense(1, 7))
WEIGHT_GRADIENTS = DrawnClass("weight gradients", 12, _weight_gradient)
EXPERTS = DrawnClass("experts", 8, _grouped)
DECODING_EXPERTS = DrawnClass("decoding experts", 8, _masked)
SMALL_EXPERTS = DrawnClass("small experts", 8, _small_experts(accumulate=True))
STORED_SMALL_EXPERTS = DrawnClass("small experts, stored", 8, _small_experts(accumulate=False))
CLASSES = (
    *(LARGE, MIDDLE, FEW_ROWS, FEWEST_ROWS),
    *(WEIGHT_GRADIENTS, EXPERTS, DECODING_EXPERTS, SMALL_EXPERTS, STORED_SMALL_EXPERTS),
)


def _weight(generator: random.Random) -> tuple[int, int]:
    return generator.choice(_model(generator, lambda model: bool(model.weights)).weights)


def _expert(generator: random.Random) -> tuple[Model, tuple[int, int]]:
    model = _model(generator, lambda model: model.n_experts > 0)
    return model, generator.choice(model.expert_weights)


def _model(generator: random.Random, is_meant: Callable[[Model], bool]) -> Model:
    """Draw a family, then a model of it, so that a family counts as much as any other."""
    meant: list[Sequence[Model]] = [tuple(filter(is_meant, models)) for models in FAMILIES.values()]
    return generator.choice(generator.choice([models for models in meant if models]))


def _experts_of_a_rank(generator: random.Random, model: Model, ranks: Sequence[int]) -> int:
    return generator.choice([model.n_experts // n for n in ranks if model.n_experts // n >= 2])


def _tokens(generator: random.Random, least: int, most: int) -> int:
    """Draw a number on a logarithmic scale, half of the time one that is aligned."""
    drawn = round(least * (most / least) ** generator.random())
    return min(aligned(drawn, 8 if most <= 256 else ALIGNMENT), most) if generator.random() < 0.5 else drawn


def _bytes(case: Case) -> int:
    """Estimate the memory of a case: operands in BF16 and in several libraries' FP8, and their results."""
    rows = case.m if case.kind == "dense" else sum(case.sizes)
    if case.kind == "wgrad":
        operands, result = (case.m + case.n) * rows, case.groups * case.m * case.n
    else:
        stored = case.groups * MASKED_ROWS if case.kind == "masked" else rows
        operands, result = stored * case.k + case.groups * case.n * case.k, stored * case.n
    return 6 * operands + 10 * result
