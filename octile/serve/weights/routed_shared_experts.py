"""Shared experts that are routed: each row of a decode step chooses them, too, with a weight of 1.

They are one MLP in a checkpoint, and so many experts in slots, which may be on any rank.

Source: DeepSeek-V3 (arXiv 2412.19437) §3.4.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from octile.formats import BLOCK
from octile.models.config import ModelConfig
from octile.scaled import ScaledTensor
from octile.serve.weights.block_weights import MLPWeights, MoEWeights, Part, Projections, Weight, join, stack


def check_shared(c: ModelConfig, is_fp8: bool, experts_are_fp8: bool) -> None:
    """Check that the shared experts of a model can be routed like other experts, each alone.

    Args:
        c: configuration of the model.
        is_fp8: whether their weights are in FP8.
        experts_are_fp8: whether those of the routed experts are.

    Raises:
        ValueError: only one of both is, or blocks of FP8 weights would be divided.
    """
    n, width, side = c.n_shared_experts, c.moe_intermediate_size, BLOCK[0]
    what = "parallel.shared_experts must be replicated, not routed"
    if is_fp8 != experts_are_fp8:
        shared, routed = ("in FP8" if fp8 else "in high precision" for fp8 in (is_fp8, experts_are_fp8))
        raise ValueError(f"{what}: the model's shared experts are {shared}, and its other ones {routed}")
    if n > 1 and is_fp8 and width % side:
        raise ValueError(
            f"{what}: the model's {n} shared experts are one MLP in FP8, which can be divided if moe_intermediate_size "
            f"is a multiple of {side}, not {width}"
        )


def check_batch_invariant(c: ModelConfig, name: str) -> None:
    """Check that logits do not depend on which steps route the shared experts: their sums are rounded alike.

    Args:
        c: configuration of the model.
        name: name of the argument that wants batch invariance.

    Raises:
        ValueError: several shared experts are one MLP in other steps, whose results are not rounded one by one.
    """
    if c.n_shared_experts > 1:
        raise ValueError(
            f"{name} must be False, not True, if shared experts are routed, of which the model has "
            f"{c.n_shared_experts}: steps with prompts round their sum once"
        )


def divide_shared(w: MLPWeights, n: int) -> list[tuple[Weight, Weight, Weight]]:
    """Divide n shared experts, which are one MLP: gate, up and down of each, whose results sum up to the MLP's.

    Those of FP8 weights are multiples of 128 wide, unless there is one (`check_shared`).
    """
    if len(w.x.weights) == 1:
        (both,), ((size, _),) = w.x.weights, w.x.sizes
        gate, up = Part(0, 0, size).of(both), Part(0, size, 2 * size).of(both)
    else:
        gate, up = w.x.weights
    width = w.down.shape[1] // n
    rows, columns = ([Part(dim, i * width, (i + 1) * width) for i in range(n)] for dim in (0, 1))
    return [(row.of(gate), row.of(up), column.of(w.down)) for row, column in zip(rows, columns, strict=True)]


def with_shared(w: MoEWeights, n: int) -> MoEWeights:
    """Append a mixture's n shared experts to its routed ones; see `divide_shared`."""
    gate, up, down = (stack(weights) for weights in zip(*divide_shared(w.shared, n), strict=True))
    x = join([gate, up], [[gate.shape[1]], [up.shape[1]]])
    weights = tuple(_concatenate(a, b) for a, b in zip(w.x.weights, x.weights, strict=True))
    return replace(w, x=Projections(weights, w.x.sizes), down=_concatenate(w.down, down))


def _concatenate(a: Weight, b: Weight) -> Weight:
    """Concatenate weights of experts [E, N, K]."""
    if isinstance(a, ScaledTensor) and isinstance(b, ScaledTensor):
        return ScaledTensor(torch.cat((a.data, b.data)), torch.cat((a.scale, b.scale)), BLOCK)
    if isinstance(a, ScaledTensor) or isinstance(b, ScaledTensor):
        raise ValueError("shared experts that are routed must be in FP8 if the other experts are, and only then")
    return torch.cat((a, b))


def with_shared_load(load_LE: Tensor, n_shared: int, n_chosen: int) -> Tensor:
    """Append the load of shared experts that are routed: each has all tokens, of which a token has chosen n_chosen."""
    tokens_L1 = load_LE.double().sum(1, keepdim=True) / n_chosen
    return torch.cat((load_LE, tokens_L1.expand(-1, n_shared)), dim=1)
