"""`octile lab recompute`: whether a CPU computes what another machine has recorded, operator by operator."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from octile.lab_options.recompute import Options
from octile.report.console import Console, progress_bar
from octile.report.table import Table, screen_table
from octile.text import format_count

if TYPE_CHECKING:
    from octile.lab.operators import Comparison, Compute, Recording
    from octile.models.deepseek_v3 import DeepseekV3


class Way(NamedTuple):
    """How operators are computed.

    Attributes:
        name: for tables.
        compute: computes an operator.
        context: is entered meanwhile.
    """

    name: str
    compute: Compute
    context: Callable[[], AbstractContextManager[None]]


class Agreement(NamedTuple):
    """How far log-probabilities agree with the recorded ones.

    Attributes:
        sums: the way in which they were computed.
        tokens, equal: how many there are, and how many have equal bits.
        mean, largest: the mean and the largest magnitude of the differences, in nats.
    """

    sums: str
    tokens: int
    equal: int
    mean: float
    largest: float


def run(options: Options) -> None:
    """Recompute operators and log-probabilities, and show how far they agree.

    Raises:
        FileNotFoundError, ValueError: the model or the recording cannot be read, or they do not belong together.
    """
    from octile.checkpoint.hugging_face import load
    from octile.lab.operators import Recording, recompute, weights_digest

    recording, used = Recording.load(options.recording), ways(options.functions)
    model = load(options.model)
    if weights_digest(model) != recording.weights:
        raise ValueError(f"recording {options.recording} is not of {options.model}: the weights are others")
    agreements, comparisons = [], []
    for way in used:
        with way.context():
            with progress_bar(f"operators, {way.name}", len(recording.calls), options.json) as advance:
                comparisons.append(recompute(recording, model, way.compute, advance))
            with progress_bar(f"texts, {way.name}", len(recording.texts), options.json) as advance:
                agreements.append(_compare(recording, model, way, advance))
    if options.json:
        rows = [[asdict(each) for each in found] for found in comparisons]
        names = [way.name for way in used]
        found = {
            "device": recording.device,
            "log_probs": [each._asdict() for each in agreements],
            "operators": dict(zip(names, rows, strict=True)),
        }
        print(json.dumps(found, indent=1))
        return
    console = Console()
    console.print_line(
        f"recorded on {recording.device}: {format_count(len(recording.texts), 'text')}, "
        f"{format_count(len(recording.calls), 'operator call')}"
    )
    console.print(screen_table(log_probs_table(agreements)))
    names = [way.name for way in used]
    console.print(screen_table(operators_table(names, comparisons)))
    console.print_line(describe(names[-1], comparisons[-1]))


def ways(functions: Path | None) -> Sequence[Way]:
    """Return how operators are computed: as on this machine, with Hopper's sums, and with a GPU's functions, too.

    Raises:
        FileNotFoundError, ValueError: the functions cannot be read.
    """
    from octile.lab import hopper_sums
    from octile.lab.hopper_functions import HopperFunctions
    from octile.lab.operators import as_called

    found = [
        Way("this CPU's", as_called, nullcontext),
        Way("Hopper's sums", hopper_sums.compute, hopper_sums.hopper_fp8),
    ]
    if functions is not None:
        compute = HopperFunctions.load(functions).compute
        found.append(Way("sums and functions", compute, hopper_sums.hopper_fp8))
    return found


def _compare(recording: Recording, model: DeepseekV3, way: Way, advance: Callable[[int], object]) -> Agreement:
    """Compute the log-probabilities of all texts, and compare them with the recorded ones."""
    from octile.lab.operators import count_equal, log_probs

    dtype = torch.float32 if recording.device == "cpu" else torch.bfloat16  # of activations there
    expected, actual = list[Tensor](), list[Tensor]()
    for text in recording.texts:
        expected.append(torch.tensor([*text.read, *text.decoded], dtype=torch.float32))
        actual.append(log_probs(model, text, way.compute, dtype))
        advance(1)
    return Agreement(way.name, *count_equal(expected, actual))


def log_probs_table(found: Sequence[Agreement]) -> Table:
    """Return the agreement of log-probabilities as a table."""
    columns = ("log-probabilities, sums", "compared", "equal bits", "mean |Δ|, nats", "largest |Δ|")
    rows = [
        (each.sums, f"{each.tokens:,}", f"{each.equal:,}", f"{each.mean:.2g}", f"{each.largest:.2g}") for each in found
    ]
    return Table(columns, rows)


def operators_table(names: Sequence[str], comparisons: Sequence[Sequence[Comparison]]) -> Table:
    """Return the operators that differ from what was recorded, as a table; the last row counts the others.

    Args:
        names: the ways in which they were computed.
        comparisons: all operators in each way. Neighbors and the largest difference are those of the last way.
    """
    columns = ("operator", "values", *(f"equal, {name}" for name in names), "neighbors", "largest |Δ|", "first in")
    rows: list[tuple[Any, ...]] = []
    equal = 0
    for found in zip(*comparisons, strict=True):
        if all(each.equal == each.values and each.error is None for each in found):
            equal += 1
            continue
        last = found[-1]
        first = next((each.first[1] for each in reversed(found) if each.first is not None), "–")
        row = (
            last.operator.removeprefix("octile."),
            f"{last.values:,}",
            *(each.error or f"{each.equal:,}" for each in found),
        )
        rows.append((*row, f"{last.near:,}", f"{last.largest:.1e}", first))
    if equal:
        rows.append((f"{equal} other results", "", *("all" for _ in names), "", "", ""))
    return Table(columns, rows)


def describe(name: str, comparisons: Sequence[Comparison]) -> str:
    """Say which operator is the first whose result differs, computed in the way of this name."""
    found = [(each.first, each) for each in comparisons if each.first is not None]
    if not found:
        return f"With {name} all operators have the recorded bits."
    (_, place), first = min(found, key=lambda pair: pair[0])
    operator = first.operator.removeprefix("octile.")
    return (
        f"With {name} the first operator with other bits is {operator}, in {place}. In all its calls "
        f"{first.values - first.equal:,} of {first.values:,} values differ."
    )
