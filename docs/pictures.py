"""Draw the pictures of docs/hopper_product.md, parallel.md, schedules.md, serving_ranks.md and tour.md.

    octile lab formats
    octile lab accumulate
    octile train --steps 200 --telemetry-every 50 --out runs/inside
    python -m octile.lab.promotion
    python docs/pictures.py                 # in the folder in which the others were called

They are written to docs/images/. The schedules and four other pictures need no input, those of the ranks and of the
experts of `small` are drawn from experiments/. A picture that needs the output of a command is not written if that
output is missing.
"""

import gzip
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

import octile
from octile.lab import tensor_core_matmul
from octile.lab.pages.figures import GEMM_COLOR
from octile.lab.pages.page import power
from octile.lab.tensor_core.reference import exponent
from octile.parallel.schedules import Simulation, make_schedule, simulate
from octile.plan.experts import balanced, consecutive, read_load, skewed_load
from octile.plan.published import published_run
from octile.plan.step import plan_step
from octile.report.experts import HEIGHT, draw_gpu_loads
from octile.report.plan import save_plan
from octile.report.schedule import draw_schedule, figure_size
from octile.report.style import COLOR, PALETTE, WIDE, drawing, label_ends, style_axes
from octile.report.svg import to_svg

IMAGES = Path(__file__).parent / "images"
EXPERIMENTS = Path(__file__).parents[1] / "experiments"
RANKS = EXPERIMENTS / "ranks"
FROM_PAGES = {
    "number_line": ("lab/formats.html", "The number line of a tile"),
    "relative_error": ("lab/formats.html", "Relative error against magnitude"),
    "accumulate": ("lab/accumulate.html", "Worst error against K"),
}
LAYOUT_HEIGHT = 600
FRACTION_BITS = 13  # of Hopper's accumulator
SCHEDULE_SIZES = {  # stages and micro-batches
    **dict.fromkeys(("gpipe", "1f1b", "zb1p", "chimera"), (4, 8)),
    "dualpipe": (8, 20),
    "dualpipev": (8, 10),
}
SUMS_COLOR = {"FP32": "ink", "promoted every 128": "blue", "never promoted": "vermilion"}


def main() -> None:
    for name, (page, heading) in FROM_PAGES.items():
        if Path(page).exists():
            write(name, cut_out(Path(page).read_text(encoding="utf-8"), heading))
    write("one_step", drawn("one_step", 560, draw_one_step))
    write("lost_share", drawn("lost_share", 320, draw_lost_share))
    write("layout", drawn("layout", LAYOUT_HEIGHT, draw_layout))
    for name, sizes in SCHEDULE_SIZES.items():
        write(f"schedule_{name}", schedule(f"schedule_{name}", simulate(make_schedule(name, *sizes))))
    draw_plans()
    write("ranks", drawn("ranks", 560, draw_ranks))
    draw_experts("experts_skewed", skewed_load(1.0, 0), 288, 8, 4, 32)
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as metrics:
        metrics.write(gzip.decompress((EXPERIMENTS / "small" / "train_deepseek_v3.jsonl.gz").read_bytes()))
        metrics.flush()
        draw_experts("experts_small", read_load(Path(metrics.name)), 24, 1, 1, 8)
    telemetry, promotion = Path("runs/inside/telemetry.jsonl"), Path("runs/lab-promotion/promotion.json")
    if telemetry.exists():
        rows = [json.loads(line) for line in telemetry.read_text(encoding="utf-8").splitlines()]
        write("telemetry", drawn("telemetry", 560, lambda figure: draw_telemetry(figure, rows)))
    if promotion.exists():
        runs = json.loads(promotion.read_text(encoding="utf-8"))["runs"]
        write("promotion", drawn("promotion", 340, lambda figure: draw_promotion(figure, runs)))


def cut_out(page: str, heading: str) -> str:
    """The SVG under this heading of a lab page, in its wide form."""
    figure = page[page.index(f"<b>{heading}</b>") :]
    return figure[figure.index("<svg") : figure.index("</svg>") + len("</svg>")]


def drawn(name: str, height: float, draw: Callable[[Figure], None], width: float = WIDE) -> str:
    with drawing(width, height) as figure:
        draw(figure)
        return to_svg(figure, name, "")


def schedule(name: str, simulation: Simulation) -> str:
    width, height = figure_size(simulation)
    return drawn(name, height, lambda figure: draw_schedule(figure, simulation), width)


def draw_plans() -> None:
    """Draw the published run of DeepSeek-V3, and the same with 1F1B, as PNG: an SVG of their passes has 700 kB."""
    published = published_run()
    layout = replace(published.layout, schedule="1f1b")
    for plan in (published, plan_step(published.model, layout, published.cluster)):
        title = f"DeepSeek-V3 on {plan.cluster.gpus:,} {plan.cluster.gpu.name}: {plan.layout}"
        path = IMAGES / f"plan_{plan.layout.schedule}.png"
        print(save_plan(path, title, plan.simulation, plan.seconds_by_kind, plan.memory))


def draw_experts(name: str, load_LE: torch.Tensor, n_slots: int, n_groups: int, n_nodes: int, n_gpus: int) -> None:
    """Draw what `octile plan experts` draws."""
    before, after = consecutive(load_LE, n_gpus), balanced(load_LE, n_slots, n_groups, n_nodes, n_gpus)
    write(name, drawn(name, HEIGHT, lambda figure: draw_gpu_loads(figure, before, after)))


def write(name: str, svg: str) -> None:
    """Write an SVG as a file that contains its colors, for light and for dark paper."""

    def colors(which: int) -> str:
        return "svg{" + "".join(f"--{name}:{both[which]};" for name, both in PALETTE.items()) + "}"

    style = (
        f"<style>{colors(0)}svg{{--font:system-ui,'Segoe UI',Roboto,Arial,sans-serif}}"
        f"@media (prefers-color-scheme: dark){{{colors(1)}}}</style>"
    )
    paper = '<rect width="100%" height="100%" style="fill: var(--paper)"/>'
    width, height = re.search(r'viewBox="0 0 (\S+) (\S+)"', svg).groups()  # type: ignore[union-attr]
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    svg = re.sub(r"<svg ([^>]*)>", rf'<svg {names} width="{width}" height="{height}" \1>{style}{paper}', svg, count=1)
    (IMAGES / f"{name}.svg").write_text(svg + "\n", encoding="utf-8")
    print(IMAGES / f"{name}.svg")


def one_signed(rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two matrices of |N(0, 1)| in E4M3, one scale per matrix: the one-signed data of `octile lab accumulate`."""
    generator = torch.Generator().manual_seed(0)
    operands = (torch.randn(rows, k, generator=generator).abs() for _ in range(2))
    a, b = (octile.quantize(x, (None, None)).data for x in operands)
    return a, b


def draw_one_step(figure: Figure) -> None:
    """Draw the bits of an accumulator and of the 32 products that are added to it, one row each."""
    a, b = one_signed(1, 4096)
    c = tensor_core_matmul(a[:, :2048], b[:, :2048]).item()
    products = (a[0, 2048:2080].double() * b[0, 2048:2080].double()).tolist()
    top = exponent(c, -1000)
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(-4.4, top + 9.5)
    axes.set_ylim(34.2, -2.6)
    axes.axvline(FRACTION_BITS + 0.5, color=COLOR["ink"], linewidth=1.2, ymax=0.94)
    axes.annotate("added", (FRACTION_BITS + 0.2, -1.4), ha="right", color=COLOR["blue"])
    axes.annotate("truncated", (FRACTION_BITS + 0.8, -1.4), color=COLOR["vermilion"])
    for row, term in enumerate([c, *sorted(products, reverse=True)]):
        text = "accumulator" if row == 0 else _number(term)
        axes.annotate(text, (-0.9, row), ha="right", va="center", fontsize=9)
        unit = 2.0 ** (top - FRACTION_BITS)
        gone = term - int(term / unit) * unit
        if gone:
            axes.annotate(f"loses {_number(gone)}", (top + 2.5, row), va="center", fontsize=9, color=COLOR["vermilion"])
        for place in range(top - exponent(term, 0), top + 2):
            one = int(term / 2.0 ** (top - place)) % 2 == 1
            if one or place <= FRACTION_BITS:
                _bit(axes, place, row, one, "blue" if place <= FRACTION_BITS else "vermilion")
    for place in (0, FRACTION_BITS):
        axes.annotate(power(2.0 ** (top - place)), (place, 33.4), ha="center", va="center", color=COLOR["muted"])


def _bit(axes: Any, place: int, row: int, one: bool, color: str) -> None:
    look = {"color": COLOR[color]} if one else {"edgecolor": COLOR["grid"], "facecolor": "none"}
    axes.barh(row, 0.8, left=place - 0.4, height=0.7, linewidth=0.8, **look)


def _number(value: float) -> str:
    return f"{value:,.1f}".removesuffix(".0")


def lost_share(every: int | None, rows: int = 64, k: int = 16384) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of products summed, and the mean share of a step's 32 products that truncation removes there."""
    a, b = one_signed(rows, k)
    c = torch.zeros(rows, rows)
    places, shares = [], []
    for start in range(0, k, 32):
        if every and start % every == 0:
            c = torch.zeros(rows, rows)
        step = a[:, start : start + 32], b[:, start : start + 32]
        after = tensor_core_matmul(*step, c=c)
        arrived = (after - c).double() / (step[0].double() @ step[1].double().T)
        places.append(start + 32)
        shares.append(1 - arrived.mean().item())
        c = after
    return np.array(places), np.array(shares)


def draw_lost_share(figure: Figure) -> None:
    axes = figure.subplots()
    style_axes(axes, "products summed so far", "share of a step's 32 products that is truncated, one sign")
    axes.set_xlim(0, 16384)
    axes.set_ylim(0, 0.55)
    ticks = range(0, 16385, 2048)
    axes.set_xticks(list(ticks), [f"{tick:,}" for tick in ticks])
    axes.set_yticks([0, 0.1, 0.2, 0.3, 0.4, 0.5], [f"{tick}%" for tick in range(0, 60, 10)])
    labels = []
    for every, text, color in ((None, "never promoted", "vermilion"), (128, "every 128", "blue")):
        places, shares = lost_share(every)
        axes.plot(places, shares, color=COLOR[color])
        labels.append((float(shares[-1]), text, COLOR[color]))
    label_ends(figure, axes, labels)


def draw_telemetry(figure: Figure, rows: Iterable[Mapping[str, Any]]) -> None:
    """Draw both errors of every GEMM at the last measured step, without the GEMMs that accumulated exactly."""
    products = [row for row in rows if row.get("accumulation_snr_db") is not None]
    last = max(row["step"] for row in products)
    products = [row for row in products if row["step"] == last]
    layers = sorted({row["layer"] for row in products}, key=_natural)
    axes = figure.subplots()
    style_axes(axes, "signal-to-noise ratio, dB (20 dB more: a tenth of the error)", f"step {last}")
    axes.grid(axis="x")
    axes.grid(axis="y", visible=False)
    axes.set_ylim(len(layers) - 0.4, -1.6)
    axes.set_yticks(range(len(layers)), [layer.removeprefix("model.layers.") for layer in layers], fontsize=8)
    for at, row in ((layers.index(row["layer"]), row) for row in products):
        color = COLOR[GEMM_COLOR[row["product"]]]
        for error, marker in (("quantization", "o"), ("accumulation", "D")):
            axes.plot(row[f"{error}_snr_db"], at, marker, color=color, markersize=4)
    for error, text in (("quantization", "8-bit operands"), ("accumulation", "accumulation, promoted every 128")):
        middle = float(np.median([row[f"{error}_snr_db"] for row in products]))
        axes.annotate(text, (middle, -1), ha="center", va="center")
    for place, (name, color) in enumerate(GEMM_COLOR.items()):
        axes.annotate(name, (0.45 + 0.06 * place, 0.93), xycoords="axes fraction", color=COLOR[color])


ROOMS = (  # from the last to the first: what the rooms are for, their color, and each room with what it holds
    (
        "measure and use",
        "vermilion",
        (
            ("cli", "commands"),
            ("compat", "DeepGEMM's names"),
            ("integrations", "others' models"),
            ("bench", "speed, memory"),
        ),
    ),
    (
        "a training run",
        "amber",
        (
            ("lab", "what 8 bits do"),
            ("lab_options", "its commands"),
            ("rl", "rewards, GRPO"),
            ("train", "data, loop, compare"),
            ("plan", "time, memory"),
        ),
    ),
    (
        "serving",
        "rose",
        (
            ("serve/http", "OpenAI's protocol"),
            ("serve/disaggregated", "prefill apart from decode"),
            ("serve/process", "an engine of its own"),
            ("serve/ranks", "experts, heads, placement"),
        ),
    ),
    (
        "one engine",
        "rose",
        (
            ("serve/engine", "requests, scheduler"),
            ("serve/runner", "steps, KV cache"),
            ("serve/model", "forward pass"),
            ("serve/weights", "loading"),
        ),
    ),
    (
        "files and state",
        "purple",
        (
            ("chat", "its template"),
            ("tokenizer", "byte-level BPE"),
            ("report", "pages"),
            ("checkpoint", "conversion"),
            ("parallel", "many ranks"),
            ("optim", "AdamW, schedules"),
        ),
    ),
    ("models", "green", (("models", "DeepSeek-V3"), ("nn", "modules"), ("nn/fused", "autograd functions"))),
    ("what is computed", "cyan", (("scaled", "ScaledTensor"), ("ops", "operators, CPU reference"))),
    (
        "how fast",
        "blue",
        (
            ("kernels", "which backend"),
            ("cuda/gemm", "GEMM kernel"),
            ("cuda/quantize", "quantization"),
            ("cuda/jit", "compile, launch"),
            ("triton", "portable kernels"),
        ),
    ),
    ("numbers", "muted", (("routing", "which expert"), ("recipe", "which operand"), ("formats", "which values"))),
    ("for all rooms", "olive", (("options", "command lines"), ("torchrun", "ranks"), ("validation", "fields, JSON"))),
)


def draw_layout(figure: Figure) -> None:
    """Draw the rooms of the package, a band for each purpose; a room imports rooms to its right and below only."""
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(0, 100)
    axes.set_ylim(len(ROOMS), 0)
    for row, (purpose, color, rooms) in enumerate(ROOMS):
        axes.annotate(purpose, (0, row + 0.5), va="center", color=COLOR["muted"])
        width = 82 / len(rooms)
        for column, (room, content) in enumerate(rooms):
            left = 18 + column * width
            axes.barh(row + 0.5, width - 1, left=left, height=0.82, color="none", edgecolor=COLOR[color], linewidth=1.4)
            middle = left + (width - 1) / 2
            axes.annotate(room, (middle, row + 0.38), ha="center", va="center", color=COLOR[color], fontsize=12)
            axes.annotate(content, (middle, row + 0.68), ha="center", va="center", color=COLOR["muted"], fontsize=10)


def _natural(name: str) -> list[Any]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def draw_promotion(figure: Figure, runs: Iterable[Mapping[str, Any]]) -> None:
    axes = figure.subplots()
    style_axes(axes, "step", "held-out loss (nats a token; lower is better)")
    labels = []
    for run in runs:
        other = run["sums"] == "FP32" and any(label[1].startswith("FP32") for label in labels)
        color = COLOR["muted" if other else SUMS_COLOR[run["sums"]]]
        axes.plot(
            run["steps"], run["val_loss"], color=color, marker="o", markersize=3.5, linestyle=":" if other else "-"
        )
        text = f"{run['sums']}, another seed" if other else run["sums"]
        labels.append((run["val_loss"][-1], f"{text} {run['val_loss'][-1]:.4f}", color))
    axes.set_xlim(0, max(max(run["steps"]) for run in runs) * 1.01)
    label_ends(figure, axes, labels)


def losses(run: str) -> np.ndarray:
    """The training loss of each step of a run in experiments/ranks/."""
    lines = (json.loads(line) for line in gzip.decompress((RANKS / f"{run}.jsonl.gz").read_bytes()).splitlines())
    return np.array([line["loss"] for line in lines if "loss" in line])


def draw_ranks(figure: Figure) -> None:
    """Draw the losses of 1, 2 and 8 processes over one another, and below how far they lie from those of one."""
    upper, lower = figure.subplots(2, 1, height_ratios=(1.2, 1))
    style_axes(upper, None, "training loss, nats a token (deepseek_v3)")
    style_axes(lower, "step", "difference from the loss of one process, relative, in the first 50 steps")
    steps = np.arange(1, len(losses("one")) + 1)
    ends = []
    for run, text, color, style in (
        ("one", "1 process", "ink", {"linewidth": 3.2, "alpha": 0.35}),
        ("two", "2 processes", "blue", {"linewidth": 1.4}),
        ("eight", "8 processes", "vermilion", {"linewidth": 1.0, "linestyle": "--"}),
    ):
        found = losses(run)
        upper.plot(steps, found, color=COLOR[color], **style)
        ends.append((float(found[-1]), text, COLOR[color]))
    differences = []
    for run, text, color in (("two", "2", "blue"), ("eight", "8", "vermilion")):
        for suffix, recipe, style in (("", "FP8", "-"), ("_fp32", "FP32", ":")):
            apart = np.abs(losses(run + suffix) / losses(f"one{suffix}") - 1)[:50]
            lower.plot(
                steps[:50], np.where(apart > 0, apart, np.nan), color=COLOR[color], linestyle=style, linewidth=1.2
            )
            differences.append((float(apart[-1]), f"{text} processes, {recipe}", COLOR[color]))
    lower.set_yscale("log")
    lower.set_ylim(3e-8, 1e-1)
    lower.yaxis.set_major_formatter(lambda value, _: f"{value:.0e}")
    for axes, last, labels in ((upper, len(steps), ends), (lower, 50, differences)):
        axes.set_xlim(0, last * 1.01)
        label_ends(figure, axes, labels)


if __name__ == "__main__":
    main()
