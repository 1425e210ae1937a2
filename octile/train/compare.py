"""`octile compare`: BF16 with two seeds or more, and every recipe from BF16's weights on BF16's batches, seed by seed.

A gap means nothing without the noise: two BF16 runs that differ in their seed alone end some way apart, and that is the
band in which a recipe's gap says nothing. What is measured, and what follows from it: `octile.report.compare.result`.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np

from octile.extras import require
from octile.report.compare.file import COMPARE_FILE, write_result
from octile.report.compare.page import write_compare_report
from octile.report.compare.result import CompareResult
from octile.report.compare.speed_notes import speed_notes
from octile.report.compare.summary import verdict_sentence
from octile.report.compare.tables import format_compare_table, format_details_table
from octile.report.compare.token_differences import TokenDifferences, token_differences
from octile.report.machine import in_words, machine
from octile.report.run.metrics import Floats
from octile.train.batches import validation
from octile.train.compared_run import ComparedRun, compared_run
from octile.train.config import TrainConfig
from octile.train.gradient_check import chosen_steps
from octile.train.loop import pick_device, prepare_tokens
from octile.train.memory import check_memory
from octile.train.run_folder import check_unused, new_folder
from octile.train.run_lock import DATA, taken
from octile.train.run_recipe import recipe_of, with_recipe_text
from octile.train.screen import Screen
from octile.train.seeds import baseline_seeds
from octile.train.token_losses import readable
from octile.train.token_store import TokenStore

FREQUENCY_TOKENS = 10_000_000  # of the training text, in which tokens are counted


def compare(
    config: TrainConfig,
    recipes: tuple[str, ...],
    out: Path | None,
    screen: Screen,
    seeds: tuple[int, ...] = (),
    gradient_steps: str = "start,middle,end",
) -> CompareResult:
    """Trains BF16 and the recipes; after each model out/report.html and out/compare.json show what there is.

    Args:
        config: of every run, but for recipe and seed.
        recipes: names; "bf16" is always there and need not be named.
        out: the folder for the results; chosen under runs/ if not given.
        screen: where progress is shown.
        seeds: every recipe is trained with each; config.seed alone if empty. BF16 has these, and never fewer than two.
        gradient_steps: of each recipe's first run, at which gradients are held against BF16's; see `chosen_steps`.

    Raises:
        FileExistsError: out holds a comparison or a run already, or another process makes one there.
        ValueError: a recipe is unknown, a seed or a step is impossible, or the data do not serve.
    """
    require("tokenizers", "filelock", extra="train")
    require("matplotlib", "jinja2", extra="report")  # now, not when the report is written
    recipes = tuple(name for name in dict.fromkeys(r.strip() for r in recipes) if name not in ("", "bf16"))
    texts = {name: with_recipe_text(replace(config, recipe=name)) for name in recipes}
    configs = {short: replace(texts[name], recipe=short) for name, short in _short_names(recipes).items()}
    for each in configs.values():
        recipe_of(each)  # an unknown one is refused before any work
    chosen = chosen_steps(gradient_steps, config.steps)
    check_memory(config, pick_device(config.device))
    out = out or new_folder(Path("runs"), f"compare-{config.preset}")
    check_unused(out)
    with taken(out):
        return _compare(config, configs, out, screen, seeds or (config.seed,), chosen)


def _short_names(recipes: tuple[str, ...]) -> dict[str, str]:
    """Recipes' files by the end of their paths that tells them apart; names stay as they are."""
    files = [name for name in recipes if name.endswith(".toml")]

    def end(name: str, parts: int) -> str:
        return str(Path(*Path(name).parts[-parts:]))

    def short(name: str) -> str:
        others = [other for other in files if other != name]
        enough = (n for n in range(1, len(Path(name).parts)) if all(end(o, n) != end(name, n) for o in others))
        return end(name, next(enough, len(Path(name).parts)))

    return {name: short(name) if name in files else name for name in recipes}


def _compare(
    config: TrainConfig,
    recipes: dict[str, TrainConfig],
    out: Path,
    screen: Screen,
    seeds: tuple[int, ...],
    chosen: tuple[int, ...],
) -> CompareResult:
    baselines = [replace(config, recipe="bf16", seed=seed) for seed in baseline_seeds(seeds)]
    store = prepare_tokens(config, out / DATA, screen)
    measured_on = machine(pick_device(config.device))

    def write(result: CompareResult) -> Path:
        write_result(out / COMPARE_FILE, result, measured_on)
        return write_compare_report(out, result)

    bf16 = {c.seed: compared_run(c, store, screen) for c in baselines}
    first, other, *more = (run.curve for run in bf16.values())
    result = CompareResult(
        config.preset,
        first,
        other,
        (),
        machine=in_words(measured_on),
        config=asdict(config),
        bf16_more_seeds=tuple(more),
        recipe_files={name: c.recipe_text for name, c in recipes.items() if c.recipe_text is not None},
    )
    report = write(result)
    for name, with_recipe in recipes.items():
        runs: dict[int, ComparedRun] = {}
        for seed in seeds:
            asked = chosen if seed == seeds[0] else ()
            runs[seed] = run = compared_run(replace(with_recipe, seed=seed), store, screen, asked)
            result = replace(
                result, recipes=(*result.recipes, run.curve), gradients=(*result.gradients, *run.gradients)
            )
            report = write(result)
        result = replace(result, tokens=(*result.tokens, *_token_differences(name, runs, bf16, store, config)))
        report = write(result)
    screen.console.print(format_compare_table(result))
    if recipes:
        screen.console.print(format_details_table(result))
    for line in (verdict_sentence(result), *speed_notes(result)):
        screen.say(line)
    screen.say(f"report: {report}")
    return result


def _token_differences(
    name: str, runs: dict[int, ComparedRun], bf16: dict[int, ComparedRun], store: TokenStore, config: TrainConfig
) -> tuple[TokenDifferences, ...]:
    """One; none where a run broke, whose last losses are not those of a trained model."""
    first, other, *_ = bf16.values()
    needed = [first, other, *runs.values(), *(bf16[seed] for seed in runs)]
    if any(run.token_losses_NS is None for run in needed):
        return ()

    def losses(run: ComparedRun) -> Floats:
        assert run.token_losses_NS is not None
        return run.token_losses_NS.double().numpy()

    counted = store.train[:FREQUENCY_TOKENS]
    found = token_differences(
        name,
        validation(store.val, config.sequence_length - 1, config.val_sequences)[:, 1:].numpy(),
        [(losses(run), losses(bf16[seed])) for seed, run in runs.items()],
        (losses(other), losses(first)),
        np.bincount(counted, minlength=config.model.vocab_size) * 1e6 / len(counted),
        partial(readable, store.tokenizer),
        lambda token: store.tokenizer.decode([token]),
    )
    return (found,)
