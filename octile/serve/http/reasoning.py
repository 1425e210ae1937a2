"""Thinking as DeepSeek-R1 writes it: `<think>`, a thought, `</think>`, and the answer."""

from __future__ import annotations

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
