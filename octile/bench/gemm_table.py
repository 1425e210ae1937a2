"""The table of `octile bench gemm`: one line per GEMM, its results in columns."""

from __future__ import annotations

from collections.abc import Sequence

from octile.bench.rows import Row, align_columns

HOST, GRAPH, DIFFERENCE = "µs of host", "µs in a graph", "difference"  # units
CLEAN = "TFLOP/s, clean L2"  # of the ratio to a peer in the same state
REGISTERS, SHARED, COMPILED = "registers", "KiB of shared memory", "s to compile"
LEGEND = """\
case: M×N×K of x[M, K] · w[N, K]ᵀ, with the number of groups before it (wgrad: K is the tokens of a group)
× peer: octile's speed / the peer's speed, higher is better. GB/s: bytes of operands and output, each once
difference: 1 − 2Σxy / Σ(x²+y²) from the high-precision GEMM"""
GPU_LEGEND = {  # unit: what its column means
    CLEAN: "clean L2: flushed by reading, as between the layers of a model; otherwise by writing, and what is read "
    "first waits until that is written back",
    HOST: "host: until a call returns, the mean of 100 calls, the minimum of ten such means; graph: a replay",
    REGISTERS: "registers per thread, shared memory per block, seconds of compilation by NVRTC "
    "(`octile doctor --kernels` also times NVCC)",
}
FIGURES = {"µs": "µs", "TFLOP/s": "TFLOP/s", "GB/s": "GB/s"}  # unit: title
LAST = {
    HOST: "host µs",
    GRAPH: "graph µs",
    DIFFERENCE: "difference",
    REGISTERS: "registers",
    SHARED: "shared KiB",
    COMPILED: "compiled in s",
}


def gemm_table(rows: Sequence[Row]) -> str:
    """Format the table; each peer has a column of ratios."""
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
    """Explain the table's columns, those of a GPU only where they are present."""
    units = {row.unit for row in rows}
    return "\n".join([LEGEND, *(text for unit, text in GPU_LEGEND.items() if unit in units)])


def _figure(row: Row) -> str:
    if row.unit == DIFFERENCE:
        return f"{row.value:.1e}"
    return f"{row.value:,.0f}" if row.value >= 100 else f"{row.value:.3g}"
