"""The feed-forward layer: SwiGLU, down(silu(gate(x)) · up(x)).  Source: Shazeer (arXiv 2002.05202)."""

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from octile.nn.functional import result_dtype
from octile.nn.fused.block_input import BlockInput
from octile.nn.fused.elementwise import swiglu
from octile.nn.fused.feed_forward import can_fuse_size, feed_forward
from octile.nn.fused.fusion import (
    Activations,
    FusableModule,
    Fusion,
    activations_of,
    fuse_linear,
    has_other_activation,
)
from octile.nn.fused.shared_quantization import shared_quantization
from octile.nn.linear import Linear
from octile.nn.made_class import MadeClass, make_subclass
from octile.nn.smooth_swiglu import power_of_2_at_least
from octile.recipe import Recipe


class SwiGLU(FusableModule):
    """What these layers share: the data flow, and the decision whether it is one function.

    The last of the `fusable_layers` is the down-projection.

    A module of another library that has become one runs the forward pass of its own class where an activation was
    replaced since, or has hooks.
    """

    _octile_activations: Activations | None = None  # of another library's module, when it was converted

    def forward(self, x: Tensor | BlockInput) -> Tensor:
        """Compute the layer of x, or of the second result of `octile.nn.pre_norm`."""
        x = self.fused_input(x)
        if isinstance(x, BlockInput):
            weights = [getattr(self, name).weight for name in self.fusable_layers]
            return feed_forward(x, weights, result_dtype(x.x)).view(x.shape)

        if has_other_activation(self, self._octile_activations):
            return super(FusableModule, self).forward(x)
        h = swiglu(*self.projections(x))
        down = self._down
        if isinstance(down, Linear) and down.recipe.has_smooth_swiglu:
            scale_I = power_of_2_at_least(h.detach().abs().flatten(0, -2).amax(0))
            return down((h / scale_I).to(h.dtype), scale_I)
        return down(h)

    def fusion(self) -> Fusion | None:
        """Return how the layers are fused in this forward pass; None: they are called one after the other."""
        return None if has_other_activation(self, self._octile_activations) else super().fusion()

    def projections(self, x: Tensor) -> Sequence[Tensor]:
        """Compute gate and up of x in high precision, as two tensors or as one with the gate's channels first."""
        raise NotImplementedError

    def decide_fusion(self) -> Fusion | None:
        """Return how the projections are fused, or None if they are called one after the other."""

        def can_fuse(recipe: Recipe) -> bool:
            return recipe.can_fuse_swiglu and can_fuse_size(self._down.in_features)

        return fuse_linear(*[getattr(self, name) for name in self.fusable_layers], can_fuse=can_fuse)

    def is_batch_invariant_unfused(self) -> bool:
        """Whether serving, too, computes the layers one after the other: where their width cannot be fused."""
        return not can_fuse_size(self._down.in_features)

    @property
    def _down(self) -> nn.Linear:
        return getattr(self, self.fusable_layers[-1])


class MLP(SwiGLU):
    """SwiGLU, with parameters named as in the published checkpoints: x [..., hidden_size] → [..., hidden_size].

    Under a recipe that says how SwiGLU's inputs are saved, and with an intermediate_size that is a multiple of 128, its
    three layers are one function (`octile.nn.fused.feed_forward`): its backward recomputes SwiGLU's output from the
    saved gate and up. Otherwise, and where a layer has hooks or was replaced, they are called one after the other.
    """

    fusable_layers = ("gate_proj", "up_proj", "down_proj")

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def projections(self, x: Tensor) -> Sequence[Tensor]:
        """Compute gate and up of x, which is quantized once for both."""
        gate, up, _ = self.fusable_layers
        return shared_quantization(x, getattr(self, gate), getattr(self, up))


class FeedForward(MLP):
    """`MLP` with the names of Meta's Llama and of torchtitan: w1 for the gate, w3 for up and w2 for down."""

    fusable_layers = ("w1", "w3", "w2")


class GateUpMLP(SwiGLU):
    """`MLP` with gate and up in one layer, gate_up_proj, whose first intermediate_size outputs are the gate's."""

    fusable_layers = ("gate_up_proj", "down_proj")

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def projections(self, x: Tensor) -> Sequence[Tensor]:
        """Compute gate and up of x by one GEMM."""
        return (self.gate_up_proj(x),)


@functools.cache
def swiglu_subclass(cls: type[nn.Module], kind: type[SwiGLU]) -> type[nn.Module]:
    """Make the subclass of a module's class that computes as `kind` does, and has the methods of both.

    torchtitan's models call `init_weights` of theirs after a conversion.
    """
    return make_subclass(cls, (MadeClass, kind), {}, swiglu_subclass, cls, kind)


def become_swiglu(module: Any, kind: type[SwiGLU]) -> None:
    """Have a module of another library that computes what `kind` does compute it as `kind` does."""
    activations = activations_of(module, kind.fusable_layers)
    classes: Any = type(module), kind
    module.__class__ = swiglu_subclass(*classes)
    module._octile_activations = activations
