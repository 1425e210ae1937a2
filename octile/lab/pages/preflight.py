"""`octile lab preflight`: a table in the terminal, a page of pictures, and a recipe."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from octile.lab.pages import preflight_figures as draw
from octile.lab.pages.formats import screen_table
from octile.lab.pages.page import Section, Table, write_lab_page
from octile.lab.pages.what_if_figures import draw_heat
from octile.lab.preflight import Place, Preflight, preflight
from octile.lab.preflight_check import measured
from octile.lab.what_if import Error
from octile.recipe import Recipe
from octile.report.page import format_count
from octile.report.style import PHONE, WIDE
from octile.report.svg import make_chart

SHOWN = 12  # products in the terminal's table


@dataclass(frozen=True)
class Asked:
    """What the command line asks for; see `octile.lab.commands.Preflight`."""

    recipe: str
    text: str
    batches: int
    batch_size: int
    sequence_length: int
    least_snr: float
    sample: int
    seed: int
    write: Path
    out: Path
    json: bool


def show_preflight(folder: Path, asked: Asked) -> None:
    """Loads a model, looks at its products on a text, and shows and writes what is advised.

    Raises:
        FileNotFoundError, ValueError: the model, its tokenizer, the text, the recipe or a number is refused.
    """
    for name in ("batches", "batch_size", "sequence_length", "sample"):
        if getattr(asked, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(asked, name)}")
    if not math.isfinite(asked.least_snr):
        raise ValueError(f"least_snr must be a number of dB, not {asked.least_snr}")
    from octile.checkpoint.hugging_face import load

    recipe = Recipe.named(asked.recipe)
    batches = list(_batches(folder, asked))
    model = load(folder).train()
    found = preflight(
        model,
        [(tokens, tokens) for tokens in batches],
        recipe,
        least_snr_db=asked.least_snr,
        sample=asked.sample,
        seed=asked.seed,
    )
    real = [measured(model, (tokens, tokens), recipe, sample=asked.sample, seed=asked.seed) for tokens in batches]
    found.recipe.write(asked.write)
    rows = predictions(found, real)
    if asked.json:
        print(json.dumps([vars(row) for row in rows], indent=1, allow_nan=False))
        return
    sentence = draw.say_risk(rows, recipe.name, asked.least_snr)
    page = _write_page(folder, asked, rows, sentence)
    console = Console()
    console.print(screen_table(table(rows[:SHOWN])))
    console.print(sentence, highlight=False)
    console.print(f"recipe:   {asked.write}", highlight=False, soft_wrap=True)
    console.print(f"pictures: {page}", highlight=False, soft_wrap=True)


def predictions(found: Preflight, real: Sequence[Mapping[Place, Error]]) -> list[draw.Predicted]:
    """Every product's risk beside what was measured in its batch, the riskiest first; one without error is left out."""
    rows = []
    for risk in found.risks:
        snr, there = risk.total.snr_db, real[risk.batch].get((risk.layer, risk.product))
        if snr is None:
            continue
        after = there.snr_db if there else None
        rows.append(
            draw.Predicted(
                risk.layer, risk.weight, risk.product, snr, after, risk.blame, risk.flushed, found.excepted(risk)
            )
        )
    return rows


def table(rows: list[draw.Predicted]) -> Table:
    """As text."""
    columns = ("product", "predicted", "measured", "blame", "zeroed", "advice")
    cells = [
        (
            f"{row.product} {row.layer.removeprefix('model.layers.')}",
            f"{row.snr_db:.1f} dB",
            "–" if row.measured_db is None else f"{row.measured_db:.1f} dB",
            row.blame,
            f"{row.flushed:.1%}",
            "BF16" if row.excepted else "8 bits",
        )
        for row in rows
    ]
    return Table(columns, cells)


def _write_page(folder: Path, asked: Asked, rows: list[draw.Predicted], sentence: str) -> Path:
    charts = []
    if rows:
        heat = draw.heat_of(rows)
        size = 80 + 19 * len(heat.rows)
        what = "predicted SNR (dB), orange is worse"
        charts.append(
            make_chart("Risk by layer", sentence, lambda f: draw_heat(f, heat, what), (WIDE, size), (PHONE, size))
        )
    if any(row.measured_db is not None for row in rows):
        charts.append(
            make_chart(
                "Was it right?",
                draw.say_check(rows),
                lambda f: draw.draw_check(f, rows, asked.least_snr),
                (WIDE, 460),
                (PHONE, 420),
            )
        )
    lead = (
        f"The products of {folder.name} in {'1 batch' if asked.batches == 1 else f'{asked.batches:,} batches'} of"
        f" {asked.batch_size} × {asked.sequence_length} tokens, made in high precision, cast as recipe {asked.recipe}"
        f" would and multiplied on the model of Hopper's tensor core, {format_count(asked.sample, 'row')} of each"
        f" operand drawn with seed {asked.seed}."
    )
    note = f"The recipe with the advised exceptions is {asked.write}: octile train --recipe {asked.write}."
    return write_lab_page(
        asked.out,
        "Preflight",
        lead,
        [Section("Layer by layer", charts), Section("In figures", table=table(rows), note=note)],
    )


def _batches(folder: Path, asked: Asked) -> Iterator[Tensor]:
    """Batches [B, S] of a text in the model's tokens."""
    from octile.checkpoint.hugging_face import checkpoint_folder
    from octile.train.corpus import open_corpus
    from octile.train.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(checkpoint_folder(folder))
    needed = asked.batches * asked.batch_size * asked.sequence_length
    ids: list[int] = []
    for text in open_corpus(asked.text).texts():
        ids += [tokenizer.begin, *tokenizer.encode(text), tokenizer.end]
        if len(ids) >= needed:
            break
    if len(ids) < needed:
        raise ValueError(f"text {asked.text!r} has {len(ids):,} tokens, and {needed:,} are needed")
    yield from torch.tensor(ids[:needed]).view(asked.batches, asked.batch_size, asked.sequence_length)
