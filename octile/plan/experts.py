"""Compute the loads of GPUs from the loads of experts, read or drawn, before and after `rebalance_experts`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from octile.report.experts import GpuLoads
from octile.serve.ranks.placement import rebalance_experts
from octile.validation import parse_json, quoted

METRICS = "metrics.jsonl"
LAYERS, EXPERTS = 58, 256  # of DeepSeek-V3


def skewed_load(sigma: float, seed: int) -> Tensor:
    """Draw a load of DeepSeek-V3's experts from a log-normal distribution, float64 [58, 256]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LAYERS, EXPERTS, generator=generator, dtype=torch.float64).mul(sigma).exp()


def read_load(path: Path) -> Tensor:
    """Read the newest record of the experts' tokens of a run, int64 [layers, experts].

    Raises:
        FileNotFoundError: there is no metrics.jsonl.
        ValueError: it has no such record, or a damaged one.
    """
    file = path / METRICS if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(f"load must be a run folder or its {METRICS}, but there is no file {file}")
    lines = file.read_bytes().split(b"\n")
    records = [number for number, line in enumerate(lines) if b'"expert_load"' in line]
    if not records:
        raise ValueError(f"{file} has no record of the experts' tokens; a run whose model has experts writes it")
    source = f"line {records[-1] + 1} of {file}"
    layers = parse_json(lines[records[-1]], source).get("expert_load")
    counts = list(layers.values()) if isinstance(layers, dict) else []
    is_good = all(isinstance(c, list) and c and all(type(n) is int and 0 <= n < 2**63 for n in c) for c in counts)
    if not counts or not is_good or len({len(c) for c in counts}) > 1:
        raise ValueError(f"expert_load in {source} must have equally long lists of counts, not {quoted(layers)}")
    return torch.tensor(counts)


def consecutive(load_LE: Tensor, n_gpus: int) -> GpuLoads:
    """Return the loads of GPUs that have one copy of each expert, as many consecutive ones as any other GPU."""
    n_experts = load_LE.shape[1]
    gpu_E = torch.arange(n_experts) * n_gpus // n_experts
    slot_E = torch.arange(n_experts) - torch.searchsorted(gpu_E, gpu_E)
    load_LGS = torch.zeros(len(load_LE), n_gpus, int(slot_E.max()) + 1, dtype=torch.float64)
    load_LGS[:, gpu_E, slot_E] = load_LE.double()
    return GpuLoads(load_LGS.numpy(), torch.zeros_like(load_LGS, dtype=torch.bool).numpy())


def balanced(load_LE: Tensor, n_slots: int, n_groups: int, n_nodes: int, n_gpus: int) -> GpuLoads:
    """Return the loads of GPUs whose experts `rebalance_experts` has placed.

    Raises:
        ValueError: the sizes do not fit the load.
    """
    physical_LP, _, count_LE = rebalance_experts(load_LE, n_slots, n_groups, n_nodes, n_gpus)
    load_LP = (load_LE.double() / count_LE).gather(1, physical_LP)
    is_redundant = count_LE.gather(1, physical_LP) > 1
    return GpuLoads(*(t.view(len(load_LE), n_gpus, -1).numpy() for t in (load_LP, is_redundant)))
