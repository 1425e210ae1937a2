"""Dynamic redundancy: tokens are divided in the best way, and every token gets a copy of its expert."""

from itertools import combinations
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octile.serve import rebalance_experts
from octile.serve.ranks.dynamic_redundancy import assign_copies, choose_copies


class Case(NamedTuple):
    """Tokens of experts, and the experts in the slots of GPUs."""

    tokens: Tensor
    physical: Tensor
    num_gpus: int

    @property
    def size(self) -> int:
        return len(self.physical) // self.num_gpus

    def gpus(self, expert: int) -> set[int]:
        return set((self.physical == expert).nonzero().flatten().div(self.size, rounding_mode="floor").tolist())

    def least(self) -> int:
        """The least load of the busiest GPU: some GPUs must serve all tokens of the experts that no other has."""
        experts = [(self.gpus(e), n) for e, n in enumerate(self.tokens.tolist())]
        some = [set(s) for n in range(1, self.num_gpus + 1) for s in combinations(range(self.num_gpus), n)]
        return max(-(-sum(n for gpus, n in experts if gpus <= subset) // len(subset)) for subset in some)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    experts, gpus = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    slots = gpus * draw(st.integers(-(-experts // gpus), 4 + experts // gpus))
    others = draw(st.lists(st.integers(0, experts - 1), min_size=slots - experts, max_size=slots - experts))
    placed = draw(st.permutations([*range(experts), *others]))
    tokens = draw(st.lists(st.integers(0, 40) | st.just(0), min_size=experts, max_size=experts))
    return Case(torch.tensor(tokens), torch.tensor(placed), gpus)


def per_expert(served: Tensor, case: Case) -> list[int]:
    return torch.zeros_like(case.tokens).index_add_(0, case.physical, served).tolist()


@given(cases())
def test_the_copies_of_an_expert_serve_its_tokens(case):
    assert per_expert(choose_copies(*case), case) == case.tokens.tolist()


@given(cases())
def test_if_all_copies_may_be_active_the_busiest_gpu_has_the_least_that_is_possible(case):
    served = choose_copies(*case)
    assert served.view(case.num_gpus, -1).sum(1).max() == case.least()


@given(cases(), st.integers(1, 4))
def test_a_gpu_has_no_more_active_slots_than_it_may(case, num_active):
    num_active = min(num_active, case.size)
    try:
        served = choose_copies(*case, num_active)
    except ValueError:
        return
    assert (served >= 0).all()
    assert (served.view(case.num_gpus, -1) > 0).sum(1).max() <= num_active
    assert per_expert(served, case) == case.tokens.tolist()


@given(cases(), st.integers(1, 4))
def test_too_few_active_slots_are_refused_exactly_if_experts_with_tokens_do_not_fit(case, num_active):
    num_active = min(num_active, case.size)
    needed = [case.gpus(e) for e, n in enumerate(case.tokens.tolist()) if n]
    some = [set(s) for n in range(1, case.num_gpus + 1) for s in combinations(range(case.num_gpus), n)]
    fits = all(sum(gpus <= subset for gpus in needed) <= num_active * len(subset) for subset in some)
    if num_active == case.size or fits:
        choose_copies(*case, num_active)
    else:
        with pytest.raises(ValueError, match=f"num_active must be larger than {num_active}: with so few"):
            choose_copies(*case, num_active)


@given(cases(), st.integers(1, 3), st.data())
def test_every_token_goes_to_a_copy_of_its_expert_and_each_copy_gets_its_share(case, n_ranks, data):
    entries = torch.arange(len(case.tokens)).repeat_interleave(case.tokens)
    entries = entries[torch.tensor(data.draw(st.permutations(range(len(entries)))), dtype=torch.int64)]
    served = choose_copies(*case)
    first, slots = torch.zeros_like(case.tokens), []
    for of_rank in entries.tensor_split(n_ranks):
        slots.append(assign_copies(of_rank[:, None], first, served, case.physical)[:, 0])
        first = first + of_rank.bincount(minlength=len(case.tokens))
    assert torch.equal(case.physical[torch.cat(slots)], entries)
    assert torch.equal(torch.cat(slots).bincount(minlength=len(case.physical)), served)


def test_tokens_move_along_paths_of_gpus():
    # GPU 0 shares expert 0 with GPU 1, which shares expert 1 with GPU 2
    case = Case(torch.tensor([9, 0, 0]), torch.tensor([0, 2, 0, 1, 1, 2]), 3)
    assert choose_copies(*case).tolist() == [5, 0, 4, 0, 0, 0]
    case = Case(torch.tensor([8, 4, 0]), torch.tensor([0, 2, 0, 1, 1, 2]), 3)
    assert choose_copies(*case).tolist() == [4, 0, 4, 0, 4, 0]


def test_an_active_copy_makes_room_for_an_expert_that_has_no_other_gpu():
    # expert 0 could be on both GPUs, expert 1 on the first only
    case = Case(torch.tensor([5, 3]), torch.tensor([0, 1, 0, 0]), 2)
    assert choose_copies(*case, 1).tolist() == [0, 3, 5, 0]


def test_with_16_hosted_and_9_active_experts_a_changed_load_is_balanced_better_than_by_all_of_9():
    generator = torch.Generator().manual_seed(0)
    past = torch.randn(1, 256, generator=generator)
    now = (past + 0.5 * torch.randn(1, 256, generator=generator)).exp()
    tokens = (now[0] / now.sum() * 1e6).long()
    busiest = []
    for slots in (288, 512):
        physical = rebalance_experts(past.exp(), slots, 8, 1, 32)[0][0]
        served = choose_copies(tokens, physical, 32, 9).view(32, -1).sum(1)
        busiest.append(float(served.max() / served.float().mean()))
    assert busiest[1] - 1 < 0.5 * (busiest[0] - 1)


def test_of_equal_choices_the_lower_number_is_taken():
    case = Case(torch.tensor([3, 3, 2]), torch.tensor([0, 1, 2, 0, 1, 2]), 2)
    assert choose_copies(*case).tolist() == [1, 2, 1, 2, 1, 1]


def test_without_tokens_nothing_is_served():
    assert choose_copies(torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1, 2, 2]), 2, 1).tolist() == [0, 0, 0, 0]


GOOD = {"tokens": torch.tensor([1, 2, 3]), "physical_to_logical": torch.tensor([0, 1, 2, 0]), "num_gpus": 2}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokens", torch.tensor([1, -2, 3]), "tokens must be at least 0, not -2"),
        ("tokens", torch.tensor([[1, 2, 3]]), r"tokens must be a vector of at least one number, not \[1, 3\]"),
        ("tokens", torch.tensor([], dtype=torch.int64), r"tokens must be a vector of at least one number, not \[0\]"),
        ("physical_to_logical", torch.tensor([0, 1, 3, 2]), "physical_to_logical must have experts from 0 to 2, not 3"),
        ("physical_to_logical", torch.tensor([0, -1, 1, 2]), "must have experts from 0 to 2, not -1"),
        ("physical_to_logical", torch.tensor([0, 1, 1, 0]), "must have every expert, but expert 2 has no slot"),
        ("num_gpus", 3, "num_gpus must divide the 4 slots, but is 3"),
        ("num_gpus", 0, "num_gpus must be at least 1, not 0"),
        ("num_active", 0, "num_active must be at least 1, not 0"),
        ("num_active", 3, "num_active must be at most 2, not 3"),
    ],
)
def test_wrong_values_are_refused(name, value, message):
    with pytest.raises(ValueError, match=message):
        choose_copies(**{**GOOD, name: value})


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tokens", [1, 2, 3], "tokens must be an int64 tensor, not list"),
        ("tokens", torch.ones(3), "tokens must be an int64 tensor, not torch.float32"),
        ("physical_to_logical", torch.ones(4), "physical_to_logical must be an int64 tensor, not torch.float32"),
        ("num_active", 1.0, "num_active must be a whole number, not 1.0"),
    ],
)
def test_wrong_types_are_refused(name, value, message):
    with pytest.raises(TypeError, match=message):
        choose_copies(**{**GOOD, name: value})


# of the first rank: expert 0 has tokens 0 and 2, expert 1 token 1; the second rank has another token of expert 0
ASSIGNED = {
    "experts": torch.tensor([[0], [1], [0]]),
    "first": torch.tensor([0, 0, 0]),
    "served": torch.tensor([2, 1, 0, 1]),
    "physical_to_logical": torch.tensor([0, 1, 2, 0]),
}


def test_a_rank_without_tokens_gets_no_slots():
    slots = assign_copies(**{**ASSIGNED, "experts": torch.zeros(0, 2, dtype=torch.int64)})
    assert slots.shape == (0, 2)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("experts", torch.tensor([0, 1]), r"experts must be \[tokens, chosen experts\], not \[2\]"),
        ("experts", torch.tensor([[-1]]), "experts must have experts from 0 to 2, not -1"),
        ("experts", torch.tensor([[1], [5]]), "experts must have experts from 0 to 2, not 5"),
        ("experts", torch.tensor([[1], [1]]), "served must count all: 1 of expert 1, but first and experts have 2"),
        ("first", torch.tensor([2, 0, 0]), "served must count all: 3 of expert 0, but first and experts have 4"),
        ("first", torch.tensor([0, -1, 0]), "first must be at least 0, not -1"),
        ("first", torch.tensor([[0, 0, 0]]), r"first must be a vector of at least one number, not \[1, 3\]"),
        ("served", torch.tensor([3, 1, 0, -1]), "served must be at least 0, not -1"),
        ("served", torch.tensor([2, 1, 0]), "served must have the 4 slots of physical_to_logical, not 3"),
        ("physical_to_logical", torch.tensor([0, 1, 3, 0]), "physical_to_logical must have experts from 0 to 2, not 3"),
    ],
)
def test_wrong_rows_are_refused(name, value, message):
    with pytest.raises(ValueError, match=message):
        assign_copies(**{**ASSIGNED, name: value})


@pytest.mark.parametrize("name", ASSIGNED)
def test_rows_of_another_type_are_refused(name):
    with pytest.raises(TypeError, match=f"{name} must be an int64 tensor, not torch.int32"):
        assign_copies(**{**ASSIGNED, name: ASSIGNED[name].int()})
