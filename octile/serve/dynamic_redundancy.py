"""Dynamic redundancy: which of the copies of an expert that GPUs hold serve its tokens in one step.

A GPU hosts more experts than it computes in a step, for example 16 of which 9 are active: each step reads the weights
of the active ones only. All ranks know how many tokens each expert has in the step, and compute the same choice:

    `choose_copies`    how many tokens each slot serves, so that the busiest GPU has as few as possible
    `assign_copies`    the slot of each token

Active copies are chosen greedily: each expert with tokens gets one, by paths that move others if a GPU is full, and
then the expert with the most tokens per active copy gets another one, until no slot is left. For the active copies the
division of the tokens is optimal: a token is moved along a path of GPUs, each of which passes on a token of another
expert, as long as the busiest GPU has at least two tokens more than the last one of the path. Where no such path is
left, no division has a smaller maximum (Harvey et al.). If all hosted copies may be active, this is the least load that
the placement allows.

This is the reference, by numpy on the host.

Sources: DeepSeek-V3 (arXiv 2412.19437) §3.4.1, "dynamic redundancy strategy"; Harvey, Ladner, Lovász, Tamir,
"Semi-matchings for bipartite graphs and load balancing", Journal of Algorithms 59 (2006).
Shapes: E experts, P slots, G GPUs of S slots each; T tokens of this rank, K chosen experts.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octile.validation import Range, check

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class TooFewActiveError(ValueError):
    """With so few active slots of a GPU some experts of a placement cannot be active together."""


def choose_copies(tokens: Tensor, physical_to_logical: Tensor, num_gpus: int, num_active: int | None = None) -> Tensor:
    """Choose how many tokens of its expert each slot serves in a step.

    Of equal choices the one with the lower number of the GPU, expert or slot is taken, so all ranks choose the same.

    Args:
        tokens: int64 [E], of each expert in this step, of all ranks together.
        physical_to_logical: int64 [P], the expert in each slot, as `rebalance_experts` places them in a layer.
        num_gpus: G; GPU g has the slots from g · P/G to (g + 1) · P/G, exclusive.
        num_active: slots of a GPU that may serve tokens in a step; None: all.

    Returns:
        int64 [P], on the CPU. The copies of an expert have its tokens together.

    Raises:
        TypeError: a tensor is not int64, or a number is not an int.
        TooFewActiveError: with so few active slots some experts cannot be active together.
        ValueError: a shape does not fit, a number of tokens is negative, or an expert is not from 0 to E − 1 or has no
            copy.
    """
    _check(tokens, physical_to_logical, num_gpus)
    size = len(physical_to_logical) // num_gpus
    num_active = size if num_active is None else num_active
    check("num_active", num_active, Annotated[int, Range(at_least=1, at_most=size)])
    tokens_E, physical_P = tokens.cpu().numpy(), physical_to_logical.cpu().numpy()
    slot_EG = np.full((len(tokens_E), num_gpus), -1)  # the first slot of an expert on a GPU
    slots = np.arange(len(physical_P))[::-1]
    slot_EG[physical_P[slots], slots // size] = slots

    active_EG = slot_EG >= 0
    if num_active < size:
        active_EG = _choose_active(tokens_E, active_EG, num_active)
    served_EG = _divide(tokens_E, active_EG)
    served_P = np.zeros(len(physical_P), dtype=np.int64)
    served_P[slot_EG[active_EG]] = served_EG[active_EG]
    return torch.from_numpy(served_P)


def assign_copies(experts: Tensor, first: Tensor, served: Tensor, physical_to_logical: Tensor) -> Tensor:
    """Assign the tokens of a rank to slots.

    The tokens of an expert, sorted by rank and position, are served by its slots in their order.

    Args:
        experts: int64 [T, K], the chosen experts of this rank's tokens, each with the tokens that `served` counts.
        first: int64 [E], how many tokens the experts have on the ranks before this one.
        served: int64 [P], what `choose_copies` has returned.
        physical_to_logical: int64 [P], as there.

    Returns:
        int64 [T, K], the slots.

    Raises:
        TypeError: a tensor is not int64.
        ValueError: a shape does not fit, a number of tokens is negative, an expert is not from 0 to E − 1, or `served`
            counts fewer tokens of an expert than `first` and `experts` have together.
    """
    _check_rows(experts, first, served, physical_to_logical)
    flat = experts.flatten()
    order = flat.argsort(stable=True)
    begin_E = torch.searchsorted(flat[order], torch.arange(len(first), device=flat.device))
    place = torch.empty_like(flat)
    place[order] = torch.arange(len(flat), device=flat.device) - begin_E[flat[order]]
    place += first[flat]  # of each entry among those of its expert

    slots = physical_to_logical.argsort(stable=True)  # of the experts, one after the other
    end = served[slots].cumsum(0)  # of the tokens of all experts, in this order
    begin = torch.searchsorted(physical_to_logical[slots], torch.arange(len(first), device=flat.device))
    before_E = torch.cat((end.new_zeros(1), end))[begin]
    return slots[torch.searchsorted(end, before_E[flat] + place, right=True)].view(experts.shape)


def _check(tokens: Tensor, physical_to_logical: Tensor, num_gpus: int) -> None:
    for name, tensor in (("tokens", tokens), ("physical_to_logical", physical_to_logical)):
        _check_vector(name, tensor)
    check("num_gpus", num_gpus, Annotated[int, Range(at_least=1)])
    if len(physical_to_logical) % num_gpus:
        raise ValueError(f"num_gpus must divide the {len(physical_to_logical)} slots, but is {num_gpus}")
    _check_counts("tokens", tokens)
    _check_experts("physical_to_logical", physical_to_logical, len(tokens))
    missing = (physical_to_logical.bincount(minlength=len(tokens)) == 0).nonzero().flatten().tolist()
    if missing:
        raise ValueError(f"physical_to_logical must have every expert, but expert {missing[0]} has no slot")


def _check_rows(experts: Tensor, first: Tensor, served: Tensor, physical_to_logical: Tensor) -> None:
    _check_int64("experts", experts)
    if experts.dim() != 2:
        raise ValueError(f"experts must be [tokens, chosen experts], not {list(experts.shape)}")
    for name, tensor in (("first", first), ("served", served), ("physical_to_logical", physical_to_logical)):
        _check_vector(name, tensor)
    n_slots, n_experts = len(physical_to_logical), len(first)
    if len(served) != n_slots:
        raise ValueError(f"served must have the {n_slots} slots of physical_to_logical, not {len(served)}")
    _check_counts("first", first)
    _check_counts("served", served)
    _check_experts("experts", experts, n_experts)
    _check_experts("physical_to_logical", physical_to_logical, n_experts)
    counted_E = torch.zeros_like(first).index_add_(0, physical_to_logical, served)
    found_E = first + experts.flatten().bincount(minlength=n_experts)
    if (found_E > counted_E).any():
        expert = int((found_E - counted_E).argmax())
        raise ValueError(
            f"served must count all: {int(counted_E[expert])} of expert {expert}, but first and experts have "
            f"{int(found_E[expert])}"
        )


def _check_int64(name: str, tensor: Tensor) -> None:
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.int64:
        found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name} must be an int64 tensor, not {found}")


def _check_vector(name: str, tensor: Tensor) -> None:
    _check_int64(name, tensor)
    if tensor.dim() != 1 or not len(tensor):
        raise ValueError(f"{name} must be a vector of at least one number, not {list(tensor.shape)}")


def _check_counts(name: str, tensor: Tensor) -> None:
    if (tensor < 0).any():
        raise ValueError(f"{name} must be at least 0, not {int(tensor.min())}")


def _check_experts(name: str, tensor: Tensor, n_experts: int) -> None:
    is_other = (tensor < 0) | (tensor >= n_experts)
    if is_other.any():
        raise ValueError(f"{name} must have experts from 0 to {n_experts - 1}, not {int(tensor[is_other][0])}")


def _choose_active(tokens_E: Ints, hosted_EG: Bools, num_active: int) -> Bools:
    """Choose the active copies: [E, G], at most num_active of a GPU."""
    hosted_E, n_slots = hosted_EG.sum(1), num_active * hosted_EG.shape[1]
    copies_E = (tokens_E > 0).astype(np.int64)
    per_copy_E = np.where(hosted_E > 1, tokens_E, 0).astype(np.float64)
    for _ in range(n_slots - copies_E.sum()):
        expert = int(per_copy_E.argmax())
        if per_copy_E[expert] <= 0:
            break
        copies_E[expert] += 1
        per_copy_E[expert] = tokens_E[expert] / copies_E[expert] if copies_E[expert] < hosted_E[expert] else 0
    load_E = tokens_E / np.maximum(copies_E, 1)
    active_EG = np.zeros_like(hosted_EG)
    load_G = np.zeros(hosted_EG.shape[1])
    order = [int(expert) for expert in np.argsort(-load_E, kind="stable") if tokens_E[expert]]
    for expert in order:
        if not _activate(expert, load_E, hosted_EG, active_EG, load_G, num_active):
            raise TooFewActiveError(
                f"num_active must be larger than {num_active}: with so few active slots of a GPU, "
                f"{1 + int(active_EG.any(1).sum())} experts that have tokens cannot be active together"
            )
    for expert in order:
        for _ in range(copies_E[expert] - 1):
            _activate(expert, load_E, hosted_EG, active_EG, load_G, num_active)
    return active_EG


def _activate(expert: int, load_E: Floats, hosted_EG: Bools, active_EG: Bools, load_G: Floats, num_active: int) -> bool:
    """Activate a further copy of an expert, on the GPU with the least load that has a free slot or can get one.

    A full GPU gets one if one of its active experts can be active elsewhere instead: a path in breadth-first order.

    Returns:
        whether there is such a path.
    """
    came_from: dict[int, tuple[int, int]] = {}  # GPU → the expert that would be activated there, and its GPU before
    by_load = np.argsort(load_G, kind="stable").tolist()
    reached = [(gpu, expert, -1) for gpu in by_load if hosted_EG[expert, gpu] and not active_EG[expert, gpu]]
    for gpu, moved, before in reached:  # grows
        if gpu in came_from:
            continue
        came_from[gpu] = moved, before
        if active_EG[:, gpu].sum() < num_active:
            break
        for other in np.flatnonzero(active_EG[:, gpu]).tolist():
            reached += [(to, other, gpu) for to in by_load if hosted_EG[other, to] and not active_EG[other, to]]
    else:
        return False
    while gpu != -1:
        moved, before = came_from[gpu]
        active_EG[moved, gpu] = True
        load_G[gpu] += load_E[moved]
        if before != -1:
            active_EG[moved, before] = False
            load_G[before] -= load_E[moved]
        gpu = before
    return True


def _divide(tokens_E: Ints, active_EG: Bools) -> Ints:
    """Divide the tokens of each expert among its active copies, so that the busiest GPU has as few as possible."""
    copies_E = np.maximum(active_EG.sum(1), 1)
    number_EG = active_EG.cumsum(1) - 1  # of a copy among those of its expert
    served_EG = np.where(active_EG, tokens_E[:, None] // copies_E[:, None], 0)
    served_EG += active_EG & (number_EG < (tokens_E % copies_E)[:, None])
    while True:
        load_G = served_EG.sum(0)
        busiest = int(load_G.argmax())
        came_from = {busiest: (-1, -1)}  # GPU → the GPU before it in a path, and the expert whose tokens would move
        queue = [busiest]
        for gpu in queue:  # grows
            for to in np.flatnonzero(active_EG[served_EG[:, gpu] > 0].any(0)).tolist():
                if to not in came_from:
                    movable_E = np.where(active_EG[:, to], served_EG[:, gpu], 0)
                    came_from[to] = gpu, int(movable_E.argmax())
                    queue.append(to)
        idlest = min(queue, key=lambda gpu: (load_G[gpu], gpu))
        if load_G[busiest] - load_G[idlest] < 2:
            return served_EG
        path, gpu = list[tuple[int, int, int]](), idlest
        while gpu != busiest:
            before, expert = came_from[gpu]
            path.append((expert, before, gpu))
            gpu = before
        most = min(int(served_EG[expert, before]) for expert, before, _ in path)
        moved = min(most, int(load_G[busiest] - load_G[idlest]) // 2)
        for expert, before, to in path:
            served_EG[expert, before] -= moved
            served_EG[expert, to] += moved
