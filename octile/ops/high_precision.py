"""Grouped GEMMs in high precision by torch's `grouped_mm`, with which the 8-bit ones are compared.

They are operators so that torch.compile does not trace them: torch 2.11 would choose strides for the operands that its
grouped GEMM does not support, which aborts the process.

Shapes: T rows of all groups together, G groups, N and K of a weight.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.ops.matmul import without_autocast
from octile.ops.operator import operator


@operator()
def high_precision_grouped_nt(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Multiply the rows of group g by b[g]ᵀ; rows past the last group are zero.

    Args:
        a: [T, K], a floating-point dtype, any strides.
        b: [G, N, K] in a's dtype, any strides.
        offs: int32 [G], non-decreasing: group g has the rows offs[g−1] … offs[g] − 1.

    Returns:
        [T, N] in a's dtype.
    """
    with without_autocast(a.device):
        y = F.grouped_mm(_aligned(a).contiguous(), _aligned(b, rows=True).mT, offs=offs)[:, : b.shape[1]].contiguous()
        past = torch.arange(a.shape[0], device=a.device) >= offs[-1]
        return y.masked_fill_(past[:, None], 0)


@high_precision_grouped_nt.register_fake
def _(a, b, offs):
    return a.new_empty(a.shape[0], b.shape[1])


@operator()
def high_precision_grouped_tn(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Compute aᵀ · b over the rows of each group.

    Args:
        a: [T, N], a floating-point dtype, any strides.
        b: [T, K] in a's dtype, any strides.
        offs: as in `high_precision_grouped_nt`.

    Returns:
        [G, N, K] in a's dtype.
    """
    with without_autocast(a.device):
        dw = F.grouped_mm(_aligned(a).contiguous().mT, _aligned(b).contiguous(), offs=offs)
        return dw[:, : a.shape[1], : b.shape[1]].contiguous()


@high_precision_grouped_tn.register_fake
def _(a, b, offs):
    return a.new_empty(offs.shape[0], a.shape[1], b.shape[1])


def _aligned(t: Tensor, rows: bool = False) -> Tensor:
    """Pad t with zeros to a multiple of 8 columns (and rows): grouped_mm needs strides of whole 16 bytes."""
    missing = (0, -t.shape[-1] % 8, 0, -t.shape[-2] % 8 if rows else 0)
    return F.pad(t, missing) if any(missing) else t
