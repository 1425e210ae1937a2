"""The optimizer that a run's configuration asks for."""

from __future__ import annotations

from typing import Any

from torch import nn

from octile.optim import AdamW, Muon, muon_groups, param_groups
from octile.recipe import OptimizerFormats
from octile.train.config import OptimConfig


def make_groups(model: nn.Module, updated: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """The parameter groups of the run's optimizer.

    Args:
        model: a rank's model.
        updated: the parameters that the rank updates, by the model's names; the model itself if these are all.
        optim: the configuration of the optimizer.
    """
    if optim.name == "muon":
        return muon_groups(model, optim.weight_decay, updated)
    return param_groups(updated, optim.weight_decay)


def make_optimizer(model: nn.Module, updated: nn.Module, optim: OptimConfig, formats: OptimizerFormats) -> AdamW:
    """The run's optimizer; arguments as in `make_groups`, and the formats of its state."""
    kind = Muon if optim.name == "muon" else AdamW
    return kind(make_groups(model, updated, optim), lr=optim.lr, betas=optim.betas, formats=formats)
