"""Compare the estimated memory of runs on a CPU with the measured peak of `octile train` and `octile compare`.

    python -m tools.measure_cpu_memory --out benchmarks/history/cpu-memory/memory.json

Each case trains two steps in a process of its own, or one for each rank, and validates after each; a resumed run trains
two more. What a process
has when the run is checked is measured too, and subtracted, because the estimate is of what comes in addition.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from octile.atomic_files import write_json
from octile.report.machine import machine

WIDE = "--model.hidden-size 512 --model.intermediate-size 1536 --model.moe-intermediate-size 384"
LARGE = "--model.hidden-size 1024 --model.moe-intermediate-size 1024 --model.n-routed-experts 32 --sequence-length 32"
CASES = (
    "--data stdlib --batch-size 8",
    "--batch-size 64",
    "--batch-size 128",
    "--batch-size 128 --micro-batches 2",
    "--batch-size 16 --sequence-length 512",
    "--batch-size 16 --sequence-length 2048",
    "--batch-size 1 --sequence-length 8192 --model.max-position-embeddings 8192",
    "--batch-size 64 --recipe bf16",
    "--batch-size 64 --recipe float32",
    "--batch-size 64 --recipe int8_tiles",
    "--batch-size 32 --recipe fp8_lm",
    f"--batch-size 8 {WIDE}",
    f"--batch-size 32 {WIDE}",
    f"--batch-size 8 {LARGE}",
    f"--batch-size 8 {LARGE} --recipe fp8_lm",
)
PIPELINE = "--parallel.pp 2 --batch-size 128 --micro-batches 8 --model.num-hidden-layers 4"
OF_TWO = tuple(f"{PIPELINE} --parallel.schedule {name}" for name in ("gpipe", "1f1b", "zb1p", "dualpipe", "dualpipev"))
RESUMED = tuple(f"--batch-size 8 {LARGE}{more}" for more in ("", " --recipe fp8_lm", " --optim.ema-decay 0.9"))
COMPARED = ("--sequence-length 256", f"{WIDE} --sequence-length 512", LARGE, f"{LARGE} --recipes fp8_lm")
CHILD = """
import atexit, json, os, resource, sys
from octile.train.memory import check as memory
estimate, rank = memory.estimate_need, int(os.environ.get("RANK") or 0)
needs, before = [], []
def record(config, ranks, **more):
    import psutil
    need = estimate(config, (rank,), **more)
    needs.append(need.total)
    before.append(psutil.Process().memory_info().rss)
    return need
def report():
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before[0]
    line = json.dumps({"rank": rank, "estimated": max(needs), "measured": used})
    os.write(sys.stderr.fileno(), f"{line}\\n".encode())
atexit.register(report)
memory.estimate_need = record
from octile.cli import main
main()
"""


def measure(command: str, options: str, n_ranks: int = 1, is_resumed: bool = False) -> list[dict[str, object]]:
    """Train two steps by a command with some options; return estimated and measured bytes of each rank.

    Args:
        command: train or compare.
        options: of the command.
        n_ranks: the number of ranks.
        is_resumed: whether to measure two more steps, with which the run is resumed.
    """
    with tempfile.TemporaryDirectory() as folder:
        child = Path(folder, "child.py")
        child.write_text(CHILD, "utf-8")
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"] if n_ranks > 1 else []
        text = ["--data", str(Path(__file__).parents[1] / "octile")]  # is prepared in seconds
        begin = [sys.executable, *start, str(child), command]
        out = ["--out", f"{folder}/run"]
        small = ["--device", "cpu"]
        if command == "train":  # from the first validation on there is a best model
            small += ["--val-sequences", "8", "--validate-every", "1"]
        stderr = _run([*begin, *text, *options.split(), *out, *small, "--steps", "2"])
        if is_resumed:
            stderr = _run([*begin, "--resume", *out, "--steps", "4"])
    found = [json.loads(line) for line in stderr.splitlines() if line.startswith("{")]
    case = {"command": f"{command} --resume" if is_resumed else command, "options": options}
    return [{**case, **of, "ratio": round(of["estimated"] / of["measured"], 3)} for of in found]


def _run(command: list[str]) -> str:
    ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if ended.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {ended.stderr}")
    return ended.stderr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows = []
    cases = [
        *(("train", options, 1, False) for options in CASES),
        *(("train", options, 1, True) for options in RESUMED),
        *(("compare", options, 1, False) for options in COMPARED),
        *(("train", options, 2, False) for options in OF_TWO),
    ]
    for case in cases:
        found = measure(*case)
        rows += found
        print(*found, sep="\n", flush=True)
        write_json(args.out, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
