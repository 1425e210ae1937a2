"""The input of a block: quantized once for all layers that read it, and saved for backward once.

wgrad needs the quantized input a second time. How it is obtained decides what is saved:

    quantized   the quantized input itself is saved, one byte a value: nothing else needs the activation
    values      it is quantized again from the activation, which a layer in high precision, an expert gate, saves anyway
    norm        it is recomputed from the norm's input, which the norm's own backward saves: nothing more is saved
    both        as "quantized"; the activation is saved, too, for a gate

Source: DeepSeek-V3 (arXiv 2412.19437) §3.2.3 (norms are recomputed) and §3.3.3.  Shapes: T tokens, K channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from octile.formats import TILE
from octile.nn.fused.quantize import quantize_operand
from octile.ops.norm import rms_norm_quantize
from octile.recipe import OperandFormat, Recipe
from octile.scaled import ScaledTensor, quantize


@dataclass(frozen=True)
class Saved:
    """What is saved of a block's input, and how the input is recomputed from it; see the head of this file."""

    what: Literal["quantized", "values", "norm", "both"]
    operand_format: OperandFormat
    eps: float = 0.0

    def quantized(self, saved: tuple[Tensor, ...]) -> ScaledTensor:
        """Return the quantized input [T, K], saved or recomputed.

        It is recomputed bit for bit, unless it is that of a norm whose values were asked for, too: on a GPU another
        kernel then sums the squares in another order.
        """
        if self.what == "values":
            return quantize(saved[0], TILE, self.operand_format.fmt, self.operand_format.scale)
        data, scale = self._norm(saved, values=False)[:2] if self.what == "norm" else saved[-2:]
        return ScaledTensor(data, scale, TILE)

    def values(self, saved: tuple[Tensor, ...]) -> Tensor:
        """Return the input [T, K] in high precision; impossible where only the quantized input was saved."""
        return self._norm(saved, values=True)[3] if self.what == "norm" else saved[0]

    def _norm(self, saved: tuple[Tensor, ...], values: bool) -> tuple[Tensor, ...]:
        x_TK, weight_K = saved[:2]
        power_of_2 = self.operand_format.scale == "power_of_2"
        return rms_norm_quantize(x_TK, weight_K, self.eps, self.operand_format.fmt.name, power_of_2, values)


class BlockInput(NamedTuple):
    """An input that several layers of a block read.

    Attributes:
        x: [T, K], the activation or its norm, which the layers' gradients go to. A norm holds values only where they
            were asked for or GEMMs are observed.
        q: x quantized.
        saved: the tensors that the layers save of it, all of them the same; `how_saved` says what they are.
        recipe: recipe of the layers that read it.
        shape: [..., K], of the activation before its leading dimensions were flattened.
        x_views: two more views of x, if it is a norm's for several readers. The norm's kernel adds the gradients that
            are sent to them and to x; autograd would add those of one tensor's readers in kernels of their own.
    """

    x: Tensor
    q: ScaledTensor
    saved: tuple[Tensor, ...]
    how_saved: Saved
    recipe: Recipe
    shape: torch.Size
    x_views: tuple[Tensor, ...] = ()

    def for_readers(self) -> tuple[BlockInput, BlockInput, BlockInput]:
        """Return this input for three layers, each with an x of its own where there is one."""
        second, third = self.x_views or (self.x, self.x)
        return self, self._replace(x=second), self._replace(x=third)


def quantize_block_input(x: Tensor, recipe: Recipe, values: bool = False) -> BlockInput:
    """Quantize an activation [..., K] once for all fused layers that read it; for its norm see `pre_norm`.

    Args:
        recipe: recipe of these layers; one with `formats`.
        values: whether another layer reads and saves x in high precision.
    """
    assert recipe.formats is not None
    x_format, shape = recipe.formats.x, x.shape
    x = x.reshape(-1, x.shape[-1])
    q = quantize_operand(x, x_format, "x")
    if values:
        return BlockInput(x, q, (x.detach(),), Saved("values", x_format), recipe, shape)
    return BlockInput(x, q, (q.data, q.scale), Saved("quantized", x_format), recipe, shape)
