"""The runs of `octile compare`: BF16 with two seeds or more, and every recipe with the same seeds.

A recipe starts from the initial weights of the BF16 run of its seed and sees the same batches. Two BF16 runs that
differ only in their seed end at different losses; a recipe's gap to BF16 that is smaller than this noise band says
nothing. `octile.report.compare.result` defines what is measured and what follows from it.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from octile.checkpoint.files import explaining_failures
from octile.command_text import quoted_path
from octile.extras import require
from octile.parallel.device import pick_device
from octile.parallel.ranks import Ranks
from octile.report.compare.file import COMPARE_FILE, write_result
from octile.report.compare.page import write_compare_report
from octile.report.compare.result import BAR, MIN_STEPS, CompareResult
from octile.report.compare.summary import notes, planned_pairs, verdict_sentence
from octile.report.compare.tables import format_compare_table, format_details_table
from octile.report.compare.token_differences import TokenDifferences, token_differences
from octile.report.machine import describe_machine, machine
from octile.report.run.metrics import Floats
from octile.signals import Stopped, stop_requests
from octile.train.compare.comparison import BASELINE, Comparison, baseline_seeds
from octile.train.compare.gradient_check import parse_steps
from octile.train.compare.run import ComparedRun, train_compared_run
from octile.train.compare.visible_tokens import visible_token
from octile.train.config import TrainConfig, describe_changes, describe_settings
from octile.train.data.batches import validation_windows
from octile.train.data.corpus import check_source
from octile.train.data.examples import is_examples
from octile.train.data.packed_tokens import PackedTokens
from octile.train.data.token_store import TokenStore
from octile.train.memory.check import check_memory
from octile.train.run.console import RunConsole
from octile.train.run.duration import check_duration
from octile.train.run.folder import COMPARISON, DATA, check_unused, lock_folder, new_folder
from octile.train.run.recipe_check import check_recipe
from octile.train.run.tokens import open_tokens, print_passes
from octile.validation import distinct_names

RUNS = "runs"  # the folder in which the runs of a comparison save their states and results
FREQUENCY_TOKENS = 10_000_000  # tokens of the training text in which the frequencies of tokens are counted


def compare(
    config: TrainConfig,
    recipes: tuple[str, ...],
    out: Path | None,
    console: RunConsole,
    seeds: tuple[int, ...] = (),
    gradient_steps: str = "start,middle,end",
    resume: bool = False,
) -> CompareResult:
    """Train BF16 and the recipes, and update out/report.html and out/compare.json after each run.

    A signal ends the comparison after the current step. With `resume` finished runs are read, and the interrupted one
    continues.

    Args:
        config: the configuration of every run, except for recipe and seed.
        recipes: names of recipes or .toml files; "bf16" is always trained and need not be named.
        out: the folder for the results; chosen under runs/ if not given.
        console: where progress is printed.
        seeds: every recipe is trained with each of them; with config.seed alone if empty. BF16 is trained with the same
            seeds, but with two at least.
        gradient_steps: the steps of each recipe's first run at which its gradients are compared with BF16's, in the
            form that `parse_steps` reads.
        resume: continue the comparison in `out`, which must have been begun with the same arguments.

    Raises:
        ImportError: a package of the extras `train` or `report` is missing.
        FileExistsError: out holds a comparison or a run already, or another process works there.
        FileNotFoundError: there is no comparison to resume.
        ValueError: a recipe is unknown, named twice or does not take a size of the model; a seed or a step is
            impossible; or the data cannot be used. A new comparison takes too long on a CPU, or the one to resume has
            other arguments.
        Stopped: Ctrl-C or SIGTERM ended the comparison early.
    """
    require("tokenizers", "filelock", extra="train")
    require("matplotlib", "jinja2", extra="report")  # now, not when the report is written
    recipes = tuple(name for name in distinct_names("recipes", recipes) if name != BASELINE)
    stored = _stored(out) if resume else None
    texts: Mapping[str, str] = {} if stored is None else stored.recipe_texts
    named = {name: replace(config, recipe=name, recipe_text=texts.get(name)).with_file_texts() for name in recipes}
    configs = {short: replace(named[name], recipe=short) for name, short in _short_names(recipes).items()}
    for each in configs.values():
        check_recipe(each)
    seeds = seeds or (config.seed,)
    baselines = [replace(config, recipe=BASELINE, seed=seed) for seed in baseline_seeds(seeds)]
    texts = {name: each.recipe_text for name, each in named.items() if each.recipe_text is not None}
    comparison = Comparison(config, recipes, seeds, gradient_steps, texts)
    if stored is not None and (changes := stored.changes(comparison)):
        raise ValueError(f"a resumed comparison keeps its settings: {describe_changes(changes)} in {out}")
    steps = parse_steps(gradient_steps, config.steps)
    with console.stopped_before("training"):
        if stored is not None and out is not None:
            console.print(
                f"settings from {out / COMPARISON}: recipes {', '.join(recipes) or BASELINE}, "
                f"seeds {', '.join(map(str, seeds))}, gradient_steps {gradient_steps}, "
                f"{describe_settings(config, ('preset',))}"
            )
        device = pick_device(config.device)
        duration = _check_new(config, device, len(baselines) + len(configs) * len(seeds)) if stored is None else None
        for each in (baselines[0], *configs.values()):
            check_memory(each, device, is_train=False)
        if duration:
            console.print(duration)
        if recipes and config.steps >= MIN_STEPS:
            console.print(planned_pairs(len(seeds), BAR))
    is_new = out is None
    out = out or new_folder(Path("runs"), f"compare-{config.preset}")
    if stored is None:
        check_unused(out)
    with lock_folder(out, is_new):
        try:
            with console.stopped_before("training"):
                store = open_tokens(config, out / DATA, resume, console, Ranks.alone())
                print_passes(config, store, console)
        except KeyboardInterrupt as interrupt:
            how = "" if resume else ", without --resume"
            raise Stopped.by(interrupt, f"stopped before the first run: start the same command again{how}") from None
        comparison.write(out)
        then = f"to continue: octile compare --resume --out {quoted_path(out)}"
        try:
            with (
                explaining_failures(lambda: then),
                stop_requests(console.acknowledge_stop) as stop,
                console.stopped_by_its_reader(stop),
            ):
                return _compare(comparison, baselines, configs, store, out, console, steps, stop)
        except Stopped as stopped:
            raise Stopped(f"{stopped}; {then}", stopped.number) from None


def _check_new(config: TrainConfig, device: torch.device, runs: int) -> str | None:
    """Check the data and the time of a new comparison; return what to say about its duration.

    Raises:
        ValueError: the data cannot be used, or the comparison takes too long on a CPU.
    """
    if is_examples(config.data):
        raise ValueError(
            f"data {config.data!r} holds examples, on which runs are not compared: name a text or a folder"
        )
    check_source(config.data)
    return check_duration(config, device, runs=runs)


def _stored(out: Path | None) -> Comparison:
    """The comparison to resume."""
    if out is None:
        raise ValueError("out is not given: --resume needs --out FOLDER, the comparison to continue")
    return Comparison.read(out)


def _short_names(recipes: tuple[str, ...]) -> dict[str, str]:
    """Map each recipe to its short name: a file's shortest unique end of its path; other names stay as they are."""
    files = [name for name in recipes if name.endswith(".toml")]

    def end(name: str, parts: int) -> str:
        return str(Path(*Path(name).parts[-parts:]))

    def short(name: str) -> str:
        others = [other for other in files if other != name]
        enough = (n for n in range(1, len(Path(name).parts)) if all(end(o, n) != end(name, n) for o in others))
        return end(name, next(enough, len(Path(name).parts)))

    return {name: short(name) if name in files else name for name in recipes}


def _compare(
    comparison: Comparison,
    baselines: list[TrainConfig],
    recipes: dict[str, TrainConfig],
    store: TokenStore,
    out: Path,
    console: RunConsole,
    gradient_steps: tuple[int, ...],
    stop: list[int],
) -> CompareResult:
    config, seeds = comparison.config, comparison.seeds
    measured_on = machine(pick_device(config.device))

    def write(result: CompareResult) -> Path:
        write_result(out / COMPARE_FILE, result, measured_on)
        return write_compare_report(out, result)

    def run(config: TrainConfig, name: str, at_steps: tuple[int, ...] = ()) -> ComparedRun:
        gc.collect()  # the trainer of the run before is part of a reference cycle, and holds as much memory as this one
        return train_compared_run(config, store, console, at_steps, out / RUNS / f"{name}-seed{config.seed}", stop)

    bf16 = {c.seed: run(c, BASELINE) for c in baselines}
    first, other, *more = (each.curve for each in bf16.values())
    result = CompareResult(
        config.preset,
        first,
        other,
        (),
        machine=describe_machine(measured_on),
        config=asdict(config),
        bf16_more_seeds=tuple(more),
        recipe_files={name: c.recipe_text for name, c in recipes.items() if c.recipe_text is not None},
    )
    report = write(result)
    for number, (name, with_recipe) in enumerate(recipes.items(), start=1):
        runs: dict[int, ComparedRun] = {}
        for seed in seeds:
            at_steps = gradient_steps if seed == seeds[0] else ()
            runs[seed] = run(replace(with_recipe, seed=seed), f"{number}-{Path(name).stem}", at_steps)
            result = replace(
                result,
                recipes=(*result.recipes, runs[seed].curve),
                gradients=(*result.gradients, *runs[seed].gradients),
            )
            report = write(result)
        result = replace(result, tokens=(*result.tokens, *_token_differences(name, runs, bf16, store, config)))
        report = write(result)
    console.console.print(format_compare_table(result))
    if recipes:
        console.console.print(format_details_table(result))
    for line in (verdict_sentence(result), *notes(result)):
        console.print(line)
    console.print(f"report: {report}")
    return result


def _token_differences(
    name: str, runs: dict[int, ComparedRun], bf16: dict[int, ComparedRun], store: TokenStore, config: TrainConfig
) -> tuple[TokenDifferences, ...]:
    """The differences of one recipe; empty if a run diverged, whose last losses are not those of a trained model."""
    first, other, *_ = bf16.values()
    needed = [first, other, *runs.values(), *(bf16[seed] for seed in runs)]
    if any(run.token_losses_NS is None for run in needed):
        return ()

    def losses(run: ComparedRun) -> Floats:
        assert run.token_losses_NS is not None
        return run.token_losses_NS.double().numpy()

    assert not isinstance(store.train, PackedTokens)  # `_check_new` refuses examples
    counted = store.train[:FREQUENCY_TOKENS]
    found = token_differences(
        name,
        validation_windows(store.val, config.sequence_length - 1, config.val_sequences)[:, 1:].numpy(),
        [(losses(run), losses(bf16[seed])) for seed, run in runs.items()],
        (losses(other), losses(first)),
        np.bincount(counted, minlength=config.model.vocab_size) * 1e6 / len(counted),
        partial(visible_token, store.tokenizer),
        lambda token: store.tokenizer.decode([token]),
    )
    return (found,)
