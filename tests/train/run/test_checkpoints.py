"""Checkpoints of a run that goes from one number of ranks to another (moved_cases.py), compared with one process."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from octile.checkpoint import latest_checkpoint
from octile.parallel.ranks import Ranks
from octile.train.data.token_store import TokenStore
from octile.train.run.checkpoints import RunCheckpoints
from octile.train.trainer import Trainer
from tests.train.run import moved_cases
from tests.train.run.moved_cases import STEPS, WORLDS, config

# test_moved_runs goes from two ranks and from a pipeline to one process and back
every_world = pytest.mark.exhaustive


@pytest.fixture(scope="module")
def moved(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run, after all worlds."""
    folder = tmp_path_factory.mktemp("moved")
    shutil.copytree(store.folder, folder / "data")
    command = [sys.executable, "-m", moved_cases.__name__, str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@every_world
def test_every_number_of_ranks_continues_with_the_bits_of_the_one_before(moved: Path):
    assert latest_checkpoint(moved / "checkpoints").name == f"step_{STEPS * len(WORLDS):08d}"


@every_world
def test_the_losses_are_those_of_one_process(moved: Path, store: TokenStore):
    found: dict[str, float] = {}
    for world in WORLDS:
        found |= json.loads((moved / f"losses-{world}.json").read_text())
    alone = Trainer(config(1), store, torch.device("cpu"))
    expected = {str(step + 1): alone.step()["loss"] for step in range(STEPS * len(WORLDS))}
    assert found == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize(("error", "waits"), [(FloatingPointError, True), (ConnectionError, False)])
def test_a_checkpoint_is_completed_if_all_ranks_end_alike(tmp_path, error, waits):
    checkpoints, closed = RunCheckpoints(str(tmp_path), Ranks.alone()), []
    checkpoints._sharded = SimpleNamespace(close=lambda: closed.append(True))
    with pytest.raises(error), checkpoints.completed():
        raise error
    assert closed == [True] * waits
