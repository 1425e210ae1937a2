"""`octile train` as a trainer to measure: its own loop, with its data and its metrics."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from octile.bench.train.worker import Requests
from octile.train.config import TrainConfig
from octile.train.loop import train
from octile.train.run.console import RunConsole
from octile.train.run.folder import DATA, RunFolder
from octile.train.run.metrics import MetricsWriter
from octile.train.trainer import Trainer


def run(requests: Requests, config: TrainConfig) -> None:
    """Train as `octile train` does, with a pause before each step that is not requested.

    It prints nothing: a line of progress would count the pauses.

    `config.out` holds the tokens. The run's folder is a new one within it: a trainer may be measured twice.
    """
    assert config.out is not None
    out = Path(tempfile.mkdtemp(dir=config.out))
    shutil.copytree(config.out / DATA, out / DATA)

    def hook(trainer: Trainer, run: RunFolder, metrics: MetricsWriter):  # type: ignore[no-untyped-def]
        def step_context(step: int) -> AbstractContextManager[object]:
            requests.before_step()
            return nullcontext()

        return step_context

    train(replace(config, out=out), False, RunConsole.silent(), hook)
