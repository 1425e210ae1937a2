"""Compare the GEMM speed of several source trees on one GPU, interleaved.

    python tools/compare_trees.py OUT.json TREE TREE … [--products few,middle] [--peer]

A TREE is a folder with `octile/` in it, such as a git worktree. Each tree runs in its own process on the one GPU, with
its own kernels and its own choice of them; `--peer` adds a process with DeepGEMM. The measurements are
interleaved, a few rounds at a time, so that temperature and clocks are alike for all. Name a tree twice to see the
effect of order and chance.

A tree whose modules have other names is measured by its own copy of this script (`tools/compare_trees.py`, before that
`benchmarks/beside.py`), which answers the same requests.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

REPETITIONS, ROUNDS = 5, 4  # repetitions per GEMM and process, rounds of each; the median of their medians counts
SCRIPTS = ("tools/compare_trees.py", "benchmarks/beside.py")  # where a tree has its copy of this script
LISTS = {"few": "FEW_ROWS", "middle": "MIDDLE", "large": "LARGE", "tiles": "BOTH_TILES", "accumulated": "ACCUMULATED",
         "wgrad": "WGRAD", "grouped": "GROUPED", "masked": "MASKED"}  # fmt: skip


class Worker:
    """The process of one tree. It answers each request, a line of JSON, with one line."""

    def __init__(self, name: str, tree: Path, peer: bool = False) -> None:
        self.name = name
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
        own = next((path for name in SCRIPTS if (path := tree / name).is_file()), Path(__file__).resolve())
        command = [sys.executable, str(own), "--serve", *(["--peer"] if peer else [])]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=tree
        )

    def ask(self, what: str, *arguments: Any) -> Any:
        """Return the process's answer.

        Raises:
            RuntimeError: the process ended, or reports why it failed.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # then there is no answer either
            print(json.dumps([what, *arguments]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"{self.name}: the process ended with {self.process.wait()}")
        found = json.loads(answer)
        if "why" in found:
            raise RuntimeError(f"{self.name}: {found['why']}")
        return found["found"]


def measure(workers: list[Worker], cases: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each GEMM's name, each worker's kernel, and its seconds."""
    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(lambda worker: worker.ask("prepare", cases), workers))
        for i in range(len(cases)):
            kernels = list(pool.map(lambda worker, i=i: worker.ask("take", i), workers))
            times: dict[str, list[float]] = {worker.name: [] for worker in workers}
            for repetition in range(REPETITIONS):
                begin = repetition % len(workers)  # a different worker is first each time
                for worker in (*workers[begin:], *workers[:begin]):
                    times[worker.name].append(worker.ask("time"))
            yield {
                "product": kernels[0][0],
                "kernels": {worker.name: kernel for worker, (_, kernel) in zip(workers, kernels, strict=True)},
                "seconds": {name: statistics.median(each) for name, each in times.items()},
            }


def line(row: dict[str, Any]) -> str:
    """Format a GEMM's kernel and µs, and the other workers' speed relative to the first."""
    first, *others = row["seconds"].items()
    relative = "  ".join(f"{name} {1e6 * s:8.2f} ({first[1] / s:.3f})" for name, s in others)
    return f"{row['product']:34} {row['kernels'][first[0]]:30} {1e6 * first[1]:8.2f}  {relative}"


def summary(rows: list[dict[str, Any]]) -> str:
    """Format each worker's speed relative to the first: the geometric mean over the GEMMs that it supports."""
    first, *others = rows[0]["seconds"]
    parts = []
    for name in others:
        ratios = [row["seconds"][first] / row["seconds"][name] for row in rows]
        known = [ratio for ratio in ratios if not math.isnan(ratio)]
        parts.append(f"{name} {statistics.geometric_mean(known):.4f} of {len(known)}" if known else f"{name} none")
    return f"speed vs. {first}: " + ", ".join(parts)


class Server:
    """The requests that a tree's process answers."""

    def __init__(self, peer: bool) -> None:
        self.peer = peer
        self.cases: list[Any] = []
        self.call: Callable[[], object] | None = None

    def products(self, names: list[str]) -> list[dict[str, Any]]:
        """Return the GEMMs of these lists, as this tree defines them."""
        from octile.bench import shapes

        return [asdict(case) for name in names for case in getattr(shapes, LISTS[name])]

    def prepare(self, cases: list[dict[str, Any]]) -> None:
        """Choose and compile the kernels of these GEMMs."""
        from octile.bench.shapes import Case
        from octile.bench.tune import problem, why_not_usable
        from octile.kernels.cuda.gemm import num_sms
        from octile.kernels.cuda.gemm.candidates import Chip, choose

        self.cases = [Case(**case) for case in cases]
        chip = num_sms.chip() if hasattr(num_sms, "chip") else Chip(num_sms.num_sms())  # an earlier tree's
        self.chosen = [choose(problem(case), chip) for case in self.cases]
        if not self.peer:
            with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
                failed = [reason for reason in pool.map(why_not_usable, set(self.chosen)) if reason]
            if failed:
                raise RuntimeError(failed[0])

    def take(self, i: int) -> tuple[str, str]:
        """Allocate the operands of a GEMM and check its result once. Return its name and its kernel's."""
        import torch

        from octile.bench.gemm_case import MAX_DIFFERENCE, prepare_case
        from octile.bench.gemm_peers import deep_gemm_call

        self.call = None  # frees the previous operands: all workers' operands together do not fit the GPU
        torch.cuda.empty_cache()
        case, c = self.cases[i], self.chosen[i]
        name, setup = f"{case.name} {case.what}", prepare_case(case, "cuda")
        if self.peer:
            try:
                self.call = deep_gemm_call(setup)
            except (RuntimeError, KeyError, AssertionError) as error:  # DeepGEMM does not support this GEMM
                return name, f"none: {error}"
            return name, "DeepGEMM"
        self.call = setup.call
        setup.check(self.call, setup.high_precision(), setup.out, MAX_DIFFERENCE)
        marks = [f"c{c.cluster_m}{c.cluster_n}"] * (c.cluster_size > 1) + [f"k{c.split_k}"] * (c.split_k > 1)
        marks += ["ping-pong"] * c.ping_pong + ["transposed"] * c.transposed
        marks += ["load C"] * c.load_c + ["prefetch C"] * getattr(c, "prefetch_c", False)  # an earlier tree has none
        marks += ["raster along N"] * c.raster_along_n
        return name, " ".join([f"{c.tile_m}×{c.tile_n} w{c.warpgroups} a{c.accumulators} s{c.stages}", *marks])

    def time(self) -> float:
        """Measure the GEMM in seconds; NaN where it is not supported."""
        from octile.bench.kernel_time import kernel_seconds

        return math.nan if self.call is None else kernel_seconds({"it": self.call}, rounds=ROUNDS)["it"]


def serve(peer: bool) -> None:
    """Answer requests until stdin ends. Output of libraries goes to stderr."""
    answers, sys.stdout = sys.stdout, sys.stderr
    server = Server(peer)
    for asked in sys.stdin:
        what, *arguments = json.loads(asked)
        try:
            answer = {"found": getattr(server, what)(*arguments)}
        except Exception as error:
            answer = {"why": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("trees", type=Path, nargs="*")
    parser.add_argument("--products", default="few,large", help=f"lists: {','.join(LISTS)}")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--peer", action="store_true", help="also measure DeepGEMM")
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.peer)
        return
    if not asked.trees:
        parser.error("name a file and one tree or more")
    names = asked.products.split(",")
    if unknown := [name for name in names if name not in LISTS]:
        parser.error(f"--products has {', '.join(unknown)}; there are {', '.join(LISTS)}")
    for tree in asked.trees:
        if not (tree / "octile").is_dir():
            parser.error(f"there is no octile in {tree}")
    workers = [Worker(f"{i}:{tree.name}", tree.resolve()) for i, tree in enumerate(asked.trees)]
    cases = workers[-1].ask("products", names)  # from the last tree: a new tree may have lists that an old one lacks
    if asked.peer:
        workers.append(Worker("DeepGEMM", asked.trees[0].resolve(), peer=True))
    rows = []
    for row in measure(workers, cases):
        rows.append(row)
        print(line(row), flush=True)
        asked.out.write_text(json.dumps(rows), "utf-8")
    print(summary(rows))


if __name__ == "__main__":
    main()
