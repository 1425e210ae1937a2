"""Prompts with their answers: those of a JSONL file, or the built-in additions.

Those of a step depend on the seed and the step's number alone.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from octile.chat.template import ChatTemplate, Rendering
from octile.train.data.arithmetic import NUMBERS, Problem, draw_problem
from octile.train.data.batches import permute
from octile.train.data.examples import check_encodable, read_lines, read_messages
from octile.validation import parse_json, quoted

TEXT = ("prompt", "answer")  # the fields of a line that are read
CONVERSATION = ("messages", "tools", "chat_template_kwargs", "answer")


class Prompt(NamedTuple):
    """A text to continue, and the right answer.

    Attributes:
        prompt: the text; of a conversation, what the chat template has written.
        answer: the right answer.
        tokens: those of a conversation, in which special tokens of the template are tokens; None: those of the text.
    """

    prompt: str
    answer: str
    tokens: tuple[int, ...] | None = None


class Prompts(Protocol):
    """Where the prompts of a run come from."""

    def of_step(self, step: int, count: int) -> list[Prompt]:
        """Return the prompts of a step, counted from 0."""
        ...

    def longest(self) -> Sequence[Prompt]:
        """Return prompts of which one has the most tokens of all."""
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

    def longest(self) -> list[Prompt]:
        """See `Prompts`."""
        problem = Problem(NUMBERS[-1], NUMBERS[-1])
        return [Prompt(problem.prompt, problem.answer)]


class FilePrompts:
    """The prompts of a JSONL file, all of them in another order in each epoch.

    Args:
        file: a line is {"prompt": …, "answer": …}, or a conversation, {"messages": […], "answer": …}, which may have
            "tools" and "chat_template_kwargs", too; further keys are ignored.
        seed: determines the order.
        template: writes conversations.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it has no prompt; or a line, which the message names, is not such an object, is longer than
            `octile.train.data.examples.MAX_LINE`, or has messages that the template refuses.
    """

    def __init__(self, file: Path, seed: int, template: ChatTemplate):
        if not file.is_file():
            raise FileNotFoundError(f"prompts {str(file)!r} does not exist: name a JSONL file")
        self._seed = seed
        name = f"prompts {str(file)!r}"
        self._prompts = [_read(line, f"{name}, line {number}", template) for number, line in read_lines(file, name)]
        if not self._prompts:
            raise ValueError(f"{name} has no line: each is a JSON object with prompt or messages, and answer")

    def of_step(self, step: int, count: int) -> list[Prompt]:
        """See `Prompts`."""
        found = []
        for number in range(step * count, (step + 1) * count):
            epoch, position = divmod(number, len(self._prompts))
            index = permute(np.array([position]), len(self._prompts), (self._seed, epoch))
            found.append(self._prompts[int(index[0])])
        return found

    def longest(self) -> list[Prompt]:
        """See `Prompts`."""
        return self._prompts


def _read(line: bytes, where: str, template: ChatTemplate) -> Prompt:
    value = parse_json(line, where)
    is_chat = value.get("messages") is not None
    if is_chat and value.get("prompt") is not None:
        raise ValueError(f"{where}: must have prompt or messages, not both")
    for name in ("answer",) if is_chat else TEXT:
        if not isinstance(value.get(name), str):
            found = quoted(value[name]) if name in value else "missing"
            hint = "; a conversation is called messages" if name == "prompt" else ""
            raise ValueError(f"{where}: {name} must be text, but it is {found}{hint}")
    try:
        for name in CONVERSATION if is_chat else TEXT:
            check_encodable(name, value.get(name))
        if is_chat:
            return _conversation(value, template)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return Prompt(value["prompt"], value["answer"])


def _conversation(value: Mapping[str, Any], template: ChatTemplate) -> Prompt:
    messages, tools, variables = read_messages(value)
    if messages[-1]["role"] == "assistant":
        raise ValueError("messages must end before the assistant's answer, which is sampled, but the last is one")
    rendered = template.prompt(messages, Rendering(tools, variables))
    return Prompt(rendered.text, value["answer"], tuple(rendered.tokens))
