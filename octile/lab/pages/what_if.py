"""`octile lab what-if`: a ranked table in the terminal, and a page of pictures."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from octile.lab.capture import Capture, CapturedGemm, load
from octile.lab.outliers import Outliers, gemms_by_token, most_outlying, outliers, token_kinds
from octile.lab.pages import what_if_figures as draw
from octile.lab.pages.formats import screen_table
from octile.lab.pages.page import Section, Table, write_lab_page
from octile.lab.pages.what_if_charts import main_sections, outlier_sections, steps_section
from octile.lab.tensor_core.architectures import ARCHITECTURES, EVIDENCE
from octile.lab.variants import CONTROLS, PUBLISHED, Choice, Variant
from octile.lab.what_if import Rank, WhatIf, chosen, decibels, what_if
from octile.recipe import GemmName
from octile.report.page import format_count

COLUMNS = (
    "format",
    "block",
    "scale",
    "promoted",
    "sums",
    "bits",
    "SNR (dB)",
    "cast",
    "sums alone",
    "worst/RMS",
    "bias",
)


@dataclass(frozen=True)
class Asked:
    """What the command line asks for; see `octile.lab.commands.WhatIf`."""

    layers: str
    products: tuple[GemmName, ...] | None
    choice: Choice
    sample: int
    seed: int
    top: int
    tokenizer: Path | None
    out: Path
    json: bool


def show_what_if(paths: Sequence[Path], asked: Asked) -> None:
    """Reads the captures, makes their products in every combination, and shows what was found.

    The first capture is looked at in all of them; of the others only the published combination, step by step.

    Raises:
        FileNotFoundError: there is no such capture, or no such tokenizer.
        ValueError: a capture or a choice is refused; see `octile.lab.capture.load` and `octile.lab.what_if`.
    """
    if asked.top < 1:
        raise ValueError(f"top must be at least 1, not {asked.top}")
    captures = [load(path) for path in paths]
    text_of = token_texts(asked.tokenizer, paths[0])
    picked = [chosen(capture, asked.layers, asked.products) for capture in captures]
    console = Console(stderr=True)

    def progress(products: Iterable[CapturedGemm]) -> Iterable[CapturedGemm]:
        return track(list(products), "multiplying", console=console, transient=True, disable=not console.is_terminal)

    found = what_if(picked[0], asked.choice, asked.sample, asked.seed, progress)
    ranking = found.ranking()
    listed, reference = best(ranking, asked.top), shown_variant(ranking)
    steps = steps_of(captures, picked, reference, asked) if len(captures) > 1 else None
    seen, why_unseen = look_at_outliers(captures[0], picked[0], text_of, asked)
    if asked.json:
        print(json.dumps(as_json(found, listed, reference, seen, steps), indent=1, allow_nan=False))
        return
    sections = [*main_sections(found, reference, picked[0]), *steps_section(steps, reference)]
    sections += outlier_sections(seen, text_of is not None) if seen else []
    sections.append(Section(f"The {asked.top} best of each format", table=ranked_table(listed), note=_note(found)))
    about = captures[0]
    lead = (
        f"The products of step {about.step} of the run {about.run} ({about.recipe}), as they were captured, multiplied"
        f" again in {len(ranking)} ways. {_sample_words(found)}"
    )
    page = write_lab_page(asked.out, "What if", lead, sections, [why_unseen] if why_unseen else [])
    shown = Console()
    shown.print(screen_table(short_table(listed)))
    for line in (_sample_words(found), *refusals(found), *unchecked(found)):
        shown.print(line, highlight=False, markup=False, soft_wrap=True)
    shown.print(f"pictures: {page}", highlight=False, soft_wrap=True)


def token_texts(tokenizer: Path | None, capture: Path) -> Callable[[int], str] | None:
    """What a token says: by the tokenizer named, or that of the run in whose folder the capture lies; else None.

    Raises:
        FileNotFoundError, ValueError: a tokenizer was named and cannot be read.
    """
    from octile.train.tokenizer import Tokenizer

    beside = capture.resolve().parent.parent / "data" / "tokenizer.json"
    if tokenizer is None and not beside.is_file():
        return None
    backend = Tokenizer.load(tokenizer or beside)
    return lambda token: backend.decode([token])


def shown_variant(ranking: Sequence[Rank]) -> Variant:
    """The combination that layers are compared in: the published one, or if it was not asked for, the best."""
    return PUBLISHED if any(rank.variant == PUBLISHED for rank in ranking) else ranking[0].variant


def best(ranking: Sequence[Rank], top: int) -> list[Rank]:
    """The ranking, no more than `top` of a format."""
    seen: Counter[str] = Counter()
    shown = []
    for rank in ranking:
        seen[rank.variant.fmt] += 1
        if seen[rank.variant.fmt] <= top:
            shown.append(rank)
    return shown


def ranked_table(ranking: Sequence[Rank]) -> Table:
    """The ranking as text."""
    return Table(COLUMNS, [_cells(rank) for rank in ranking])


def _cells(rank: Rank) -> tuple[str, ...]:
    v = rank.variant
    promoted = "–" if v.arch in CONTROLS else "never" if v.promote is None else f"every {v.promote}"
    snr = [_db(noise) for noise in (rank.total, rank.quantization, rank.accumulation)]
    head = draw.format_label(v.fmt), draw.block_label(v.block), v.scale, promoted, v.arch
    return (*head, f"{rank.bits:.2f}", *snr, f"{rank.worst:.3g}", f"{rank.bias:+.1e}".replace("-", "−"))


def short_table(ranking: Sequence[Rank]) -> Table:
    """The ranking as a terminal of 80 columns shows it."""
    cells = [_cells(rank) for rank in ranking]
    rows = [
        (f"{c[0]} {c[1]}", c[2], f"{c[4]} {c[3].removeprefix('every ')}".removesuffix(" –"), *c[5:10]) for c in cells
    ]
    return Table(("cast", "scale", "sums", "bits", "SNR dB", "its own", "the sums'", "worst"), rows)


def _db(noise: float) -> str:
    db = decibels(noise)
    return "exact" if noise == 0 else "–" if db is None else f"{db:.1f}"


def refusals(found: WhatIf) -> list[str]:
    """A line for each reason why combinations do not apply."""
    left_out = [(format_count(len(variants), "combination"), reason) for reason, variants in found.refused.items()]
    return [f"left out, {how_many}: {reason}" for how_many, reason in left_out] + (
        [f"left out, products that are all zeros: {', '.join(found.silent)}"] if found.silent else []
    )


def _sample_words(found: WhatIf) -> str:
    n = len({(row.layer, row.product) for row in found.rows})
    return (
        f"Measured on {format_count(n, 'product')}, {format_count(found.sample, 'row')} of each operand drawn with seed"
        f" {found.seed}, whole sums; of experts the busiest of each layer."
    )


def _note(found: WhatIf) -> str:
    return (
        "SNR is that of all errors together, noise averaged over the products; beside it the cast's alone (sums exact)"
        " and the sums' alone (operands as cast). Worst/RMS is the largest single error of any product over its RMS;"
        " bias is the mean error away from zero, below 0 where results are too small. Bits a value count the scales. "
        + " ".join(f"{line[0].upper()}{line[1:]}." for line in [*refusals(found), *unchecked(found)])
    )


def unchecked(found: WhatIf) -> list[str]:
    """The tensor cores among the combinations that are modeled as published, and no more."""
    archs = [arch for arch in ARCHITECTURES if any(row.variant.arch == arch for row in found.rows)]
    only = [arch for arch in archs if all(row.evidence == "published" for row in ARCHITECTURES[arch])]
    return [f"{', '.join(only)}: {EVIDENCE['published']}"] if only else []


def steps_of(
    captures: Sequence[Capture], picked: Sequence[Sequence[CapturedGemm]], reference: Variant, asked: Asked
) -> tuple[GemmName, draw.Heat]:
    """Total SNR of one product in the reference's combination, layers × steps; a layer's experts are one row."""
    choice = Choice(
        (reference.fmt,), _own_block(reference), _own_scale(reference), (reference.promote,), (reference.arch,)
    )
    product: GemmName = next(p for p in ("fprop", "wgrad", "dgrad") if any(each.product == p for each in picked[0]))
    columns: dict[str, dict[str, float | None]] = {}
    for capture, products in sorted(zip(captures, picked, strict=True), key=lambda pair: pair[0].step):
        rows = what_if([p for p in products if p.product == product], choice, asked.sample, asked.seed).rows
        experts = {p.layer: p.layer.rpartition(".")[0] for p in products if p.expert is not None}
        columns[f"step {capture.step}"] = {experts.get(row.layer, row.layer): row.total.snr_db for row in rows}
    layers = list(dict.fromkeys(layer for column in columns.values() for layer in column))
    return product, draw.Heat(layers, list(columns), [[c.get(layer) for c in columns.values()] for layer in layers])


def _own_block(v: Variant) -> tuple[str, ...]:
    return ("1x128",) if v.block == "1x16" else (v.block,)  # nvfp4 brings its own


def _own_scale(v: Variant) -> tuple[str, ...]:
    return ("float32",) if v.scale == "e4m3" else (v.scale,)


def look_at_outliers(
    capture: Capture, picked: Sequence[CapturedGemm], text_of: Callable[[int], str] | None, asked: Asked
) -> tuple[Outliers | None, str | None]:
    """The most outlying input among the products that were picked; or why there is none to look at."""
    try:
        there = [p for p in gemms_by_token(capture) if any(p is each for each in picked)]
    except ValueError as error:
        return None, f"No picture of outliers: {error}."
    if not there or capture.tokens is None:
        return None, "No picture of outliers: no fprop was asked for whose rows are the tokens."
    kinds = token_kinds(capture.tokens, text_of)
    return outliers(most_outlying(there), kinds, capture.tokens.shape[1], asked.sample, asked.seed), None


def as_json(
    found: WhatIf,
    listed: Sequence[Rank],
    reference: Variant,
    seen: Outliers | None,
    steps: tuple[GemmName, draw.Heat] | None,
) -> dict[str, Any]:
    """The best combinations, and the products of these and of the reference."""
    shown = {rank.variant for rank in listed} | {reference}
    return {
        "sample": found.sample,
        "seed": found.seed,
        "ranking": [
            {
                **asdict(rank.variant),
                "products": rank.products,
                "bits": rank.bits,
                **{
                    f"{part}_snr_db": decibels(getattr(rank, part))
                    for part in ("total", "quantization", "accumulation")
                },
                "worst_over_rms": rank.worst,
                "bias": rank.bias,
                "hardest": list(rank.hardest),
            }
            for rank in listed
        ],
        "products": [
            {
                "layer": row.layer,
                "product": row.product,
                **asdict(row.variant),
                **{part: getattr(row, part).figures() for part in ("total", "quantization", "accumulation")},
            }
            for row in found.rows
            if row.variant in shown
        ],
        "refused": [{"why": why, "combinations": [asdict(v) for v in all_of]} for why, all_of in found.refused.items()],
        "silent": list(found.silent),
        "outliers": {"layer": seen.layer, "without": [_finite(asdict(w)) for w in seen.without]} if seen else None,
        "steps": {"product": steps[0], **asdict(steps[1])} if steps else None,
    }


def _finite(value: Any) -> Any:
    """NaN as None, throughout."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
