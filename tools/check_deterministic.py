"""Measure what deterministic mode and the moving average of the weights cost.

    python -m tools.check_deterministic OUT

With the `small` preset, each recipe runs twice as usual and twice in deterministic mode; the weights of the two runs
are compared bit for bit. Then the first recipe runs without and with `optim.ema_decay`, interleaved. Writes and prints
OUT/deterministic.txt.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from octile.parallel.device import pick_device
from octile.report.machine import describe_machine, machine
from octile.train.config import TrainConfig, preset
from octile.train.data.token_store import TokenStore
from octile.train.run.console import RunConsole
from octile.train.run.deterministic import deterministic
from octile.train.run.tokens import prepare_tokens
from octile.train.trainer import Trainer

RECIPES = ("deepseek_v3", "bf16")
STEPS, EMA_STEPS = 24, 60
ROUNDS = 3  # pairs of runs without and with the moving average
EMA_DECAY = 0.999
SCHEDULE = 300  # steps of the learning rate schedule, of which only the first are run
WARM_UP = 4  # steps in which kernels are compiled


class Ran(NamedTuple):
    """The result of a run: a digest of its weights, the loss of its last step, the median of tokens a second."""

    weights: str
    loss: float
    tokens_per_s: int


def run(config: TrainConfig, store: TokenStore, steps: int, same_bits: bool = False) -> Ran:
    """Train the first steps of a new run."""
    trainer = Trainer(config, store, pick_device(config.device))
    with deterministic(same_bits):
        lines = [trainer.step() for _ in range(steps)]
    if trainer.ema:
        trainer.ema.synchronize()  # its pending update must not slow down the next run
    speeds = [line["tokens_per_s"] for line in lines[WARM_UP:] or lines]
    return Ran(digest(trainer), lines[-1]["loss"], round(statistics.median(speeds)))


def digest(trainer: Trainer) -> str:
    """Return the first 12 hex digits of a SHA-256 of the weights."""
    found = hashlib.sha256()
    for tensor in trainer.model.state_dict().values():
        found.update(tensor.float().cpu().numpy().tobytes())
    return found.hexdigest()[:12]


def compared(recipe: str, same_bits: bool, a: Ran, b: Ran) -> str:
    """Format the comparison of two runs."""
    mode = "deterministic" if same_bits else "usual"
    return f"{recipe} {mode} {'same bits' if a.weights == b.weights else 'DIFFER'} {tuple(a)} {tuple(b)}"


def measurements(config: TrainConfig, store: TokenStore) -> Iterator[str]:
    """Run all measurements and yield the lines of the report."""
    found = machine(pick_device(config.device))
    yield (
        f"The {config.preset} preset on {describe_machine(found)}, {found['date']}, commit {found['commit']}. "
        f"Trainer.step, batch {config.batch_size} × {config.sequence_length} tokens."
    )
    yield (
        f"Two runs of {STEPS} steps each, usual and within octile.train.run.deterministic: (digest of the weights, "
        f"loss of the last step,\ntokens a second, the median after the first {WARM_UP} steps). Then {EMA_STEPS} steps "
        "without and with optim.ema_decay: tokens a second.\n"
    )
    for recipe in RECIPES:
        for same_bits in (False, True):
            a, b = (run(replace(config, recipe=recipe), store, STEPS, same_bits) for _ in range(2))
            yield compared(recipe, same_bits, a, b)
    for decay in (0.0, EMA_DECAY) * ROUNDS:
        averaged = replace(config, recipe=RECIPES[0], optim=replace(config.optim, ema_decay=decay))
        yield f"ema {decay} {run(averaged, store, EMA_STEPS).tokens_per_s}"


def main(out: Path, config: TrainConfig) -> None:
    with tempfile.TemporaryDirectory() as folder, (out / "deterministic.txt").open("w", encoding="utf-8") as file:
        for line in measurements(config, prepare_tokens(config, Path(folder), RunConsole())):
            print(line, flush=True)
            print(line, file=file, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), replace(preset("small"), steps=SCHEDULE, device="cuda"))
