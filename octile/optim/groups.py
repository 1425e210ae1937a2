"""Which parameters decay: matrices do, vectors don't."""

from typing import Any

from torch import nn


def param_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for an optimizer: matrices with weight decay; norms, biases and other 1-D parameters without.

    A decaying weight loses scale, which the norm behind it gives back; the gain of a norm has nothing behind it. Shared
    parameters count once, frozen ones not at all, and an empty group is left out.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
