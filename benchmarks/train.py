"""`python -m benchmarks.train OUT [STEPS]`: the `small` preset in BF16 and with DeepSeek-V3's recipe, side by side.

Leaves OUT/train_RECIPE.jsonl (the runs' measurements) and OUT/train.json, and prints a table. Imports no command line.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

RECIPES = ("bf16", "deepseek_v3")
STEPS = 300
WARM_UP = 20  # steps in which kernels are compiled


def summary(lines: list[dict[str, Any]]) -> dict[str, float]:
    """The median speed after the first steps, and the mean loss of the last tenth."""
    steps = [line for line in lines if "main_loss" in line]
    speeds = [line["tokens_per_s"] for line in steps[WARM_UP:] or steps]
    last = [line["main_loss"] for line in steps[-max(1, len(steps) // 10) :]]
    return {
        "steps": len(steps),
        "tokens_per_s": statistics.median(speeds),
        "loss": statistics.fmean(last),
    }


def main(out: Path, steps: int) -> None:
    from octile.report.machine import machine
    from octile.train.config import preset
    from octile.train.loop import train
    from octile.train.screen import Screen

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for recipe in RECIPES:
            config = replace(
                preset("small"), recipe=recipe, steps=steps, checkpoint_every=0, out=Path(folder, recipe), device="cuda"
            )
            run = train(config, False, Screen())
            text = (run / "metrics.jsonl").read_text()
            (out / f"train_{recipe}.jsonl").write_text(text)
            found[recipe] = summary([json.loads(line) for line in text.splitlines()])
            (out / "train.json").write_text(json.dumps({"machine": machine(), "runs": found}, indent=2))
    print(f"\n{'recipe':12} {'steps':>6} {'tokens/s':>12} {'against BF16':>13} {'loss at the end':>16}")
    for recipe, row in found.items():
        ratio = row["tokens_per_s"] / found["bf16"]["tokens_per_s"]
        print(f"{recipe:12} {row['steps']:6.0f} {row['tokens_per_s']:12,.0f} {ratio:13.3f} {row['loss']:16.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else STEPS)
