"""Compare wgrad in two runs' telemetry: `python -m experiments.wgrad_blocks.telemetry RUN_OF_TILES RUN_OF_BLOCKS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

COLUMNS = ("product, tiles", "product, blocks", "x, tiles", "x, blocks")


def rows_of_wgrad(run: Path) -> dict[tuple[int, str, bool], dict[str, Any]]:
    """Return the rows of weight gradients, by step, layer and whether the row is that of the operand x."""
    rows = [json.loads(line) for line in (run / "telemetry.jsonl").read_text().splitlines()]
    of_wgrad = [row for row in rows if row["product"] == "wgrad" and row.get("operand") in (None, "x")]
    return {(row["step"], row["layer"], "operand" in row): row for row in of_wgrad}


def table(tiles: Path, blocks: Path) -> list[str]:
    """Return lines: of each step and layer the SNR of the product's quantization in dB, and x's flushed values in %."""
    runs = [rows_of_wgrad(run) for run in (tiles, blocks)]
    keys = [(step, layer) for step, layer, is_x in runs[0] if not is_x]
    lines = [f"{'step':>5} {'layer':42}{''.join(f'{name:>18}' for name in COLUMNS)}"]
    values = [
        [run[step, layer, False]["quantization_snr_db"] for run in runs]
        + [run[step, layer, True]["underflows%"] for run in runs]
        for step, layer in keys
    ]
    for (step, layer), cells in zip(keys, values, strict=True):
        lines.append(f"{step:>5} {layer:42}{''.join(f'{cell:>18.4g}' for cell in cells)}")
    lines.append(f"{'':5} {'median':42}{''.join(f'{median(column):>18.4g}' for column in zip(*values, strict=True))}")
    return lines


if __name__ == "__main__":
    print("\n".join(table(*map(Path, sys.argv[1:3]))))
