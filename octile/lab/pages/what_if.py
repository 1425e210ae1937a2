"""`octile lab what-if`: the GEMMs of a capture in other formats, as a ranked table and as a page."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import track

from octile.lab.capture import Capture, CapturedGemm, load, parse_gemm_names
from octile.lab.outliers import Outliers, find_outliers, gemms_by_token, most_outlying, token_kinds
from octile.lab.pages import what_if_figures as draw
from octile.lab.pages.figures import TERMS, Heat
from octile.lab.pages.outliers_figures import outlier_section
from octile.lab.pages.page import Section, parse_intervals, parse_words, write_lab_page
from octile.lab.tensor_core.architectures import ARCHITECTURES, EVIDENCE
from octile.lab.variants import PUBLISHED, REFERENCES, SearchSpace, Variant, operands_of
from octile.lab.what_if import Rank, WhatIf, noise_to_db, select_gemms, what_if
from octile.lab_options.what_if import Options
from octile.recipe import GemmName, Recipe
from octile.report.console import Console
from octile.report.table import Table, screen_table
from octile.text import format_count, format_signed

COLUMNS = (
    *("format", "block", "scale", "promoted", "sums", "bits"),
    *("SNR (dB)", "quantization", "accumulation", "worst/RMS", "bias"),
)
MARK = "*"  # at the combination of the run's recipe
SNR_MEANING = "SNR is about all errors, with noise over signal averaged over the GEMMs."


def run(options: Options) -> None:
    """Read the captures, compute their GEMMs in every combination, and show the results.

    The first capture is computed in all combinations, the others in the published one only.

    Raises:
        FileNotFoundError: a capture or the tokenizer does not exist.
        ValueError: a capture is damaged or an option is invalid; see `octile.lab.capture.load` and
            `octile.lab.what_if`.
    """
    if not options.captures:
        raise ValueError("name a capture: write one with octile lab capture")
    space = SearchSpace(
        parse_words(options.formats),
        parse_words(options.blocks),
        parse_words(options.scales),
        parse_intervals(options.promote),
        parse_words(options.arch),
    )
    names = parse_gemm_names(options.products) if options.products else None
    captures = [load(path) for path in options.captures]
    text_of = token_texts(options.tokenizer, options.captures[0])
    selected = [select_gemms(capture, options.layers, names) for capture in captures]
    console = Console(stderr=True)

    def progress(gemms: Iterable[CapturedGemm]) -> Iterable[CapturedGemm]:
        return track(list(gemms), "multiplying", console=console, transient=True, disable=not console.is_terminal)

    found = what_if(selected[0], space, options.sample, options.seed, progress)
    ranking = found.ranking()
    own, mark = own_variant(ranking, captures[0].recipe)
    listed, reference = best(ranking, options.top, own), reference_variant(ranking)
    steps = heat_by_step(captures, selected, reference, options) if len(captures) > 1 else None
    outliers, why_no_outliers = analyze_outliers(captures[0], selected[0], text_of, options)
    if options.json:
        print(json.dumps(as_json(found, listed, reference, own, outliers, steps), indent=1, allow_nan=False))
        return
    sections = [
        Section("Terms", note=TERMS),
        *draw.main_sections(found, reference, selected[0]),
        *draw.steps_section(steps, reference),
    ]
    sections += [outlier_section(outliers, text_of is not None)] if outliers else []
    heading = "The best of each format" if options.top == 1 else f"The {options.top:,} best of each format"
    sections.append(Section(heading, table=ranked_table(listed, own), note=f"{mark}. {_note(found)}"))
    first = captures[0]
    lead = (
        f"The GEMMs of step {first.step:,} of the run “{first.run}” ({first.recipe}), computed from their captured"
        f" operands in {format_count(len(ranking), 'combination')}. {_describe_sample(found)}"
    )
    page = write_lab_page(options.out, "What if", lead, sections, [why_no_outliers] if why_no_outliers else [])
    screen = Console()
    screen.print(screen_table(short_table(listed, own)))
    listing = f"{heading} (--top), {len(listed):,} of {format_count(len(ranking), 'combination')}. {SNR_MEANING}"
    for line in (mark, listing, _describe_sample(found), *refusals(found), *unchecked(found)):
        screen.print_line(line)
    screen.print_line(f"pictures: {page}")


def token_texts(tokenizer: Path | None, capture: Path) -> Callable[[int], str] | None:
    """Return a function from token ids to text, with the given tokenizer or that of the capture's run; None without.

    Raises:
        FileNotFoundError, ValueError: the tokenizer cannot be read.
    """
    from octile.tokenizer import Tokenizer

    own = capture.resolve().parent.parent / "data" / "tokenizer.json"
    if tokenizer is None and not own.is_file():
        return None
    backend = Tokenizer.load(tokenizer or own)
    return lambda token: backend.decode([token])


def reference_variant(ranking: Sequence[Rank]) -> Variant:
    """Return the combination in which layers are compared: the published one, or the best if that was not computed."""
    return PUBLISHED if any(rank.variant == PUBLISHED for rank in ranking) else ranking[0].variant


def own_variant(ranking: Sequence[Rank], recipe: str) -> tuple[Variant | None, str]:
    """Return the combination that is a run's recipe, and a line about its mark in the table.

    Of several, it is the one that octile computes on Hopper, or else the best.

    Args:
        ranking: all combinations.
        recipe: the name of the run's recipe. A file may give a recipe any formats, so none is found for its path.
    """
    formats = Recipe.named(recipe).formats if recipe in Recipe.names() else None
    operands = formats and operands_of(formats)
    same = [v for v in (rank.variant for rank in ranking) if (v.fmt, v.block, v.scale) == operands]
    if not (same and formats):
        return None, f"No combination is marked as that of the run's recipe, {recipe}"
    own = min(same, key=lambda v: (v.promote, v.arch) != (PUBLISHED.promote, PUBLISHED.arch))
    differences = []
    if formats.x.scale != formats.w.scale:
        differences.append(f"x has {formats.x.scale} scales")
    if formats.wgrad_x.block != formats.wgrad_dy.block:
        differences.append("wgrad's x has blocks of its own")
    except_that = f", except that there {' and '.join(differences)}" if differences else ""
    return own, f"{MARK} the run's recipe, {recipe}{except_that}"


def best(ranking: Sequence[Rank], top: int, own: Variant | None = None) -> list[Rank]:
    """Return the ranking with at most `top` combinations per format, and the run's own."""
    count: Counter[str] = Counter()
    shown = []
    for rank in ranking:
        count[rank.variant.fmt] += 1
        if count[rank.variant.fmt] <= top or rank.variant == own:
            shown.append(rank)
    return shown


def ranked_table(ranking: Sequence[Rank], own: Variant | None = None) -> Table:
    """Return the ranking as a table, with a mark at the run's own combination."""
    return Table(COLUMNS, [_cells(rank, own) for rank in ranking])


def _cells(rank: Rank, own: Variant | None) -> tuple[str, ...]:
    v = rank.variant
    promoted = "–" if v.arch in REFERENCES else "never" if v.promote is None else f"every {v.promote}"
    snr = [_db(noise) for noise in (rank.total, rank.quantization, rank.accumulation)]
    block = draw.block_label(v.block) + (f" {MARK}" if v == own else "")
    head = draw.format_label(v.fmt), block, v.scale, promoted, v.arch
    return (*head, f"{rank.bits:.2f}", *snr, f"{rank.worst:.3g}", format_signed(rank.bias, ".1e"))


def short_table(ranking: Sequence[Rank], own: Variant | None = None) -> Table:
    """Return the ranking as a table for a terminal of 80 columns, with a mark at the run's own combination."""
    cells = [_cells(rank, own) for rank in ranking]
    rows = [
        (f"{c[0]} {c[1]}", c[2], f"{c[4]} {c[3].removeprefix('every ')}".removesuffix(" –"), *c[5:10]) for c in cells
    ]
    return Table(("operands", "scale", "sums", "bits", "SNR dB", "quant.", "accum.", "worst/RMS"), rows)


def _db(noise: float) -> str:
    db = noise_to_db(noise)
    return "exact" if noise == 0 else "–" if db is None else f"{db:.1f}"


def refusals(found: WhatIf) -> list[str]:
    """Return a line for each reason why combinations do not apply."""
    left_out = [(format_count(len(variants), "combination"), reason) for reason, variants in found.refused.items()]
    return [f"left out, {how_many}: {reason}" for how_many, reason in left_out] + (
        [f"left out, GEMMs that are all zeros: {', '.join(found.silent)}"] if found.silent else []
    )


def _describe_sample(found: WhatIf) -> str:
    gemms = len({(row.layer, row.gemm) for row in found.rows})
    return (
        f"Measured on {format_count(gemms, 'GEMM')} with complete sums, and {format_count(found.sample, 'row')} of each"
        f" operand, drawn with seed {found.seed}; of each layer's experts, the one with most tokens."
    )


def _note(found: WhatIf) -> str:
    return (
        f"{SNR_MEANING} Quantization is about quantization alone (exact sums), and accumulation about the sums alone"
        " (quantized operands). Worst/RMS is the largest error of any output over its GEMM's RMS; bias is the mean"
        " error away from zero, negative if results are too small. Bits per value include the scales. "
        + " ".join(f"{line[0].upper()}{line[1:]}." for line in [*refusals(found), *unchecked(found)])
    )


def unchecked(found: WhatIf) -> list[str]:
    """Return a line about tensor cores whose model follows publications and was not checked on hardware."""
    archs = [arch for arch in ARCHITECTURES if any(row.variant.arch == arch for row in found.rows)]
    published = [arch for arch in archs if all(i.evidence == "published" for i in ARCHITECTURES[arch])]
    return [f"{', '.join(published)}: {EVIDENCE['published']}"] if published else []


def heat_by_step(
    captures: Sequence[Capture], selected: Sequence[Sequence[CapturedGemm]], reference: Variant, options: Options
) -> tuple[GemmName, Heat]:
    """Return the total SNR of one GEMM in the reference's combination, by layer and step, with one row for experts."""
    block = "1x128" if reference.block == "1x16" else reference.block  # nvfp4 has fixed blocks and scales
    scale = "float32" if reference.scale == "e4m3" else reference.scale
    space = SearchSpace((reference.fmt,), (block,), (scale,), (reference.promote,), (reference.arch,))
    name: GemmName = next(n for n in ("fprop", "wgrad", "dgrad") if any(g.gemm == n for g in selected[0]))
    columns: dict[str, dict[str, float | None]] = {}
    for capture, gemms in sorted(zip(captures, selected, strict=True), key=lambda pair: pair[0].step):
        rows = what_if([g for g in gemms if g.gemm == name], space, options.sample, options.seed).rows
        experts = {g.layer: g.layer.rpartition(".")[0] for g in gemms if g.expert is not None}
        columns[f"step {capture.step}"] = {experts.get(row.layer, row.layer): row.total.snr_db for row in rows}
    layers = list(dict.fromkeys(layer for column in columns.values() for layer in column))
    return name, Heat(layers, list(columns), [[c.get(layer) for c in columns.values()] for layer in layers])


def analyze_outliers(
    capture: Capture, selected: Sequence[CapturedGemm], text_of: Callable[[int], str] | None, options: Options
) -> tuple[Outliers | None, str | None]:
    """Analyze the input with the largest outliers among the selected GEMMs; or return the reason why there is none."""
    try:
        candidates = [g for g in gemms_by_token(capture) if any(g is each for each in selected)]
    except ValueError as error:
        return None, f"No picture of outliers: {error}."
    if not candidates or capture.tokens is None:
        return None, "No picture of outliers: no fprop whose rows are the tokens was selected."
    kinds = token_kinds(capture.tokens, text_of)
    length = capture.tokens.shape[1]
    return find_outliers(most_outlying(candidates), kinds, length, options.sample, options.seed), None


def as_json(
    found: WhatIf,
    listed: Sequence[Rank],
    reference: Variant,
    own: Variant | None,
    outliers: Outliers | None,
    steps: tuple[GemmName, Heat] | None,
) -> dict[str, Any]:
    """Return the best combinations and the run's own, and the GEMMs of these and of the reference, as JSON values."""
    shown = {rank.variant for rank in listed} | {reference}
    return {
        "sample": found.sample,
        "seed": found.seed,
        "ranking": [
            {
                **asdict(rank.variant),
                "is_run_recipe": rank.variant == own,
                "products": rank.gemms,
                "bits": rank.bits,
                **{
                    f"{part}_snr_db": noise_to_db(getattr(rank, part))
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
                "product": row.gemm,
                **asdict(row.variant),
                **{part: getattr(row, part).statistics() for part in ("total", "quantization", "accumulation")},
            }
            for row in found.rows
            if row.variant in shown
        ],
        "refused": [
            {"why": why, "combinations": [asdict(v) for v in variants]} for why, variants in found.refused.items()
        ],
        "silent": list(found.silent),
        "outliers": {"layer": outliers.layer, "without": [_finite(asdict(w)) for w in outliers.without]}
        if outliers
        else None,
        "steps": {"product": steps[0], **asdict(steps[1])} if steps else None,
    }


def _finite(value: Any) -> Any:
    """Replace NaN and infinities with None, in nested dictionaries too."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
