"""Matrices whose rows are divided among ranks: whole matrices on some ranks, and rows of the results back.

Newton–Schulz needs a whole matrix. Each matrix has an owner among the ranks, chosen so that all have about as much to
compute. Two all-to-alls take its rows there and back:

    collect       every rank sends its rows of each matrix to the owner     the owner has [N, K]
    distribute    the owner sends every rank its rows of the result         every rank has its rows of all matrices

Shapes: N rows, K columns.
"""

import heapq
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class RowShard(NamedTuple):
    """How the rows of a parameter's dimension 0 are divided among ranks.

    Attributes:
        rows: how many each rank of the group has, in the order of the ranks.
        group: the ranks.
    """

    rows: tuple[int, ...]
    group: dist.ProcessGroup


class MatrixOwners:
    """The owners of some matrices, and the exchange of their rows. All ranks of the group make it alike.

    Args:
        rows: how many rows of each matrix each rank has.
        columns: K of each matrix.
        group: the ranks.

    Attributes:
        own: the indices of the matrices that this rank owns.
    """

    def __init__(self, rows: Sequence[tuple[int, ...]], columns: Sequence[int], group: dist.ProcessGroup):
        rank, n_ranks = dist.get_rank(group), dist.get_world_size(group)
        owners = _assign([matrix_flops(sum(n), k) for n, k in zip(rows, columns, strict=True)], n_ranks)
        self._group, self._rows, self._columns = group, rows, columns
        self.own = [i for i, owner in enumerate(owners) if owner == rank]
        self._order = [i for owner in range(n_ranks) for i, its in enumerate(owners) if its == owner]
        self._parts = [sum(rows[i][rank] * columns[i] for i in self._order if owners[i] == r) for r in range(n_ranks)]
        self._wholes = [sum(rows[i][r] * columns[i] for i in self.own) for r in range(n_ranks)]
        self._rank, self._n_ranks = rank, n_ranks

    def collect(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Send this rank's rows of all matrices, [n, K] each, of one dtype: the matrices of `own`, [N, K] each."""
        received = self._exchange([parts[i] for i in self._order], self._parts, self._wholes, parts[0])
        by_rank = [
            part.split([self._rows[i][r] * self._columns[i] for i in self.own])
            for r, part in enumerate(received.split(self._wholes))
        ]
        by_matrix = zip(self.own, zip(*by_rank, strict=True), strict=True)
        return [torch.cat(rows).view(-1, self._columns[i]) for i, rows in by_matrix]

    def distribute(self, wholes: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """Send rows of the matrices of `own`, [N, K] each: this rank's rows of all matrices, [n, K] each.

        Args:
            wholes: the matrices; none if this rank owns none.
            like: a tensor of their dtype and device.
        """
        split = [whole.split(self._rows[i]) for i, whole in zip(self.own, wholes, strict=True)]
        sent = [rows[r] for r in range(self._n_ranks) for rows in split]
        received = self._exchange(sent, self._wholes, self._parts, like)
        sizes = [self._rows[i][self._rank] * self._columns[i] for i in self._order]
        found = dict(zip(self._order, received.split(sizes), strict=True))
        return [found[i].view(-1, k) for i, k in enumerate(self._columns)]

    def _exchange(self, tensors: Sequence[Tensor], into: list[int], out: list[int], like: Tensor) -> Tensor:
        """Send the elements of tensors, `into[r]` of them to rank r, and receive `out[r]` from it."""
        sent = torch.cat([like.new_empty(0), *(t.reshape(-1) for t in tensors)])
        received = like.new_empty(sum(out))
        dist.all_to_all_single(received, sent, out, into, group=self._group)
        return received


def row_shard_of(param: Any) -> RowShard | None:
    """How the rows of a matrix are divided among ranks: by FSDP2, or as its `row_shard` says; None: they are not.

    Of a stack of matrices each rank has some, as a whole.

    Raises:
        ValueError: as for `check_placements`.
    """
    check_placements(param)
    if param.dim() != 2:
        return None
    if not hasattr(param, "placements"):
        return getattr(param, "row_shard", None)
    sharded = [i for i, placement in enumerate(param.placements) if placement.is_shard()]
    if not sharded or param.device_mesh.size(sharded[0]) == 1:
        return None
    n_ranks = param.device_mesh.size(sharded[0])
    most = -(-param.shape[0] // n_ranks)
    rows = tuple(max(min(param.shape[0] - most * rank, most), 0) for rank in range(n_ranks))  # as torch.chunk
    return RowShard(rows, param.device_mesh.get_group(sharded[0]))


def check_placements(param: Any) -> None:
    """Refuse a DTensor that is sharded otherwise than along its dimension 0; a matrix by one dimension of the mesh.

    Raises:
        ValueError: it is.
    """
    placements = getattr(param, "placements", ())
    sharded = [placement for placement in placements if not placement.is_replicate()]
    if any(not placement.is_shard(0) for placement in sharded) or (len(sharded) > 1 and param.dim() == 2):
        raise ValueError(
            f"a parameter {list(param.shape)} must be sharded along dimension 0, by one dimension of the mesh, "
            f"not as {list(placements)}"
        )


def matrix_flops(n: int, k: int) -> int:
    """FLOPs of an iteration of Newton–Schulz for [n, k]: X·Xᵀ and its product with X, and the square of X·Xᵀ."""
    small, large = sorted((n, k))
    return 2 * small**2 * (2 * large + small)


def max_owned_elements(shapes: Sequence[tuple[int, int]], n_ranks: int) -> int:
    """The elements of the matrices that a rank owns, at most, of matrices of these N and K."""
    owned = Counter[int]()
    for (n, k), owner in zip(shapes, _assign([matrix_flops(n, k) for n, k in shapes], n_ranks), strict=True):
        owned[owner] += n * k
    return max(owned.values(), default=0)


def _assign(costs: Sequence[int], n_ranks: int) -> list[int]:
    """The rank of each cost: the largest first, each to the first of the ranks with the least so far."""
    owners, loads = [0] * len(costs), [(0, rank) for rank in range(n_ranks)]  # a heap
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, owners[i] = loads[0]
        heapq.heapreplace(loads, (load + costs[i], owners[i]))
    return owners
