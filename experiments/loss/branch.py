"""Weights and moments of a run, kept half-way, for runs under other recipes to go on from.

A recipe may keep its moments in another format than BF16's run did, and beside them a master: they are stored anew.
Histories of scales begin empty, a loss scale at its beginning.
"""

from __future__ import annotations

from pathlib import Path

import torch

from octile.optim.state import load, new_state, store_
from octile.train.trainer import Trainer

MOMENTS = ("exp_avg", "exp_avg_sq")


def save(trainer: Trainer, file: Path) -> None:
    """Writes what `continue_from` reads."""
    beside = file.with_suffix(".part")
    state = {"steps_done": trainer.steps_done, "tokens": trainer.tokens, "model": trainer.model.state_dict()}
    torch.save(state | {"moments": trainer.optimizer.state_dict()["state"]}, beside)
    beside.replace(file)


def continue_from(trainer: Trainer, file: Path) -> None:
    """Gives a new trainer, whatever its recipe, the weights, moments and number of steps of another one.

    Raises:
        FileNotFoundError: that one has left nothing.
        RuntimeError: it is of another shape.
    """
    kept = torch.load(file, map_location=trainer.device, weights_only=True)
    trainer.model.load_state_dict(kept["model"])
    optimizer = trainer.optimizer
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = {}
    for i, parameter in enumerate(parameters):
        states[i] = new_state(parameter, optimizer.formats)
        states[i]["step"].copy_(kept["moments"][i]["step"])
        for kind in MOMENTS:
            store_(states[i], kind, load(kept["moments"][i], kind).float())
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
    trainer.steps_done, trainer.tokens = kept["steps_done"], kept["tokens"]
