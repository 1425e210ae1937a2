"""Prompts with their answers: those of a JSONL file, or the built-in additions.

Those of a step depend on the seed and the step's number alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from octile.train.data.arithmetic import NUMBERS, Problem, draw_problem
from octile.train.data.batches import permute
from octile.train.data.examples import read_lines
from octile.validation import parse_json, quoted

FIELDS = ("prompt", "answer")


class Prompt(NamedTuple):
    """A text to continue, and the right answer."""

    prompt: str
    answer: str


class Prompts(Protocol):
    """Where the prompts of a run come from."""

    def of_step(self, step: int, count: int) -> list[Prompt]:
        """Return the prompts of a step, counted from 0."""
        ...

    def longest(self) -> Sequence[str]:
        """Return texts of which one has the most tokens of all prompts."""
        ...


class ArithmeticPrompts:
    """Additions of graded difficulty (`octile.train.data.arithmetic`), drawn anew in each step.

    Args:
        seed: determines them.
    """

    def __init__(self, seed: int):
        self._seed = seed

    def of_step(self, step: int, count: int) -> list[Prompt]:
        """See `Prompts`."""
        rng = random.Random(f"{self._seed} {step}")
        problems = [draw_problem(rng) for _ in range(count)]
        return [Prompt(problem.prompt, problem.answer) for problem in problems]

    def longest(self) -> list[str]:
        """See `Prompts`."""
        return [Problem(NUMBERS[-1], NUMBERS[-1]).prompt]


class FilePrompts:
    """The prompts of a JSONL file, all of them in another order in each epoch.

    Args:
        file: a line is {"prompt": …, "answer": …}; further keys are ignored.
        seed: determines the order.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it has no prompt, or a line is not such an object or longer than
            `octile.train.data.examples.MAX_LINE`; the message names the line.
    """

    def __init__(self, file: Path, seed: int):
        if not file.is_file():
            raise FileNotFoundError(f"prompts {str(file)!r} does not exist: name a JSONL file")
        self._seed = seed
        name = f"prompts {str(file)!r}"
        self._prompts = [_read(line, f"{name}, line {number}") for number, line in read_lines(file, name)]
        if not self._prompts:
            raise ValueError(f"{name} has no line: each is a JSON object with {' and '.join(FIELDS)}")

    def of_step(self, step: int, count: int) -> list[Prompt]:
        """See `Prompts`."""
        found = []
        for number in range(step * count, (step + 1) * count):
            epoch, position = divmod(number, len(self._prompts))
            index = permute(np.array([position]), len(self._prompts), (self._seed, epoch))
            found.append(self._prompts[int(index[0])])
        return found

    def longest(self) -> list[str]:
        """See `Prompts`."""
        return [prompt.prompt for prompt in self._prompts]


def _read(line: bytes, where: str) -> Prompt:
    value = parse_json(line, where)
    for name in FIELDS:
        if not isinstance(value.get(name), str):
            found = quoted(value[name]) if name in value else "missing"
            raise ValueError(f"{where}: {name} must be text, but it is {found}")
        if any("\ud800" <= character <= "\udfff" for character in value[name]):
            raise ValueError(f"{where}: {name} must be text that UTF-8 can encode, but it has a lone surrogate")
    return Prompt(value["prompt"], value["answer"])
