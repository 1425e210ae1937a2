"""Time `rebalance_experts` at DeepSeek-V3's size: python benchmarks/history/expert-placement/time.py > time.txt"""

import time

import torch

from octile.serve import rebalance_experts

SIZES = {  # slots, groups, nodes, GPUs
    "4 nodes of 8 GPUs, 9 slots each": (288, 8, 4, 32),
    "32 GPUs as one node, 9 slots each": (288, 8, 1, 32),
    "144 GPUs, 2 slots each": (288, 8, 18, 144),
    "32 GPUs as one node, 16 slots each": (512, 8, 1, 32),
}


def loads(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if name == "log-normal, σ = 1":
        return torch.randn(58, 256, generator=generator).exp()
    if name == "one expert has all":
        return torch.eye(256)[:58]
    return torch.ones(58, 256)


print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; 58 layers of 256 experts, ms of 9 calls")
for load in ("log-normal, σ = 1", "equal", "one expert has all"):
    for size, arguments in SIZES.items():
        times = []
        for _ in range(9):
            begin = time.perf_counter()
            rebalance_experts(loads(load), *arguments)
            times.append(1e3 * (time.perf_counter() - begin))
        times.sort()
        print(f"{load:20}{size:36}median {times[4]:6.1f}, slowest {times[-1]:6.1f}")
