"""The thought of a message, as DeepSeek-R1 writes it: `<think>`, a thought, `</think>`, and the answer."""

from __future__ import annotations

from enum import Enum, auto

BEGIN, END = "<think>", "</think>"


def ends_inside(prompt: str, continued: str = "") -> bool:
    """Whether a prompt ends within a thought.

    Args:
        prompt: its text.
        continued: the message that the model continues, with which the prompt ends. Its tags count; in other messages
            they are mere text.
    """
    begin, end = continued.rfind(BEGIN), continued.rfind(END)
    if begin != end:  # one of them is there
        return begin > end
    return prompt.rstrip().removesuffix(continued.strip()).rstrip().endswith(BEGIN)


class Thought(Enum):
    """Whether a message has a thought."""

    NONE = auto()
    BEGUN = auto()  # by the prompt, which ends within it
    POSSIBLE = auto()  # if the model begins one


def thought_after(prompt: str, continued: str = "") -> Thought:
    """Whether the message after a prompt has a thought; prompt and continued as in `ends_inside`."""
    if ends_inside(prompt, continued):
        return Thought.BEGUN
    return Thought.NONE if continued or prompt.rstrip().endswith(END) else Thought.POSSIBLE
