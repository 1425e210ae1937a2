"""Additions of graded difficulty: a task for reinforcement learning without downloads, and examples of it to train on.

A problem adds two numbers of two digits. It is solved column by column from the right, with the carry as a third
summand:

    4 7 + 3 8 = <think> 7 + 8 = 1 5 , 4 + 3 + 1 = 8 </think> 8 5

Digits have spaces between them, so that a tokenizer has one token for each. The level of a problem is the number of
its columns whose sum has two digits: 0, 1 or 2.

Most examples count one too far in their first column, and go on with what they have. A model that is trained on them
has the format and the method, and its most likely answers are wrong: what is left to learn from rewards.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

NUMBERS = range(10, 100)
LEVELS = range(3)
WRONG_SHARE = 0.8  # of the examples; the others are right
SEED = 0  # of the examples


class Problem(NamedTuple):
    """An addition.

    Attributes:
        a, b: the summands.
    """

    a: int
    b: int

    @property
    def prompt(self) -> str:
        """The text that a model continues."""
        return f"{spaced(self.a)} + {spaced(self.b)} ="

    @property
    def answer(self) -> str:
        """What follows `</think>` in a right completion."""
        return spaced(self.a + self.b)

    @property
    def level(self) -> int:
        """How many columns have a sum of two digits."""
        return (self.a % 10 + self.b % 10 > 9) + (self.a + self.b > 99)


def draw_problem(rng: random.Random) -> Problem:
    """Draw a level, and then a problem of it."""
    level = rng.choice(LEVELS)
    while True:
        problem = Problem(rng.choice(NUMBERS), rng.choice(NUMBERS))
        if problem.level == level:
            return problem


def solve(problem: Problem, is_wrong: bool = False) -> str:
    """Write the completion of a problem.

    Args:
        problem: the problem.
        is_wrong: whether the sum of the first column is one too many.
    """
    ones = problem.a % 10 + problem.b % 10 + is_wrong
    carry, last = divmod(ones, 10)
    tens = problem.a // 10 + problem.b // 10 + carry
    columns = (
        f"{problem.a % 10} + {problem.b % 10} = {spaced(ones)}",
        f"{problem.a // 10} + {problem.b // 10}{f' + {carry}' if carry else ''} = {spaced(tens)}",
    )
    return f" <think> {' , '.join(columns)} </think> {spaced(10 * tens + last)}"


def examples() -> Iterator[str]:
    """Yield a text of each problem with its completion, always the same in the same order."""
    rng = random.Random(SEED)
    problems = [Problem(a, b) for a in NUMBERS for b in NUMBERS]
    rng.shuffle(problems)
    for problem in problems:
        yield problem.prompt + solve(problem, is_wrong=rng.random() < WRONG_SHARE)


def spaced(number: int) -> str:
    """Write a number with spaces between its digits."""
    return " ".join(str(number))
