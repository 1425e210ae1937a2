"""How far a step in 8 bits is from FP32's, with Muon and with AdamW.

    python experiments/loss/noise/directions.py STORE [STEPS [BATCHES]]

The preset `tiny` is trained by Muon in FP32. From those weights, which do not change any more, each recipe computes the
gradients of the same batches. Printed is the relative distance, over all matrices of hidden layers, of their moving
average, of its orthogonalization, which is Muon's step, and of its quotient by the second moment, AdamW's.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from experiments.loss.recipes import VARIATIONS
from octile.optim.muon_update import newton_schulz
from octile.recipe import Recipe
from octile.train.config import TrainConfig, preset
from octile.train.data.token_store import TokenStore
from octile.train.trainer import Trainer

PARTS = ("gemms_alone", "without_fprop", "without_dgrad", "without_wgrad", "wgrad_alone")
RATE, FIRST, OTHER = 0.003, 1000, 5000  # the first batch of the gradients, and of those of another text
MOMENTUM, SQUARES = 0.95, 0.99
Directions = dict[str, tuple[Tensor, Tensor, Tensor]]


def directions(
    config: TrainConfig, store: TokenStore, recipe: Recipe, weights: dict[str, Tensor], first: int, n: int
) -> Directions:
    """Return the average gradient, Muon's step and AdamW's step of each matrix of a hidden layer."""
    trainer = Trainer(config, store, torch.device("cpu"), recipe)
    trainer.model.load_state_dict(weights)
    matrices = {
        name: parameter
        for group in trainer.optimizer.param_groups
        if group["use_muon"]
        for name, parameter in trainer.model.named_parameters()
        if any(parameter is one for one in group["params"])
    }
    merged = {id(p): group["merged"] for group in trainer.optimizer.param_groups for p in group["params"]}
    averages = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in matrices.items()}
    squares = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in matrices.items()}
    computation = trainer._computation
    computation.sequences = config.batch_size
    for step in range(first, first + n):
        computation.compute(trainer.batches.batch(step))
        for name, parameter in matrices.items():
            assert parameter.grad is not None
            gradient = parameter.grad.float()
            averages[name].lerp_(gradient, 1 - MOMENTUM)
            squares[name].lerp_(gradient.square(), 1 - SQUARES)
    found: Directions = {}
    for name, average in averages.items():
        stack = average.reshape(-1, average.shape[-2] // merged[id(matrices[name])], average.shape[-1])
        muon = newton_schulz(stack.bfloat16()).float().reshape(average.shape)
        found[name] = average, muon, average / (squares[name].sqrt() + 1e-12)
    return found


def distance(one: Directions, base: Directions, which: int) -> float:
    apart = sum(float((one[name][which] - base[name][which]).square().sum()) for name in base)
    return (apart / sum(float(base[name][which].square().sum()) for name in base)) ** 0.5


def print_distances(name: str, own: Directions, base: Directions) -> None:
    average, muon, adamw = (distance(own, base, which) for which in range(3))
    print(f"{name:16}{average:16.1%}{muon:13.1%}{adamw:14.1%}", flush=True)


def main(store: TokenStore, steps: int = 250, n: int = 20) -> None:
    config = preset("tiny")
    model = replace(config.model, vocab_size=store.manifest.vocab_size)
    config = replace(config, steps=steps, model=model, optim=replace(config.optim, name="muon", lr=RATE))
    trainer = Trainer(config, store, torch.device("cpu"), Recipe.float32())
    losses = [trainer.step()["loss"] for _ in range(steps)]
    print(f"loss after {steps} steps {losses[-1]:.3f}; {n} batches of 32 sequences", flush=True)
    weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    config = replace(config, batch_size=32, micro_batches=1, steps=10**6)
    recipes = {"bf16": Recipe.bf16(), "deepseek_v3": Recipe.deepseek_v3(), **{name: VARIATIONS[name] for name in PARTS}}
    base = directions(config, store, Recipe.float32(), weights, FIRST, n)
    print(f"{'':16}average gradient  Muon's step  AdamW's step")
    for name, recipe in recipes.items():
        print_distances(name, directions(config, store, recipe, weights, FIRST, n), base)
    print_distances("other text", directions(config, store, Recipe.float32(), weights, OTHER, n), base)


if __name__ == "__main__":
    main(TokenStore.open(Path(sys.argv[1])), *map(int, sys.argv[2:]))
