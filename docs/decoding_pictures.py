"""Draw the pictures of docs/mla_decoding.md.

    python docs/decoding_pictures.py

They are written to docs/images/. The roofline and the form's bytes are computed, the points and the steps are read from
benchmarks/. The points are what `octile bench attention --json NAME.json` wrote on an H200.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.transforms import offset_copy
from pictures import drawn, write

from octile.report.style import COLOR, style_axes
from octile.text import format_count

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
RECORD = BENCHMARKS / "results" / "h200_attention.json"
SERVE = BENCHMARKS / "results" / "h200_serve.json"
STEPS = BENCHMARKS / "history" / "mla-decode" / "steps.json"
PEAK, BANDWIDTH = 989e12, 4.8e12  # an H200's, by its data sheet: dense BF16 FLOP/s, bytes/s
LATENT, ROTARY, HEAD = 512, 64, 128  # channels of a latent, of a rotary key, and of a head's key without it or value
ROW_BYTES = {"BF16": 2 * (LATENT + ROTARY), "FP8": LATENT + 4 * LATENT // 128 + 2 * ROTARY}
FORM_COLOR = {"BF16": "blue", "FP8": "vermilion"}
MARKERS = {4096: "o", 8192: "s", 32768: "D"}
BATCHES = 1, 32, 256  # texts of a whole step
MARKER_DISTANCE = 8  # pixels between calls of the same form, which would cover each other


class Point(NamedTuple):
    """A measured call: heads, context, form of the cache and FLOP/s."""

    heads: int
    context: int
    form: str
    speed: float


def absorbed_flops(heads: int) -> int:
    """FLOPs of a new token for each position of its text: the scores and the weighted latents of all heads."""
    return 2 * heads * (LATENT + ROTARY + LATENT)


def points(rows: Sequence[Mapping[str, Any]]) -> list[Point]:
    """The FLOP/s of a record of `octile bench attention`."""
    found = []
    for row in rows:
        if row["unit"] == "TFLOP/s" and not row["against"]:  # a row with a peer repeats the speed
            texts, heads, form = row["case"].split(", ")
            found.append(Point(int(heads.split()[0]), int(texts.split()[-1]), form, row["value"] * 1e12))
    return found


def draw_roofline(figure: Figure) -> None:
    """Draw the roof over FLOPs per byte of the cache, the intensity of each form, and what was measured."""
    axes = figure.subplots()
    style_axes(axes, "FLOPs per byte of the cache", "TFLOP/s")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    x = np.geomspace(0.5, 1024, 200)
    axes.plot(x, np.minimum(x * BANDWIDTH, PEAK) / 1e12, color=COLOR["ink"])
    axes.set_xlim(0.5, 1024)
    axes.set_ylim(1.5, 2200)
    axes.set_xticks([2.0**n for n in range(-1, 11)], [f"{2.0**n:g}" for n in range(-1, 11)])
    axes.set_yticks([2, 10, 100, 1000], ["2", "10", "100", "1,000"])
    axes.annotate("4.8 TB/s", (9, 43), rotation=38, ha="right", va="bottom", color=COLOR["muted"])
    axes.annotate("989 TFLOP/s in BF16", (1000, 1050), ha="right", va="bottom", color=COLOR["muted"])
    naive = 2 * (HEAD + ROTARY + HEAD) / (2 * (HEAD + ROTARY + HEAD))
    axes.plot(naive, naive * BANDWIDTH / 1e12, "o", fillstyle="none", color=COLOR["ink"])
    axes.annotate("naive, any heads, BF16", (naive, naive * BANDWIDTH / 1e12), (10, -4), textcoords="offset points")
    for form, row_bytes in ROW_BYTES.items():
        for heads in (16, 128):
            intensity = absorbed_flops(heads) / row_bytes
            roof = min(intensity * BANDWIDTH, PEAK) / 1e12
            axes.plot([intensity, intensity], [1.5, roof], color=COLOR[FORM_COLOR[form]], linewidth=0.8, linestyle=":")
            axes.annotate(
                f"{heads} heads, {form}", (intensity, 1.7), (-4, 0), textcoords="offset points", rotation=90,
                ha="right", va="bottom", color=COLOR[FORM_COLOR[form]],
            )  # fmt: skip
    if RECORD.exists():
        for point in points(json.loads(RECORD.read_text(encoding="utf-8"))["rows"]):
            intensity = absorbed_flops(point.heads) / ROW_BYTES[point.form]
            shift = MARKER_DISTANCE * (list(MARKERS).index(point.context) - len(MARKERS) // 2)
            axes.plot(
                intensity, point.speed / 1e12, MARKERS[point.context], color=COLOR[FORM_COLOR[point.form]],
                markersize=5, transform=offset_copy(axes.transData, figure, shift, units="dots"),
            )  # fmt: skip
    keys = [
        Line2D([], [], color=COLOR["muted"], marker=marker, linestyle="", markersize=5, label=f"{context:,} positions")
        for context, marker in MARKERS.items()
    ]
    axes.legend(handles=keys, loc="upper left", frameon=False, labelcolor=COLOR["muted"])


def draw_split_kv(figure: Figure) -> None:
    """Draw eight texts on eight thread blocks: one text each, and equal ranges of the pages of all."""
    pages = [60, 4, 18, 9, 31, 2, 12, 24]
    blocks = len(pages)
    whole = [[(text, count)] for text, count in enumerate(pages)]
    of_range = -(-sum(pages) // blocks)
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(blocks)]
    line = 0
    for text, count in enumerate(pages):
        while count:
            taken = min(count, of_range - line % of_range)
            ranges[line // of_range].append((text, taken))
            line, count = line + taken, count - taken
    colors = ["blue", "vermilion", "green", "amber", "purple", "rose", "cyan", "olive"]
    upper, lower = figure.subplots(2, 1, sharex=True)
    for axes, shares, title in (
        (upper, whole, "thread blocks with a text each"),
        (lower, ranges, f"thread blocks with {of_range} of the {sum(pages)} pages each"),
    ):
        style_axes(axes, "pages; each color is a text" if axes is lower else None, title)
        axes.set_ylim(blocks - 0.4, -0.6)
        axes.set_yticks(range(blocks), [str(block) for block in range(blocks)])
        for block, share in enumerate(shares):
            at = 0
            for text, count in share:
                axes.barh(block, count, left=at, height=0.7, color=COLOR[colors[text]], edgecolor=COLOR["paper"])
                at += count
        axes.set_xlim(0, max(pages) * 1.02)


def draw_steps(figure: Figure) -> None:
    """Draw the time of each version of the kernels, a panel for each case."""
    steps = json.loads(STEPS.read_text(encoding="utf-8"))
    cases = list(dict.fromkeys((step["heads"], step["context"], step["form"]) for step in steps))
    panels = figure.subplots(len(cases), 1)
    for axes, (heads, context, form) in zip(panels, cases, strict=True):
        of_case = [step for step in steps if (step["heads"], step["context"], step["form"]) == (heads, context, form)]
        style_axes(axes, None, f"µs, {heads} heads, {context:,} positions, {form} cache")
        axes.set_axisbelow(True)
        axes.grid(axis="y", visible=False)
        axes.set_yticks(range(len(of_case)), [step["step"] for step in of_case])
        axes.set_ylim(len(of_case) - 0.4, -0.6)
        axes.barh(range(len(of_case)), [step["us"] for step in of_case], height=0.6, color=COLOR[FORM_COLOR[form]])
        for row, step in enumerate(of_case):
            axes.annotate(f"{step['us']:.0f}", (step["us"], row), (4, 0), textcoords="offset points", va="center")
        axes.set_xlim(0, 1.08 * max(step["us"] for step in of_case))


def draw_whole_steps(figure: Figure) -> None:
    """Draw the time of each kind of bytes of whole steps at the published bandwidth, and the measured time."""
    values = {(row["case"], row["what"]): row["value"] for row in json.loads(SERVE.read_text(encoding="utf-8"))["rows"]}
    panels = figure.subplots(len(BATCHES), 1)
    for axes, batch in zip(panels, BATCHES, strict=True):
        style_axes(axes, "ms" if batch == BATCHES[-1] else None, f"a step of {format_count(batch, 'text')}")
        axes.set_axisbelow(True)
        axes.grid(axis="y", visible=False)
        axes.set_yticks(range(2), ["FP8 weights", "BF16 weights"])
        axes.set_ylim(1.6, -0.6)
        longest = 0.0
        for line, weights in enumerate(("", "BF16 weights, ")):
            case = f"V2-Lite shape, {weights}decode, batch {batch}"
            moved, experts, cache = (values[case, f"bytes{of}"] for of in ("", " of routed experts", " of cache"))
            left, ms = 0.0, values[case, "step"]
            longest = max(longest, ms)
            for name, color, part in (
                ("experts", "blue", experts),
                ("other weights", "vermilion", moved - experts - cache),
                ("cache", "green", cache),
            ):
                axes.barh(line, 1e12 * part / BANDWIDTH, left=left, height=0.6, color=COLOR[color], label=name)
                left += 1e12 * part / BANDWIDTH
            axes.barh(line, ms - left, left=left, height=0.6, color="none", edgecolor=COLOR["muted"])
            axes.annotate(f"{ms:.2f} ms: {left / ms:.0%}", (ms, line), (4, 0), textcoords="offset points", va="center")
        axes.set_xlim(0, 1.2 * longest)
    kinds, _ = panels[0].get_legend_handles_labels()
    measured = Patch(facecolor="none", edgecolor=COLOR["muted"], label="measured step")
    panels[0].legend(
        handles=[*kinds[:3], measured], ncols=4, loc="lower right", bbox_to_anchor=(1, 1), frameon=False
    )  # fmt: skip


PICTURES = {  # how they are drawn, and their heights in pixels
    "decode_roofline": (draw_roofline, 440),
    "decode_split_kv": (draw_split_kv, 400),
    "decode_steps": (draw_steps, 430),
    "decode_whole_step": (draw_whole_steps, 420),
}


def main() -> None:
    for name, (draw, height) in PICTURES.items():
        write(name, drawn(name, height, draw))


if __name__ == "__main__":
    main()
