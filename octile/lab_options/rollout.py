"""The options of `octile lab rollout`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from octile.options import Positional
from octile.validation import Range, check_fields

Mode = Literal["exact", "batch_invariant", "default"]


@dataclass(frozen=True)
class Options:
    """Compare the log-probabilities of a served model with those of a training forward pass, token by token.

    Attributes:
        model: a run folder, or the Hugging Face folder of a DeepSeek model.
        mode: how the engine computes: exact, batch_invariant or default. If not given, exact for weights of the recipe
            exact, and default for others.
        tokens: decoded tokens to compare, at least; each text has as many as new_tokens says.
        new_tokens: decoded tokens of a text. Prompts are cut to what these leave of the model's context.
        drafts: draft tokens per request and step at most.
        max_batch: texts that the engine decodes at once.
        max_step_tokens: tokens of one forward pass of the engine; longer prompts are prefilled in chunks.
        text: the text that prompts are cut from: a text file, a folder, hf:NAME, stdlib or packages.
        seed: determines prompts and samples.
        record: a file for octile lab recompute, with the texts and the operators of a training forward pass.
        json: print JSON.

    Raises:
        TypeError, ValueError: an option has another type or is outside its range.
    """

    model: Positional[Path]
    mode: Mode | None = None
    tokens: Annotated[int, Range(at_least=1, at_most=2**31)] = 2000
    new_tokens: Annotated[int, Range(at_least=1, at_most=2**20)] = 64
    drafts: Annotated[int, Range(at_least=0, at_most=7)] = 0
    max_batch: Annotated[int, Range(at_least=1, at_most=4096)] = 32
    max_step_tokens: Annotated[int, Range(at_least=1, at_most=2**20)] = 512
    text: str = "stdlib"
    seed: int = 0
    record: Path | None = None
    json: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
