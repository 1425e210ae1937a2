"""The choice of experts: by hand, against torch's top-k, and what it refuses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octile.ops.gate import top_experts


def test_the_highest_scores_are_chosen_in_their_order():
    scores = torch.tensor([[0.1, 0.9, 0.5, 0.7], [4.0, 3.0, 2.0, 1.0]])
    assert top_experts(scores, 3, 1, 1, 1).tolist() == [[1, 3, 2], [0, 1, 2]]


def test_among_equal_scores_the_lower_index_comes_first():
    assert top_experts(torch.tensor([[0.0, 1.0, -0.0, 1.0, 0.0]]), 4, 1, 1, 1).tolist() == [[1, 3, 0, 2]]


def test_experts_come_from_the_groups_with_the_highest_sums():
    scores = torch.tensor([[9.0, 0.0, 6.0, 6.0, 5.0, 5.0]])  # sums of two: 9, 12, 10
    assert top_experts(scores, 2, 3, 1, 2).tolist() == [[2, 3]]
    assert top_experts(scores, 2, 3, 1, 1).tolist() == [[0, 1]]
    assert top_experts(scores, 4, 3, 2, 2).tolist() == [[2, 3, 4, 5]]


def test_negative_scores_of_a_chosen_group_are_above_others():
    assert top_experts(torch.tensor([[-1.0, -2.0, -3.0, -4.0]]), 2, 2, 1, 2).tolist() == [[0, 1]]


@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 99))
def test_without_ties_it_is_torchs_top_k(experts: int, tokens: int, seed: int):
    scores = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))
    k = 1 + seed % experts
    assert torch.equal(top_experts(scores, k, 1, 1, 1), scores.topk(k).indices)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_chosen": 5}, "n_chosen must be from 1 to 4, not 5"),
        ({"n_chosen": 0}, "n_chosen must be from 1 to 4, not 0"),
        ({"n_group": 3}, "n_group must divide the 8 experts of scores, not be 3"),
        ({"topk_group": 5}, "topk_group must be from 1 to n_group, 4, not 5"),
        ({"best": 3}, "best must be 1 or 2 and at most the 2 experts of a group, not 3"),
        ({"n_group": 8, "topk_group": 4}, "best must be 1 or 2 and at most the 1 experts of a group, not 2"),
        ({"scores": torch.zeros(8)}, r"scores must be a matrix \[T, E\] with E from 1 to 4096, not \(8,\)"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(changes, message: str):
    settings = {"scores": torch.zeros(2, 8), "n_chosen": 2, "n_group": 4, "topk_group": 2, "best": 2} | changes
    with pytest.raises(ValueError, match=message):
        top_experts(**settings)


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match=r"scores must be float32, not torch.float16"):
        top_experts(torch.zeros(2, 8, dtype=torch.float16), 2, 1, 1, 1)
