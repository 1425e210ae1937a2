"""The GEMMs of a model's forward pass, and the operators before them, which quantize rows for FP8 weights.

    weight               its rows                       GEMM
    FP8                  E4M3 in tiles of 1×128         FP8, grouped by expert for the weights of experts
    in high precision    in the activations' dtype      PyTorch's; grouped by expert for the weights of experts

Rows are quantized once for all FP8 weights that read them.

With `batch_invariant` a GEMM computes a row in one form for any number of rows, so that the bits of its result depend
on no other row. FP8 GEMMs then do not split K.

Shapes: T rows, K and N the columns of a GEMM's input and of its result, H heads, E experts, I intermediate; R rows
sorted by expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.formats import TILE
from octile.ops.absorbed_attention import multiply_heads
from octile.ops.grouped import grouped_matmul_nt_out
from octile.ops.high_precision import high_precision_grouped_nt
from octile.ops.matmul import Block, matmul_nt, matmul_nt_out
from octile.ops.norm import rms_norm, rms_norm_quantize
from octile.ops.paged_attention import has_quantizing_kernel, heads_nt_out, heads_nt_quantize
from octile.ops.quantize import quantize
from octile.ops.row_invariant import (
    row_invariant_groups_nt,
    row_invariant_scaled_nt,
    row_invariant_scaled_nt_out,
)
from octile.ops.swiglu import swiglu, swiglu_quantize
from octile.scaled import ScaledTensor
from octile.serve.weights.block_weights import Projections, Weight

INVARIANT_ROWS = 64  # of a group, by which the kernel of experts in high precision is chosen in batch-invariant mode


class Rows(NamedTuple):
    """What several weights read: rows in high precision, where one of them does, and in FP8."""

    values: Tensor | None
    q: ScaledTensor | None


@dataclass(frozen=True)
class Gemms:
    """How a model's rows are multiplied by its weights.

    Attributes:
        dtype: dtype of activations.
        power_of_2: whether the scales of activations are powers of two.
        batch_invariant: see the head of this file.
    """

    dtype: torch.dtype
    power_of_2: bool
    batch_invariant: bool

    def norm(self, x_TK: Tensor, weight: Tensor, eps: float, fp8: bool, values: bool) -> Rows:
        """Normalize rows.

        Args:
            x_TK: the rows.
            weight, eps: weight and epsilon of the norm.
            fp8, values: whether a weight reads the result in FP8, and whether one does in high precision.
        """
        if not fp8:
            return Rows(rms_norm(x_TK, weight, eps)[0], None)
        data, scale, _, normed = rms_norm_quantize(x_TK, weight, eps, "e4m3", self.power_of_2, values)
        return Rows(normed if values else None, ScaledTensor(data, scale, TILE))

    def rows_for(self, x_TK: Tensor, w: Weight) -> Rows:
        """Return rows as one weight reads them."""
        if not isinstance(w, ScaledTensor):
            return Rows(x_TK, None)
        data, scale = quantize(x_TK, *TILE, "e4m3", self.power_of_2)
        return Rows(None, ScaledTensor(data, scale, TILE))

    def swiglu(
        self, gate: Tensor, up: Tensor, w: Weight, weight_R: Tensor | None = None, offs_E: Tensor | None = None
    ) -> Rows:
        """Compute silu(gate) · up · weight as the down-projection w reads it; one in high precision has no weight."""
        if not isinstance(w, ScaledTensor):
            return Rows(swiglu(gate, up), None)
        data, scale = swiglu_quantize(gate, up, "e4m3", self.power_of_2, weight_R, offs_E)
        return Rows(None, ScaledTensor(data, scale, TILE))

    def projections(
        self, x: Rows, w: Projections, offs_E: Tensor | None = None, out: Tensor | None = None
    ) -> list[Tensor]:
        """Multiply rows by all weights that read them, and split the results into their sizes; out: of the first."""
        results: list[Tensor] = []
        for i, (weight, sizes) in enumerate(zip(w.weights, w.sizes, strict=True)):
            results += self.nt(x, weight, offs_E, None if i else out).split(sizes, dim=-1)
        return results

    def nt(self, x: Rows, w: Weight, offs_E: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Multiply rows by a weight [N, K], or rows sorted by expert by the weights [E, N, K]: [T, N].

        Rows after the last expert's are undefined: exchanges leave room for more rows than come.
        The result is written to `out` [T, N], contiguous, if it is given: of a single weight.
        """
        if out is not None and self.batch_invariant:
            return self._row_invariant_nt_out(x, w, out)
        if out is not None:
            return _nt_out(x, w, out)
        if isinstance(w, ScaledTensor):
            assert x.q is not None
            return self._fp8_nt(x.q, w, offs_E)
        assert x.values is not None
        if not self.batch_invariant:
            if offs_E is None:
                return F.linear(x.values, w)
            return high_precision_grouped_nt(x.values, w, offs_E, self.dtype)
        if offs_E is None or not w.is_cuda:
            return row_invariant_groups_nt(x.values, w, offs_E, self.dtype)
        return high_precision_grouped_nt(x.values, w, offs_E, torch.float32, INVARIANT_ROWS).to(self.dtype)

    def add_nt_(self, x_TN: Tensor, x: Rows, w: Weight) -> Tensor:
        """Add rows times a weight [N, K] to others, in place, and return those: [T, N].

        The GEMM of an FP8 weight adds before it rounds. In batch-invariant mode it rounds the product first, as
        training does.
        """
        if not isinstance(w, ScaledTensor):
            return x_TN.add_(self.nt(x, w))
        assert x.q is not None
        nt_out = row_invariant_scaled_nt_out if self.batch_invariant else matmul_nt_out
        nt_out(x_TN, x.q.data, x.q.scale, x.q.block, w.data, w.scale, w.block, True)
        return x_TN

    def _fp8_nt(self, x: ScaledTensor, w: ScaledTensor, offs_E: Tensor | None) -> Tensor:
        operands = x.data, x.scale, x.block, w.data, w.scale, w.block
        if self.batch_invariant:
            return row_invariant_scaled_nt(*operands, offs_E, self.dtype, zero_rest=False)
        return matmul_nt(*operands, self.dtype) if offs_E is None else _grouped_nt(*operands, offs_E, self.dtype)

    def _row_invariant_nt_out(self, x: Rows, w: Weight, out: Tensor) -> Tensor:
        if not isinstance(w, ScaledTensor):
            return out.copy_(self.nt(x, w))
        assert x.q is not None
        row_invariant_scaled_nt_out(out, x.q.data, x.q.scale, x.q.block, w.data, w.scale, w.block, False)
        return out

    def heads_nt(self, x_THK: Tensor, w_HNK: Tensor, out_THN: Tensor) -> None:
        """Multiply each head of rows by its own weight, and write the results to out."""
        if self.batch_invariant:
            multiply_heads(x_THK, w_HNK, out_THN)
        else:
            heads_nt_out(out_THN, x_THK, w_HNK)

    def heads_rows(self, x_THK: Tensor, w_HNK: Tensor, w: Weight) -> Rows:
        """Multiply each head of rows by its own weight, and return the results [T, H·N] as a weight reads them."""
        if isinstance(w, ScaledTensor) and (not self.batch_invariant or has_quantizing_kernel(x_THK, w_HNK)):
            data, scale = heads_nt_quantize(x_THK, w_HNK, self.power_of_2)
            return Rows(None, ScaledTensor(data, scale, TILE))
        out_THN = x_THK.new_empty(*x_THK.shape[:2], w_HNK.shape[1])
        self.heads_nt(x_THK, w_HNK, out_THN)
        return self.rows_for(out_THN.flatten(1), w)


def _nt_out(x: Rows, w: Weight, out: Tensor) -> Tensor:
    if isinstance(w, ScaledTensor):
        assert x.q is not None
        matmul_nt_out(out, x.q.data, x.q.scale, x.q.block, w.data, w.scale, w.block, False)
        return out
    assert x.values is not None
    return torch.mm(x.values, w.mT, out=out)


def _grouped_nt(
    a: Tensor, a_scale: Tensor, a_block: Block, b: Tensor, b_scale: Tensor, b_block: Block, offs: Tensor,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Multiply as `grouped_matmul_nt` does, without the time to set the rows after the last group to zero."""
    out = a.new_empty(len(a), b.shape[1], dtype=dtype)
    grouped_matmul_nt_out(out, a, a_scale, a_block, b, b_scale, b_block, offs)
    return out
