"""The placement of experts: EPLB's, or one without two copies of an expert on a GPU, whichever has less load."""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import octile.serve
from octile.serve.ranks.placement import find_copy, rebalance_experts

PUBLISHED_LOAD = [  # of the README of https://github.com/deepseek-ai/EPLB
    [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
    [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
]
PUBLISHED_PLACEMENT = [
    [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
    [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
]


class Case(NamedTuple):
    """Arguments of `rebalance_experts`."""

    load: Tensor
    num_replicas: int
    num_groups: int
    num_nodes: int
    num_gpus: int

    @property
    def nodes(self) -> int:
        """The nodes among which groups are divided if no GPU has two copies of an expert."""
        experts, slots = self.load.shape[1], self.num_replicas // self.num_gpus
        is_one = self.num_groups % self.num_nodes or experts // self.num_nodes < slots <= experts
        return 1 if is_one else self.num_nodes

    @property
    def is_separable(self) -> bool:
        """Whether no GPU needs two copies of an expert: it has at most as many slots as there are experts."""
        return self.num_replicas // self.num_gpus <= self.load.shape[1]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    nodes, groups, size = (draw(st.integers(1, most)) for most in (3, 4, 3))
    layers, gpus = draw(st.integers(1, 3)), nodes * draw(st.integers(1, 4))
    experts = groups * size
    least = -(-experts // gpus)
    slots = gpus * draw(st.integers(least, least + 3))
    loads = st.integers(0, 2) | st.integers(0, 1000) | st.floats(0, 1e3, allow_subnormal=False)
    load = draw(st.lists(loads, min_size=layers * experts, max_size=layers * experts))
    return Case(torch.tensor(load, dtype=torch.float64).view(layers, experts), slots, groups, nodes, gpus)


def second_copies(placed: list[int], n_gpus: int) -> int:
    """How many copies in the slots of a layer share a GPU with an earlier one of their expert."""
    size = len(placed) // n_gpus
    return sum(size - len(set(placed[i : i + size])) for i in range(0, len(placed), size))


def max_load(case: Case, layer: int, placed: list[int]) -> float:
    """The load of the busiest GPU of a layer, if the copies of an expert have as much each."""
    load, size = case.load[layer].tolist(), case.num_replicas // case.num_gpus
    loads = [load[expert] / placed.count(expert) for expert in placed]
    return max(math.fsum(loads[i : i + size]) for i in range(0, len(loads), size))


def eplb_packs(load: list[float], n_packs: int) -> list[list[int]]:
    """EPLB's packs, as its README describes them, of one layer."""
    size = len(load) // n_packs
    if size == 1:
        return [[item] for item in range(len(load))]
    packs: list[list[int]] = [[] for _ in range(n_packs)]
    total = [0.0] * n_packs
    for item in sorted(range(len(load)), key=lambda i: -load[i]):
        pack = min((p for p in range(n_packs) if len(packs[p]) < size), key=lambda p: total[p])
        packs[pack].append(item)
        total[pack] += load[item]
    return packs


def eplb_layer(case: Case, layer: int) -> list[int]:
    """EPLB's placement of one layer, by loops over numbers."""
    load, nodes = case.load[layer].tolist(), case.num_nodes
    groups = case.num_groups
    if groups % nodes:
        groups = nodes = 1
    size, placed = len(load) // groups, []
    in_groups = [list(range(g * size, (g + 1) * size)) for g in range(groups)]
    for pack in eplb_packs([sum(load[e] for e in group) for group in in_groups], nodes):
        experts = [e for g in pack for e in in_groups[g]]
        copies, count = list(experts), dict.fromkeys(experts, 1)
        while len(copies) < case.num_replicas // nodes:
            busiest = max(experts, key=lambda e: load[e] / count[e])
            copies.append(busiest)
            count[busiest] += 1
        gpus = eplb_packs([load[e] / count[e] for e in copies], case.num_gpus // nodes)
        placed += [copies[item] for gpu in gpus for item in gpu]
    return placed


def test_the_published_example_is_reproduced():
    physical, logical, count = octile.serve.rebalance_experts(torch.tensor(PUBLISHED_LOAD), 16, 4, 2, 8)
    assert physical.tolist() == PUBLISHED_PLACEMENT
    assert count.tolist() == [[1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1], [1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1]]
    assert logical[0, :6].tolist() == [[12, -1], [15, 13], [11, -1], [6, -1], [7, 5], [0, 2]]


@given(cases())
def test_the_counts_are_those_of_the_slots(case):
    physical, _, count = rebalance_experts(*case)
    assert torch.equal(count, (physical[:, :, None] == torch.arange(case.load.shape[1])).sum(1))


@given(cases())
def test_every_expert_has_a_copy(case):
    assert (rebalance_experts(*case)[2] >= 1).all()


@given(cases())
def test_the_maps_are_inverse(case):
    physical, logical, count = rebalance_experts(*case)
    for layer in range(len(case.load)):
        for expert in range(case.load.shape[1]):
            slots = logical[layer, expert].tolist()
            n = int(count[layer, expert])
            assert slots[n:] == [-1] * (len(slots) - n)
            assert sorted(slots[:n]) == (physical[layer] == expert).nonzero().flatten().tolist()


@pytest.mark.slow
@given(cases())
def test_no_gpu_has_two_distinct_copies_of_an_expert_where_that_can_be_avoided(case):
    placed = rebalance_experts(*case, distinct_copies=True)[0].tolist()
    if case.is_separable:
        assert [second_copies(layer, case.num_gpus) for layer in placed] == [0] * len(placed)


@given(cases())
def test_the_placement_is_that_of_eplb_where_that_has_no_two_copies_on_a_gpu(case):
    placed = rebalance_experts(*case)[0].tolist()
    for layer, ours in enumerate(placed):
        per_node = case.load[layer][ours].view(case.nodes, -1)
        expected = eplb_layer(case, layer)
        if per_node.any(1).all() and not second_copies(expected, case.num_gpus):
            assert ours == expected


@given(cases())
def test_the_busiest_gpu_never_has_more_load_than_in_eplbs_placement(case):
    for layer, ours in enumerate(rebalance_experts(*case)[0].tolist()):
        assert max_load(case, layer, ours) <= max_load(case, layer, eplb_layer(case, layer)) * (1 + 1e-8)


@pytest.mark.slow
@given(cases())
def test_the_busiest_gpu_never_has_more_load_than_with_distinct_copies(case):
    distinct = rebalance_experts(*case, distinct_copies=True)[0].tolist()
    for layer, ours in enumerate(rebalance_experts(*case)[0].tolist()):
        assert max_load(case, layer, ours) <= max_load(case, layer, distinct[layer]) * (1 + 1e-8)


@pytest.mark.slow
@given(cases())
def test_a_gpu_has_two_copies_of_an_expert_only_where_that_is_better(case):
    distinct = rebalance_experts(*case, distinct_copies=True)[0].tolist()
    for layer, ours in enumerate(rebalance_experts(*case)[0].tolist()):
        if ours != distinct[layer]:
            assert max_load(case, layer, ours) < max_load(case, layer, distinct[layer])


@given(cases())
def test_the_copies_of_an_expert_and_its_group_stay_in_one_node(case):
    physical = rebalance_experts(*case)[0]
    size = case.load.shape[1] // case.num_groups
    for layer in physical.view(len(case.load), case.nodes, -1).tolist():
        groups = [{expert // size for expert in node} for node in layer]
        assert sum(map(len, groups)) == len(set().union(*groups))


@pytest.mark.slow
@given(cases())
def test_a_layer_does_not_depend_on_the_others(case):
    together = rebalance_experts(*case)[0]
    alone = [rebalance_experts(layer[None], *case[1:])[0] for layer in case.load]
    assert torch.equal(together, torch.cat(alone))


def test_of_equal_loads_the_lower_numbers_come_first():
    physical, _, count = rebalance_experts(torch.full((1, 6), 7), 8, 1, 1, 4)
    assert count.tolist() == [[2, 2, 1, 1, 1, 1]]
    assert physical.tolist() == [[2, 0, 3, 1, 4, 0, 5, 1]]


def test_experts_without_load_are_placed_as_if_their_loads_were_equal():
    sizes = (40, 8, 1, 8)
    idle, equal = (rebalance_experts(load, *sizes) for load in (torch.zeros(2, 32), torch.ones(2, 32)))
    assert all(torch.equal(a, b) for a, b in zip(idle, equal, strict=True))


def test_experts_without_load_get_as_many_copies_as_each_other():
    count = rebalance_experts(torch.tensor([[9, 0, 0, 0, 0]]), 10, 1, 1, 2)[2]
    assert count.tolist() == [[2, 2, 2, 2, 2]]


def test_copies_that_meet_on_the_last_free_gpu_are_swapped_away():
    case = Case(torch.tensor([[1, 2, 1]]), 4, 1, 1, 2)
    assert eplb_layer(case, 0) == [0, 2, 1, 1]
    assert rebalance_experts(*case)[0].tolist() == [[1, 2, 1, 0]]


def test_a_gpu_has_two_copies_of_an_expert_where_that_is_better():
    case = Case(torch.tensor([[10.0, 9.0, 1.0]]), 4, 1, 1, 2)
    assert eplb_layer(case, 0) == [1, 2, 0, 0]
    assert rebalance_experts(*case)[0].tolist() == [[1, 2, 0, 0]]  # 10 and 10
    assert rebalance_experts(*case, distinct_copies=True)[0].tolist() == [[1, 0, 0, 2]]  # 14 and 6


def test_each_layer_has_the_better_of_both_placements():
    case = Case(torch.tensor([[1, 2, 7, 1], [5, 19, 3, 9]]), 6, 1, 1, 2)
    assert [eplb_layer(case, layer) for layer in (0, 1)] == [[2, 2, 3, 2, 1, 0], [3, 1, 2, 1, 1, 0]]
    assert rebalance_experts(*case)[0].tolist() == [[2, 1, 3, 2, 1, 0], [3, 1, 2, 1, 1, 0]]


def test_an_expert_gets_no_more_copies_than_there_are_gpus():
    load = torch.tensor([[1e9, 1, 1, 1, 1, 1, 1, 1]])
    count = rebalance_experts(load, 12, 1, 1, 4, distinct_copies=True)[2]
    assert count.tolist() == [[4, 2, 1, 1, 1, 1, 1, 1]]


def test_if_a_gpu_has_more_slots_than_its_node_experts_all_gpus_are_one_node():
    load = torch.tensor([[8, 7, 6, 5, 4, 3, 2, 1]])
    separate, together = (rebalance_experts(load, 10, *sizes, 2, distinct_copies=True) for sizes in ((2, 2), (1, 1)))
    assert torch.equal(separate[0], together[0])
    assert second_copies(separate[0][0].tolist(), 2) == 0


def test_with_more_slots_than_experts_a_gpu_has_as_few_second_copies_as_it_must():
    physical = rebalance_experts(torch.tensor([[5, 1, 1]]), 8, 1, 1, 2, distinct_copies=True)[0]
    assert second_copies(physical[0].tolist(), 2) == 2


def test_deepseek_v3_at_its_size_has_no_two_distinct_copies_on_a_gpu():
    load = torch.randn(58, 256, generator=torch.Generator().manual_seed(0)).mul(2).exp()
    placed = rebalance_experts(load, 288, 8, 4, 32, distinct_copies=True)[0].tolist()
    assert sum(second_copies(layer, 32) for layer in placed) == 0


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.uint16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float64]
)
def test_loads_may_be_of_any_dtype_of_real_numbers(dtype):
    load = torch.tensor([[1, 9, 4, 2]])
    assert torch.equal(rebalance_experts(load.to(dtype), 6, 1, 1, 2)[0], rebalance_experts(load, 6, 1, 1, 2)[0])


GOOD = {"load": torch.ones(2, 12), "num_replicas": 16, "num_groups": 4, "num_nodes": 2, "num_gpus": 8}


def changed(value: float) -> Tensor:
    load = torch.ones(2, 12)
    load[1, 5] = value
    return load


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("load", torch.ones(12), r"load must be \[layers, experts\], at least one of each, not \[12\]"),
        ("load", torch.ones(0, 12), r"load must be \[layers, experts\], at least one of each, not \[0, 12\]"),
        ("load", torch.ones(2, 0), r"load must be \[layers, experts\], at least one of each, not \[2, 0\]"),
        ("load", changed(-1), r"load must be from 0 to 3.4e\+38, not -1.0 of expert 5 in layer 1"),
        ("load", changed(float("nan")), r"load must be from 0 to 3.4e\+38, not nan of expert 5 in layer 1"),
        ("load", changed(float("inf")).bfloat16(), r"load must be from 0 to 3.4e\+38, not inf of expert 5 in layer 1"),
        ("load", changed(float("inf")), r"load must be from 0 to 3.4e\+38, not inf of expert 5 in layer 1"),
        ("num_replicas", 8, "num_replicas must be at least 12, the experts of load, not 8"),
        ("load", torch.ones(2, 12, device="meta"), "load must be a dense tensor with values, not one on meta"),
        ("load", torch.ones(2, 12).to_sparse(), "load must be a dense tensor with values, not torch.sparse_coo"),
        ("num_replicas", 18, "num_replicas, 18, must be a multiple of num_gpus, 8"),
        ("num_replicas", 0, "num_replicas must be at least 1, not 0"),
        ("num_groups", 5, "num_groups must divide the experts of load, 12, but is 5"),
        ("num_groups", -4, "num_groups must be at least 1, not -4"),
        ("num_nodes", 3, "num_gpus, 8, must be a multiple of num_nodes, 3"),
        ("num_nodes", 0, "num_nodes must be at least 1, not 0"),
        ("num_gpus", 0, "num_gpus must be at least 1, not 0"),
    ],
)
def test_wrong_values_are_refused(name, value, message):
    with pytest.raises(ValueError, match=message):
        rebalance_experts(**{**GOOD, name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "load",
            [[1.0] * 12],
            "load must be a tensor of integers, or of floating-point numbers of 16, 32 or 64 bits, not list",
        ),
        ("load", torch.ones(2, 12, dtype=torch.bool), "load must be a tensor of .* bits, not torch.bool"),
        ("load", torch.ones(2, 12, dtype=torch.complex64), "load must be a tensor of .* bits, not torch.complex64"),
        (
            "load",
            torch.ones(2, 12).to(torch.float8_e4m3fn),
            "load must be a tensor of .* 16, 32 or 64 bits, not .*e4m3fn",
        ),
        ("num_gpus", 8.0, "num_gpus must be a whole number, not 8.0"),
        ("num_nodes", True, "num_nodes must be a whole number, not True"),
        ("distinct_copies", 1, "distinct_copies must be true or false, not 1"),
    ],
)
def test_wrong_types_are_refused(name, value, message):
    with pytest.raises(TypeError, match=message):
        rebalance_experts(**{**GOOD, name: value})


@pytest.mark.parametrize(
    ("n_nodes", "expert", "rank", "slot"),
    [
        (1, 0, 2, 3),  # rank 1 is as near as rank 3, and has the lower number
        (2, 0, 2, 6),  # rank 3 is of the same node
        (2, 1, 3, 7),  # its own
        (2, 2, 3, 2),  # no rank of its node has it
    ],
)
def test_an_expert_comes_from_the_own_rank_or_node_if_it_is_there(n_nodes, expert, rank, slot):
    assert find_copy([3, 1, 2, 0, 3, 4, 0, 1], expert, rank, 4, n_nodes) == slot
