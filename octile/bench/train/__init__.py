"""`octile bench train`: the speed of `octile train` on this GPU in FP8, vs. BF16 and torchtitan's trainer.

octile_trainer.py       `octile train`: its loop, its data, its metrics
torchtitan_trainer.py   torchtitan's trainer of its own DeepSeek-V3 model, of the same shape, on the same batches: in
                        BF16, with torchao's float8 converters, and with octile's converter
worker.py               a trainer in a process of its own

Each trainer has a process of its own. Those of `small` are alive at the same time, and their measurements are
interleaved. One of `medium` needs most of the memory of the GPU, so they are measured one after the other, and once
more if the time suffices. torchtitan has no multi-token prediction (MTP); octile is compared with it without MTP. A
trainer that does not run on this machine is left out, and a row says why.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from octile.bench.goals import (
    FP8_TRAINER,
    IDLE,
    MFU,
    PLAIN_BF16,
    TITAN_BF16,
    TITAN_FP8,
    TITAN_OCTILE,
    WITHOUT_MTP,
    train_verdicts,
)
from octile.bench.rows import LEGEND, Row, compare, table_with
from octile.bench.train import octile_trainer, torchtitan_trainer
from octile.bench.train.torchtitan_trainer import FLOAT8, OCTILE
from octile.bench.train.worker import Measured, Steps, Worker
from octile.models.config import PRESETS
from octile.models.flops import bf16_peak, train_flops_per_token
from octile.report.console import Console
from octile.train.config import TrainConfig, preset
from octile.train.run.console import RunConsole
from octile.train.run.folder import DATA
from octile.train.run.tokens import prepare_tokens

NAMES = (FP8_TRAINER, PLAIN_BF16, TITAN_OCTILE, TITAN_BF16, TITAN_FP8)
ROUNDS = 5  # measurements of each trainer
ROUNDS_ALONE = 4  # the same, of a trainer that is measured alone
PASSES = 2  # in which trainers are measured alone
PROFILED = 2  # steps whose kernels are recorded
READY_SECONDS = 120.0  # after which a trainer that is not ready is left out


@dataclass(frozen=True)
class Case:
    """A preset of `octile train`.

    Attributes:
        preset: its name.
        warm_up: training steps in which kernels are compiled and graphs are captured.
        steps: training steps of one measurement.
        is_interleaved: whether the memory of the GPU suffices for the trainers of one shape at the same time.
        seconds: the time after which nothing further is measured.
    """

    preset: str
    warm_up: int
    steps: int
    is_interleaved: bool
    seconds: float


CASES = (Case("small", 10, 20, True, 205.0), Case("medium", 5, 2, False, 330.0))


@dataclass(frozen=True)
class Candidate:
    """A trainer: run(requests, *arguments), or why it cannot run here.

    Attributes:
        name: whose trainer it is, and the number format.
        shape: what its model lacks, "" or WITHOUT_MTP.
        run, arguments: as `Worker` takes them.
        why_not: why it cannot run here; None if it can.
    """

    name: str
    shape: str
    run: Callable[..., None]
    arguments: tuple[Any, ...]
    why_not: str | None = None

    @property
    def label(self) -> str:
        """The name and the shape."""
        return self.name + self.shape


@dataclass
class Results:
    """The measurements of trainers, by their labels.

    Attributes:
        times: the measurements after warm-up.
        idle: the share of a step in which the GPU idles.
        left_out: why a trainer was not measured.
    """

    times: dict[str, list[Measured]] = field(default_factory=lambda: defaultdict(list))
    idle: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def rows() -> Iterator[Row]:
    """Measure the cases.

    Raises:
        ValueError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError("bench train measures a GPU, and torch finds none here: use bench step")
    for case in CASES:
        if case.preset in PRESETS:
            yield from measure_case(case, preset(case.preset))


def show(rows: Sequence[Row]) -> str:
    """Format the table, the meaning of its columns, and the verdicts on the goals."""
    return "\n\n".join(filter(None, (table_with(LEGEND, rows), train_verdicts(rows))))


def measure_case(case: Case, config: TrainConfig) -> Iterator[Row]:
    """Measure octile with and without multi-token prediction, and torchtitan.

    Args:
        case: how it is measured.
        config: what `octile train` runs; it reads Python's library, and neither validates nor writes checkpoints.
    """
    deadline = time.monotonic() + case.seconds
    config = replace(config, data="stdlib", checkpoint_every=0, validate_every=config.steps)
    shapes = {"": config} if config.model.num_nextn_predict_layers else {}
    shapes[WITHOUT_MTP] = without_mtp(config)
    with tempfile.TemporaryDirectory() as folder:
        prepare_tokens(config, Path(folder, DATA), RunConsole(Console(stderr=True)))
        trainers = [candidates(config, shape, Path(folder)) for shape, config in shapes.items()]
        results = measure(case, trainers, deadline)
    for shape, config in shapes.items():
        yield from result_rows(case, config, shape, results)
    for label, why in results.left_out.items():
        yield Row(case.preset, f"{label} is left out: {why}", 0.0, "steps")


def without_mtp(config: TrainConfig) -> TrainConfig:
    """Return the configuration without what torchtitan's model lacks: MTP and the sequence-wise balance loss."""
    model = replace(config.model, num_nextn_predict_layers=0, aux_loss_alpha=0.0)
    return replace(config, model=model, optim=replace(config.optim, mtp_change=1.0))


def candidates(config: TrainConfig, shape: str, folder: Path) -> list[Candidate]:
    """Return the trainers of a configuration, which read the tokens in the folder."""

    def in_folder(recipe: str) -> TrainConfig:
        return replace(config, recipe=recipe, out=folder)

    found = [
        Candidate(name, shape, octile_trainer.run, (in_folder(recipe),))
        for name, recipe in ((FP8_TRAINER, "deepseek_v3"), (PLAIN_BF16, "bf16"))
    ]
    if shape == WITHOUT_MTP:
        for name, converters in ((TITAN_BF16, ()), (TITAN_FP8, FLOAT8), (TITAN_OCTILE, OCTILE)):
            arguments, why_not = (in_folder("bf16"), converters), torchtitan_trainer.why_not(converters)
            found.append(Candidate(name, shape, torchtitan_trainer.run, arguments, why_not))
    return found


def measure(case: Case, shapes: Sequence[Sequence[Candidate]], deadline: float) -> Results:
    """Measure trainers until every one has its rounds, or the time is over. Those that fail are left out.

    Args:
        case: how they are measured.
        shapes: the trainers of each shape.
        deadline: the value of time.monotonic() after which nothing further is measured.
    """
    every = [trainer for trainers in shapes for trainer in trainers]
    results = Results(left_out={trainer.label: trainer.why_not for trainer in every if trainer.why_not})
    groups = shapes if case.is_interleaved else [[trainer] for trainer in every]
    longest = 0.0
    for _ in range(1 if case.is_interleaved else PASSES):
        with ExitStack() as stack:
            workers = {  # imports end while others are measured; nothing is built before the first request
                trainer.label: stack.enter_context(Worker(trainer.run, *trainer.arguments))
                for trainer in every
                if trainer.label not in results.left_out and time.monotonic() + longest < deadline
            }
            for group in groups:
                begin = time.monotonic()
                if begin + longest < deadline:
                    labels = [trainer.label for trainer in group if trainer.label in workers]
                    _measure_group(case, {label: workers[label] for label in labels}, results, deadline)
                    longest = max(longest, time.monotonic() - begin)
    for trainer in every:
        if trainer.label not in results.times:
            results.left_out.setdefault(trainer.label, f"{case.seconds:g} s are over")
    return results


def _measure_group(case: Case, workers: dict[str, Worker], results: Results, deadline: float) -> None:
    """Measure trainers that share the GPU's memory, then end their processes."""

    def answer(label: str, until: float) -> Measured | None:
        try:
            return workers[label].answer(until - time.monotonic())
        except (RuntimeError, TimeoutError) as error:
            results.left_out[label] = str(error)
            print(f"{case.preset}: {label} failed: {error}", file=sys.stderr, flush=True)
            workers.pop(label).stop()
            return None

    begin = time.monotonic()
    for worker in workers.values():
        worker.request(Steps(case.warm_up))
    for label in list(workers):
        if answer(label, min(deadline, begin + READY_SECONDS)):
            ready = time.monotonic() - begin
            print(f"{case.preset}: {label} ready after {ready:.0f} s", file=sys.stderr, flush=True)
    for _ in range(ROUNDS if case.is_interleaved else ROUNDS_ALONE):
        for label in list(workers):
            if time.monotonic() < deadline:
                workers[label].request(Steps(case.steps))
                if measured := answer(label, deadline + case.steps):
                    results.times[label].append(measured)
    for label in list(workers):
        if label not in results.idle and time.monotonic() < deadline:
            workers[label].request(Steps(PROFILED, profiled=torch.cuda.is_available()))
            measured = answer(label, deadline + case.steps)
            if measured and measured.idle is not None:
                results.idle[label] = measured.idle
    for worker in workers.values():
        worker.stop()


def result_rows(case: Case, config: TrainConfig, shape: str, results: Results) -> Iterator[Row]:
    """Yield the rows of one shape: tokens per second and memory vs. each peer, MFU and idle shares."""
    times = {n: results.times[n + shape] for n in NAMES if results.times.get(n + shape)}
    step = {name: statistics.median(m.seconds for m in found) / case.steps for name, found in times.items()}
    tokens = config.batch_size * config.sequence_length
    for ours in (FP8_TRAINER, PLAIN_BF16, TITAN_OCTILE):
        for peer in NAMES[NAMES.index(ours) + 1 :]:
            if ours in step and peer in step:
                speeds = tokens / step[ours], tokens / step[peer]
                yield compare(case.preset, f"train {ours}{shape}", speeds[0], "tokens/s", peer, speeds[1])
    flops = tokens * train_flops_per_token(config.model, config.sequence_length)
    most = bf16_peak(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    memory = {name: max(m.peak_bytes for m in found) / 2**30 for name, found in times.items()}
    for name, found in times.items():
        setting = f", {found[-1].setting}" if found[-1].setting else ""
        yield Row(case.preset, f"step, {name}{shape}{setting}", step[name] * 1e3, "ms")
        if most:
            yield Row(case.preset, f"{MFU}, {name}{shape}", 100 * flops / step[name] / most, "% of the BF16 peak")
        if name + shape in results.idle:
            yield Row(case.preset, f"{IDLE}, {name}{shape}", 100 * results.idle[name + shape], "% of a step")
        what = f"peak memory, {name}{shape}"
        if name == PLAIN_BF16 or not memory.get(PLAIN_BF16):
            yield Row(case.preset, what, memory[name], "GiB")
        else:
            yield compare(case.preset, what, memory[name], "GiB", PLAIN_BF16, memory[PLAIN_BF16])
