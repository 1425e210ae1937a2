"""The pictures of `octile lab what-if`, from what was found to a page's sections."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from octile.lab.capture import CapturedGemm
from octile.lab.outliers import MASSIVE, Outliers
from octile.lab.pages import outliers_figures as outlier_figures
from octile.lab.pages import what_if_figures as draw
from octile.lab.pages.page import Section
from octile.lab.variants import CONTROLS, Variant
from octile.lab.what_if import Row, WhatIf, decibels
from octile.recipe import GEMMS, GemmName
from octile.report.style import PHONE, WIDE
from octile.report.svg import Chart, make_chart


def _mean_db(rows: Iterable[Row], part: str) -> float | None:
    noise = [getattr(row, part).noise for row in rows]
    return decibels(math.fsum(noise) / len(noise)) if noise else None


def main_sections(found: WhatIf, reference: Variant, products: Sequence[CapturedGemm]) -> list[Section]:
    """Of casts, sums and layers; what lost nothing at all has no picture."""
    casts = casts_of(found)
    sections = [Section("Which cast", [_casts_chart(found, casts)])] if casts else []
    sums = sums_of(found, reference)
    quantization = _mean_db(found.of(reference), "quantization")
    if sums and quantization is not None:
        longest = max(p.a.shape[1] for p in products)
        name = f"in {draw.format_label(reference.fmt)} {draw.block_label(reference.block)}"
        sentence = draw.say_sums(sums, name, quantization, longest)
        size = 130 + 26 * len(sums)
        chart = make_chart(
            "How the tensor core sums",
            sentence,
            lambda f: draw.draw_sums(f, sums, quantization),
            (WIDE, size),
            (PHONE, size),
        )
        sections.append(Section("Which sum", [chart]))
    heat = by_layer(found.of(reference))
    if not heat.known:
        return [*sections, Section("Where in the model", note=f"Nowhere: {reference} is exact on these products.")]
    sentence = draw.say_heat(heat, str(reference))
    return [*sections, Section("Where in the model", [_heat_chart("Layer by layer", sentence, heat)])]


def _casts_chart(found: WhatIf, casts: Sequence[draw.CastLoss]) -> Chart:
    rows = len({(cast.fmt, cast.block) for cast in casts})
    n = len({(row.layer, row.product) for row in found.rows})
    return make_chart(
        "Formats, blocks and scales",
        draw.say_casts(casts, n),
        lambda f: draw.draw_casts(f, casts),
        (WIDE, 130 + 22 * rows),
        (PHONE, 170 + 22 * rows),
    )


def casts_of(found: WhatIf) -> list[draw.CastLoss]:
    """The casts apart from the sums; formats as asked for, within one the best block first."""
    rows: dict[tuple[str, str, str], dict[tuple[str, str], Row]] = {}
    for row in found.rows:  # one row a product: the cast's error is the same for every way to sum
        v = row.variant
        rows.setdefault((v.fmt, v.block, v.scale), {})[row.layer, row.product] = row
    casts = [
        draw.CastLoss(*cast, db, math.fsum(row.bits for row in own.values()) / len(own))
        for cast, own in rows.items()
        if (db := _mean_db(own.values(), "quantization")) is not None
    ]
    formats = list(dict.fromkeys(cast.fmt for cast in casts))
    highest: dict[tuple[str, str], float] = {}
    for cast in casts:
        highest[cast.fmt, cast.block] = max(highest.get((cast.fmt, cast.block), -math.inf), cast.snr_db)
    return sorted(casts, key=lambda cast: (formats.index(cast.fmt), -highest[cast.fmt, cast.block]))


def sums_of(found: WhatIf, reference: Variant) -> list[draw.SumLoss]:
    """The ways to sum the reference's cast, by product."""
    losses = []
    cast = reference.fmt, reference.block, reference.scale
    for variant in dict.fromkeys(row.variant for row in found.rows):
        if (variant.fmt, variant.block, variant.scale) != cast or variant.arch == "exact":
            continue
        rows = found.of(variant)
        snr = {p: _mean_db([row for row in rows if row.product == p], "accumulation") for p in GEMMS}
        promoted = "" if variant.arch in CONTROLS else f", every {variant.promote}" if variant.promote else ", never"
        losses.append(
            draw.SumLoss(variant.arch + promoted, {p: db for p, db in snr.items() if any(r.product == p for r in rows)})
        )
    return losses


def by_layer(rows: Sequence[Row]) -> draw.Heat:
    """Total SNR, layers × products."""
    layers = list(dict.fromkeys(row.layer for row in rows))
    products = [p for p in GEMMS if any(row.product == p for row in rows)]
    db = {(row.layer, row.product): row.total.snr_db for row in rows}
    return draw.Heat(layers, products, [[db.get((layer, p)) for p in products] for layer in layers])


def _heat_chart(title: str, sentence: str, heat: draw.Heat) -> Chart:
    what = "SNR (dB), orange is worse"
    size = 80 + 19 * len(heat.rows)
    return make_chart(title, sentence, lambda f: draw.draw_heat(f, heat, what), (WIDE, size), (PHONE, size))


def steps_section(steps: tuple[GemmName, draw.Heat] | None, reference: Variant) -> list[Section]:
    """Layers by step, where there are several."""
    if steps is None or not steps[1].known:
        return []
    product, heat = steps
    sentence = draw.say_steps(heat, product, str(reference))
    return [Section("As training goes on", [_heat_chart("Layer by step", sentence, heat)])]


def outlier_sections(seen: Outliers, texts_known: bool) -> list[Section]:
    """The sequence that holds the largest value, and what is without the outliers."""
    token = int(seen.size.amax(1).argmax())
    start = token // seen.sequence * seen.sequence
    part = slice(start, start + seen.sequence)
    data = outlier_figures.Map(seen.layer, seen.size[part].double().numpy(), seen.kinds[part], MASSIVE)
    charts = [
        make_chart(
            "Tokens and channels",
            outlier_figures.say_map(data),
            lambda f: outlier_figures.draw_map(f, data),
            (WIDE, 460),
            (PHONE, 520),
        )
    ]
    charts.append(
        make_chart(
            "Without the outliers",
            outlier_figures.say_without(seen.without, MASSIVE),
            lambda f: outlier_figures.draw_without(f, seen.without),
            (WIDE, 270),
            (PHONE, 520),
        )
    )
    note = (
        "" if texts_known else "What the tokens say is not known here: --tokenizer tells “.” and newlines from others."
    )
    return [Section("Outliers", charts, note=note)]
