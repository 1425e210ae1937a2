"""Compare the estimated memory of runs on a CPU with the measured peak of `octile train`.

    python -m tools.measure_cpu_memory --out benchmarks/history/cpu-memory/memory.json

Each case trains two steps in a process of its own, or one for each rank. What a process has when the run is checked is
measured too, and subtracted, because the estimate is of what comes in addition.
"""

from __future__ import annotations

import argparse
import json
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
PIPELINE = "--parallel.pp 2 --batch-size 128 --micro-batches 8 --model.num-hidden-layers 4"
OF_TWO = tuple(f"{PIPELINE} --parallel.schedule {name}" for name in ("gpipe", "1f1b", "zb1p", "dualpipe", "dualpipev"))
CHILD = """
import atexit, json, os, resource, sys
from octile.train import memory
estimate, rank = memory.estimate_need, int(os.environ.get("RANK") or 0)
def record(config, ranks):
    import psutil
    need, before = estimate(config, (rank,)), psutil.Process().memory_info().rss
    def report():
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
        line = json.dumps({"rank": rank, "estimated": need.total, "measured": used})
        os.write(sys.stderr.fileno(), f"{line}\\n".encode())
    atexit.register(report)
    return need
memory.estimate_need = record
from octile.cli import main
main()
"""


def measure(options: str, n_ranks: int = 1) -> list[dict[str, object]]:
    """Train two steps with some options; return estimated and measured bytes of each rank."""
    with tempfile.TemporaryDirectory() as folder:
        child = Path(folder, "child.py")
        child.write_text(CHILD)
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"] if n_ranks > 1 else []
        out = ["--out", f"{folder}/run", "--steps", "2", "--val-sequences", "8", "--device", "cpu"]
        text = ["--data", str(Path(__file__).parents[1] / "octile")]  # is prepared in seconds
        command = [sys.executable, *start, str(child), "train", *text, *options.split(), *out]
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if ended.returncode:
        raise RuntimeError(f"octile train {options} failed: {ended.stderr}")
    found = [json.loads(line) for line in ended.stderr.splitlines() if line.startswith("{")]
    return [{"options": options, **of, "ratio": round(of["estimated"] / of["measured"], 3)} for of in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    for options, n_ranks in [*((options, 1) for options in CASES), *((options, 2) for options in OF_TWO)]:
        rows += measure(options, n_ranks)
        print(*rows[-n_ranks:], sep="\n", flush=True)
        write_json(args.out, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
