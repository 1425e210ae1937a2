"""Tests of the rank from which a rank receives an expert."""

import pytest

from octile.serve.ranks.expert_moves import find_copy


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
