"""`octile train --profile`: where the time of a step goes, as torch's profiler records a few steps after warm-up.

    RUN/trace.json.gz   every kernel and operator on a time line, for chrome://tracing or https://ui.perfetto.dev
    RUN/profile.txt     the ten largest costs, and on a GPU the share of the time in which it idles; with several ranks,
                        how much of the communication is exposed: no other kernel runs meanwhile

Both are of rank 0. On a GPU a cost is a kernel or a copy, with the time that the device records. On a CPU it is an
operator, with its own time, without that of the operators that it calls. The profiler itself slows the host down: steps
that launch kernel by kernel take longer under it, and the GPU idles more.
"""

from __future__ import annotations

import gzip
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from octile.atomic_files import write_text
from octile.train.config import TrainConfig
from octile.train.run.console import RunConsole
from octile.train.run.folder import RunFolder
from octile.train.run.metrics import MetricsWriter
from octile.train.run.recorder import RunHook, StepContext
from octile.train.step.kernel_records import (
    Communication,
    Cost,
    communication,
    costs,
    idle_share,
    kernels_of,
    largest_first,
)
from octile.train.trainer import Trainer

if TYPE_CHECKING:
    from torch.profiler import profile

WARM_UP = 10  # steps before the profiled ones: kernels are compiled, and the step is captured
PROFILED = 3  # steps in sequence
LARGEST = 10  # costs that are listed
MAX_NAME = 70  # characters of a name in the table; names of C++ templates have hundreds


def profiling(config: TrainConfig, hook: RunHook, console: RunConsole) -> RunHook:
    """Return a hook that profiles PROFILED steps after WARM_UP, within the contexts of another hook.

    Args:
        config: the configuration of the run.
        hook: entered around every step, too.
        console: where the table is printed.

    Raises:
        ValueError: the run has too few steps, or too few in sequence without a validation or a checkpoint.
    """
    _first_step(config, 0)

    def attach(trainer: Trainer, run: RunFolder, metrics: MetricsWriter) -> StepContext:
        first = _first_step(config, trainer.steps_done)
        return _Profiler(trainer, run, console, hook(trainer, run, metrics), first).around

    return attach


def _first_step(config: TrainConfig, done: int) -> int:
    """The first step to profile. What follows the steps is not profiled, so nothing may come between them."""
    for first in range(done + WARM_UP + 1, config.steps - PROFILED + 2):
        inner = range(first, first + PROFILED - 1)
        intervals = [n for n in (config.validate_every, config.checkpoint_every) if n]
        if not any(step % n == 0 for step in inner for n in intervals):
            return first
    raise ValueError(
        f"profile needs {PROFILED} steps after {WARM_UP}, without a validation or a checkpoint between them: steps is "
        f"{config.steps}, of which {done} are done, validate_every {config.validate_every}, checkpoint_every "
        f"{config.checkpoint_every}"
    )


class _Profiler:
    """Profiles a few steps of a run."""

    def __init__(self, trainer: Trainer, run: RunFolder, console: RunConsole, inner: StepContext, first: int):
        self.trainer, self.run, self.console, self.inner = trainer, run, console, inner
        self.first, self.last = first, first + PROFILED - 1
        self._record: profile | None = None
        self._start = 0.0

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        if step == self.first:
            self._begin()
        try:
            with self.inner(step):
                yield
        except BaseException:
            if self._record is not None:
                self._record.stop()
            raise
        if step == self.last:
            self._end()

    def _begin(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        on_gpu = self.trainer.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._record = profile(activities=activities, acc_events=True)  # or torch warns of events that it clears
        self._synchronize()
        self._record.start()
        self._start = time.perf_counter()

    def _end(self) -> None:
        assert self._record is not None
        self._synchronize()
        ms = 1e3 * (time.perf_counter() - self._start) / PROFILED
        record, self._record = self._record, None
        record.stop()
        trace, report = self.run.path / "trace.json.gz", self.run.path / "profile.txt"
        _write_trace(record, trace)
        text = f"steps {self.first:,} to {self.last:,} took {ms:,.1f} ms each under the profiler"
        if self.trainer.device.type == "cuda":
            kernels = kernels_of(record)
            if not kernels:
                self.console.print(f"{text}; it recorded no kernel, as it has no access to the GPU")
                return
            text += f"; the GPU idled {idle_share(kernels):.1%} of the time"
            if self.trainer.ranks.size > 1:
                text += f"\n{describe(communication(kernels), PROFILED)}"
            text += f"\n\n{table(costs(kernels, PROFILED), ms)}"
        else:
            text += f"\n\n{table(operator_costs(record, PROFILED), ms)}"
        write_text(report, text + "\n")
        self.console.print(f"{text}\n\nprofile: {report}\ntrace:   {trace} (open it at https://ui.perfetto.dev)")

    def _synchronize(self) -> None:
        if self.trainer.device.type == "cuda":
            torch.cuda.synchronize(self.trainer.device)


def _write_trace(record: profile, path: Path) -> None:
    """Compress a trace in large pieces. The profiler would compress it line by line, in several times the time."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder, "trace.json")
        record.export_chrome_trace(str(plain))
        with plain.open("rb") as source, gzip.open(path, "wb") as compressed:
            shutil.copyfileobj(source, compressed, 1 << 20)


def operator_costs(record: profile, steps: int) -> list[Cost]:
    """The time of each operator itself on the CPU in some steps, the largest first."""
    averages: Any = record.key_averages()
    return largest_first(Cost(e.key, e.count / steps, e.self_cpu_time_total / 1e3 / steps) for e in averages)


def describe(found: Communication, steps: int) -> str:
    """Say how long the communication of some steps took, and how much of it is exposed."""
    ms = found.time / 1e3 / steps
    exposed = f"{found.exposed_share:.1%} is exposed: no other kernel runs"
    return f"communication with other ranks: {ms:,.2f} ms a step, of which {exposed}"


def table(found: list[Cost], step_ms: float) -> str:
    """Format the largest costs; `step_ms` is the time of a step, of which each has a share."""
    lines = [f"{'ms a step':>10} {'share':>7} {'calls':>8}  name"]
    for cost in found[:LARGEST]:
        name = cost.name if len(cost.name) <= MAX_NAME else f"{cost.name[: MAX_NAME - 1]}…"
        lines.append(f"{cost.ms:10,.2f} {cost.ms / step_ms:7.1%} {cost.calls:8,.1f}  {name}")
    return "\n".join(lines)
