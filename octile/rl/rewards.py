"""Rewards of completions: accuracy and format, as DeepSeek-R1-Zero has them, or a function in a user's file.

    accuracy    1 if what follows `</think>` is the answer
    format      1 if the completion is `<think>…</think>` and then an answer

The reward is 0.9 · accuracy + 0.1 · format, so that format alone earns little. DeepSeek-R1 publishes no factors.

A user's file defines `reward(prompt: str, completion: str, answer: str) -> float`.

Source: DeepSeek-R1 (arXiv 2501.12948) §2.2.2.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path

from octile.validation import quoted

Reward = Callable[[str, str, str], float]  # of a prompt, its completion, and the right answer

FUNCTION = "reward"  # of a user's file
MAX_REWARD = 1e15  # magnitude up to which FP32 can sum the squares of a group's rewards
FORMAT = re.compile(r"\s*<think>(.*)</think>(.*)", re.DOTALL)


def accuracy(prompt: str, completion: str, answer: str) -> float:
    """Return 1 if what follows the last `</think>` is the answer, without the space around both; else 0."""
    _, end, found = completion.rpartition("</think>")
    return float(bool(end) and found.strip() == answer.strip())


def has_format(prompt: str, completion: str, answer: str) -> float:
    """Return 1 if a completion is one `<think>…</think>` and then an answer, neither of them empty; else 0."""
    found = FORMAT.fullmatch(completion)
    is_once = completion.count("<think>") == completion.count("</think>") == 1
    return float(found is not None and is_once and all(part.strip() for part in found.groups()))


BUILT_IN: Mapping[str, tuple[float, Reward]] = {"accuracy": (0.9, accuracy), "format": (0.1, has_format)}


class Rewards:
    """The rewards of a run.

    Args:
        file: a Python file that defines `reward`; None: accuracy and format.

    Attributes:
        parts: the names of what a reward is the weighted sum of; none for a user's function.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: as for `load_reward`.
    """

    def __init__(self, file: Path | None = None):
        self._file = file
        self._function = None if file is None else load_reward(file)
        self.parts = tuple(BUILT_IN) if file is None else ()

    def __call__(self, prompt: str, completion: str, answer: str) -> dict[str, float]:
        """Return the reward of a completion as "reward", and its parts by their names.

        Raises:
            RuntimeError: a user's function raised an exception; the message names the file, the prompt and the
                exception.
            ValueError: it returned NaN, Inf, or a number of a magnitude above MAX_REWARD.
            TypeError: it returned no number.
        """
        if self._function is None:
            values = {name: part(prompt, completion, answer) for name, (_, part) in BUILT_IN.items()}
            return {"reward": sum(weight * values[name] for name, (weight, _) in BUILT_IN.items()), **values}
        where = f"reward {str(self._file)!r} for the prompt {quoted(prompt)}"
        try:
            value = self._function(prompt, completion, answer)
        except (Exception, SystemExit) as error:  # an exit would end the run as if it had finished
            raise RuntimeError(f"{where} raised {type(error).__name__}: {error}") from error
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{where} must return a number, not {quoted(value)}")
        if not abs(value) <= MAX_REWARD:  # or it is NaN
            raise ValueError(f"{where} must return a finite number up to ±{MAX_REWARD:g}, not {quoted(value)}")
        return {"reward": float(value)}


def load_reward(file: Path) -> Reward:
    """Load the function `reward` of a Python file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file cannot be run, or defines no function `reward` that is called with three arguments.
    """
    if not file.is_file():
        raise FileNotFoundError(f"reward {str(file)!r} does not exist: name a Python file")
    spec = importlib.util.spec_from_file_location("octile_reward", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"reward {str(file)!r} must be a Python file, whose name ends in .py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses and pickle look it up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise ValueError(f"reward {str(file)!r} cannot be run: {type(error).__name__}: {error}") from error
    function: Reward | None = getattr(module, FUNCTION, None)
    if not callable(function):
        raise ValueError(f"reward {str(file)!r} must define a function {FUNCTION}(prompt, completion, answer)")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"reward {str(file)!r} must define {FUNCTION} with def, not with async def")
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function in C may have none; then the first call shows what it takes
        return function
    try:
        signature.bind("", "", "")
    except TypeError as error:
        raise ValueError(
            f"reward {str(file)!r} must define {FUNCTION} for the three arguments prompt, completion, answer, not "
            f"{FUNCTION}{signature}: {error}"
        ) from None
    return function
