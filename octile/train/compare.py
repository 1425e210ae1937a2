"""`octile compare`: BF16 with two seeds, and every recipe from the first one's weights on the first one's batches.

A gap means nothing without the noise: two BF16 runs that differ in their seed alone end some way apart, and that is the
band in which a recipe's gap says nothing.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, replace
from pathlib import Path

from octile.checkpoint.files import write_text
from octile.recipe import Recipe
from octile.report.compare import CompareResult, Curve, format_compare_table, verdict_sentence, write_compare_report
from octile.report.machine import in_words, machine
from octile.train.config import TrainConfig
from octile.train.loop import pick_device, prepare_tokens
from octile.train.run_folder import free_place
from octile.train.screen import Screen
from octile.train.store import TokenStore
from octile.train.trainer import Trainer

RESULT = "compare.json"


def compare(config: TrainConfig, recipes: tuple[str, ...], out: Path | None, screen: Screen) -> CompareResult:
    """Trains 2 + len(recipes) models; after each one out/report.html and out/compare.json show what there is.

    Args:
        config: of every run, but for recipe and seed.
        recipes: names; "bf16" is always there and need not be named.
        out: the folder for the results; chosen under runs/ if not given.
        screen: where progress is shown.

    Raises:
        FileExistsError: out holds a comparison already.
        ValueError: a recipe is unknown, or the data do not serve.
    """
    recipes = tuple(name for name in dict.fromkeys(r.strip() for r in recipes) if name != "bf16")
    for known in recipes:
        Recipe.named(known)
    device = pick_device(config.device)
    out = out or free_place(Path("runs"), f"compare-{config.preset}")
    if (out / RESULT).exists():
        raise FileExistsError(f"out {str(out)!r} holds a comparison already: choose another --out")
    store = prepare_tokens(config, out / "data", screen)

    base = replace(config, recipe="bf16")
    bf16 = _curve(base, store, screen)
    other = _curve(replace(base, seed=config.seed + 1), store, screen)
    measured_on, curves = machine(device), list[Curve]()
    for name in (*recipes, None):
        result = CompareResult(
            config.preset, bf16, other, tuple(curves), machine=in_words(measured_on), config=asdict(config)
        )
        write_text(out / RESULT, json.dumps({**asdict(result), "measured_on": measured_on}, default=str) + "\n")
        report = write_compare_report(out, result)
        if name is not None:
            curves.append(_curve(replace(config, recipe=name), store, screen))
    screen.console.print(format_compare_table(result))
    screen.say(verdict_sentence(result))
    screen.say(f"report: {report}")
    return result


def _curve(config: TrainConfig, store: TokenStore, screen: Screen) -> Curve:
    """Trains one model. A run that breaks ends there and says so; the others go on."""
    screen.say(f"{config.recipe}, seed {config.seed}")
    trainer = Trainer(config, store, pick_device(config.device))
    train_loss, speeds, val_steps, val_loss = [], [], [], []
    diverged_at = None
    with screen.progress(config.steps, 0) as shown:
        while trainer.steps_done < config.steps:
            try:
                line = trainer.step()
            except FloatingPointError as error:
                screen.say(str(error))
                diverged_at = trainer.steps_done + 1
                break
            shown.step(line)
            train_loss.append(line["main_loss"])
            speeds.append(line["tokens_per_s"])
            if trainer.steps_done % config.validate_every == 0 or trainer.steps_done == config.steps:
                val_steps.append(trainer.steps_done)
                line = trainer.validate()
                val_loss.append(line["val_loss"])
                shown.validation({"step": trainer.steps_done, **line})
    tensors, _ = trainer.state()
    return Curve(
        recipe=config.recipe,
        seed=config.seed,
        steps=tuple(range(1, len(train_loss) + 1)),
        train_loss=tuple(train_loss),
        val_steps=tuple(val_steps),
        val_loss=tuple(val_loss),
        tokens_per_s=statistics.median(speeds) if speeds else 0.0,
        state_bytes=sum(t.nbytes for t in tensors.values()),
        diverged_at=diverged_at,
    )
