"""Dynamic redundancy: which of the copies of an expert that GPUs hold serve its tokens in one step.

A GPU hosts more experts than it computes in a step, for example 16 of which 9 are active: each step reads the weights
of the active ones only. All ranks know how many tokens each expert has in the step, and compute the same choice:

    `choose_copies`    how many tokens each slot serves, so that the busiest GPU has as few as possible
    `assign_copies`    the slot of each token

Active copies are chosen greedily: each expert with tokens gets one, by paths that move others if a GPU is full, and
then the expert with the most tokens per active copy gets another one, until no slot is left. For the active copies the
division of the tokens is optimal. A token is moved along a path of GPUs, each of which passes on a token of another
expert, as long as the busiest GPU has at least two tokens more than the last one of the path. Where no such path is
left, no division has a smaller maximum (Harvey et al.). If all hosted copies may be active, this is the least load that
the placement allows.

The host computes it, with Python's lists: an expert has so few copies that arrays would be small.

Sources: DeepSeek-V3 (arXiv 2412.19437) §3.4.1, "dynamic redundancy strategy"; Harvey, Ladner, Lovász, Tamir,
"Semi-matchings for bipartite graphs and load balancing", Journal of Algorithms 59 (2006).
Shapes: E experts, P slots, G GPUs of S slots each; T tokens of this rank, K chosen experts.
"""

from __future__ import annotations

import heapq
from typing import Annotated

import torch
from torch import Tensor

from octile.validation import Range, check


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
    tokens_E, physical_P = tokens.tolist(), physical_to_logical.tolist()
    slot_of_EG = [dict[int, int]() for _ in tokens_E]  # the first slot of an expert on a GPU, by the GPU
    for slot, expert in enumerate(physical_P):
        slot_of_EG[expert].setdefault(slot // size, slot)
    active = [list(slots) for slots in slot_of_EG]
    if num_active < size:
        active = _choose_active(tokens_E, active, num_gpus, num_active)
    served_P = [0] * len(physical_P)
    for slots, served in zip(slot_of_EG, _divide(tokens_E, active, num_gpus), strict=True):
        for gpu, count in served.items():
            served_P[slots[gpu]] = count
    return torch.tensor(served_P)


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
    position = torch.empty_like(flat)
    position[order] = torch.arange(len(flat), device=flat.device) - begin_E[flat[order]]
    position += first[flat]  # of each entry among those of its expert

    slots = physical_to_logical.argsort(stable=True)  # of the experts, one after the other
    end = served[slots].cumsum(0)  # of the tokens of all experts, in this order
    begin = torch.searchsorted(physical_to_logical[slots], torch.arange(len(first), device=flat.device))
    before_E = torch.cat((end.new_zeros(1), end))[begin]
    return slots[torch.searchsorted(end, before_E[flat] + position, right=True)].view(experts.shape)


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


def _choose_active(tokens: list[int], hosted: list[list[int]], num_gpus: int, num_active: int) -> list[list[int]]:
    """Choose the GPUs with active copies of each expert, in their order, at most num_active copies of a GPU.

    Args:
        tokens: tokens of each expert.
        hosted: the GPUs that have each expert, in their order.
        num_gpus, num_active: arguments of `choose_copies`.
    """
    copies = [int(n > 0) for n in tokens]
    most = [(-float(n), expert) for expert, n in enumerate(tokens) if n and len(hosted[expert]) > 1]  # per copy
    heapq.heapify(most)
    for _ in range(num_gpus * num_active - sum(copies)):
        if not most:
            break
        expert = most[0][1]
        copies[expert] += 1
        if copies[expert] < len(hosted[expert]):
            heapq.heapreplace(most, (-tokens[expert] / copies[expert], expert))
        else:
            heapq.heappop(most)
    load = [n / max(number, 1) for n, number in zip(tokens, copies, strict=True)]
    copies_of_gpus = _ActiveCopies(load, hosted, num_gpus, num_active)
    order = sorted((expert for expert, n in enumerate(tokens) if n), key=lambda expert: -load[expert])
    for i, expert in enumerate(order):
        if not copies_of_gpus.add(expert):
            raise TooFewActiveError(
                f"num_active must be larger than {num_active}: with so few active slots of a GPU, {i + 1} experts that "
                "have tokens cannot be active together"
            )
    for expert in order:
        for _ in range(copies[expert] - 1):
            copies_of_gpus.add(expert)
    return [sorted(gpus) for gpus in copies_of_gpus.gpus]


class _ActiveCopies:
    """The active copies so far.

    Args:
        load: tokens of a copy of each expert.
        hosted, num_gpus, num_active: arguments of `_choose_active`.

    Attributes:
        gpus: with an active copy of each expert.
    """

    def __init__(self, load: list[float], hosted: list[list[int]], num_gpus: int, num_active: int):
        self.gpus = [set[int]() for _ in load]
        self._load, self._hosted, self._num_active = load, hosted, num_active
        self._experts = [set[int]() for _ in range(num_gpus)]  # that are active on each GPU
        self._load_of_gpu = [0.0] * num_gpus

    def add(self, expert: int) -> bool:
        """Activate a further copy of an expert, on the GPU with the least load that has a free slot or can get one.

        A full GPU gets one if one of its active experts can be active elsewhere instead: a path in breadth-first order.

        Returns:
            whether there is such a path.
        """
        free = [gpu for gpu in self._others(expert) if self._is_free(gpu)]
        if free:
            self._activate(expert, min(free, key=self._load_of_gpu.__getitem__))
            return True
        came_from = dict[int, tuple[int, int]]()  # GPU → the expert that would be activated there, and its GPU before
        reached = [(gpu, expert, -1) for gpu in self._by_load(expert)]
        for gpu, moved, before in reached:  # grows
            if gpu in came_from:
                continue
            came_from[gpu] = moved, before
            if self._is_free(gpu):
                self._move(gpu, came_from)
                return True
            for other in sorted(self._experts[gpu]):
                reached += [(to, other, gpu) for to in self._by_load(other)]
        return False

    def _is_free(self, gpu: int) -> bool:
        return len(self._experts[gpu]) < self._num_active

    def _others(self, expert: int) -> list[int]:
        """The GPUs that have an expert which is not active there."""
        return [gpu for gpu in self._hosted[expert] if gpu not in self.gpus[expert]]

    def _by_load(self, expert: int) -> list[int]:
        """The same, those with the least load first."""
        return sorted(self._others(expert), key=self._load_of_gpu.__getitem__)

    def _move(self, gpu: int, came_from: dict[int, tuple[int, int]]) -> None:
        """Activate the experts along a path that ends at a GPU with a free slot."""
        while gpu != -1:
            moved, before = came_from[gpu]
            self._activate(moved, gpu)
            if before != -1:
                self._deactivate(moved, before)
            gpu = before

    def _activate(self, expert: int, gpu: int) -> None:
        self.gpus[expert].add(gpu)
        self._experts[gpu].add(expert)
        self._load_of_gpu[gpu] += self._load[expert]

    def _deactivate(self, expert: int, gpu: int) -> None:
        self.gpus[expert].remove(gpu)
        self._experts[gpu].remove(expert)
        self._load_of_gpu[gpu] -= self._load[expert]


def _divide(tokens: list[int], active: list[list[int]], num_gpus: int) -> list[dict[int, int]]:
    """Divide the tokens of each expert among its active copies, so that the busiest GPU has as few as possible.

    Args:
        tokens, num_gpus: arguments of `_choose_active`.
        active: what it has chosen.

    Returns:
        the tokens of each expert by the GPU that serves them.
    """
    served = list[dict[int, int]]()
    load = [0] * num_gpus
    shared = [list[int]() for _ in range(num_gpus)]  # the experts of a GPU that have other copies, too
    for expert, (n, gpus) in enumerate(zip(tokens, active, strict=True)):
        least, rest = divmod(n, max(len(gpus), 1))
        served.append({gpu: least + (i < rest) for i, gpu in enumerate(gpus)})
        for gpu, count in served[expert].items():
            load[gpu] += count
            if len(gpus) > 1:
                shared[gpu].append(expert)
    while True:
        busiest = load.index(max(load))
        came_from = {busiest: (-1, -1)}  # GPU → the GPU before it in a path, and the expert whose tokens would move
        queue = [busiest]
        for gpu in queue:  # grows
            movable = dict[int, int]()  # GPU → the expert of which most tokens can move there
            for expert in shared[gpu]:
                count = served[expert][gpu]
                for to in active[expert] if count else ():
                    if to not in came_from and (to not in movable or count > served[movable[to]][gpu]):
                        movable[to] = expert
            for to in sorted(movable):
                came_from[to] = gpu, movable[to]
                queue.append(to)
        idlest = min(queue, key=lambda gpu: (load[gpu], gpu))
        if load[busiest] - load[idlest] < 2:
            return served
        path, gpu = list[tuple[int, int, int]](), idlest
        while gpu != busiest:
            before, expert = came_from[gpu]
            path.append((expert, before, gpu))
            gpu = before
        moved = min(*(served[expert][before] for expert, before, _ in path), (load[busiest] - load[idlest]) // 2)
        for expert, before, to in path:
            served[expert][before] -= moved
            served[expert][to] += moved
        load[busiest] -= moved
        load[idlest] += moved
