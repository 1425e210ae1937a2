"""`octile lab preflight`: predicted errors of a model's GEMMs, as a table and a page, and a recipe with exceptions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octile.command_text import quoted_path
from octile.lab.pages.figures import GEMM_COLOR, TERMS, Heat, draw_heat, is_wide, legend, short_names
from octile.lab.pages.page import Section, write_lab_page
from octile.lab.preflight import GemmKey, Preflight, check_recipe, preflight
from octile.lab.preflight_check import observe_batch
from octile.lab.what_if import Error
from octile.lab_options.preflight import Options
from octile.recipe import Recipe
from octile.report.console import Console, progress_bar
from octile.report.style import COLOR, PHONE, WIDE, lay_out, style_axes
from octile.report.svg import make_chart
from octile.report.table import Table, screen_table
from octile.text import format_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from octile.models.config import ModelConfig
    from octile.models.deepseek_v3 import DeepseekV3

MAX_ROWS = 12  # of the table in the terminal
MIN_BAND = 0.05  # of the scatter's height, the band of what stays in BF16, which is wide enough for its label
MIN_TOKENS = 128  # of a batch, for an expert on average: wgrad quantizes tiles of 128 tokens


def run(options: Options) -> None:
    """Load a model, predict the errors of its GEMMs on a text, and show and write the advice.

    Raises:
        FileNotFoundError, ValueError: the model, its tokenizer, the text or the recipe cannot be read, or an option is
            invalid.
    """
    from octile.checkpoint.hugging_face import read_model_config

    recipe = Recipe.named(options.recipe)
    check_recipe(recipe)
    check_tokens(options, read_model_config(options.model))
    needed = options.batches * options.batch_size * options.sequence_length
    tokens = read_tokens(options.model, options.text, needed)
    batches = tokens.view(options.batches, options.batch_size, options.sequence_length)
    model, weights = read_model(options.model)
    Console(stderr=options.json).print_line(f"weights:  {weights}")
    with progress_bar("batches", 2 * options.batches, options.json) as advance:

        def counted() -> Iterator[tuple[Tensor, Tensor]]:
            for tokens in batches:
                yield tokens, tokens
                advance(1)

        found = preflight(
            model,
            counted(),
            recipe,
            least_snr_db=options.least_snr,
            sample=options.sample,
            seed=options.seed,
        )
        measured = [
            observe_batch(model, batch, recipe, sample=options.sample, seed=options.seed) for batch in counted()
        ]
    found.recipe.write(options.write)
    rows = predictions(found, measured)
    if options.json:
        print(json.dumps([vars(row) for row in rows], indent=1, allow_nan=False))
        return
    page = _write_page(options, weights, rows, describe_risk(rows, recipe.name, options.least_snr))
    console = Console()
    console.print(screen_table(table(rows[:MAX_ROWS])))
    if len(rows) > MAX_ROWS:
        console.print_line(f"The {MAX_ROWS} lowest of {len(rows)} GEMMs; the page has all.")
    console.print_line(describe_risk(rows, recipe.name, options.least_snr, is_caption=False))
    if any(row.measured_db is not None for row in rows):
        console.print_line(describe_check(rows, options.least_snr, is_caption=False))
    console.print_line(f"recipe:   {options.write}")
    console.print_line(f"pictures: {page}")


@dataclass(frozen=True)
class Predicted:
    """The SNR (dB) of a GEMM as predicted, and as measured in a real step, if it was.

    Attributes:
        layer: the layer's name, for experts with an expert's number.
        weight: the layer's name without an expert's number.
        product: fprop, dgrad or wgrad.
        snr_db, measured_db: predicted and measured SNR.
        blame: the operand whose quantization causes more error.
        flushed: the share of that operand's nonzero values that become zero.
        excepted: whether the advice is to leave the GEMM in BF16.
        batches: the batches in which the GEMM has outputs.
        batches_below: those of them in which it is below the limit.
    """

    layer: str
    weight: str
    product: str
    snr_db: float
    measured_db: float | None
    blame: str
    flushed: float
    excepted: bool
    batches: int = 1
    batches_below: int = 0


def predictions(found: Preflight, measured: Sequence[Mapping[GemmKey, Error]]) -> list[Predicted]:
    """Return predicted and measured SNR of every GEMM, lowest first, without GEMMs that have no error."""
    rows = []
    for risk in found.risks:
        snr, error = risk.total.snr_db, measured[risk.batch].get((risk.layer, risk.gemm))
        if snr is None:
            continue
        measured_db = error.snr_db if error else None
        rows.append(
            Predicted(
                risk.layer,
                risk.weight,
                risk.gemm,
                snr,
                measured_db,
                risk.blame,
                risk.flushed,
                found.is_excepted(risk),
                len(risk.by_batch),
                found.batches_below(risk),
            )
        )
    return rows


def table(rows: Sequence[Predicted]) -> Table:
    """Return the predictions as a table."""
    columns = ("GEMM", "predicted", "measured", "blame", "zeroed", "advice", "below in")
    cells = [
        (
            f"{row.product} {row.layer.removeprefix('model.layers.')}",
            f"{row.snr_db:.1f} dB",
            "–" if row.measured_db is None else f"{row.measured_db:.1f} dB",
            row.blame,
            f"{row.flushed:.1%}",
            "BF16" if row.excepted else "8 bits",
            f"{row.batches_below} of {row.batches}",
        )
        for row in rows
    ]
    return Table(columns, cells)


def _write_page(options: Options, weights: str, rows: Sequence[Predicted], caption: str) -> Path:
    charts = []
    if rows:
        heat = heat_of(rows)
        title = "predicted SNR (dB), deeper is worse"
        charts.append(
            make_chart(
                "Risk by layer", caption, lambda f: draw_heat(f, heat, title), (WIDE, heat.height), (PHONE, heat.height)
            )
        )
    if any(row.measured_db is not None for row in rows):
        charts.append(
            make_chart(
                "Prediction vs. measurement",
                describe_check(rows, options.least_snr),
                lambda f: draw_check(f, rows, options.least_snr),
                (WIDE, 460),
                (PHONE, 420),
            )
        )
    batches = "1 batch" if options.batches == 1 else f"{options.batches:,} batches"
    lead = (
        f"The GEMMs of “{options.model.name}” in {batches} of {options.batch_size} × {options.sequence_length} tokens."
        f" Their operands were captured in high precision, quantized as in recipe {options.recipe}, and multiplied on"
        f" the model of Hopper's tensor core, with {format_count(options.sample, 'row')} of each operand, drawn with"
        f" seed {options.seed}. Weights: {weights}."
    )
    layers = Section("Layer by layer", charts, note="" if charts else caption)
    command = f"octile train --recipe {quoted_path(options.write)}"
    note = f"The recipe with the advised exceptions is {options.write}: {command}."
    return write_lab_page(
        options.out,
        "Preflight",
        lead,
        [Section("Terms", note=TERMS), layers, Section("In figures", table=table(rows), note=note)],
    )


def check_tokens(options: Options, model: ModelConfig) -> None:
    """Refuse batches that are too small for an advice, or too long for the model.

    Raises:
        ValueError: the message says how many tokens a batch needs; or a sequence is too long for the model.
    """
    if options.sequence_length > model.max_position_embeddings:
        raise ValueError(
            f"sequence_length must be at most the model's max_position_embeddings, {model.max_position_embeddings}, "
            f"not {options.sequence_length}"
        )
    given, shares = options.batch_size * options.sequence_length, max(model.n_routed_experts, 1)
    needed = MIN_TOKENS * math.ceil(shares / max(model.num_experts_per_tok, 1))
    if given < needed:
        raise ValueError(
            f"a batch has {given:,} tokens, and {needed:,} are needed, so that each of the {shares} experts has"
            f" {MIN_TOKENS} on average: use --batch-size {math.ceil(needed / options.sequence_length)}"
        )


def read_model(path: Path) -> tuple[DeepseekV3, str]:
    """Load a model in training mode, from a run with the weights of its newest checkpoint, and say which weights.

    Raises:
        FileNotFoundError, ValueError, OSError: as in `octile.lab.run.load_newest_weights`; or as in
            `octile.checkpoint.hugging_face.load`.
    """
    from octile.checkpoint.hugging_face import has_fp8_weights, load
    from octile.lab.run import load_newest_weights

    if (newest := load_newest_weights(path)) is not None:
        model, checkpoint = newest
        return model.train(), f"those of {checkpoint}, before quantization"
    rounded = "already rounded to FP8 in this folder, so that the error of w is missing or too small"
    return load(path).train(), rounded if has_fp8_weights(path) else "those of the folder, in high precision"


def read_tokens(model: Path, text: str, needed: int) -> Tensor:
    """Read the first tokens [needed] of a text with a model's tokenizer.

    Raises:
        FileNotFoundError, ValueError: the tokenizer or the text cannot be read, or the text has too few tokens.
    """
    from octile.checkpoint.hugging_face import checkpoint_folder
    from octile.tokenizer import Tokenizer
    from octile.train.data.corpus import open_corpus

    tokenizer = Tokenizer.load(checkpoint_folder(model))
    ids: list[int] = []
    for document in open_corpus(text, "text").texts():
        ids += [tokenizer.begin, *tokenizer.encode(document), tokenizer.end]
        if len(ids) >= needed:
            break
    if len(ids) < needed:
        raise ValueError(f"text {text!r} has {len(ids):,} tokens, and {needed:,} are needed")
    return torch.tensor(ids[:needed])


def heat_of(rows: Sequence[Predicted]) -> Heat:
    """Return the predicted SNR by layer and GEMM, the layer with the lowest at the top."""
    layers = list(dict.fromkeys(row.weight for row in rows))
    gemms = [g for g in GEMM_COLOR if any(row.product == g for row in rows)]
    snr = {(row.weight, row.product): row.snr_db for row in rows}
    return Heat(layers, gemms, [[snr.get((layer, g)) for g in gemms] for layer in layers])


def describe_risk(rows: Sequence[Predicted], recipe: str, least_db: float, is_caption: bool = True) -> str:
    """Describe how many GEMMs are below the bound, how many are advised to stay in BF16, and the worst one.

    Args:
        rows: the predictions, the lowest SNR first.
        recipe: its name.
        least_db: the bound.
        is_caption: whether the text stands below the picture, which it then explains.
    """
    if not rows:
        return f"Every GEMM is exact under {recipe}, so none needs to stay in BF16."
    worst = rows[0]
    below, excepted = sum(row.snr_db < least_db for row in rows), sum(row.excepted for row in rows)
    shared = " (the two weights of experts share one recipe)" if excepted > below else ""
    found = (
        f"{below} of {format_count(len(rows), 'GEMM')} {'is' if below == 1 else 'are'} below {least_db:g} dB;"
        f" {excepted} {'is' if excepted == 1 else 'are'} advised to stay in BF16{shared}."
        if below
        else f"None is below {least_db:g} dB, so none needs to stay in BF16."
    )
    disputed = [row for row in rows if 0 < row.batches_below < row.batches]
    if disputed:
        few = "use more or larger batches to decide"
        sure = f" In {format_count(len(disputed), 'GEMM')} the batches disagree, so the advice there is unsure: {few}."
    else:
        sure = f" All {worst.batches} batches agree in every GEMM." if worst.batches > 1 else ""
    flushed = f", where {worst.flushed:.0%} of the values become zero" if worst.flushed >= 0.005 else ""
    colors = "; a deeper orange is a lower SNR, as in the legend" if is_caption else ""
    return (
        f"Predicted SNR in dB under {recipe}, with equal weight for every channel{colors}. {found}{sure} The lowest is"
        f" in {worst.product} of {short_names([worst.layer])[0]}, {worst.snr_db:.1f} dB, caused by the quantization of"
        f" {worst.blame}{flushed}."
    )


def draw_check(figure: Figure, rows: Sequence[Predicted], least_db: float) -> None:
    """Draw the measured against the predicted SNR, with a dot per GEMM."""
    axes = figure.subplots()
    style_axes(axes, "predicted (dB)", "measured in a real step in 8 bits (dB)")
    known = [row for row in rows if row.measured_db is not None]
    ends = [v for row in known for v in (row.snr_db, row.measured_db) if v is not None]
    high = max(ends) + 1
    low = min([*ends, least_db - MIN_BAND * (high - least_db)]) - 1
    axes.plot([low, high], [low, high], color=COLOR["muted"], linewidth=1, linestyle=":")
    axes.axvspan(low, least_db, color=COLOR["vermilion"], alpha=0.1, linewidth=0)
    for gemm, color in GEMM_COLOR.items():
        own = [row for row in known if row.product == gemm]
        x, y = [row.snr_db for row in own], [row.measured_db or 0.0 for row in own]
        axes.plot(x, y, "o", color=COLOR[color], markersize=5.5, alpha=0.75)
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.grid(axis="x")
    legend(figure, {g: c for g, c in GEMM_COLOR.items() if any(row.product == g for row in known)},
           is_wide(figure))  # fmt: skip
    label = axes.annotate("stays in BF16", (low, high), (3, -3), textcoords="offset points", color=COLOR["muted"],
                          va="top")  # fmt: skip
    lay_out(figure)  # so that widths are known
    if label.get_window_extent().x1 > axes.transData.transform((least_db, high))[0]:
        label.set_rotation(90)


def describe_check(rows: Sequence[Predicted], least_db: float, is_caption: bool = True) -> str:
    """Describe which predictions a real step confirmed, and how far they differ, as the RMS difference in dB.

    Args:
        rows: the predictions.
        least_db: the bound.
        is_caption: whether the text stands below the picture, which it then explains.
    """
    pairs = [(row.snr_db, row.measured_db) for row in rows if row.measured_db is not None]
    rms = math.sqrt(math.fsum((a - b) ** 2 for a, b in pairs) / len(pairs))
    unmeasured = [row for row in rows if row.measured_db is None]
    left_out = (
        f" {format_count(len(unmeasured), 'GEMM')} did not run in the real step, the lowest predicted at"
        f" {min(row.snr_db for row in unmeasured):.1f} dB: an expert got no token, or a layer is not in 8 bits."
        if unmeasured
        else ""
    )
    low = [row for row in rows if row.measured_db is not None and row.snr_db < least_db]
    confirmed = sum(row.measured_db < least_db for row in low if row.measured_db is not None)
    missed = sum(measured < least_db <= snr for snr, measured in pairs)
    was = ["was" if number == 1 else "were" for number in (confirmed, missed)]
    right = (
        f" Of {format_count(len(low), 'GEMM')} predicted below {least_db:g} dB, {confirmed} {was[0]} measured below it;"
        f" of the others, {missed} {was[1]}."
        if low or missed
        else f" No GEMM was predicted below {least_db:g} dB, and none was measured below it."
    )
    line = "On the dotted line both are equal; the" if is_caption else "The"
    return (
        f"Measured SNR of {format_count(len(pairs), 'GEMM')} in real steps in 8 bits on the same batches, against the"
        f" predicted SNR.{right}{left_out} {line} RMS difference is {rms:.1f} dB. In a"
        " real step the operands of a layer carry the errors of the layers before it."
    )
