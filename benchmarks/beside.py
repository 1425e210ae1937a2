"""`python benchmarks/beside.py OUT.json TREE TREE … [--products few,middle]`: products of several octiles, by turns.

A TREE is a folder with `octile/` in it, such as a git worktree. Each has a process of its own on the one GPU, with its
own kernels and its own choice of them; one more has DeepGEMM, where that can be imported. They measure in turns, a few
rounds at a time, so that heat and clocks are alike for all. What order and chance do is seen by naming a tree twice.

Run by the file's path, so that every process finds the octile of its own tree, and no other.
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

TURNS, ROUNDS = 5, 4  # of each process for a product; of its median in a turn the median counts
LISTS = {"few": "FEW_ROWS", "middle": "MIDDLE", "large": "LARGE", "tiles": "BOTH_TILES", "accumulated": "ACCUMULATED",
         "wgrad": "WGRAD", "grouped": "GROUPED", "masked": "MASKED"}  # fmt: skip


class Worker:
    """The process of a tree: it answers each line that it is given with one."""

    def __init__(self, name: str, tree: Path, peer: bool = False) -> None:
        self.name = name
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])}
        command = [sys.executable, str(Path(__file__).resolve()), "--serve", *(["--peer"] if peer else [])]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=tree
        )

    def ask(self, what: str, *arguments: Any) -> Any:
        """What the process finds.

        Raises:
            RuntimeError: it ended, or says why it could not.
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
    """For each product: its name, each worker's kernel, and its seconds."""
    with ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(lambda worker: worker.ask("prepare", cases), workers))
        for i in range(len(cases)):
            kernels = list(pool.map(lambda worker, i=i: worker.ask("take", i), workers))
            times: dict[str, list[float]] = {worker.name: [] for worker in workers}
            for turn in range(TURNS):
                begin = turn % len(workers)  # another one is the first each time
                for worker in (*workers[begin:], *workers[:begin]):
                    times[worker.name].append(worker.ask("time"))
            yield {
                "product": kernels[0][0],
                "kernels": {worker.name: kernel for worker, (_, kernel) in zip(workers, kernels, strict=True)},
                "seconds": {name: statistics.median(each) for name, each in times.items()},
            }


def line(row: dict[str, Any]) -> str:
    """A product's kernel and µs, and how fast the others are beside the first."""
    first, *others = row["seconds"].items()
    beside = "  ".join(f"{name} {1e6 * s:8.2f} ({first[1] / s:.3f})" for name, s in others)
    return f"{row['product']:34} {row['kernels'][first[0]]:30} {1e6 * first[1]:8.2f}  {beside}"


def summary(rows: list[dict[str, Any]]) -> str:
    """The geometric mean of each one's speed beside the first, over the products that it makes."""
    first, *others = rows[0]["seconds"]
    said = []
    for name in others:
        ratios = [row["seconds"][first] / row["seconds"][name] for row in rows]
        made = [ratio for ratio in ratios if not math.isnan(ratio)]
        said.append(f"{name} {statistics.geometric_mean(made):.4f} of {len(made)}" if made else f"{name} none")
    return f"speed beside {first}: " + ", ".join(said)


class Server:
    """In a tree's process: what it is asked."""

    def __init__(self, peer: bool) -> None:
        self.peer = peer
        self.cases: list[Any] = []
        self.call: Callable[[], object] | None = None

    def products(self, names: list[str]) -> list[dict[str, Any]]:
        """Those of these lists, as this tree has them."""
        from octile.bench import shapes

        return [asdict(case) for name in names for case in getattr(shapes, LISTS[name])]

    def prepare(self, cases: list[dict[str, Any]]) -> None:
        """Compiles the kernels of these products."""
        from octile.bench.shapes import Case
        from octile.bench.tune import compiles, problem
        from octile.kernels.cuda.gemm.candidates import choose
        from octile.kernels.cuda.gemm.num_sms import num_sms
        from octile.kernels.cuda.gemm.problem import Chip

        self.cases = [Case(**case) for case in cases]
        chip = Chip(num_sms())
        self.chosen = [choose(problem(case), chip) for case in self.cases]
        if not self.peer:
            with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
                failed = [reason for reason in pool.map(compiles, set(self.chosen)) if reason]
            if failed:
                raise RuntimeError(failed[0])

    def take(self, i: int) -> tuple[str, str]:
        """Makes the operands of a product, and the product once; its name and the kernel's."""
        import torch

        from octile.bench.gemm_case import MAX_DIFFERENCE, prepare_case
        from octile.bench.gemm_peers import deep_gemm_call

        self.call = None  # with the operands before, which the others' have no room beside
        torch.cuda.empty_cache()
        case, c = self.cases[i], self.chosen[i]
        name, setup = f"{case.name} {case.what}", prepare_case(case, "cuda")
        if self.peer:
            try:
                self.call = deep_gemm_call(setup)
            except (RuntimeError, KeyError, AssertionError) as error:  # it has no such product
                return name, f"none: {error}"
            return name, "DeepGEMM"
        self.call = setup.call
        setup.check(self.call, setup.high_precision(), setup.out, MAX_DIFFERENCE)
        marks = [f"c{c.cluster_m}{c.cluster_n}"] * (c.cluster_size > 1) + [f"k{c.split_k}"] * (c.split_k > 1)
        marks += (
            ["pp"] * c.ping_pong + ["turned"] * c.transposed + ["fetching"] * c.load_c + ["along n"] * c.raster_along_n
        )
        return name, " ".join([f"{c.tile_m}×{c.tile_n} w{c.warpgroups} a{c.accumulators} s{c.stages}", *marks])

    def time(self) -> float:
        """Seconds of the product; NaN where there is none."""
        from octile.bench.kernel_time import kernel_seconds

        return math.nan if self.call is None else kernel_seconds({"it": self.call}, rounds=ROUNDS)["it"]


def serve(peer: bool) -> None:
    """Answers lines until there are no more; what libraries print goes to stderr."""
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
    parser.add_argument("--peer", action="store_true", help="DeepGEMM, too")
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
    cases = workers[-1].ask("products", names)  # of the last tree, since a new one has lists that an old one lacks
    if asked.peer:
        workers.append(Worker("DeepGEMM", asked.trees[0].resolve(), peer=True))
    rows = []
    for row in measure(workers, cases):
        rows.append(row)
        print(line(row), flush=True)
        asked.out.write_text(json.dumps(rows))
    print(summary(rows))


if __name__ == "__main__":
    main()
