"""What `octile bench step` is measured against: a floor and an aim for speed, bytes, time beside products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octile.bench.rows import Row

DENSE, SLICE = "dense decoder", "V3 rank slice"
STEP, OPTIMIZED = "forward + backward", "forward + backward + AdamW"
BF16, EAGER = "compiled BF16", "BF16"
OUTSIDE, OUTSIDE_LAYERS = "outside the products, attention's among them", "outside the products of layers"
SAVED, SAVED_LESS = "saved, octile", "saved, octile, q k v again"
OF_A_PARAMETER = "of a parameter"


@dataclass(frozen=True)
class Bound:
    """One figure of a case and what is asked of it; None: nothing.

    Attributes:
        peers: of whose ratios the worst counts; () means the figure itself.
        at_least: more is better.
    """

    title: str
    case: str
    what: str
    peers: Sequence[str]
    floor: float | None
    aim: float | None
    at_least: bool = True


AO = tuple(f"torchao {name}" for name in ("tensorwise", "blockwise", "rowwise"))
BOUNDS = (
    Bound("dense, speed beside compiled BF16", DENSE, STEP, (BF16,), 1.25, 1.50),
    Bound("dense with AdamW, speed beside compiled BF16", DENSE, OPTIMIZED, (BF16,), 1.25, 1.50),
    Bound("V3 rank slice, speed beside BF16, compiled or not", SLICE, STEP, (BF16, EAGER), 1.25, 1.60),
    Bound("dense, speed beside torchao blockwise", DENSE, STEP, ("torchao blockwise",), 1.0, None),
    Bound("dense, speed beside the fastest of torchao", DENSE, STEP, AO, None, 1.0),
    Bound("dense, bytes kept beside compiled BF16", DENSE, SAVED, (BF16,), 0.56, 0.50, at_least=False),
    Bound("dense, bytes kept with q, k, v made again", DENSE, SAVED_LESS, (BF16,), None, 0.36, at_least=False),
    Bound("dense, % of a step beside the products", DENSE, OUTSIDE, (), 35.0, 25.0, at_least=False),
    Bound("V3 rank slice, % of a step beside the products", SLICE, OUTSIDE, (), 35.0, 25.0, at_least=False),
    Bound("dense, % where attention's are not counted as products", DENSE, OUTSIDE_LAYERS, (), None, None),
    Bound("V3 rank slice, % where attention's are not counted as products", SLICE, OUTSIDE_LAYERS, (), None, None),
)


def in_words(rows: Sequence[Row]) -> str:
    """A line a bound of which there is a figure, and one for the bytes of a parameter."""
    lines = [line for bound in BOUNDS if (line := _line(bound, rows))]
    sizes = {row.what: row.value for row in rows if row.what.endswith(OF_A_PARAMETER) and "cached" not in row.what}
    if sizes:
        total = sum(sizes.values())
        lines.append(f"bytes of a parameter, without cached FP8: {total:.2f}: floor ≤ 12 {_word(total <= 12.01)}")
    return "\n".join(lines)


def _line(bound: Bound, rows: Sequence[Row]) -> str:
    found = [row for row in rows if (row.case, row.what) == (bound.case, bound.what)]
    if bound.peers:
        beside = [row.against for row in found if row.against]
        values = {against.peer: against.ratio for against in beside if against.peer in bound.peers}
    else:
        values = {row.what: row.value for row in found}
    complete = len(values) >= len(bound.peers)
    if not values:
        return ""
    worse: Callable[..., str] = min if bound.at_least else max
    worst = worse(values, key=values.__getitem__)
    asked = ", ".join(
        f"{name} {'≥' if bound.at_least else '≤'} {limit:g} {_word(complete and _met(values[worst], limit, bound))}"
        for name, limit in (("floor", bound.floor), ("aim", bound.aim))
        if limit is not None
    )
    of = f" ({worst})" if len(bound.peers) > 1 else ""
    return f"{bound.title}: {values[worst]:.3f}{of}{f': {asked}' if asked else ''}"


def _met(value: float, limit: float, bound: Bound) -> bool:
    return value >= limit if bound.at_least else value <= limit


def _word(met: bool) -> str:
    return "met" if met else "MISSED"
