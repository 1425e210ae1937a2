"""The arithmetic of a Muon step over many matrices, in FP32 but for Newton–Schulz, which runs in BF16.

    m ← m + (1 − μ)·(g − m)             u = g + μ·(m − g), Nesterov's momentum
    w ← w·(1 − lr·λ) − lr·s·NS(u)       s: the factor of the learning rate, of a matrix [N, K]

NS(u) has the singular vectors of u; its singular values are near 1, whatever those of u, unless they are much smaller
than its norm. Five times, from X = u/‖u‖:

    A = X·Xᵀ        X ← a·X + (b·A + c·A²)·X           a, b, c = 3.4445, −4.7750, 2.0315

which maps each singular value σ to a·σ + b·σ³ + c·σ⁵. The coefficients make small values grow as fast as possible, so
that the largest end between 0.68 and 1.21 instead of converging to 1. All operations, and their roundings, are those of
`torch.optim.Muon`; matrices of the same shape are multiplied as a batch.

Source: K. Jordan, "Muon: An optimizer for hidden layers in neural networks"; Moonlight (arXiv 2502.16982) §2.2.
Shapes: B matrices of a batch, N rows, K columns.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, DEFAULT_NS_STEPS, EPS, _adjust_lr

from octile.optim.row_shards import MatrixOwners, RowShard, max_owned_elements
from octile.optim.storage import overwrite_

BATCH = 2**24  # elements of a batch of matrices, if one has no more


class MatrixGroup(NamedTuple):
    """Matrices that are updated with the same settings; each list has an entry per parameter.

    Attributes:
        weights: float32 [N, K], or [E, N, K] with E matrices; contiguous. Where ranks have divided the rows, those of
            this rank.
        gradients: the same shapes, any floating-point dtype.
        momentum_buffers: m, float32 or bfloat16, contiguous; rounded to nearest even.
        copies: the parameter of another dtype that becomes the rounded weight, contiguous; or None.
        row_shards: how the rows of [N, K] are divided among ranks; None: they are not.
        merged: how many matrices have their rows in a parameter's N, one after the other.
        lr: a number, or a tensor [] on the weights' device.
        momentum, weight_decay: μ and λ.
        adjust_lr_fn: as in `octile.optim.Muon`.
    """

    weights: list[Tensor]
    gradients: list[Tensor]
    momentum_buffers: list[Tensor]
    copies: list[Tensor | None]
    row_shards: list[RowShard | None]
    merged: int
    lr: float | Tensor
    momentum: float
    weight_decay: float
    adjust_lr_fn: str


class _Piece(NamedTuple):
    """Some whole matrices of a parameter [B, N, K], or this rank's rows [n, K] of one whose rows ranks have divided.

    Attributes:
        weight, gradient, momentum_buffer, copy, row_shard: as in `MatrixGroup`.
        shape: N and K of a matrix.
        group: the group, with the settings.
    """

    weight: Tensor
    gradient: Tensor
    momentum_buffer: Tensor
    copy: Tensor | None
    row_shard: RowShard | None
    shape: torch.Size
    group: MatrixGroup


def muon_(groups: Sequence[MatrixGroup], skip: Tensor | None = None, gradient_scale: Tensor | None = None) -> None:
    """Update weights and momenta in place.

    Args:
        groups: the matrices, on one device.
        skip: bool [] on the weights' device: if true, nothing changes.
        gradient_scale: float32 [] on the weights' device: the factor of all gradients, which keep their values.
    """
    pieces = [piece for group in groups for piece in _pieces(group)]
    step = _Step(skip, gradient_scale)
    whole = [piece for piece in pieces if piece.row_shard is None]
    for batch in _batches([piece.weight for piece in whole]):
        for i, result in zip(batch, _newton_schulz_of_each([step.direction(whole[i]) for i in batch]), strict=True):
            step.apply_(whole[i], result)
    divided: dict[dist.ProcessGroup, list[_Piece]] = {}
    for piece in pieces:
        if piece.row_shard is not None:
            divided.setdefault(piece.row_shard.group, []).append(piece)
    for ranks, parts in divided.items():
        _update_divided_(parts, ranks, step)


def temporary_bytes(whole: Mapping[tuple[int, int], int], divided: Mapping[tuple[int, int], int], ranks: int) -> int:
    """The bytes that `muon_` takes in addition to its arguments, at most, if gradients are FP32 and momenta BF16.

    Each element of a batch of whole matrices takes 16: NS(u) of the batch before and u in BF16, and three tensors in
    FP32 that u is computed from. Where rows are divided, each element that a rank owns takes 2, for u or NS(u), and in
    addition 4 when NS(u) is sent, or, of a batch, 10 in Newton–Schulz.

    Args:
        whole: how many matrices [N, K] are updated as a whole, of each N and K.
        divided: the same of matrices whose rows these ranks have divided.
        ranks: how many.
    """
    if ranks == 1:
        whole, divided = {n_k: whole.get(n_k, 0) + divided.get(n_k, 0) for n_k in {**whole, **divided}}, {}
    owned = max_owned_elements([n_k for n_k, count in divided.items() for _ in range(count)], ranks)
    return max(
        16 * _largest_batch(whole),
        2 * owned + max(4 * owned, 10 * min(owned, _largest_batch(divided))),
    )


def _largest_batch(shapes: Mapping[tuple[int, int], int]) -> int:
    """The elements of the largest batch of matrices."""
    sizes = ((n * k, count) for (n, k), count in shapes.items() if n * k)
    return max((min(count, max(BATCH // size, 1)) * size for size, count in sizes), default=0)


def newton_schulz(u_BNK: Tensor) -> Tensor:
    """Make the singular values of matrices about 1, as the head of this file says.

    Args:
        u_BNK: bfloat16; not changed.

    Returns:
        bfloat16 [B, N, K]; zeros for a matrix of zeros.
    """
    is_tall = u_BNK.shape[1] > u_BNK.shape[2]
    x = u_BNK.mT if is_tall else u_BNK  # the products are those of the shorter side
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(DEFAULT_NS_STEPS):
        a = x @ x.mT
        polynomial = torch.baddbmm(a, a, a, beta=DEFAULT_B, alpha=DEFAULT_C)
        x = torch.baddbmm(x, polynomial, x, beta=DEFAULT_A)
    return x.mT if is_tall else x


def _newton_schulz_of_each(stacks: Sequence[Tensor]) -> Sequence[Tensor]:
    """NS of stacks [B, N, K] of the same N and K, multiplied as one batch."""
    return newton_schulz(torch.cat(list(stacks))).split([len(stack) for stack in stacks])


class _Step:
    """What a step does with each piece, element by element.

    Args:
        skip, gradient_scale: as in `muon_`.
    """

    def __init__(self, skip: Tensor | None, gradient_scale: Tensor | None):
        self._skip, self._gradient_scale = skip, gradient_scale
        self._factors: dict[tuple[int, torch.Size], tuple[Tensor, Tensor]] = {}  # of a group and a shape

    def direction(self, piece: _Piece) -> Tensor:
        """Update the momentum: u in bfloat16, of the piece's shape."""
        g, mu = piece.gradient.float(), piece.group.momentum
        if self._gradient_scale is not None:
            g = g * self._gradient_scale
        m = piece.momentum_buffer.float().lerp(g, 1 - mu)
        overwrite_(piece.momentum_buffer, m, self._skip)
        return g.lerp(m, mu).bfloat16()

    def apply_(self, piece: _Piece, result: Tensor) -> None:
        """Update the weight with the piece's part of NS(u), bfloat16."""
        if self._skip is not None:
            result = result.masked_fill(self._skip, 0.0)  # it may be NaN
        key = id(piece.group), piece.shape
        if key not in self._factors:
            self._factors[key] = self._make_factors(piece)
        decay, step_size = self._factors[key]
        piece.weight.mul_(decay).addcmul_(result, step_size, value=-1.0)
        if piece.copy is not None:
            overwrite_(piece.copy, piece.weight, self._skip)

    def _make_factors(self, piece: _Piece) -> tuple[Tensor, Tensor]:
        """1 − lr·λ and lr·s as float32 [] on the device; 1 and 0 in a step that is skipped."""
        lr, device = piece.group.lr, piece.weight.device
        lr = lr.double() if isinstance(lr, Tensor) else torch.full((), lr, dtype=torch.float64, device=device)
        decay = 1 - lr * piece.group.weight_decay
        step_size = lr * _adjust_lr(1.0, piece.group.adjust_lr_fn, piece.shape)
        if self._skip is not None:
            decay, step_size = decay.masked_fill(self._skip, 1.0), step_size.masked_fill(self._skip, 0.0)
        return decay.float(), step_size.float()


def _update_divided_(pieces: Sequence[_Piece], ranks: dist.ProcessGroup, step: _Step) -> None:
    """Update matrices whose rows these ranks have."""
    columns = [piece.shape[1] for piece in pieces]
    owners = MatrixOwners([piece.row_shard.rows for piece in pieces if piece.row_shard is not None], columns, ranks)
    directions = [step.direction(piece) for piece in pieces]
    like = directions[0].new_empty(0)
    results = [u.view(-1, *pieces[i].shape) for i, u in zip(owners.own, owners.collect(directions), strict=True)]
    del directions
    for batch in _batches(results):
        for i, result in zip(batch, _newton_schulz_of_each([results[i] for i in batch]), strict=True):
            results[i] = result
    parts = owners.distribute([result.flatten(0, 1) for result in results], like)
    for piece, part in zip(pieces, parts, strict=True):
        step.apply_(piece, part)


def _pieces(group: MatrixGroup) -> Iterator[_Piece]:
    """Yield the matrices of a group, so many of a stack at once that they are no more than a batch."""
    for weight, gradient, momentum, copy, row_shard in zip(*group[:5], strict=True):
        rows = weight.shape[-2] if row_shard is None else sum(row_shard.rows)
        shape = torch.Size((rows // group.merged, weight.shape[-1]))
        if row_shard is not None:
            yield _Piece(weight, gradient, momentum, copy, row_shard, shape, group)
            continue
        if not weight.numel():
            continue
        at_once = max(BATCH // shape.numel(), 1)
        w, g, m = (t.reshape(-1, *shape).split(at_once) for t in (weight, gradient, momentum))
        copies = [None] * len(w) if copy is None else copy.view(-1, *shape).split(at_once)
        for w_BNK, g_BNK, m_BNK, copy_BNK in zip(w, g, m, copies, strict=True):
            yield _Piece(w_BNK, g_BNK, m_BNK, copy_BNK, None, shape, group)


def _batches(stacks: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the indices of stacks [B, N, K] of the same shapes, so many that they are no more than a batch."""
    by_shape: dict[torch.Size, list[int]] = {}
    for i, stack in enumerate(stacks):
        by_shape.setdefault(stack.shape[1:], []).append(i)
    for indices in by_shape.values():
        batch: list[int] = []
        filled = 0
        for i in indices:
            if batch and filled + stacks[i].numel() > BATCH:
                yield batch
                batch, filled = [], 0
            batch.append(i)
            filled += stacks[i].numel()
        yield batch
