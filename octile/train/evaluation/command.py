"""The options of `octile eval`, which loads no torch to check them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from octile.options import Positional
from octile.validation import Range, check_fields


@dataclass(frozen=True)
class Options:
    """Measure the loss of a model on a text, and how much more it is than that of another model, or in BF16.

    Attributes:
        folder: a run folder, or a Hugging Face folder of a DeepSeek model, in BF16 or FP8.
        against: the folder of another model, in its own recipe, with which the loss is compared on the same sequences,
            such as the BF16 folder from which octile convert has made an FP8 one.
        data: a text file, a folder, hf:NAME, stdlib or packages; or a run, or the folder or URL of a token store, of
            which the held-out part is used. If not given, that of the run that a folder is from.
        recipes: recipes in which the model computes, separated by commas. own is that of the folder's weights, in which
            octile serve computes. Without --against the losses are compared with that of bf16, if it is among them.
        sequence_length: tokens per sequence. If not given, as in the run that the data or a folder are from; if they
            are from none, 1,024, or the context if it is shorter.
        sequences: how many sequences are used, evenly spaced; all if not given.
        device: auto uses a GPU if there is one.
        json: also write the results to this file.

    Raises:
        TypeError, ValueError: an option has another type or is outside its range.
    """

    folder: Positional[Path]
    against: Path | None = None
    data: str | None = None
    recipes: str = "own"
    sequence_length: Annotated[int, Range(at_least=2)] | None = None
    sequences: Annotated[int, Range(at_least=1)] | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    json: Path | None = None

    def __post_init__(self) -> None:
        check_fields(self)
