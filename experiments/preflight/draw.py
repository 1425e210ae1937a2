"""Draw preflight.svg from preflight.json.gz, and print the README's table of predicted and measured errors.

    python experiments/preflight/draw.py experiments/preflight

The folder contains preflight.json.gz; preflight.svg is written to it.
"""

import gzip
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octile.lab.pages.figures import GEMM_COLOR, legend, short_names
from octile.report.style import COLOR, WIDE, save_drawing, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Run = dict[str, Any]
MAX_LABELS, LABEL_DB = 4, 10.0  # at most so many GEMMs are labeled, whose prediction is further off


def draw(figure: "Figure", runs: list[Run], least_db: float) -> None:
    """Draw a panel per recipe: a dot per GEMM at the first FP8 or INT8 step, and a line to its error at the last."""
    from matplotlib.ticker import MultipleLocator

    for axes, run in zip(figure.subplots(2, 2).flat, runs, strict=True):
        style_axes(axes, "predicted (dB)", f"{run['recipe']}: found (dB)")
        points = run["products_db"]
        every = [v for p in points.values() for v in (p["predicted"], *p["found"]) if v is not None]
        low, high = min([*every, least_db]) - 1, max(every) + 1
        axes.plot([low, high], [low, high], color=COLOR["muted"], linewidth=1, linestyle=":")
        axes.axvspan(low, least_db, color=COLOR["vermilion"], alpha=0.1, linewidth=0)
        axes.annotate(" kept in BF16", (low, high), va="top", fontsize=9, color=COLOR["muted"])
        for gemm, color in GEMM_COLOR.items():
            own = [p for name, p in points.items() if name.startswith(gemm) and None not in p["found"]]
            x, first, last = [p["predicted"] for p in own], [p["found"][0] for p in own], [p["found"][-1] for p in own]
            axes.vlines(x, first, last, color=COLOR[color], linewidth=0.8, alpha=0.5)
            axes.plot(x, first, "o", color=COLOR[color], markersize=4.5, alpha=0.8)
        for name in list(run["measured"][0]["first_prediction"]["misses_db"])[:MAX_LABELS]:
            x, y = points[name]["predicted"], points[name]["found"][0]
            if abs(y - x) > LABEL_DB:
                gemm, weight = name.split()
                where = f"{gemm} {short_names([weight])[0]}"
                axes.annotate(where, (x, y), (5, -9), textcoords="offset points", fontsize=8, color=COLOR["muted"])
        axes.set_xlim(low, high)
        axes.set_ylim(low, high)
        axes.grid(axis="x")
        axes.xaxis.set_major_locator(MultipleLocator(5))
        axes.yaxis.set_major_locator(MultipleLocator(5))
    legend(figure, GEMM_COLOR, True)


def lines(runs: list[Run]) -> list[str]:
    """Return the table's rows, one per recipe and step."""
    rows = []
    for run in runs:
        for at in run["measured"]:
            first, anew = at["first_prediction"], at["prediction_anew"]
            below = {kind: set(names) for kind, names in first["below_least"].items()}
            rows.append(
                f"| {run['recipe']} | {at['step']} | {first['rms_db']:.1f} | {first['mean_db']:+.1f} |"
                f" {first['rank_correlation']:.2f} | {first['of_the_worst_ten']} |"
                f" {len(below['predicted'])}, {len(below['found'])}, {len(below['predicted'] & below['found'])} |"
                f" {anew['rms_db']:.1f} | {anew['rank_correlation']:.2f} | {anew['of_the_worst_ten']} |"
            )
    return rows


def main() -> None:
    folder = Path(sys.argv[1])
    result = json.loads(gzip.decompress((folder / "preflight.json.gz").read_bytes()))
    runs = [run for run in result["runs"] if run["measured"]]
    save_drawing(folder / "preflight.svg", WIDE, 940, lambda figure: draw(figure, runs, result["least_snr_db"]))
    print("\n".join(lines(runs)))


if __name__ == "__main__":
    main()
