"""Tensor parallelism of one linear layer: what a rank computes where torch has sharded the weight as a DTensor.

    column-wise   weight Shard(0), x whole              → y Shard(-1); the gradients of x are summed over the ranks
    row-wise      weight Shard(1), x Shard(-1)          → y Partial: the ranks' results are summed, then the bias added
    replicated    weight and x whole                    → y whole

These are the layouts of torch's `ColwiseParallel` and `RowwiseParallel`, which also do the communication, and of
torchtitan's `NoParallel`. A rank's part of a quantized operand must consist of whole tiles and blocks, so that it has
the encoded values that quantizing the whole operand gives: the sharded dimension is a multiple of 128 · ranks.

Source: Megatron-LM (arXiv 1909.08053) §3; `torch.distributed.tensor`.  Shapes: K inputs, N outputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from octile.formats import BLOCK
from octile.recipe import Recipe


class LocalLinear(NamedTuple):
    """A rank's part of a linear layer.

    Attributes:
        x, weight: local tensors; their gradients are placed as the layout needs it.
        bias: a DTensor, or None.
        mesh, placement: mesh and placement of the result.
    """

    x: Tensor
    weight: Tensor
    bias: DTensor | None
    mesh: DeviceMesh
    placement: Placement

    def result(self, y: Tensor) -> Tensor:
        """Return the layer's result of the rank's x · weightᵀ: a DTensor [..., N]."""
        result = DTensor.from_local(_Wait.apply(y), self.mesh, [self.placement], run_check=False)
        return result if self.bias is None else result + self.bias.to(y.dtype)


def local_linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> LocalLinear:
    """Return a rank's part of x · weightᵀ + bias.

    Raises:
        TypeError: one of x, weight and bias is a DTensor and another is not, or the weight has a main_grad.
        ValueError: the layout is none of the above, or a tile or block of the recipe would cross ranks.
    """
    operands = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    for name, t in operands.items():
        if not isinstance(t, DTensor):
            raise TypeError(
                f"{name} must be a DTensor as the layer's other tensors are, not {type(t).__name__}: parallelize the "
                "layer by ColwiseParallel or RowwiseParallel, and fully_shard the block that holds the layers"
            )
    if hasattr(weight, "main_grad"):
        raise TypeError("a weight that is a DTensor must have no main_grad: its gradient is placed as the weight is")
    assert isinstance(x, DTensor)
    assert isinstance(weight, DTensor)
    assert bias is None or isinstance(bias, DTensor)
    last = x.dim() - 1
    placements = {name: t.placements for name, t in operands.items() if isinstance(t, DTensor)}
    whole, partial = (Replicate(),), (Partial(),)
    column_wise = {"x": whole, "weight": (Shard(0),), "bias": (Shard(0),)}, partial, Shard(last)
    row_wise = {"x": (Shard(last),), "weight": (Shard(1),), "bias": whole}, (Shard(last),), Partial()
    replicated = {"x": whole, "weight": whole, "bias": whole}, whole, Replicate()
    for layout, dx, y in (column_wise, row_wise, replicated):
        if all(placements[name] == layout[name] for name in placements):
            _check_blocks(weight, recipe)
            local_x, local_weight = _Wait.apply(x.to_local(grad_placements=dx)), weight.to_local()
            if not weight.requires_grad:  # no parameter, which the weight cache would know by an id that is gone soon
                local_weight = local_weight.detach()
            return LocalLinear(local_x, local_weight, bias, weight.device_mesh, y)
    found = ", ".join(f"{name} {list(placed)}" for name, placed in placements.items())
    raise ValueError(
        f"tensor parallelism of a linear layer must be column-wise (x whole, weight Shard(0)) or row-wise "
        f"(x Shard({last}), weight Shard(1)) over one mesh dimension, not {found}"
    )


def _check_blocks(weight: DTensor, recipe: Recipe) -> None:
    """Refuse a sharded weight whose ranks would quantize other tiles and blocks than one process does."""
    (placement,), ranks = weight.placements, weight.device_mesh.size()
    if isinstance(placement, Shard):
        check_blocks(("out_features", "in_features")[placement.dim], weight.shape[placement.dim], ranks, recipe)


def check_blocks(name: str, size: int, ranks: int, recipe: Recipe) -> None:
    """Refuse a dimension of a weight, divided among ranks, whose parts have other tiles and blocks than the whole.

    Args:
        name: name of the dimension.
        size: its size in one process.
        ranks: the number of ranks.
        recipe: recipe of the layer.

    Raises:
        ValueError: the recipe has one scale for a whole tensor, or the size is no multiple of 128 · ranks.
    """
    formats = recipe.formats
    if formats is None:
        return
    used = (formats.x, formats.w, formats.dy, formats.wgrad_x, formats.wgrad_dy)
    if any(f.amax == "delayed" or (f.amax == "current" and None in f.block) for f in used):
        raise ValueError(
            f"recipe {recipe.name!r} has one scale for a whole tensor, of which each rank has a part: tensor "
            "parallelism needs a recipe with tiles and blocks, or one without FP8"
        )
    if size % (BLOCK[0] * ranks):
        raise ValueError(
            f"{name} must be a multiple of {BLOCK[0]} × {ranks} ranks for tensor parallelism, not {size}: tiles and "
            "blocks would cross ranks. octile.convert(keep=[…]), or keep in the section octile of torchtitan's job, "
            "leaves the layer in high precision"
        )


class _Wait(torch.autograd.Function):
    """The identity, which waits for a tensor, or for a gradient, that torch still communicates."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        """Wait for t."""
        return _waited(t)

    @staticmethod
    def backward(ctx: Any, dt: Tensor) -> Tensor:
        """Wait for the gradient."""
        return _waited(dt)


def _waited(t: Tensor) -> Tensor:
    return t.wait() if isinstance(t, AsyncCollectiveTensor) else t.view_as(t)
