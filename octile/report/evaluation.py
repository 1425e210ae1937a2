"""What `octile eval` reports: losses of models on the same text, and the difference of each from one of them.

Shapes: N sequences of the text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from octile.atomic_files import write_json
from octile.report.compare.intervals import (
    MIN_BOOTSTRAP_SAMPLES,
    TEXT_BLOCKS,
    Interval,
    block_means,
    bootstrap_interval,
)
from octile.report.run.curves import MAX_LOSS_FOR_PERPLEXITY
from octile.report.run.metrics import Floats
from octile.report.table import Table
from octile.text import format_bytes, format_count, format_percent, format_quantity

MIN_SHARE = 0.001  # of the stored values, in a format that is named
DIGITS = 3  # of a difference in percent


@dataclass(frozen=True)
class EvaluatedText:
    """The size of a text, and how much of it is evaluated.

    Attributes:
        name: what it is, such as "my.txt".
        tokens: its tokens, with those at the ends of documents.
        sequence_length: tokens of a sequence, of which the first is not predicted.
        sequences: the sequences that are evaluated, evenly spaced.
        all_sequences: the sequences of the text.
        n_bytes: its bytes in UTF-8; None where tokens without a loss are among its tokens.
    """

    name: str
    tokens: int
    sequence_length: int
    sequences: int
    all_sequences: int
    n_bytes: int | None

    @property
    def bytes_per_token(self) -> float | None:
        """The bytes of a token; None where `n_bytes` is."""
        return None if self.n_bytes is None else self.n_bytes / self.tokens

    def __str__(self) -> str:
        """A line that says how much text there is."""
        size = "" if self.n_bytes is None else f"{format_bytes(self.n_bytes)}, "
        some = "" if self.sequences == self.all_sequences else f"{self.sequences:,} of "
        how = "" if self.sequences == self.all_sequences else ", evenly spaced"
        return (
            f"text: {self.name}, {size}{format_count(self.tokens, 'token')}; {some}"
            f"{format_count(self.all_sequences, 'sequence')} of {self.sequence_length:,} tokens{how}"
        )


@dataclass(frozen=True)
class EvaluatedModel:
    """A folder that is evaluated.

    Attributes:
        folder: the folder, as it was named.
        parameters: all parameters but those of multi-token prediction, which is not evaluated.
        active_parameters: those of them that a token uses, the whole embedding included.
        stored: the share of the stored values in each format, such as {"FP8": 0.9, "BF16": 0.1}, the largest first.
    """

    folder: str
    parameters: int
    active_parameters: int
    stored: Mapping[str, float]

    def __str__(self) -> str:
        """A line that says how large the model is, and how it is stored."""
        shown = {name: f"{share:.1%}" for name, share in self.stored.items() if share >= MIN_SHARE}
        shares = ", ".join(f"{share} {name}" for name, share in shown.items()) if len(shown) > 1 else "".join(shown)
        return (
            f"model: {self.folder}, {format_quantity(self.parameters)} parameters, "
            f"{format_quantity(self.active_parameters)} active per token; stored in {shares}"
        )


@dataclass(frozen=True)
class Difference:
    """The difference of two losses on the same sequences, as a fraction of the second.

    Attributes:
        fraction: (loss − loss of the other) / loss of the other.
        interval: the bootstrap's 95% interval over blocks of the text; None for fewer than six sequences.
    """

    fraction: float
    interval: Interval | None


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The losses of a model under a recipe.

    Attributes:
        model: the model.
        recipe: the recipe's name.
        is_own: whether the recipe is that of the folder's weights, in which `octile serve` computes.
        loss_sum_N: float64 [N], the summed losses of each sequence, in nats.
        labels_N: int64 [N], the predicted tokens of each sequence.
    """

    model: EvaluatedModel
    recipe: str
    is_own: bool
    loss_sum_N: Floats
    labels_N: npt.NDArray[np.int64]

    @property
    def title(self) -> str:
        """The recipe, and whether it is the folder's own."""
        return f"{self.recipe} (own)" if self.is_own else self.recipe

    @cached_property
    def loss(self) -> float:
        """The mean loss of a predicted token, in nats."""
        return float(self.loss_sum_N.sum() / self.labels_N.sum())

    @property
    def standard_error(self) -> float | None:
        """The standard error of `loss` over blocks of the text, in nats; None for a single sequence.

        It is that of a ratio, as sequences may have different numbers of predicted tokens.
        """
        blocks = block_means((self.loss_sum_N - self.loss * self.labels_N) / self.labels_N.mean())
        return float(blocks.std(ddof=1)) / math.sqrt(len(blocks)) if len(blocks) > 1 else None

    @property
    def perplexity(self) -> float | None:
        """The exponential of `loss`; None where `loss` is so large that it is meaningless, or no float."""
        return math.exp(self.loss) if self.loss < MAX_LOSS_FOR_PERPLEXITY else None

    def bits_per_byte(self, text: EvaluatedText) -> float | None:
        """`loss` in bits of a byte of the text; None where its bytes are not known."""
        return None if text.bytes_per_token is None else self.loss / math.log(2) / text.bytes_per_token

    def difference_from(self, other: Evaluation) -> Difference:
        """Compare with another evaluation on the same sequences.

        The interval is that of a ratio, linearized: if each loss is 1.01 times the other, it has no width.
        """
        ratio = self.loss / other.loss
        rest_N = (self.loss_sum_N - ratio * other.loss_sum_N) / self.labels_N.mean() / other.loss
        return Difference(ratio - 1, bootstrap_interval(block_means(ratio - 1 + rest_N)))


def evaluation_table(evaluations: Sequence[Evaluation], text: EvaluatedText, baseline: Evaluation | None) -> Table:
    """Return a row for each evaluation, with its difference from the baseline, if there is one."""
    has_folders = len({each.model.folder for each in evaluations}) > 1
    has_bytes = text.bytes_per_token is not None
    columns = ["folder"] * has_folders + ["recipe", "loss", "perplexity"] + ["bits per byte"] * has_bytes
    columns += [] if baseline is None else ["difference", "95% interval"]
    return Table(columns, [[*_cells(each, text, baseline, has_folders)] for each in evaluations])


def _cells(each: Evaluation, text: EvaluatedText, baseline: Evaluation | None, has_folders: bool) -> list[str]:
    error, bits = each.standard_error, each.bits_per_byte(text)
    cells = [each.model.folder] * has_folders + [each.title, f"{each.loss:.4f}"]
    cells[-1] += "" if error is None else f" ± {error:.4f}"
    cells += ["–" if each.perplexity is None else f"{each.perplexity:,.2f}"]
    cells += [] if bits is None else [f"{bits:.4f}"]
    if baseline is each:
        cells += ["", ""]
    elif baseline is not None:
        difference = each.difference_from(baseline)
        interval = difference.interval
        cells += [_percent(difference.fraction), "" if interval is None else _span(interval)]
    return cells


def explanations(evaluations: Sequence[Evaluation], baseline: Evaluation | None) -> list[str]:
    """Return the lines that say what the numbers of the table mean."""
    n = len(evaluations[0].labels_N)
    blocks = f"{TEXT_BLOCKS} blocks of neighboring sequences" if n >= 2 * TEXT_BLOCKS else format_count(n, "sequence")
    error = "" if n == 1 else f", ± its standard error over {blocks}"
    lines = [f"loss: nats per predicted token{error}"]
    if any(each.is_own for each in evaluations):
        lines.append("own: the recipe of the folder's weights, in which octile serve computes")
    if baseline is None:
        return [*lines, _how_to_compare(evaluations[0])]
    other = f"{baseline.model.folder} in {baseline.recipe}"
    lines.append(f"difference: from the loss of {other}, as a share of it, on the same sequences")
    if n < MIN_BOOTSTRAP_SAMPLES:
        lines.append(f"95% interval: left out, since it needs {MIN_BOOTSTRAP_SAMPLES} sequences, not {n}")
    else:
        lines.append(
            f"95% interval: of the difference of these weights on other text of this kind (a bootstrap over {blocks}), "
            "not over training seeds"
        )
    if baseline.model is evaluations[0].model and "FP8" in baseline.model.stored:
        lines.append(
            "both losses are of the FP8 weights, so the difference leaves out what rounding the weights costs: "
            "--against FOLDER, from which they were converted, includes it"
        )
    return lines


def _how_to_compare(evaluation: Evaluation) -> str:
    """Say how to measure what FP8 costs."""
    if "FP8" in evaluation.model.stored:
        return "what FP8 costs: --against FOLDER, the BF16 model from which these weights were converted"
    return "what FP8 would cost: --recipes bf16,deepseek_v3"


def _span(interval: Interval) -> str:
    return f"{_percent(interval.low).removesuffix('%')} … {_percent(interval.high)}"


def _percent(fraction: float) -> str:
    return format_percent(fraction, DIGITS)


def write_evaluations(
    path: Path,
    evaluations: Sequence[Evaluation],
    text: EvaluatedText,
    baseline: Evaluation | None,
    machine: Mapping[str, Any],
) -> None:
    """Write evaluations, their text, and the machine that they were measured on, as JSON; make the file's folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        path,
        {
            "machine": machine,
            "text": {**vars(text), "bytes_per_token": text.bytes_per_token},
            "results": [_result(each, text, baseline) for each in evaluations],
        },
    )


def _result(each: Evaluation, text: EvaluatedText, baseline: Evaluation | None) -> dict[str, Any]:
    compared = None
    if baseline is not None and baseline is not each:
        difference = each.difference_from(baseline)
        interval = difference.interval
        compared = {
            "folder": baseline.model.folder,
            "recipe": baseline.recipe,
            "difference": difference.fraction,
            "interval_over_text": None if interval is None else [interval.low, interval.high],
        }
    return {
        **vars(each.model),
        "recipe": each.recipe,
        "is_own_recipe": each.is_own,
        "loss": each.loss,
        "standard_error": each.standard_error,
        "perplexity": each.perplexity,
        "bits_per_byte": each.bits_per_byte(text),
        "compared_with": compared,
    }
