"""Expert-parallel load balance: how many copies each expert has, and which GPU holds them.

`rebalance_experts` derives it from the experts' loads, as DeepSeek's EPLB does:

    groups to nodes    groups of experts are packed into nodes, since a token goes to few groups
    copies in a node   the expert with the largest load per copy gets one more, until all slots are taken
    copies to GPUs     the copy with the largest load goes to the GPU with the least load that has a free slot

If the nodes do not divide the groups, the first step is left out and all GPUs count as one node.

EPLB may put two copies of an expert on one GPU, where the second is of no use. Here no GPU has two if that can be
avoided, that is, if a GPU has at most as many slots as its node has experts: an expert gets at most as many copies as
the node has GPUs, a copy goes to a GPU without another one of its expert, and copies that still meet are swapped.
With more slots some GPU has two in any case; then a copy goes to a GPU without one as long as there is one with room.

Source: EPLB (https://github.com/deepseek-ai/EPLB), DeepSeek-V3 (arXiv 2412.19437) §3.4.
Shapes: L layers, E experts, P slots, C the most copies of an expert; X = layers × nodes, where a node has N experts, M
slots and G GPUs of S slots.
"""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from octile.validation import Range, check

MAX_LOAD = torch.finfo(torch.float32).max
HAS_COPY = 1e300  # what a copy of an expert adds to the load of a GPU for the next one; above all sums of loads


def rebalance_experts(
    load: Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose copies of experts, and place them on GPUs so that these have about equal loads.

    Of equal loads the lower number of the expert, copy or GPU comes first, so the result is the same everywhere. A node
    whose experts have no load is treated as if their loads were equal. Otherwise the result is that of EPLB's algorithm
    in float64 wherever that puts no two copies of an expert on one GPU.

    Args:
        load: [L, E], integers or floating-point numbers: what each expert has to do, such as its number of tokens.
        num_replicas: P, the slots of all GPUs together, a multiple of num_gpus.
        num_groups: the groups that the experts are divided into, of one size (`n_group`).
        num_nodes: the nodes, inside of which GPUs have fast links.
        num_gpus: the GPUs of all nodes together, a multiple of num_nodes.

    Returns:
        physical_to_logical, [L, P]: the expert in each slot. GPU g has the slots from g · P/num_gpus on, and nodes have
        consecutive GPUs. logical_to_physical, [L, E, C]: the slots of each expert in the order in which it got its
        copies, then −1. count, [L, E]: how many copies each expert has, at least 1. All are int64, on the CPU.

    Raises:
        TypeError: load is not a tensor of such numbers, or a size is not an int.
        ValueError: load has another shape, or a value that is negative, NaN or above the largest float32; a size is not
            positive, there are fewer slots than experts, or a number does not divide another one as said above.
    """
    _check(load, num_replicas, num_groups, num_nodes, num_gpus)
    load_LE = load.detach().to("cpu", torch.float64)
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    n_layers, n_experts = load_LE.shape
    group_size, node_size, n_gpus = n_experts // num_groups, n_experts // num_nodes, num_gpus // num_nodes
    gpu_size = num_replicas // num_gpus

    groups = _pack(load_LE.unflatten(1, (num_groups, group_size)).sum(2), num_nodes)
    logical_LE = (groups[:, :, None] * group_size + torch.arange(group_size)).flatten(1)  # node after node
    load_XN = load_LE.gather(1, logical_LE).view(-1, node_size)
    load_XN = load_XN.where(load_XN.any(1, keepdim=True), 1)

    most = n_gpus * -(-gpu_size // node_size)
    expert_XM, copy_XM, count_XN = _replicate(load_XN, n_gpus * gpu_size, most)
    load_XM = (load_XN / count_XN).gather(1, expert_XM)
    order_XM = _pack(load_XM, n_gpus, expert_XM)
    if gpu_size <= node_size:
        _separate(order_XM.unflatten(1, (n_gpus, gpu_size)), expert_XM, load_XM)

    node_P = torch.arange(num_nodes).repeat_interleave(n_gpus * gpu_size)
    in_order_LP, copy_LP = (t.gather(1, order_XM).view(n_layers, -1) for t in (expert_XM, copy_XM))
    physical_LP = logical_LE.gather(1, node_P * node_size + in_order_LP)
    count_LE = torch.empty_like(logical_LE).scatter_(1, logical_LE, count_XN.view(n_layers, -1))
    most = int(count_LE.max())
    slots_LP = torch.arange(num_replicas).expand(n_layers, -1)
    logical_LEC = torch.full((n_layers, n_experts * most), -1).scatter_(1, physical_LP * most + copy_LP, slots_LP)
    return physical_LP, logical_LEC.unflatten(1, (n_experts, most)), count_LE


def _check(load: Tensor, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int) -> None:
    if not isinstance(load, Tensor) or load.is_complex() or load.dtype == torch.bool:
        found = load.dtype if isinstance(load, Tensor) else type(load).__name__
        raise TypeError(f"load must be a tensor of integers or floating-point numbers, not {found}")
    sizes = {"num_replicas": num_replicas, "num_groups": num_groups, "num_nodes": num_nodes, "num_gpus": num_gpus}
    for name, size in sizes.items():
        check(name, size, Annotated[int, Range(at_least=1)])
    if load.dim() != 2 or not load.numel():
        raise ValueError(f"load must be [layers, experts], at least one of each, not {list(load.shape)}")
    is_bad = ~((load >= 0) & (load <= MAX_LOAD))
    if is_bad.any():
        layer, expert = is_bad.nonzero()[0].tolist()
        value = load[layer, expert].item()
        raise ValueError(f"load must be from 0 to {MAX_LOAD:.3g}, not {value} of expert {expert} in layer {layer}")
    n_experts = load.shape[1]
    if num_replicas < n_experts:
        raise ValueError(f"num_replicas must be at least {n_experts}, the experts of load, not {num_replicas}")
    for name, number, of, whole in (
        ("num_groups", num_groups, "the experts of load", n_experts),
        ("num_nodes", num_nodes, "num_gpus", num_gpus),
        ("num_gpus", num_gpus, "num_replicas", num_replicas),
    ):
        if whole % number:
            raise ValueError(f"{name} must divide {of}, {whole}, but is {number}")


def _replicate(load_XN: Tensor, n_slots: int, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Make one copy of each expert, and then another one of the expert with the largest load per copy, until M.

    Args:
        most: how many copies an expert has at most.

    Returns:
        the expert of each copy [X, M], the copy's number among those of its expert [X, M], the copies of each expert
        [X, N].
    """
    n_rows, n_experts = load_XN.shape
    row = torch.arange(n_rows)
    expert_XM = torch.arange(n_slots).repeat(n_rows, 1)
    copy_XM = torch.zeros_like(expert_XM)
    count_XN = torch.ones_like(load_XN, dtype=torch.int64)
    per_copy_XN = load_XN.clone()
    for i in range(n_experts, n_slots):
        expert = per_copy_XN.argmax(1)
        copy = count_XN[row, expert]
        expert_XM[:, i], copy_XM[:, i] = expert, copy
        count_XN[row, expert] = copy + 1
        per_copy_XN[row, expert] = torch.where(copy + 1 < most, load_XN[row, expert] / (copy + 1), -1.0)
    return expert_XM, copy_XM, count_XN


def _pack(load_XM: Tensor, n_packs: int, expert_XM: Tensor | None = None) -> Tensor:
    """Pack items into packs of one size: the one with the largest load into the pack with the least that has room.

    Args:
        expert_XM: of each item; of the packs with room those with the fewest items of the same expert come first.

    Returns:
        the items, pack after pack, and in each in the order in which they came: [X, M].
    """
    n_rows, n_items = load_XM.shape
    size = n_items // n_packs
    if size == 1:
        return torch.arange(n_items).repeat(n_rows, 1)
    row = torch.arange(n_rows)
    sorted_load, items = load_XM.sort(stable=True, dim=1, descending=True)
    load_XG = load_XM.new_zeros(n_rows, n_packs)  # infinite where a pack is full
    filled_XG = torch.zeros(n_rows, n_packs, dtype=torch.int64)
    packed = torch.empty(n_rows, n_packs, size, dtype=torch.int64)
    experts = has_XNG = None
    if expert_XM is not None:
        experts = expert_XM.gather(1, items)
        has_XNG = load_XM.new_zeros(n_rows, int(expert_XM.max()) + 1, n_packs)
    for i in range(n_items):
        if experts is None or has_XNG is None:
            pack = load_XG.argmin(1)
        else:
            pack = (load_XG + has_XNG[row, experts[:, i]]).argmin(1)
            has_XNG[row, experts[:, i], pack] += HAS_COPY
        place = filled_XG[row, pack]
        packed[row, pack, place] = items[:, i]
        filled_XG[row, pack] = place + 1
        load_XG[row, pack] += torch.where(place < size - 1, sorted_load[:, i], torch.inf)
    return packed.flatten(1)


def _separate(order_XGS: Tensor, expert_XM: Tensor, load_XM: Tensor) -> None:
    """Swap items of GPUs, in place, until no GPU has two copies of an expert.

    Of the GPUs with the fewest different experts the first gives a second copy to one without that expert. There is
    such a GPU, since an expert has at most G copies. It has at least as many different experts as the first, and lacks
    one that the first has, so it has one that the first lacks, and gives that. Each swap leaves fewer second copies.
    Of all such swaps the one after which the larger load of the two GPUs is least is taken.
    """
    experts = expert_XM.gather(1, order_XGS.flatten(1)).view(order_XGS.shape)
    ordered = experts.sort(2).values
    for x in (ordered[..., 1:] == ordered[..., :-1]).flatten(1).any(1).nonzero().flatten().tolist():
        _separate_row(order_XGS[x], expert_XM[x], load_XM[x])


def _separate_row(order_GS: Tensor, expert_M: Tensor, load_M: Tensor) -> None:
    gpus, expert, load = order_GS.tolist(), expert_M.tolist(), load_M.tolist()
    while True:
        different = [{expert[item] for item in gpu} for gpu in gpus]
        giver = min(range(len(gpus)), key=lambda gpu: len(different[gpu]))
        given = [s for s, item in enumerate(gpus[giver]) if expert[item] in {expert[i] for i in gpus[giver][:s]}]
        if not given:
            order_GS.copy_(torch.tensor(gpus))
            return
        total = [sum(load[item] for item in gpu) for gpu in gpus]
        swaps = [
            (max(total[giver] - by, total[taker] + by), taker, s, t)
            for s in given
            for taker in range(len(gpus))
            if expert[gpus[giver][s]] not in different[taker]
            for t, item in enumerate(gpus[taker])
            if expert[item] not in different[giver]
            for by in [load[gpus[giver][s]] - load[item]]
        ]
        _, taker, s, t = min(swaps)
        gpus[giver][s], gpus[taker][t] = gpus[taker][t], gpus[giver][s]
