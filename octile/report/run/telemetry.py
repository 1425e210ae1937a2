"""The telemetry of a run: a figure over the measured steps, and a table of the GEMMs with the largest errors.

A measured step has rows of operands and rows of GEMMs (`octile.lab.telemetry`). The figure shows the worst layer at
each of them, and the table the worst GEMMs of the last one.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from octile.report.run.experts_and_scales import OPERANDS
from octile.report.run.metrics import Floats, Record, Run, as_float, last_known
from octile.report.style import COLOR, label_ends, line, plain_log_ticks, step_axis, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WORST = 4  # GEMMs in the table for each statistic


@dataclass(frozen=True)
class Statistic:
    """A statistic of telemetry's rows, with a panel of the figure.

    Attributes:
        key: its name in a row.
        title: the panel's title.
        by: the field of a row that chooses the line: "operand", or "product" for a GEMM.
        colors: the names of the lines and their colors.
        worst: max or min.
        is_log: whether the panel's axis is logarithmic.
    """

    key: str
    title: str
    by: str
    colors: dict[str, str]
    worst: Callable[..., Any] = max
    is_log: bool = False


_GEMMS = {"fprop": "purple", "dgrad": "amber", "wgrad": "cyan"}
_OPERANDS = {operand: color for operand, (_, color) in OPERANDS.items()}
SNR = Statistic("quantization_snr_db", "lowest SNR of a GEMM (dB)", "product", _GEMMS, worst=min)
UNDERFLOWS = Statistic("underflows%", "most underflows (%)", "operand", _OPERANDS)
SATURATED = Statistic("overflows%", "most saturated (%)", "operand", _OPERANDS)
AMAX = Statistic("cur_amax", "largest magnitude (amax)", "operand", _OPERANDS, is_log=True)
STATISTICS = (SNR, UNDERFLOWS, SATURATED, AMAX)
Line = tuple[Floats, Floats]  # steps and values


def has_telemetry(run: Run) -> bool:
    """Whether telemetry has a value that a panel shows."""
    return any(_lines(run, statistic) for statistic in _shown(run))


def draw_telemetry(figure: "Figure", run: Run) -> None:
    """Draw the worst layer at each measured step: a panel for each statistic, a line for each operand or GEMM."""
    panels = [(statistic, found) for statistic in _shown(run) if (found := _lines(run, statistic))]
    side_by_side = figure.get_figwidth() > 1.5 * figure.get_figheight()
    grid = (1, len(panels)) if side_by_side else (len(panels), 1)
    last = panels[-1][0]
    for axes, (statistic, found) in zip(figure.subplots(*grid, squeeze=False).flat, panels, strict=True):
        style_axes(axes, "step" if side_by_side or statistic is last else None, statistic.title)
        for name, (steps, values) in found.items():
            line(axes, steps, values, color=COLOR[statistic.colors[name]])
        step_axis(axes, run.telemetry[-1]["step"], intervals=3 if side_by_side else 6)
        _scale(axes, statistic, np.concatenate([values for _, values in found.values()]))
        ends = [(last_known(values), name, COLOR[statistic.colors[name]]) for name, (_, values) in found.items()]
        label_ends(figure, axes, ends)


def caption_telemetry(run: Run) -> str:
    """Return the caption: how many steps were measured, and the worst value of each error with its GEMM."""
    steps = sorted({row["step"] for row in run.telemetry})
    when = f"at each of {len(steps):,} measured steps" if len(steps) > 1 else f"at step {steps[0]:,}"
    sentences = [f"The worst layer {when}."]
    if worst := _worst(run, SNR):
        sentences.append(f"The lowest SNR of a GEMM was {worst[SNR.key]:.1f} dB, of {_gemm(worst, steps)}.")
    for statistic, what in ((UNDERFLOWS, "became zero"), (SATURATED, "saturated")):
        if not (worst := _worst(run, statistic)):
            continue
        percent, where = worst[statistic.key], f"{worst['operand']} in {_gemm(worst, steps)}"
        most = f"At most {percent:.2g}% of an operand's nonzero values {what}, of {where}."
        sentences.append(most if percent else f"No value {what}.")
    return " ".join(sentences)


class WorstGemms(NamedTuple):
    """The table of the worst GEMMs of the last measured step: by SNR, by underflows, and by saturated values.

    Underflows, saturated values and amax are those of the GEMM's worse operand.
    """

    step: int
    rows: list[tuple[str, ...]]
    columns: tuple[str, ...] = ("Layer", "GEMM", "SNR", "Underflows", "Saturated", "amax")


def worst_gemms(run: Run) -> WorstGemms | None:
    """The table of the worst GEMMs, the lowest SNR first; None without telemetry."""
    if not run.telemetry:
        return None
    last = run.telemetry[-1]["step"]
    gemms: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in run.telemetry:
        if row["step"] == last:
            found = gemms[row["layer"], row["product"]]
            for statistic in STATISTICS:
                if math.isfinite(value := as_float(row.get(statistic.key))):
                    found[statistic.key] = statistic.worst(found.get(statistic.key, value), value)
    chosen = set[tuple[str, str]]()
    for statistic in (SNR, UNDERFLOWS, SATURATED):
        key, sign = statistic.key, 1 if statistic.worst is min else -1
        measured = [gemm for gemm, found in gemms.items() if found.get(key, 0.0) or (statistic is SNR and key in found)]
        chosen.update(sorted(measured, key=lambda gemm: sign * gemms[gemm][key])[:WORST])
    ordered = sorted(chosen, key=lambda gemm: gemms[gemm].get(SNR.key, math.inf))
    cells = ([_cell(statistic, gemms[gemm].get(statistic.key)) for statistic in STATISTICS] for gemm in ordered)
    return WorstGemms(last, [(*gemm, *row) for gemm, row in zip(ordered, cells, strict=True)])


def _cell(statistic: Statistic, value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.1f} dB" if statistic is SNR else f"{value:.3g}" if statistic is AMAX else f"{value:.2g}%"


def _shown(run: Run) -> Iterator[Statistic]:
    """The statistics with a panel: saturated values only if there are any."""
    for statistic in STATISTICS:
        if statistic is not SATURATED or any(as_float(row.get(statistic.key)) > 0 for row in run.telemetry):
            yield statistic


def _lines(run: Run, statistic: Statistic) -> dict[str, Line]:
    """The worst value of each measured step for each line that has one."""
    worst: dict[str, dict[int, float]] = {name: {} for name in statistic.colors}
    for row in run.telemetry:
        value = as_float(row.get(statistic.key))
        if math.isfinite(value) and (value > 0 or not statistic.is_log) and row.get(statistic.by) in worst:
            so_far = worst[row[statistic.by]]
            so_far[row["step"]] = statistic.worst(so_far.get(row["step"], value), value)
    return {
        name: (np.array(list(by_step), dtype=np.float64), np.array(list(by_step.values())))
        for name, by_step in worst.items()
        if by_step
    }


def _worst(run: Run, statistic: Statistic) -> Record | None:
    """The row with the worst value of all measured steps."""
    rows = [row for row in run.telemetry if math.isfinite(as_float(row.get(statistic.key)))]
    return statistic.worst(rows, key=lambda row: row[statistic.key], default=None)


def _gemm(row: Record, steps: list[int]) -> str:
    """The GEMM of a row, and its step if several were measured."""
    return f"{row['product']} of {row['layer']}" + (f" at step {row['step']:,}" if len(steps) > 1 else "")


def _scale(axes: "Axes", statistic: Statistic, values: Floats) -> None:
    low, high = float(values.min()), float(values.max())
    if statistic.is_log:
        axes.set_yscale("log")
        plain_log_ticks(axes)
    elif statistic is SNR:
        axes.set_ylim(low - 0.1 * (high - low) - 0.5, high + 0.1 * (high - low) + 0.5)
    else:
        axes.set_ylim(0, 1.1 * high or 1)
