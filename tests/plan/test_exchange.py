"""What dispatch and combine send, and how long they take."""

from dataclasses import replace

import pytest
import torch

from octile.models.config import ModelConfig
from octile.plan.exchange import busiest_rank, exchange, experts_at_equal_cost, hit_probability
from octile.plan.hardware import read_cluster

V3 = ModelConfig.v3_671b()
H800 = read_cluster("h800_2048")


def test_a_token_reaches_3_2_experts_of_a_node_and_13_in_all_at_the_price_of_one_hop():
    per_node, in_all = experts_at_equal_cost(V3, H800)
    assert per_node == pytest.approx(3.2)
    assert round(in_all) == 13


def test_a_cluster_of_one_node_has_no_hop():
    with pytest.raises(ValueError, match="cluster h200_8 has no network between nodes"):
        experts_at_equal_cost(V3, read_cluster("h200_8"))


@pytest.mark.parametrize("units", [2, 4, 8, 16, 64, 256])
def test_the_probability_of_an_expert_on_a_unit_is_that_of_drawn_tokens(units):
    generator = torch.Generator().manual_seed(units)
    tokens, size = 20_000, V3.n_routed_experts // V3.n_group
    groups = torch.rand(tokens, V3.n_group, generator=generator).argsort(1)[:, : V3.topk_group]
    of_groups = torch.rand(tokens, V3.topk_group * size, generator=generator).argsort(1)[:, : V3.num_experts_per_tok]
    experts = groups.gather(1, of_groups // size) * size + of_groups % size
    hit = torch.zeros(tokens, units).scatter(1, experts * units // V3.n_routed_experts, 1).mean()
    assert hit_probability(V3, units) == pytest.approx(hit.item(), rel=0.02)


def test_the_exchange_of_64_ranks_takes_what_deepep_measured():
    """DeepEP's README: 51 and 50 GB/s at EP64, a row counted once for each of its nodes, its own among them."""
    times, rows = exchange(V3, 4096, 64, H800, is_balanced=True), 4096 * 8 * hit_probability(V3, 8)
    assert times.dispatch == pytest.approx(rows * 7168 / 51e9, rel=0.05)
    assert times.combine == pytest.approx(rows * 2 * 7168 / 50e9, rel=0.05)


def test_without_spread_experts_nothing_is_exchanged():
    assert exchange(V3, 4096, 1, H800).total == 0


def test_a_faster_network_makes_the_exchange_of_nodes_shorter():
    faster = replace(H800, network=replace(H800.network, bandwidth=60e9))
    assert exchange(V3, 4096, 64, faster).total < exchange(V3, 4096, 64, H800).total


def test_the_busiest_rank_is_busier_the_fewer_experts_a_rank_has():
    loads = [busiest_rank(V3, ep, H800) for ep in (1, 2, 16, 64, 256)]
    assert loads[0] == 1
    assert loads == sorted(loads)
