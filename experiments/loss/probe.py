"""Measure the speed of a training step of each size, and where its time goes: `python -m experiments.loss.probe OUT`.

It measures each size in BF16 and with DeepSeek-V3's recipe on random tokens (`tools.random_run`; until November 2026
evenly drawn ones, which load the experts otherwise): tokens per second, peak memory and, for a few steps under torch's
profiler, the share of the time in which the GPU is idle and the time of each kind of kernel.
OUT/probe.json and OUT/probe.txt are rewritten after each model. A model that fails is recorded, and the others are
measured. With `--quick` it runs five steps of each without a profile, to see whether every recipe runs at all.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import pstats
import statistics
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from experiments.loss.recipes import accumulator_context, recipe
from experiments.loss.sizes import MODELS, run_config, share_in_8_bits
from octile.bench.kernel_time import record_kernels
from octile.parallel.device import pick_device
from octile.report.machine import machine
from octile.train.step.kernel_records import KernelRecord, costs, idle_share, span
from octile.train.trainer import Trainer
from tools.kernel_kinds import kind_of
from tools.random_run import random_store

RECIPES = ("bf16", "deepseek_v3")
WARM_UP, STEPS, PROFILED = 12, 40, 3
QUICK = 5  # steps
MAX_SECONDS = 14.0  # for the steps of one model; slower models are measured over fewer steps
TOP = 25  # kernels that are listed


def summary(kernels: list[KernelRecord], steps: int) -> dict[str, Any]:
    """Summarize the kernels of some steps: idle time between the first and the last, and the time of each kind."""
    kinds: dict[str, float] = defaultdict(float)
    each = costs(kernels, steps)
    for cost in each:
        kinds[kind_of(cost.name)] += cost.ms
    total = sum(kinds.values())
    return {
        "span_ms": span(kernels) / 1e3 / steps,
        "idle_share": idle_share(kernels),
        "kernels_a_step": len(kernels) / steps,
        "kinds": {n: {"ms": ms, "share": ms / total} for n, ms in sorted(kinds.items(), key=lambda item: -item[1])},
        "top": [{"kernel": c.name[:110], "kind": kind_of(c.name), "ms": c.ms, "calls": c.calls} for c in each[:TOP]],
    }


def profiled(trainer: Trainer, steps: int) -> dict[str, Any]:
    """Train some steps under torch's profiler and summarize their kernels."""

    def train() -> None:
        for _ in range(steps):
            for _ in trainer.advance():
                pass
        for _ in trainer.collect():
            pass

    return summary(list(record_kernels(train)), steps)


def host(trainer: Trainer, steps: int) -> str:
    """Return cProfile's table of some steps, sorted by the time in each function itself."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        trainer.step()
    profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(30)
    return text.getvalue()


def measure(size: str, name: str, device: torch.device, quick: bool) -> dict[str, Any]:
    """Measure one size under one recipe."""
    config = run_config(size, 1e9)
    store = random_store(config.model.vocab_size, 16 * config.batch_size * config.sequence_length)
    begin = time.perf_counter()
    trainer = Trainer(config, store, device, recipe(name))
    for _ in range(2 if quick else WARM_UP):
        trainer.step()
    ready = time.perf_counter() - begin
    gpu = device.type == "cuda"
    seconds: list[float] = []
    begin = time.perf_counter()
    while len(seconds) < (QUICK if quick else STEPS) and time.perf_counter() - begin < MAX_SECONDS:
        before = trainer.progress.seconds
        trainer.step()
        seconds.append(trainer.progress.seconds - before)
    tokens = config.batch_size * config.sequence_length
    found = {
        "ready_s": ready,
        "steps": len(seconds),
        "step_ms": 1e3 * statistics.median(seconds),
        "tokens_per_s": tokens / statistics.median(seconds),
        "peak_GiB": torch.cuda.max_memory_allocated() / 2**30 if gpu else None,  # of the eager steps
        "share_in_8_bits": share_in_8_bits(config.model),
        "loss": trainer.evaluator.validate()["val_loss"],
    }
    if not quick:
        found |= profiled(trainer, PROFILED) if gpu else {}
        found["host"] = host(trainer, 2)
    return found


def show(found: dict[str, dict[str, Any]]) -> str:
    """Format the measurements as text."""
    lines = []
    for name, row in found.items():
        if "error" in row:
            lines.append(f"{name}: {row['error']}")
            continue
        peak = "" if row["peak_GiB"] is None else f"   {row['peak_GiB']:.1f} GiB"
        lines.append(
            f"{name}: {row['tokens_per_s']:,.0f} tokens/s   {row['step_ms']:.1f} ms a step ({row['steps']})"
            f"{peak}   ready in {row['ready_s']:.1f} s   loss {row['loss']:.3f}"
        )
        if "kinds" in row:
            lines.append(
                f"    profiled: {row['span_ms']:.1f} ms a step, the GPU is idle {row['idle_share']:.1%}, "
                f"{row['kernels_a_step']:.0f} kernels"
            )
            lines += [f"    {n:32} {k['ms']:8.2f} ms {k['share']:7.1%}" for n, k in row["kinds"].items()]
            lines += [
                f"        {k['ms']:8.3f} ms {k['calls']:7.1f} × {k['kind']:14.14} {k['kernel']}" for k in row["top"]
            ]
    hosts = [f"\n== host, {name}\n{row['host']}" for name, row in found.items() if "host" in row]
    return "\n".join([*lines, *hosts]) + "\n"


@contextmanager
def written(out: Path, found: dict[str, dict[str, Any]], device: torch.device) -> Iterator[None]:
    """Write both files on exit, also after an exception."""
    try:
        yield
    finally:
        rest = {n: {k: v for k, v in row.items() if k != "host"} for n, row in found.items()}
        (out / "probe.json").write_text(json.dumps({"machine": machine(device), "models": rest}, indent=1) + "\n")
        (out / "probe.txt").write_text(show(found))


def main(out: Path, sizes: tuple[str, ...], recipes: tuple[str, ...], quick: bool) -> None:
    device = pick_device("auto")
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    for size in sizes:
        for one in recipes:
            name = f"{size} {one}"
            with written(out, found, device), accumulator_context(one):
                try:
                    found[name] = measure(size, one, device, quick)
                except Exception as error:  # the other models are still measured
                    found[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-3000:]}
            print(show({name: {k: v for k, v in found[name].items() if k != "host"}}), flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--sizes", default=",".join(MODELS), help=f"of {','.join(MODELS)}, or toy")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    main(asked.out, tuple(asked.sizes.split(",")), tuple(asked.recipes.split(",")), asked.quick)
