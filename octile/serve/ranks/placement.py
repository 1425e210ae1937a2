"""Expert-parallel load balance: how many copies each expert has, and which GPU holds them.

`rebalance_experts` derives it from the experts' loads, as DeepSeek's EPLB does:

    groups to nodes    groups of experts are packed into nodes, since a token goes to few groups
    copies in a node   the expert with the largest load per copy gets one more, until all slots are taken
    copies to GPUs     the copy with the largest load goes to the GPU with the least load that has a free slot

If the nodes do not divide the groups, the first step is left out and all GPUs count as one node.

EPLB may put two copies of an expert on one GPU, which then has two shares of the expert's load. For a layer in which it
does, a second placement is computed in which no GPU has two if that can be avoided, that is, if a GPU has at most as
many slots as there are experts. In it an expert gets at most as many copies as the node has GPUs, a copy goes to a GPU
without another one of its expert, and copies that still meet are swapped. All GPUs count as one node there if a GPU has
more slots than its node would have experts. With more slots than experts some GPU has two in any case; then a copy goes
to a GPU without one as long as there is one with room.

Of the two placements the one whose busiest GPU has less load is taken, of equal ones the second. Either may be better:
two shares of a large load are much for one GPU, but the second copy of an expert with a small load fills a slot in
which a copy of another expert would be more.

`move_experts` brings the experts to their new slots, which may be on other ranks.

Source: EPLB (https://github.com/deepseek-ai/EPLB), DeepSeek-V3 (arXiv 2412.19437) §3.4.
Shapes: L layers, E experts, P slots, C the most copies of an expert; X = layers × nodes, where a node has N experts, M
slots and G GPUs of S slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from octile.scaled import ScaledTensor
from octile.serve.weights.block_weights import Weight
from octile.validation import Range, check

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

INTEGERS = (torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64)
FORMATS = frozenset((*INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64))
MAX_LOAD = torch.finfo(torch.float32).max
ROUNDING = 1e-9  # of a load: the order in which the loads of a GPU are added
HAS_COPY = 1e300  # what a copy of an expert adds to the load of a GPU for the next one; above all sums of loads


def rebalance_experts(
    load: Tensor,
    num_replicas: int,
    num_groups: int,
    num_nodes: int,
    num_gpus: int,
    *,
    distinct_copies: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose copies of experts, and place them on GPUs so that these have about equal loads.

    Of equal loads the lower number of the expert, copy or GPU comes first, so the result is the same everywhere. A node
    whose experts have no load is treated as if their loads were equal. Otherwise the result is that of EPLB's algorithm
    in float64 wherever that puts no two copies of an expert on one GPU. The busiest GPU never has more load than in
    EPLB's placement.

    Args:
        load: [L, E], integers, or floating-point numbers of 16, 32 or 64 bits: what each expert has to do, such as its
            number of tokens.
        num_replicas: P, the slots of all GPUs together, a multiple of num_gpus.
        num_groups: the groups that the experts are divided into, of one size (`n_group`).
        num_nodes: the nodes, inside of which GPUs have fast links.
        num_gpus: the GPUs of all nodes together, a multiple of num_nodes.
        distinct_copies: whether no GPU gets two copies of an expert, if that can be avoided, even where EPLB's loads
            are better balanced. Dynamic redundancy needs it: it divides tokens among GPUs, not copies.

    Returns:
        physical_to_logical, [L, P]: the expert in each slot. GPU g has the slots from g · P/num_gpus on, and nodes have
        consecutive GPUs. logical_to_physical, [L, E, C]: the slots of each expert in the order in which it got its
        copies, then −1. count, [L, E]: how many copies each expert has, at least 1. All are int64, on the CPU.

    Raises:
        TypeError: load is not a tensor of such numbers, a size is not an int, or distinct_copies no bool.
        ValueError: load has another shape, is sparse or without values, or has one that is negative, NaN or above the
            largest float32. Or a size is not positive, there are fewer slots than experts, or a number does not divide
            another one as said above.
    """
    _check(load, num_replicas, num_groups, num_nodes, num_gpus)
    check("distinct_copies", distinct_copies, bool)
    load_LE = load.detach().to("cpu", torch.float64).numpy()
    sizes = num_replicas, num_groups, num_nodes, num_gpus
    placed = _place(load_LE, *sizes, is_distinct=False)
    meeting = np.flatnonzero(_second_copies(placed, num_gpus))
    if len(meeting):
        distinct = _place(load_LE[meeting], *sizes, is_distinct=True)
        if not distinct_copies:
            most, other = (_max_load(load_LE[meeting], p, num_gpus) for p in (_rows(placed, meeting), distinct))
            is_better = most >= other * (1 - ROUNDING)
            meeting, distinct = meeting[is_better], _rows(distinct, is_better)
        for part, new in zip(placed, distinct, strict=True):
            part[meeting] = new
    physical_LP, copy_LP, count_LE = placed
    n_layers, n_experts = load_LE.shape
    logical_LEC = np.full((n_layers, n_experts, count_LE.max()), -1)
    logical_LEC[np.arange(n_layers)[:, None], physical_LP, copy_LP] = np.arange(num_replicas)
    return torch.from_numpy(physical_LP), torch.from_numpy(logical_LEC), torch.from_numpy(count_LE)


class _Placement(NamedTuple):
    """The expert in each slot [L, P], the number of the copy there among those of its expert [L, P], and the copies of
    each expert [L, E]."""

    physical_LP: Ints
    copy_LP: Ints
    count_LE: Ints


def _rows(placed: _Placement, layers: NDArray[Any]) -> _Placement:
    return _Placement(*(part[layers] for part in placed))


def _second_copies(placed: _Placement, num_gpus: int) -> Ints:
    """How many slots of each layer have an expert that another slot of the same GPU has, too: [L]."""
    sorted_LGS = np.sort(placed.physical_LP.reshape(len(placed.physical_LP), num_gpus, -1))
    return (sorted_LGS[..., 1:] == sorted_LGS[..., :-1]).sum((1, 2))


def _max_load(load_LE: Floats, placed: _Placement, num_gpus: int) -> Floats:
    """The load of the busiest GPU of each layer, if the copies of an expert have as much each: [L]."""
    load_LP = np.take_along_axis(load_LE / placed.count_LE, placed.physical_LP, 1)
    return load_LP.reshape(len(load_LE), num_gpus, -1).sum(2).max(1)


def _place(
    load_LE: Floats, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int, is_distinct: bool
) -> _Placement:
    """Place the experts as EPLB does, or without two copies of one on a GPU."""
    n_layers, n_experts = load_LE.shape
    gpu_size = num_replicas // num_gpus
    if num_groups % num_nodes or (is_distinct and n_experts // num_nodes < gpu_size <= n_experts):
        num_groups = num_nodes = 1
    group_size, node_size, n_gpus = n_experts // num_groups, n_experts // num_nodes, num_gpus // num_nodes

    groups = _pack(load_LE.reshape(n_layers, num_groups, group_size).sum(2), num_nodes)
    logical_LE = (groups[:, :, None] * group_size + np.arange(group_size)).reshape(n_layers, n_experts)  # node by node
    load_XN = np.take_along_axis(load_LE, logical_LE, 1).reshape(-1, node_size)
    load_XN = np.where(load_XN.any(1, keepdims=True), load_XN, 1)

    n_slots = n_gpus * gpu_size
    most = n_gpus * -(-gpu_size // node_size) if is_distinct else n_slots
    expert_XM, copy_XM, count_XN = _replicate(load_XN, n_slots, most)
    load_XM = np.take_along_axis(load_XN / count_XN, expert_XM, 1)
    order_XM = _pack(load_XM, n_gpus, expert_XM if is_distinct else None)
    if is_distinct and gpu_size <= node_size:
        _separate(order_XM.reshape(-1, n_gpus, gpu_size), expert_XM, load_XM)

    expert_LP, copy_LP = (np.take_along_axis(t, order_XM, 1).reshape(n_layers, -1) for t in (expert_XM, copy_XM))
    node_P = np.arange(num_replicas) // n_slots
    physical_LP = np.take_along_axis(logical_LE, node_P * node_size + expert_LP, 1)
    count_LE = np.empty_like(logical_LE)
    np.put_along_axis(count_LE, logical_LE, count_XN.reshape(n_layers, -1), 1)
    return _Placement(physical_LP, copy_LP, count_LE)


def _check(load: Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int) -> None:
    if not isinstance(load, Tensor) or load.dtype not in FORMATS:
        found = load.dtype if isinstance(load, Tensor) else type(load).__name__
        needed = "a tensor of integers, or of floating-point numbers of 16, 32 or 64 bits"
        raise TypeError(f"load must be {needed}, not {found}")
    if load.layout != torch.strided or load.is_nested or load.is_meta:
        kind = "one on meta" if load.is_meta else "a nested one" if load.is_nested else load.layout
        raise ValueError(f"load must be a dense tensor with values, not {kind}")
    sizes = {"num_replicas": num_replicas, "num_groups": num_groups, "num_nodes": num_nodes, "num_gpus": num_gpus}
    for name, size in sizes.items():
        check(name, size, Annotated[int, Range(at_least=1)])
    if load.dim() != 2 or not load.numel():
        raise ValueError(f"load must be [layers, experts], at least one of each, not {list(load.shape)}")
    values = load.detach().to("cpu", torch.float64)  # that of a 16-bit load rounds the largest float32 to infinity
    is_bad = ~((values >= 0) & (values <= MAX_LOAD))
    if is_bad.any():
        layer, expert = is_bad.nonzero()[0].tolist()
        value = load[layer, expert].item()
        raise ValueError(f"load must be from 0 to {MAX_LOAD:.3g}, not {value} of expert {expert} in layer {layer}")
    n_experts = load.shape[1]
    if num_replicas < n_experts:
        raise ValueError(f"num_replicas must be at least {n_experts}, the experts of load, not {num_replicas}")
    if n_experts % num_groups:
        raise ValueError(f"num_groups must divide the experts of load, {n_experts}, but is {num_groups}")
    for whole, part in (("num_gpus", "num_nodes"), ("num_replicas", "num_gpus")):
        if sizes[whole] % sizes[part]:  # either may be the wrong one
            raise ValueError(f"{whole}, {sizes[whole]}, must be a multiple of {part}, {sizes[part]}")


def _replicate(load_XN: Floats, n_slots: int, most: int) -> tuple[Ints, Ints, Ints]:
    """Make one copy of each expert, and then another one of the expert with the largest load per copy, until M.

    Of experts without load the one with the fewest copies comes first.

    Args:
        most: how many copies an expert has at most.

    Returns:
        the expert of each copy [X, M], the copy's number among those of its expert [X, M], the copies of each expert
        [X, N].
    """
    n_rows, n_experts = load_XN.shape
    row = np.arange(n_rows)
    expert_XM = np.tile(np.arange(n_slots), (n_rows, 1))
    copy_XM = np.zeros_like(expert_XM)
    count_XN = np.ones((n_rows, n_experts), dtype=np.int64)
    per_copy_XN = np.where(load_XN > 0, load_XN, -1)
    for i in range(n_experts, n_slots):
        expert = per_copy_XN.argmax(1)
        copy = count_XN[row, expert]
        expert_XM[:, i], copy_XM[:, i] = expert, copy
        copies, load = copy + 1, load_XN[row, expert]
        count_XN[row, expert] = copies
        per_copy_XN[row, expert] = np.where(copies < most, np.where(load > 0, load / copies, -copies), -np.inf)
    return expert_XM, copy_XM, count_XN


def _pack(load_XM: Floats, n_packs: int, expert_XM: Ints | None = None) -> Ints:
    """Pack items into packs of one size: the one with the largest load into the pack with the least that has room.

    Args:
        expert_XM: expert of each item; the packs with room and the fewest items of the same expert come first.

    Returns:
        the items, pack after pack, and in each in the order in which they came: [X, M].
    """
    n_rows, n_items = load_XM.shape
    size = n_items // n_packs
    if size == 1:
        return np.tile(np.arange(n_items), (n_rows, 1))
    row = np.arange(n_rows)
    items_MX = np.ascontiguousarray(np.argsort(-load_XM, axis=1, kind="stable").T)
    load_XG = np.zeros((n_rows, n_packs))  # infinite where a pack is full
    filled_XG = np.zeros((n_rows, n_packs), dtype=np.int64)
    packed = np.empty((n_rows, n_packs, size), dtype=np.int64)
    n_experts = 0 if expert_XM is None else expert_XM.max() + 1
    copies_XNG = np.zeros((n_rows, n_experts, n_packs), dtype=np.int32)
    for item in items_MX:
        if expert_XM is None:
            pack = load_XG.argmin(1)
        else:
            expert = expert_XM[row, item]
            copies = copies_XNG[row, expert]
            pack = (load_XG + HAS_COPY * copies).argmin(1)
            copies_XNG[row, expert, pack] += 1
        slot = filled_XG[row, pack]
        packed[row, pack, slot] = item
        filled_XG[row, pack] = slot + 1
        load_XG[row, pack] += np.where(slot < size - 1, load_XM[row, item], np.inf)
    return packed.reshape(n_rows, n_items)


def _separate(order_XGS: Ints, expert_XM: Ints, load_XM: Floats) -> None:
    """Swap items of GPUs, in place, until no GPU has two copies of an expert.

    Of the GPUs with the fewest different experts the first gives a second copy to one without that expert. There is
    such a GPU, since an expert has at most G copies. It has at least as many different experts as the first, and lacks
    one that the first has, so it has one that the first lacks, and gives that. Each swap leaves fewer second copies.
    Of all swaps of that copy the one after which the larger load of the two GPUs is least is taken.
    """
    experts = np.sort(np.take_along_axis(expert_XM, order_XGS.reshape(expert_XM.shape), 1).reshape(order_XGS.shape))
    for x in np.flatnonzero((experts[..., 1:] == experts[..., :-1]).any((1, 2))):
        _separate_row(order_XGS[x], expert_XM[x].tolist(), load_XM[x].tolist())


def _separate_row(order_GS: Ints, expert: list[int], load: list[float]) -> None:
    gpus = order_GS.tolist()
    different = [{expert[item] for item in gpu} for gpu in gpus]
    total = [sum(load[item] for item in gpu) for gpu in gpus]
    while True:
        giver = min(range(len(gpus)), key=lambda gpu: len(different[gpu]))
        given = next((s for s, i in enumerate(gpus[giver]) if expert[i] in (expert[j] for j in gpus[giver][:s])), None)
        if given is None:
            order_GS[:] = gpus
            return
        item = gpus[giver][given]
        swaps = [
            (max(total[giver] + load[other] - load[item], total[taker] + load[item] - load[other]), taker, taken)
            for taker in range(len(gpus))
            if expert[item] not in different[taker]
            for taken, other in enumerate(gpus[taker])
            if expert[other] not in different[giver]
        ]
        _, taker, taken = min(swaps)
        gpus[giver][given], gpus[taker][taken] = gpus[taker][taken], item
        for gpu in (giver, taker):
            different[gpu] = {expert[item] for item in gpus[gpu]}
            total[gpu] = sum(load[item] for item in gpus[gpu])


def move_experts(
    weights: Sequence[Weight], now: Sequence[int], wanted: Sequence[int], ranks: dist.ProcessGroup, n_nodes: int
) -> None:
    """Bring the wanted experts into this rank's slots, from its own ones or from the nearest rank's; all ranks call it.

    Args:
        weights: weights of the experts in this rank's slots, each stacked [slots of a rank, N, K]; overwritten.
        now, wanted: the experts in the slots of all ranks, which have as many each.
        ranks: those that share the experts.
        n_nodes: nodes of the ranks, which have consecutive numbers in a node.
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
