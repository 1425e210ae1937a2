"""Compare the estimated memory of runs on a CPU with the measured peak of `octile train`.

    python -m tools.measure_cpu_memory --out benchmarks/history/cpu-memory/memory.json

Each case trains two steps in a process of its own. What that process has when the run is checked is measured too, and
subtracted, because the estimate is of what comes in addition.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from octile.checkpoint.files import write_json
from octile.report.machine import machine

WIDE = "--model.hidden-size 512 --model.intermediate-size 1536 --model.moe-intermediate-size 384"
CASES = (
    "--data stdlib --batch-size 8",
    "--batch-size 64",
    "--batch-size 128",
    "--batch-size 128 --micro-batches 2",
    "--batch-size 16 --sequence-length 512",
    "--batch-size 64 --recipe bf16",
    "--batch-size 64 --recipe float32",
    "--batch-size 64 --recipe int8_tiles",
    "--batch-size 32 --recipe fp8_lm",
    f"--batch-size 8 {WIDE}",
    f"--batch-size 32 {WIDE}",
)
CHILD = """
import json, resource, sys
from octile.train import memory
estimate = memory.estimate_need
def record(config):
    import psutil
    need, before = estimate(config), psutil.Process().memory_info().rss
    print(json.dumps({"estimated": need.total, "before": before}), file=sys.stderr, flush=True)
    return need
memory.estimate_need = record
from octile.cli import main
main()
"""


def measure(options: str) -> dict[str, object]:
    """Train two steps with some options; return estimated and measured bytes."""
    with tempfile.TemporaryDirectory() as folder:
        out = ["--out", f"{folder}/run", "--steps", "2", "--val-sequences", "8", "--device", "cpu"]
        text = ["--data", str(Path(__file__).parents[1] / "octile")]  # is prepared in seconds
        command = [sys.executable, "-c", CHILD, "train", *text, *options.split(), *out]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        assert child.stderr is not None
        said = json.loads(next(line for line in child.stderr if line.startswith("{")))
        child.stderr.read()
        _, status, used = os.wait4(child.pid, 0)
    if status:
        raise RuntimeError(f"octile train {options} failed")
    measured = used.ru_maxrss * 1024 - said["before"]
    ratio = round(said["estimated"] / measured, 3)
    return {"options": options, "estimated": said["estimated"], "measured": measured, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for options in CASES:
        rows.append(measure(options))
        print(rows[-1], flush=True)
        write_json(args.out, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
