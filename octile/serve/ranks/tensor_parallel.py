"""Tensor parallelism of attention with sequence parallelism: ranks of a group share their requests.

Each rank of a group has some heads of attention, and in between some rows of a step:

    norm, quantization      each rank has its own rows
    all-gather              of the rows as the projections read them, in FP8 where their weights are
    projections, attention  all rows, the heads of the rank; the latents, and so the cache, are those of all ranks
    output projection       all rows, columns of the rank's heads: one of the terms of a sum over the ranks
    reduce-scatter          each rank receives the terms of its own rows, and adds them to its residual
    MLP or mixture          own rows, whole weights; the experts are spread over the ranks of all groups

So each row is routed once, and a dense MLP or a shared expert computes it once. The head computes own rows, too: of the
logits or the tokens chosen from them all ranks receive the same bits, and schedule the same steps.

The terms are exchanged in the dtype of activations, and summed in FP32 in the order of the ranks, together with the
residual, rounded once. FP32 terms would be twice the bytes; in BF16 each is rounded as the whole sum is on one rank. A
ring's order of sums would depend on the position of a row, and with it the row's bits.

Source: DeepSeek-V3 (arXiv 2412.19437) §3.4; sequence parallelism: Korthikanti et al. (arXiv 2205.05198).
Shapes: M ranks of a group, T rows of a step, t = ⌈T/M⌉ own ones, D model.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from octile.kernels.memory_layout import contiguous_copy, padded
from octile.ops.permute import unpermute
from octile.parallel.experts import in_tiles
from octile.parallel.state import all_gather
from octile.scaled import ScaledTensor
from octile.serve.weights.head_share import HeadShare


class TensorParallel:
    """The ranks of a group, as one of them sees it. `ALONE` has one rank, for which nothing is exchanged.

    All ranks of a group call the methods that exchange rows in the same order, with the same numbers of rows.

    Args:
        group: the ranks; None: this one alone.

    Attributes:
        rank: number of this rank in the group.
        size: M.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self._group = group
        self._row_ids = dict[int, Tensor]()  # the terms of own rows among those received, by the number of rows
        self.rank, self.size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))

    @classmethod
    def of_consecutive(cls, size: int, timeout: timedelta | None = None) -> TensorParallel:
        """Divide all ranks into groups of so many consecutive ones, and return that of this rank; all ranks call it.

        Args:
            size: M.
            timeout: after which a rank that waits for another one gives up; None: torch's.

        Raises:
            ValueError: M does not divide the ranks.
        """
        if size == 1:
            return ALONE
        n_ranks, own = dist.get_world_size(), None
        if n_ranks % size:
            raise ValueError(f"groups must divide the ranks, but {size} does not divide {n_ranks}")
        for first in range(0, n_ranks, size):
            group = dist.new_group(list(range(first, first + size)), timeout)
            own = group if dist.get_rank() in range(first, first + size) else own
        return cls(own)

    @property
    def share(self) -> HeadShare:
        """The heads of this rank."""
        return HeadShare(self.rank, self.size)

    def n_own(self, n_rows: int) -> int:
        """Return t of T rows."""
        return -(-n_rows // self.size)

    def n_padded(self, n_rows: int) -> int:
        """Return M · t of T rows: as many are gathered."""
        return self.size * self.n_own(n_rows)

    def pad(self, t: Tensor, value: int = 0) -> Tensor:
        """Append values to a tensor [T, …] up to M · t rows."""
        missing = self.n_padded(len(t)) - len(t)
        return F.pad(t, (*(t.dim() - 1) * (0, 0), 0, missing), value=value) if missing else t

    def own(self, t: Tensor) -> Tensor:
        """Return this rank's rows of a tensor [T, …] that all ranks have: [t, …]; those beyond the last are zeros."""
        n = self.n_own(len(t))
        return self.pad(t).narrow(0, self.rank * n, n)

    def gather(self, t: Tensor) -> Tensor:
        """Gather the rows [t, …] of all ranks: [M · t, …]."""
        if self.size == 1 or not t.numel():
            return t
        out = t.new_empty(self.size * len(t), *t.shape[1:])
        all_gather(out, t.contiguous(), group=self._group)
        return out

    def gather_quantized(self, x: ScaledTensor) -> ScaledTensor:
        """Gather rows in 1×128 tiles, [t, D] of each rank: data and scales in one exchange."""
        if self.size == 1 or not len(x.data):
            return x
        (rows, width), tiles = x.data.shape, x.scale.shape[1]
        scales_at = padded(width)

        def parts_of(packed: Tensor) -> tuple[Tensor, Tensor]:
            return packed[:, :width], packed.view(torch.float32)[:, scales_at // 4 :][:, :tiles]

        packed = x.data.new_empty(rows, scales_at + padded(tiles, 4) * 4, dtype=torch.uint8)
        for part, values in zip(parts_of(packed), (x.data.view(torch.uint8), x.scale), strict=True):
            part.copy_(values)
        data, scale = parts_of(self.gather(packed))
        return in_tiles(contiguous_copy(data).view(x.data.dtype), scale)

    def add_sums_(self, x_TD: Tensor, terms_TD: Tensor) -> Tensor:
        """Add to own rows [t, D] the sums over all ranks of their terms [M · t, D], in place; return the rows."""
        if self.size == 1:
            return x_TD.add_(terms_TD)
        if not x_TD.numel():
            return x_TD
        n = len(terms_TD)
        if n not in self._row_ids:
            ids_T = torch.arange(n, dtype=torch.int32, device=x_TD.device)
            self._row_ids[n] = ids_T.view(self.size, -1).mT.contiguous()
        received = torch.empty_like(terms_TD)
        dist.all_to_all_single(received, terms_TD.contiguous(), group=self._group)
        return x_TD.copy_(unpermute(received, self._row_ids[n], x_TD))


ALONE = TensorParallel()
