"""The move of a layer's experts to other slots, which may be on other ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from octile.scaled import ScaledTensor
from octile.serve.weights.block_weights import Weight


def move_experts(
    weights: Sequence[Weight], now: Sequence[int], wanted: Sequence[int], ranks: dist.ProcessGroup, n_nodes: int
) -> None:
    """Bring the wanted experts into this rank's slots, from its own ones or from the nearest rank's; all ranks call it.

    Args:
        weights: of the experts in this rank's slots, each stacked [slots of a rank, N, K]; overwritten.
        now, wanted: the experts in the slots of all ranks, which have as many each.
        ranks: those that share the experts.
        n_nodes: of the ranks, which have consecutive numbers in a node.
    """
    here, n_ranks = dist.get_rank(ranks), dist.get_world_size(ranks)
    size, parts = len(now) // n_ranks, [part for weight in weights for part in _parts(weight)]
    received: dict[int, list[Tensor]] = {}
    operations: list[dist.P2POp] = []
    for to, expert in enumerate(wanted):
        if now[to] == expert:
            continue
        receiver = to // size
        at = find_copy(now, expert, receiver, n_ranks, n_nodes)
        sender = at // size
        if receiver == here:
            received[to % size] = [part[at % size if sender == here else 0].clone() for part in parts]
        if sender != receiver and here in (sender, receiver):
            sends = here == sender
            tensors = [part[at % size] for part in parts] if sends else received[to % size]
            peer = dist.get_global_rank(ranks, receiver if sends else sender)
            operation = dist.isend if sends else dist.irecv
            operations += [dist.P2POp(operation, t.view(torch.uint8), peer, ranks) for t in tensors]  # gloo: no FP8
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
    for slot, new in received.items():
        for part, values in zip(parts, new, strict=True):
            part[slot].copy_(values)


def find_copy(physical_to_logical: Sequence[int], expert: int, rank: int, n_ranks: int, n_nodes: int) -> int:
    """Return the slot from which a rank receives an expert: its own, one of its node, or that of the nearest node."""
    size, in_node = len(physical_to_logical) // n_ranks, n_ranks // n_nodes

    def distance(slot: int) -> tuple[int, int, int]:
        sender = slot // size
        return abs(sender // in_node - rank // in_node), abs(sender - rank), slot

    return min((slot for slot, other in enumerate(physical_to_logical) if other == expert), key=distance)


def _parts(weight: Weight) -> list[Tensor]:
    return [weight.data, weight.scale] if isinstance(weight, ScaledTensor) else [weight]
