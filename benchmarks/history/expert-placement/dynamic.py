"""Compare copies that share tokens equally with dynamic redundancy, when a load changes after the placement.

python benchmarks/history/expert-placement/dynamic.py > dynamic.txt
"""

import time

import torch

from octile.serve import rebalance_experts
from octile.serve.ranks.dynamic_redundancy import choose_copies

LAYERS, EXPERTS, GPUS, TOKENS = 8, 256, 32, 2**20
CASES = {"9 hosted, equally": (288, 0), "9 hosted": (288, 9), "16 hosted, 9 active": (512, 9)}
CASES |= {"16 hosted, 10 active": (512, 10), "16 hosted and active": (512, 16)}

generator = torch.Generator().manual_seed(0)
past = torch.randn(LAYERS, EXPERTS, generator=generator, dtype=torch.float64)
change = torch.randn(LAYERS, EXPERTS, generator=generator, dtype=torch.float64)
print(
    f"{LAYERS} layers of {EXPERTS} experts on {GPUS} GPUs; the busiest GPU's tokens / the mean: mean layer, worst layer"
)
for sigma in (0.0, 0.5, 1.0):
    now = (past + sigma * change).exp()
    tokens = (TOKENS * now / now.sum(1, keepdim=True)).long()
    for name, (slots, active) in CASES.items():
        physical, _, count = rebalance_experts(past.exp(), slots, 8, 1, GPUS)
        if active:
            begin = time.perf_counter()
            served = torch.stack([choose_copies(*layer, GPUS, active) for layer in zip(tokens, physical, strict=True)])
            took = f"{1e3 * (time.perf_counter() - begin) / LAYERS:.1f} ms a layer"
        else:
            served, took = (tokens / count).gather(1, physical), ""
        load = served.view(LAYERS, GPUS, -1).sum(2)
        busiest = load.amax(1) / load.double().mean(1)
        print(f"change {sigma}  {name:22}{busiest.mean():6.2f}{busiest.max():6.2f}  {took}")
