"""Products of a mixture of experts in an ordinary dtype, torch's own: what the 8-bit ones are compared with.

They are operators so that no compiler looks into them: torch 2.11's lays operands out as its grouped product does not
take them, which stops the whole process.

Shapes: T rows of all groups together, G groups, N and K sides of a weight.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.ops.matmul import without_autocast
from octile.ops.operator import operator


@operator()
def high_precision_grouped_nt(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Rows of group g times b[g]ᵀ: a[T, K], b[G, N, K] → [T, N]. Rows past the last group are zero.

    Args:
        a, b: of one floating-point dtype; any strides.
        offs: int32 [G], never falling: the rows of group g are offs[g−1] … offs[g].
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
    """aᵀ · b, summed over the rows of each group: a[T, N], b[T, K] → [G, N, K].

    Args: as in `high_precision_grouped_nt`.
    """
    with without_autocast(a.device):
        dw = F.grouped_mm(_aligned(a).contiguous().mT, _aligned(b).contiguous(), offs=offs)
        return dw[:, : a.shape[1], : b.shape[1]].contiguous()


@high_precision_grouped_tn.register_fake
def _(a, b, offs):
    return a.new_empty(offs.shape[0], a.shape[1], b.shape[1])


def _aligned(t: Tensor, rows: bool = False) -> Tensor:
    """t with zeros appended to its columns, and rows, up to a multiple of 8: grouped_mm wants strides of 16 bytes."""
    missing = (0, -t.shape[-1] % 8, 0, -t.shape[-2] % 8 if rows else 0)
    return F.pad(t, missing) if any(missing) else t
