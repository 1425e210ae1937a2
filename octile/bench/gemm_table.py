"""Rows of `octile bench gemm` as a table for a person: one line a product, what was measured of it beside another."""

from __future__ import annotations

from collections.abc import Sequence

from octile.bench.rows import Row, align_columns

EVERYWHERE = """\
case: M×N×K of x[M, K] · w[N, K]ᵀ, with the number of groups before it (of wgrad, K is the tokens of a group)
× a peer: octile's speed over its speed, more is better. GB/s: operands and result, each once
difference: 1 − 2Σxy / Σ(x²+y²) from the product of plain numbers"""
ON_A_GPU = {  # by the unit of what it explains
    "µs of host": "host: until a call returns, the mean of 100, the least of ten such means; graph: a replay",
    "registers": "registers of a thread, shared memory of a block, seconds that NVRTC took "
    "(`octile doctor --kernels`: NVCC beside it)",
}
FIGURES = {"µs": "µs", "TFLOP/s": "TFLOP/s", "GB/s": "GB/s"}  # unit: title
LAST = {
    "µs of host": "host µs",
    "µs in a graph": "graph µs",
    "difference": "difference",
    "registers": "registers",
    "KiB of shared memory": "shared KiB",
    "s to compile": "compiled in s",
}


def gemm_table(rows: Sequence[Row]) -> str:
    """The table; a product's peers are columns of ratios."""
    peers = list(dict.fromkeys(row.against.peer for row in rows if row.against))
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        line = lines.setdefault((row.case, row.what), {})
        line[row.unit] = _figure(row)
        if row.against:
            line[row.against.peer] = f"{row.against.ratio:.3f}"
    units = [unit for unit in FIGURES if any(unit in line for line in lines.values())]
    last = [unit for unit in LAST if any(unit in line for line in lines.values())]
    head = ["case", "what", *(FIGURES[u] for u in units), *(f"× {peer}" for peer in peers), *(LAST[u] for u in last)]
    body = [[*key, *(line.get(name, "") for name in (*units, *peers, *last))] for key, line in lines.items()]
    return align_columns([head, *body], right=set(head[2:]))


def legend(rows: Sequence[Row]) -> str:
    """What the table's columns mean; of those that a CPU has not, only where they are."""
    units = {row.unit for row in rows}
    return "\n".join([EVERYWHERE, *(said for unit, said in ON_A_GPU.items() if unit in units)])


def _figure(row: Row) -> str:
    if row.unit == "difference":
        return f"{row.value:.1e}"
    return f"{row.value:,.0f}" if row.value >= 100 else f"{row.value:.3g}"
