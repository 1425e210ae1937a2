"""What `octile bench gemm` is measured against: a floor and an aim for each kind of product, as ratios to a peer.

A goal that names shapes which were not measured is missed: nothing is proved by what could not run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from octile.bench import shapes
from octile.bench.rows import Row
from octile.bench.shapes import Case

HOST_UNIT, HOST_FLOOR, HOST_AIM = "µs of host", 25.0, 10.0

# The casts of training and serving, as `octile bench casts` names them.
ONCE = {
    "quantize 1×128",
    "quantize 128×128",
    "quantize 1×128 E5M6",
    "dequantize 1×128 E5M6",
    "SwiGLU, 1×128",
    "RMSNorm, 1×128",
}
TWICE = {
    "1×128 and turned",
    "requantize 1×128 turned",
    "128×128 and turned",
    "SwiGLU, 1×128, inputs kept",
    "SwiGLU backward, 1×128 and turned",
    "RMSNorm, 1×128 and as it is",
}
MOVES = {"permute to 8 places", "unpermute, sums of 8", "AdamW, BF16 moments"}


@dataclass(frozen=True)
class Goal:
    """Ratios to a peer, ours over theirs, over several cases.

    Attributes:
        title: of the cases.
        cases: that count.
        peer: as in a row.
        mean: what the geometric mean must reach, and what it should; None: nothing is asked.
        each: likewise for the smallest ratio.
    """

    title: str
    cases: Sequence[Case]
    peer: str
    mean: tuple[float | None, float | None] = (None, None)
    each: tuple[float | None, float | None] = (None, None)


@dataclass(frozen=True)
class Verdict:
    """How a goal was met.

    Attributes:
        measured: ratios that there are, of `asked`.
        worst: the case with the smallest ratio.
        floor, aim: whether all of it is met; None where nothing is asked.
    """

    goal: Goal
    measured: int
    asked: int
    mean: float
    smallest: float
    worst: str
    floor: bool | None
    aim: bool | None


DEEP_GEMM = "DeepGEMM"
GOALS = (
    Goal("dense, large", shapes.LARGE, DEEP_GEMM, mean=(0.97, 1.06), each=(0.93, 1.00)),
    Goal("dense, large", shapes.LARGE, "cuBLASLt fast", each=(None, 0.97)),
    Goal("dense, M = 128", shapes.M128, DEEP_GEMM, mean=(0.97, 1.12)),
    Goal("dense, M = 1 … 64", shapes.FEWER, DEEP_GEMM, mean=(0.97, 1.12)),
    Goal("1D1D, FP32 +=", shapes.ACCUMULATED, DEEP_GEMM, mean=(1.10, 1.35)),
    Goal("1D1D, BF16 store", shapes.BOTH_TILES, "octile 1D2D", each=(None, 0.93)),
    Goal("wgrad, grouped", shapes.WGRAD, DEEP_GEMM, mean=(1.05, 1.30)),
    Goal("grouped", shapes.GROUPED, DEEP_GEMM, mean=(0.96, 1.03)),
    Goal("masked", shapes.MASKED, DEEP_GEMM, mean=(0.96, 1.05)),
)


def judge(rows: Sequence[Row]) -> list[Verdict]:
    """A verdict on each goal of whose ratios there is at least one."""
    ratios = {(row.case, row.what, row.against.peer): row.against.ratio for row in rows if row.against}
    verdicts = []
    for goal in GOALS:
        asked = list(dict.fromkeys((case.name, case.what, goal.peer) for case in goal.cases))
        found = {key[0]: ratios[key] for key in asked if key in ratios}
        if not found:
            continue
        worst = min(found, key=found.__getitem__)
        mean, complete = geometric_mean(found.values()), len(found) == len(asked)
        floor, aim = (_met([(goal.mean[i], mean), (goal.each[i], found[worst])], complete) for i in (0, 1))
        verdicts.append(Verdict(goal, len(found), len(asked), mean, found[worst], worst, floor, aim))
    return verdicts


def in_words(rows: Sequence[Row]) -> str:
    """A line a goal: the mean and smallest ratio, what is asked of them, and whether it is met."""
    lines = [_line(verdict) for verdict in judge(rows)]
    if host := {f"{row.case} {row.what}": row.value for row in rows if row.unit == HOST_UNIT}:
        slowest = max(host, key=host.__getitem__)
        met = f"floor ≤ {HOST_FLOOR:g} {_word(host[slowest] <= HOST_FLOOR)}, aim ≤ {HOST_AIM:g} "
        lines.append(f"host time of a warm call: at most {host[slowest]:.1f} µs ({slowest}): {met}"
                     f"{_word(host[slowest] <= HOST_AIM)}")  # fmt: skip
    return "\n".join(lines)


def casts_in_words(rows: Sequence[Row]) -> str:
    """A line for casts that write once as they read, one for those that transpose or write twice, one for the rest."""
    lines = []
    for title, casts, floor, aim in (
        ("casts", ONCE, 0.80, 0.92),
        ("casts that turn or write twice", TWICE, 0.70, 0.85),
        ("permutation and optimizer", MOVES, 0.80, None),
    ):
        ratios = {(row.what, row.case): row.against.ratio for row in rows if row.against and row.what in casts}
        if ratios:
            worst = min(ratios, key=ratios.__getitem__)
            bounds = [
                f"{n} each ≥ {b:.2f}× {_word(ratios[worst] >= b)}" for n, b in (("floor", floor), ("aim", aim)) if b
            ]
            lines.append(
                f"{title}, beside a copy: smallest {ratios[worst]:.3f}× ({', '.join(worst)}): {', '.join(bounds)}"
            )
    return "\n".join(lines)


def _met(asked: list[tuple[float | None, float]], complete: bool) -> bool | None:
    bounds = [(bound, value) for bound, value in asked if bound is not None]
    return complete and all(value >= bound for bound, value in bounds) if bounds else None


def _line(v: Verdict) -> str:
    asked = [
        f"{name} {' and '.join(f'{what} ≥ {bound:.2f}×' for what, bound in bounds if bound)} {_word(met)}"
        for name, bounds, met in (
            ("floor", (("mean", v.goal.mean[0]), ("each", v.goal.each[0])), v.floor),
            ("aim", (("mean", v.goal.mean[1]), ("each", v.goal.each[1])), v.aim),
        )
        if met is not None
    ]
    measured = f"{v.measured} shapes" if v.measured == v.asked else f"only {v.measured} of {v.asked} shapes"
    found = f"mean {v.mean:.3f}×, smallest {v.smallest:.3f}× ({v.worst})"
    return f"{v.goal.title}, beside {v.goal.peer}, {measured}: {found}: {', '.join(asked)}"


def _word(met: bool | None) -> str:
    return "met" if met else "MISSED"
