"""A save that is killed before each of its operations on files: run by test_distributed.py in a process of its own.

A child saves and kills itself with SIGKILL before its k-th operation; then the checkpoint that was there or the new one
must be whole. If none was there, there may be none. k grows until the child ends by itself. The child is forked, so
that torch is imported once.
"""

import os
import shutil
import signal
import sys
import warnings
from pathlib import Path

import torch

from octile.checkpoint import DistributedCheckpoints, latest_checkpoint, load_checkpoint

OPERATIONS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}


def save(folder: Path, step: int, value: float) -> None:
    checkpoints = DistributedCheckpoints(folder, keep=1)
    checkpoints.save(step, {"w": torch.full((4, 3), value), "n": torch.tensor(step)}, {"value": value})
    checkpoints.close()


def saved_until(folder: Path, kill_at: int, step: int, value: float) -> bool:
    """Save in a child that is killed before operation `kill_at`; return whether it was."""
    child = os.fork()
    if child == 0:
        count = 0

        def kill(event: str, arguments: tuple) -> None:
            nonlocal count
            if event in OPERATIONS and str(arguments[0]).startswith(str(folder)):
                count += 1
                if count > kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        save(folder, step, value)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status == 0 or os.WIFSIGNALED(status), status
    return status != 0


def check(folder: Path, step: int) -> None:
    """Kill the save of a step after that of step 1, at every operation."""
    kill_at, found = 0, set()
    while True:
        run = folder / f"{step}-{kill_at}"
        save(run, 1, 1.0)
        killed = saved_until(run, kill_at, step, 2.0)
        tensors, state = load_checkpoint(latest_checkpoint(run))
        assert state["value"] in (1.0, 2.0), (kill_at, state)
        assert tensors["w"].eq(state["value"]).all(), (kill_at, tensors)
        found.add(state["value"])
        save(run, 3, 3.0)  # what was left does not disturb the next one, and is removed
        assert [path.name for path in run.iterdir()] == ["step_00000003"], (kill_at, list(run.iterdir()))
        shutil.rmtree(run)
        if not killed:
            break
        kill_at += 1
    assert found == {1.0, 2.0}
    assert kill_at > 8, kill_at


def check_first(folder: Path) -> None:
    """Kill the first save of a run at every operation: there is none then, or a whole one, and a save may follow."""
    kill_at, found, killed = 0, set(), True
    while killed:
        run = folder / f"first-{kill_at}"
        killed = saved_until(run, kill_at, 1, 1.0)
        latest = latest_checkpoint(run)
        found.add(latest is None)
        if latest is not None:
            assert load_checkpoint(latest)[0]["w"].eq(1.0).all(), kill_at
        save(run, 1, 3.0)
        assert load_checkpoint(latest_checkpoint(run))[1]["value"] == 3.0, kill_at
        assert len(list(run.iterdir())) == 1, (kill_at, list(run.iterdir()))
        shutil.rmtree(run)
        kill_at += 1
    assert found == {True, False}


def run(_: int, folder: str) -> None:
    """Check the first save of a run, and those after it."""
    torch.set_num_threads(1)
    warnings.filterwarnings("error", "checkpoint .* cannot be used")
    for step in (2, 1):
        check(Path(folder), step)
    check_first(Path(folder))
