"""The options of `octile lab preflight`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from octile.options import Positional
from octile.validation import Range, check_fields

MAX_SNR = 200  # dB, of the least SNR that is asked for, in either direction; FP32 has 150
MIN_BATCHES = 2  # with one, nothing tells how sure the advice is
MIN_SAMPLE = 16  # rows; with fewer the SNR of a GEMM is off by more than 2 dB (experiments/preflight)

Positive = Annotated[int, Range(at_least=1)]


@dataclass(frozen=True)
class Options:
    """Predict which layers of a model lose too much in 8 bits, and write a recipe that leaves them in BF16.

    Attributes:
        model: a run folder, of which the newest checkpoint is read, or the Hugging Face folder of a DeepSeek model.
        recipe: the recipe to check.
        text: the text that the model reads: a text file, a folder, hf:NAME, stdlib or packages.
        batches: the number of batches, at least 2, each of which is a prediction of its own.
        batch_size: the number of sequences in a batch.
        sequence_length: the number of tokens in a sequence.
        least_snr: a GEMM with a lower signal-to-noise ratio, in dB, is advised to stay in BF16.
        sample: the number of rows of each operand to multiply, at least 16.
        seed: the seed with which the rows are drawn.
        write: the recipe to write, for octile train --recipe.
        out: the page to write.
        json: print JSON and write no page.

    Raises:
        TypeError, ValueError: an option has another type or is outside its range.
    """

    model: Positional[Path]
    recipe: str = "deepseek_v3"
    text: str = "stdlib"
    batches: int = 4
    batch_size: Positive = 4
    sequence_length: Positive = 128
    least_snr: float = 20.0
    sample: int = 32
    seed: int = 0
    write: Path = Path("lab/recipe.toml")
    out: Path = Path("lab/preflight.html")
    json: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.batches < MIN_BATCHES:
            raise ValueError(f"batches must be at least {MIN_BATCHES}, not {self.batches}: only several can agree")
        if self.sample < MIN_SAMPLE:
            raise ValueError(
                f"sample must be at least {MIN_SAMPLE}, not {self.sample}: the advice would depend on the rows drawn"
            )
        if not abs(self.least_snr) <= MAX_SNR:
            raise ValueError(f"least_snr must be from -{MAX_SNR} to {MAX_SNR} dB, not {self.least_snr}")
