"""A run that goes from 4 ranks to 2, to 8 and to 1, for test_checkpoints.py.

    python -m tests.train.run.moved_cases FOLDER

FOLDER has the tokens as data/. Each world resumes what the one before saved, checks that it has the same bits, steps
and saves. The ranks are forked, so that torch is imported once.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import torch

from octile.checkpoint import ShardedCheckpoint
from octile.parallel.ranks import join, leave
from octile.train.config import ParallelConfig, TrainConfig
from octile.train.data.token_store import TokenStore
from octile.train.run.best_model import BestModel
from octile.train.run.checkpoints import RunCheckpoints
from octile.train.trainer import Trainer
from tests.train.conftest import micro
from tests.train.strategy.test_ranks import free_port

WORLDS = (4, 2, 8, 1)
STEPS = 2  # of each world


def config(world: int) -> TrainConfig:
    optim = replace(micro().optim, ema_decay=0.9)
    settings = {"recipe": "float32", "steps": 40, "batch_size": 8, "val_sequences": 2, "optim": optim}
    return replace(micro(**settings), parallel=ParallelConfig(world, min(world, 2)))


def be_rank(rank: int, world: int, folder: Path, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    ranks = join(torch.device("cpu"), 60)
    trainer = Trainer(config(world), TokenStore.open(folder / "data"), torch.device("cpu"), ranks=ranks)
    best, checkpoints = BestModel(trainer.model), RunCheckpoints(str(folder / "checkpoints"), ranks)
    found = checkpoints.latest()
    assert (found is None) == (world == WORLDS[0])
    if found is not None:
        checkpoint = ShardedCheckpoint(found.url, check=False)
        tensors = trainer.strategy.layout.own_rows(checkpoint)
        trainer.load(tensors, checkpoint.state)
        best.load(trainer.strategy.layout.own_rows(checkpoint, best=True), checkpoint.state, trainer.steps_done)
        for name, tensor in trainer.state()[0].items():
            assert tensor.equal(tensors[name]), name  # no bit has changed on the way
    lines = []
    for _ in range(STEPS):
        lines.append(trainer.step())
        best.update(trainer.steps_done, trainer.evaluator.validate()["val_loss"])
    checkpoints.save(trainer, best, config(world))
    checkpoints.close()
    if ranks.is_first:
        losses = {line["step"]: line["loss"] for line in lines}
        (folder / f"losses-{world}.json").write_text(json.dumps(losses))
    leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for world in WORLDS:
        children, port = [], free_port()
        for rank in range(world):
            if (child := os.fork()) == 0:
                be_rank(rank, world, Path(sys.argv[1]), port)
                os._exit(0)
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        assert not any(statuses), (world, statuses)
