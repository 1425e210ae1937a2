"""The check that the disk has room for a run, before its first step.

It counts what a run surely writes: weights, moments and the moving average of its checkpoints, and the weights of its
`model/`. The tokens, the measurements, and the best model in a checkpoint come on top.
"""

from __future__ import annotations

from pathlib import Path

from octile.checkpoint.files import check_space
from octile.checkpoint.step_folders import finished_steps
from octile.checkpoint.store import Store
from octile.train.config import TrainConfig
from octile.train.model import converted_meta_model
from octile.train.optimizer import make_optimizer
from octile.train.run.folder import RunFolder

KEPT = 2  # checkpoints that stay when a third one is written
ANOTHER_OUT = "name another --out"


def check_disk_space(config: TrainConfig, run: RunFolder, checkpoints: Store, done: int) -> None:
    """Refuse a run whose checkpoints and model do not fit on the disk.

    Args:
        config: the configuration of the run.
        run: its folder, which exists.
        checkpoints: the folder of its checkpoints. Nothing is counted of one under a URL.
        done: the steps before the one that the run begins with.

    Raises:
        OSError: fewer bytes are free than the run is going to write.
    """
    every, steps = config.checkpoint_every, config.steps
    last = 1 if done < steps and (not every or steps % every) else 0
    to_write = (steps // every - done // every if every else 0) + last
    stored = len(finished_steps(checkpoints)) if done else 0
    checkpoint, model = count_bytes(config)

    def added(most: int) -> int:
        """The bytes of checkpoints that are there at a time, of at most so many, and were not before."""
        return checkpoint * (min(stored + to_write, most) - min(stored, most))

    if "://" in checkpoints.url:
        check_space(run.path, model, ANOTHER_OUT)
    elif config.checkpoints is not None:  # perhaps on another disk
        check_space(run.path, model, ANOTHER_OUT)
        check_space(_existing(Path(config.checkpoints)), added(KEPT + 1), "name other --checkpoints")
    else:
        most = max(added(KEPT + 1), added(KEPT) + model)
        check_space(run.path, most, f"{ANOTHER_OUT}, or --checkpoints on another disk")


def count_bytes(config: TrainConfig) -> tuple[int, int]:
    """The fewest bytes of the tensors in a checkpoint of a run, and in the folder of its model, in FP8 or not."""
    recipe = config.load_recipe()
    model = converted_meta_model(config, recipe)
    weights = sum(p.nbytes for p in model.parameters())
    moments = make_optimizer(model, model, config.optim, recipe.optimizer).state_bytes()
    average = weights if config.optim.ema_decay else 0
    folders = 2 if config.optim.ema_decay else 1
    return weights + moments + average, folders * sum(p.numel() for p in model.parameters())


def _existing(path: Path) -> Path:
    """A path, or the nearest folder above it that exists."""
    return next(each for each in (path, *path.absolute().parents) if each.exists())
