"""The work of `octile eval`: checks, then one model after the other, and what is printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from octile.checkpoint.files import check_output_file
from octile.parallel.device import pick_device
from octile.recipe import Recipe
from octile.report.console import Console, progress_bar
from octile.report.evaluation import Evaluation, evaluation_table, explanations, write_evaluations
from octile.report.machine import machine
from octile.report.table import screen_table
from octile.torchrun import check_one_process
from octile.train.data.corpus import is_path
from octile.train.data.token_store import Manifest
from octile.train.evaluation.command import Options
from octile.train.evaluation.folders import OWN, ModelFolder
from octile.train.evaluation.text import Sequences, TextTokens, check_data, open_text, sequence_length_of
from octile.validation import distinct_names

BASELINE = "bf16"  # which the other recipes are compared with, unless another folder is given
SEQUENCE_LENGTH = 1024  # tokens, where no run says another


def run(options: Options) -> None:
    """Evaluate in one process, and print the losses.

    Raises:
        ValueError: torchrun has started several processes, or as for `evaluate`.
        Exception: what `evaluate` raises.
    """
    check_one_process("octile eval")
    evaluate(options, Console())


def evaluate(options: Options, console: Console) -> None:
    """Evaluate a model under some recipes, and another one in its own, and print their losses.

    Args:
        options: what to evaluate.
        console: where the results are printed.

    Raises:
        FileNotFoundError: there is no model, no tokenizer, no text or no recipe of these names.
        ValueError: a recipe is unknown, named twice or not one of the model. The tokenizers differ. The text is too
            short, no text, or holds the file for the results. A sequence exceeds a context. The weights exceed the
            memory. A file is damaged.
        OSError: the file for the results cannot be written.
        FloatingPointError: a loss is NaN or Inf.
        MemoryError: there is no memory for a sequence.
    """
    device = pick_device(options.device)
    if options.json is not None:
        _check_json(options.json, options.data)
    names = _recipe_names(options.recipes)
    models = [ModelFolder.open(folder) for folder in (options.folder, options.against) if folder is not None]
    _check_tokenizers(models)
    jobs = {each: {name: each.recipe(name) for name in (names if each is models[0] else [OWN])} for each in models}
    for each, recipes in jobs.items():
        each.check_memory(recipes.values(), device)
    _check_context(options.sequence_length, models)
    run_data = next((each.run_data for each in models if each.run_data is not None), None)
    data = options.data if run_data is None or options.data is not None else str(run_data)
    if data is None:
        raise ValueError(
            f"data is not given, and {models[0].name} is no model of a run with held-out text: name a text"
        )
    check_data(data)
    with open_text(data, models[0].tokenizer) as text:
        _check_text(jobs, text, data)
        length = _sequence_length(options.sequence_length, models, text, run_data)
        sequences = Sequences.of(text, length, options.sequences)
        size = sequences.size()
        for line in (*(each.describe() for each in models), size, *text.notes()):
            console.print_line(str(line))
        console.print_line(f"{_where(device)}\n")
        found: list[Evaluation] = []
        for each, recipes in jobs.items():
            with progress_bar(f"evaluating {each.name}", len(recipes) * len(sequences)) as advance:
                found += each.evaluate(sequences, recipes, device, advance)
    baseline = found[-1] if len(jobs) > 1 else _baseline(found)
    console.print(screen_table(evaluation_table(found, size, baseline)))
    console.print()
    for line in explanations(found, baseline):
        console.print_line(line)
    if options.json is not None:
        write_evaluations(options.json, found, size, baseline, machine(device))


def _check_json(file: Path, data: str | None) -> None:
    """Refuse a file that cannot be written, or that is a part of the text."""
    check_output_file("json", file)
    if data is not None and is_path(data) and file.exists() and file.resolve().is_relative_to(Path(data).resolve()):
        raise ValueError(f"json {str(file)!r} is a file of data {data!r}, which it would replace: name another file")


def _recipe_names(recipes: str) -> list[str]:
    """Read the names of recipes, OWN first: the others replace it in the model."""
    names = distinct_names("recipes", recipes.split(","))
    if not names:
        raise ValueError("recipes is empty: name recipes, separated by commas")
    return sorted(names, key=lambda name: name != OWN)


def _check_tokenizers(models: Sequence[ModelFolder]) -> None:
    """Refuse models of different tokenizers."""
    first, *others = models
    for other in others:
        if other.tokenizer.fingerprint != first.tokenizer.fingerprint:
            raise ValueError(
                f"against must have the tokenizer of {first.name}, but {other.name} has another one: their losses "
                "would be of other tokens"
            )


def _check_context(sequence_length: int | None, models: Sequence[ModelFolder]) -> None:
    """Refuse sequences that are longer than the context of a model."""
    shortest = min(models, key=lambda each: each.context)
    if sequence_length is not None and sequence_length > shortest.context:
        raise ValueError(
            f"sequence_length {sequence_length} exceeds the context of {shortest.name}, max_position_embeddings "
            f"{shortest.context}"
        )


def _check_text(jobs: Mapping[ModelFolder, Mapping[str, Recipe]], text: TextTokens, data: str) -> None:
    """Refuse tokens of another tokenizer, and packed examples that a recipe does not take."""
    first = next(iter(jobs))
    if text.tokenizer.fingerprint != first.tokenizer.fingerprint:
        raise ValueError(f"data {data!r} was encoded by another tokenizer than that of {first.name}")
    if text.is_packed:
        for each, recipes in jobs.items():
            each.check_packed(recipes.values())


def _sequence_length(given: int | None, models: Sequence[ModelFolder], text: TextTokens, run_data: Path | None) -> int:
    """Return the tokens of a sequence: as given, as in the token store, as in the run of a model, or the usual number.

    Raises:
        ValueError: it exceeds the context of a model, or it is given for packed examples and is not theirs.
    """
    stored = text.sequence_length
    if stored is None and run_data is not None:
        stored = sequence_length_of(Manifest.read(run_data))
    length = given or stored or min(SEQUENCE_LENGTH, *(each.context for each in models))
    if text.is_packed and length != stored:
        raise ValueError(f"sequence_length must be {stored}, as {text.name} are packed, not {length}")
    _check_context(length, models)
    return length


def _baseline(found: Sequence[Evaluation]) -> Evaluation | None:
    """Return the evaluation in BF16 with which others are compared, if there are both."""
    baseline = next((each for each in found if each.recipe == BASELINE), None)
    return baseline if len(found) > 1 else None


def _where(device: torch.device) -> str:
    if device.type == "cuda":
        return f"computed on {torch.cuda.get_device_name(device)}"
    return "computed on the CPU, where what is not quantized is in FP32"
