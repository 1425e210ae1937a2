"""Save the weights and optimizer moments of a run half-way, and let runs under other recipes continue from them.

A recipe may store its moments in another format than the BF16 run did, possibly with master weights: both are stored
again in the recipe's formats. Histories of scales begin empty, and a loss scale begins at its initial value.
"""

from __future__ import annotations

from pathlib import Path

import torch

from octile.optim.state import load, new_state, store_
from octile.train.trainer import Trainer

MOMENTS = ("exp_avg", "exp_avg_sq")


def save(trainer: Trainer, file: Path) -> None:
    """Write the file that `continue_from` reads; it appears only when it is complete."""
    partial = file.with_suffix(".part")
    state = {"steps_done": trainer.steps_done, "tokens": trainer.progress.tokens, "model": trainer.model.state_dict()}
    torch.save(state | {"moments": trainer.optimizer.state_dict()["state"]}, partial)
    partial.replace(file)


def continue_from(trainer: Trainer, file: Path) -> None:
    """Set a new trainer, whatever its recipe, to the weights, moments and step of a saved one.

    Raises:
        FileNotFoundError: there is no such file.
        RuntimeError: the saved model has another shape.
    """
    saved = torch.load(file, map_location=trainer.device, weights_only=True)
    trainer.model.load_state_dict(saved["model"])
    optimizer = trainer.optimizer
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = {}
    for i, parameter in enumerate(parameters):
        states[i] = new_state(parameter, optimizer.formats)
        states[i]["step"].copy_(saved["moments"][i]["step"])
        for kind in MOMENTS:
            store_(states[i], kind, load(saved["moments"][i], kind).float())
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
    trainer.progress.steps_done, trainer.progress.tokens = saved["steps_done"], saved["tokens"]
