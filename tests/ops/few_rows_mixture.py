"""Arguments of the mixture of few rows, for tests of its reference and of its kernels."""

import math
from typing import Any

import torch
from torch import Tensor

from octile.formats import BLOCK
from octile.ops.quantize import quantize


def arguments(
    t: int,
    e: int,
    d: int,
    i: int,
    s: int,
    k: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> dict[str, Any]:
    """Random arguments of the operator, by name and in order."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def fp8(*shape: int) -> tuple[Tensor, Tensor]:
        return quantize(random(*shape) / math.sqrt(shape[-1]), *BLOCK, "e4m3", False)

    weights = (*fp8(e, 2 * i, d), *fp8(e, d, i), *((*fp8(2 * s, d), *fp8(d, s)) if s else (None,) * 4))
    names = "up", "up_scale", "down", "down_scale", "shared_up", "shared_up_scale", "shared_down", "shared_down_scale"
    return {
        "x": random(t, d).to(dtype), "norm_weight": 1 + 0.1 * random(d), "eps": 1e-6,
        "gate_weight": random(e, d) * 2 / math.sqrt(d),
        "bias": None, "n_chosen": k, "n_group": 1, "topk_group": 1, "best": 1, "scoring_func": "sigmoid",
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, **dict(zip(names, weights, strict=True)),
        "power_of_2": False,
    }  # fmt: skip
