"""Train the `small` preset in BF16 and in FP8, and compare their speed: `python -m tools.bench_train OUT [STEPS]`.

FP8 (`deepseek_v3`) runs twice: with the CUDA kernels for Hopper and with the portable Triton kernels. Each run has its
own process. Writes OUT/train_RUN.jsonl (the runs' metrics) and OUT/train.json, and prints a table. Needs no tyro.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

RUNS = {"bf16": "bf16", "hopper": "deepseek_v3", "portable": "deepseek_v3"}  # run → recipe
STEPS = 300
RUN_SECONDS = 160.0
WARM_UP = 20  # steps in which kernels are compiled


def summary(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Return the steps, the median tokens a second after warm-up, and the mean loss of the last tenth of the steps."""
    steps = [line for line in lines if "main_loss" in line]
    speeds = [line["tokens_per_s"] for line in steps[WARM_UP:] or steps]
    last = [line["main_loss"] for line in steps[-max(1, len(steps) // 10) :]]
    return {
        "steps": len(steps),
        "tokens_per_s": statistics.median(speeds),
        "loss": statistics.fmean(last),
    }


def measurements(name: str, steps: int) -> str:
    """Train one run and return its metrics, a line of JSON a step."""
    from octile.kernels.cuda.gemm import request
    from octile.train.config import preset
    from octile.train.console import RunConsole
    from octile.train.loop import train

    if name == "portable":
        request.why_not_on = lambda device: "portable kernels are measured"  # type: ignore[assignment]
    with tempfile.TemporaryDirectory() as folder:
        config = replace(
            preset("small"), recipe=RUNS[name], steps=steps, checkpoint_every=0, out=Path(folder, name), device="cuda"
        )
        return (train(config, False, RunConsole()) / "metrics.jsonl").read_text()


def main(out: Path, steps: int) -> None:
    from octile.bench.subprocess_call import call_in_subprocess
    from octile.report.machine import machine

    found = {}
    for name in RUNS:
        try:
            text = call_in_subprocess(measurements, name, steps, seconds=RUN_SECONDS)
        except (RuntimeError, TimeoutError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        (out / f"train_{name}.jsonl").write_text(text)
        found[name] = summary([json.loads(line) for line in text.splitlines()])
        (out / "train.json").write_text(json.dumps({"machine": machine(), "runs": found}, indent=2))
    print(f"\n{'run':12} {'steps':>6} {'tokens/s':>12} {'vs. BF16':>13} {'loss at the end':>16}")
    for name, row in found.items():
        ratio = row["tokens_per_s"] / found["bf16"]["tokens_per_s"] if "bf16" in found else float("nan")
        print(f"{name:12} {row['steps']:6.0f} {row['tokens_per_s']:12,.0f} {ratio:13.3f} {row['loss']:16.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else STEPS)
