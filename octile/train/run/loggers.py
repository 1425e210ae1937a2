"""Loggers of a run: the metrics also go to TensorBoard, Weights & Biases or MLflow.

metrics.jsonl has every metric, so a logger that fails causes a warning and does not end the run. Each logger has a
thread of its own, which takes the metrics in order: training does not wait for a server. The id that a server gives the
run is stored in the run's folder, so that a resumed run continues there.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from textwrap import shorten
from threading import Lock, Thread
from typing import Any, NamedTuple, Protocol

from octile.atomic_files import write_json
from octile.extras import require
from octile.train.config import Logger, flatten
from octile.train.run.folder import RunFolder
from octile.validation import read_json

PROJECT = "octile"  # of Weights & Biases, and the experiment of MLflow, unless their own variables name one
CLOSE_SECONDS = 30.0  # that a server may take for the last metrics
MAX_METRICS = 1000  # of a request to MLflow's server
MAX_PARAMS = 100
MAX_REASON = 300  # characters of a warning

log = logging.getLogger("octile")
_ids_lock = Lock()


class Line(NamedTuple):
    """Metrics of a step.

    Attributes:
        step: number of the step.
        values: names → numbers, which may be NaN or infinite.
    """

    step: int
    values: Mapping[str, float]


class Sink(Protocol):
    """Where a logger writes; any method may raise."""

    def write(self, lines: Sequence[Line]) -> None:
        """Take metrics, in their order."""
        ...

    def close(self, failed: bool) -> None:
        """End the run there, which a resumed run continues."""
        ...


def require_loggers(names: Sequence[Logger] | None) -> None:
    """Check that the packages of loggers are installed, without importing them.

    Raises:
        ImportError: one is not; the message names its extra.
    """
    for name in names or ():
        require(name, extra=name)


class Loggers:
    """The loggers of a run.

    Args:
        names: which ones; none if None. The packages must be installed (`require_loggers`).
        run: the run's folder.
        settings: the run's configuration, as a JSON object.
        steps_done: steps that lie before a resumed run.
    """

    def __init__(self, names: Sequence[Logger] | None, run: RunFolder, settings: Mapping[str, Any], steps_done: int):
        sinks: dict[str, Callable[[], Sink]] = {
            "tensorboard": lambda: TensorBoard(run, steps_done),
            "wandb": lambda: WandB(run, settings),
            "mlflow": lambda: MLflow(run, settings),
        }
        self._threads = [_SinkThread(name, sinks[name], name == "wandb") for name in dict.fromkeys(names or ())]

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Take metrics of a step. Returns at once."""
        for thread in self._threads:
            thread.put(Line(step, values))

    def close(self, failed: bool = False) -> None:
        """Write what is left, and end the runs of the loggers.

        Args:
            failed: whether the run ended with an exception.
        """
        for thread in self._threads:
            thread.put(failed)
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.close(deadline)


class _SinkThread:
    """Writes to a sink until it fails.

    Args:
        name: name of the logger.
        open_sink: opens it.
        is_opened_first: whether to open it before its thread begins, because it may ask the user for a key.
    """

    def __init__(self, name: Logger, open_sink: Callable[[], Sink], is_opened_first: bool):
        self.name = name
        self._waiting = SimpleQueue[Line | bool]()  # the last one is whether the run failed
        self._thread: Thread | None = None
        if is_opened_first:
            try:
                sink = open_sink()
            except Exception as error:
                self._warn(error)
                return
            open_sink = lambda: sink  # noqa: E731
        self._thread = Thread(target=self._run, args=(open_sink,), name=f"octile-{name}", daemon=True)
        self._thread.start()

    def put(self, line: Line | bool) -> None:
        """Take a line, or at the end whether the run failed. After a failure of the sink, it is dropped."""
        if self._thread is not None and self._thread.is_alive():
            self._waiting.put(line)

    def _run(self, open_sink: Callable[[], Sink]) -> None:
        try:
            sink = open_sink()
            while True:
                waiting = [self._waiting.get()]
                with suppress(Empty):
                    while True:
                        waiting.append(self._waiting.get_nowait())
                if lines := [line for line in waiting if isinstance(line, Line)]:
                    sink.write(lines)
                if isinstance(failed := waiting[-1], bool):
                    return sink.close(failed)
        except Exception as error:
            self._warn(error)

    def close(self, deadline: float) -> None:
        """Wait until all is written."""
        if self._thread is None:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._warn(TimeoutError(f"it did not take the last ones in {CLOSE_SECONDS:.0f} seconds"))

    def _warn(self, error: Exception) -> None:
        reason = shorten(f"{type(error).__name__}: {error}", MAX_REASON, placeholder=" …")
        log.warning("%s gets no further metrics of this run; metrics.jsonl has all of them. %s", self.name, reason)


class TensorBoard:
    """Event files in the run's folder; of steps that are repeated, TensorBoard shows the later ones only."""

    def __init__(self, run: RunFolder, steps_done: int):
        from torch.utils.tensorboard import SummaryWriter  # it takes a second to import

        self._writer = SummaryWriter(str(run.tensorboard), purge_step=steps_done + 1)

    def write(self, lines: Sequence[Line]) -> None:
        """Write events."""
        for step, values in lines:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self, failed: bool) -> None:
        """Close the file."""
        self._writer.close()


class WandB:
    """A run of Weights & Biases, whose own environment variables (`WANDB_MODE`, `WANDB_PROJECT`, …) count.

    The step is a metric, and the x-axis of all others. As W&B's own step it could not be repeated: a server drops what
    a resumed run measures again.
    """

    def __init__(self, run: RunFolder, settings: Mapping[str, Any]):
        import wandb

        run.path.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", run.path.name),
            id=_stored_id(run, "wandb"),
            resume="allow",
            dir=str(run.path),
            config=dict(settings),
            allow_val_change=True,  # a resumed run may have more steps
        )
        _store_id(run, "wandb", self._run.id)
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, lines: Sequence[Line]) -> None:
        """Log metrics; another process sends them."""
        for step, values in lines:
            self._run.log({"step": step, **values})

    def close(self, failed: bool) -> None:
        """End the run, and wait until all is sent."""
        self._run.finish(exit_code=int(failed))


class MLflow:
    """A run of MLflow, whose own environment variables (`MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME`) count."""

    def __init__(self, run: RunFolder, settings: Mapping[str, Any]):
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        stored = _stored_id(run, "mlflow")
        if stored is not None:
            self._client.update_run(stored, status="RUNNING")
            self._id = stored
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self._id = self._client.create_run(number, run_name=run.path.name).info.run_id
        _store_id(run, "mlflow", self._id)
        params = [Param(key, str(value)) for key, value in flatten(settings)]
        for first in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + MAX_PARAMS])

    def write(self, lines: Sequence[Line]) -> None:
        """Log metrics in as few requests as the server takes."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [
            Metric(re.sub(r"[^\w\-. :/]", "_", name.replace("%", "_percent")), value, now, step)
            for step, values in lines
            for name, value in values.items()
        ]
        for first in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + MAX_METRICS])

    def close(self, failed: bool) -> None:
        """End the run."""
        self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


def _stored_id(run: RunFolder, name: str) -> str | None:
    """The id that a logger's run has had so far."""
    with _ids_lock:
        found = read_json(run.loggers_file).get(name) if run.loggers_file.exists() else None
    return found if isinstance(found, str) else None


def _store_id(run: RunFolder, name: str, number: str) -> None:
    with _ids_lock:
        stored = read_json(run.loggers_file) if run.loggers_file.exists() else {}
        write_json(run.loggers_file, stored | {name: number})
