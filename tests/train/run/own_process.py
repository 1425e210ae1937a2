"""`octile train` in a process of its own, forked by `begin_ranks`, for tests that stop it or kill it."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from octile.cli import main
from octile.train.trainer import Trainer


def write_output_to(folder: Path, name: str) -> None:
    """Write what this process prints to NAME.out and NAME.err in a folder."""
    for stream, suffix in ((sys.stdout, "out"), (sys.stderr, "err")):
        file = os.open(folder / f"{name}.{suffix}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, stream.fileno())


def train_slowly(_: int, folder: str, arguments: Sequence[str], hangs_after: int = -1) -> None:
    """Train with slow steps, so that a test can stop the run at a chosen one; what it prints is in the folder.

    The step that follows the step `hangs_after` takes ten minutes; the file `hangs` says that it has begun.
    """
    from tests.train.conftest import estimate_memory_once  # which processes that need only the output do not import

    torch.set_num_threads(1)
    write_output_to(Path(folder), "octile")
    estimate_memory_once(pytest.MonkeyPatch())
    launch = Trainer.launch

    def launch_slowly(self: Trainer) -> None:
        if self.steps_done == hangs_after:
            Path(folder, "hangs").touch()
            time.sleep(600)
        time.sleep(0.1)
        launch(self)

    Trainer.launch = launch_slowly  # type: ignore[method-assign]
    main(["train", *arguments])
