"""A word of the command line as the value of an annotation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from octile.options.fields import Option, members, without_marks


class OptionError(ValueError):
    """An option is unknown, missing or has a wrong value.

    Args:
        option: what a user types, such as "--steps".
        reason: what is wrong or needed, as it follows the option in a sentence.
        value: the word that was given instead, if the reason does not name it.

    Attributes:
        option, reason, value: as above.
    """

    def __init__(self, option: str, reason: str, value: str | None = None):
        super().__init__(f"{option} {reason}" if value is None else f"{option} {reason}, not {value!r}")
        self.option, self.reason, self.value = option, reason, value


def value_of(option: Option, words: Sequence[str]) -> Any:
    """Convert the words that are given for an option. Whether a number is in its range is not checked here.

    Raises:
        OptionError: a word is not what the option needs.
    """
    kinds = members(option.annotation)
    if type(None) in kinds and list(words) == ["None"]:
        return None
    scalars = [kind for kind in kinds if get_origin(kind) is not tuple and kind is not type(None)]
    if len(words) == 1 and scalars:
        return _scalar(option.name, words[0], scalars[0])
    items = get_args(next(kind for kind in kinds if get_origin(kind) is tuple))
    kinds_of_items = items[:1] * len(words) if items[-1] is Ellipsis else items
    return tuple(
        _scalar(option.name, word, without_marks(kind)) for word, kind in zip(words, kinds_of_items, strict=True)
    )


def _scalar(name: str, word: str, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        choices = {str(choice): choice for choice in get_args(kind)}
        if word not in choices:
            alike = [choice for choice in choices if choice.lower() == word.lower()]  # octile prints DualPipeV
            if len(alike) != 1:
                raise OptionError(name, f"must be one of {', '.join(choices)}", word)
            word = alike[0]
        return choices[word]
    if kind is bool:
        return word == "True"
    if kind is Path and not word:
        raise OptionError(name, "is empty: name a path")
    try:
        return kind(word)
    except ValueError:
        raise OptionError(name, f"must be {'a whole number' if kind is int else 'a number'}", word) from None
