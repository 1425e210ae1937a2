"""The model that two processes train, and its training in one process."""

import torch
from torch import Tensor, nn

from octile.nn.conversion import apply_recipe
from octile.optim import AdamW, Muon, muon_groups

RANKS = 2


def model() -> nn.Module:
    """A converted model with a layer of one output, of which the second of two processes gets no row."""
    torch.manual_seed(0)
    return apply_recipe(nn.Sequential(nn.Linear(128, 192), nn.SiLU(), nn.Linear(192, 128), nn.Linear(128, 1)))


def batches(steps: int = 3) -> Tensor:
    """Inputs [steps, ranks, rows, 128]."""
    return torch.randn(steps, RANKS, 16, 128, generator=torch.Generator().manual_seed(1))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int | None = None, steps: int = 3) -> None:
    """Train on a rank's batches; or, with the same mean gradient, on those of all ranks one after the other."""
    for x in batches(steps):
        for rows in x if rank is None else x[rank : rank + 1]:
            ((module(rows) - 1).square().mean() / (RANKS if rank is None else 1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def optimizer_of(kind: str, module: nn.Module) -> torch.optim.Optimizer:
    """octile's AdamW or Muon or torch's AdamW, with the same settings."""
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    if kind == "muon":
        return Muon(muon_groups(module, 0.1), lr=1e-2)
    return (
        AdamW(module.parameters(), **settings)
        if kind == "octile"
        else torch.optim.AdamW(module.parameters(), **settings)
    )


def trained_alone(kind: str, steps: int = 3) -> dict[str, Tensor]:
    """The parameters after one process has trained on all batches."""
    alone = model()
    train(alone, optimizer_of(kind, alone), steps=steps)
    return dict(alone.named_parameters())


def assert_same_training(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The gradients of the processes are summed in another order, so the results are alike, not equal."""
    assert found.keys() == expected.keys()
    for name, parameter in expected.items():
        assert (found[name] - parameter).norm() <= 1e-3 * parameter.norm(), name
