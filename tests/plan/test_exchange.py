"""What dispatch and combine send, and how long they take."""

from dataclasses import replace
from itertools import combinations
from math import log

import pytest
import torch

from octile.models.config import ModelConfig
from octile.plan.exchange import busiest_rank, exchange, experts_at_equal_cost, hit_probability
from octile.plan.hardware import read_cluster
from tests.plan.toy import CLUSTER, EFFICIENCIES, TOY

V3 = ModelConfig.v3_671b()
H800 = read_cluster("h800_2048")


def test_a_token_reaches_3_2_experts_of_a_node_and_13_in_all_at_the_price_of_one_hop():
    per_node, in_all = experts_at_equal_cost(V3, H800)
    assert per_node == pytest.approx(3.2)
    assert round(in_all) == 13


def test_a_cluster_of_one_node_has_no_hop():
    with pytest.raises(ValueError, match="cluster h200_8 has no network between nodes"):
        experts_at_equal_cost(V3, read_cluster("h200_8"))


@pytest.mark.one_case
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


@pytest.mark.parametrize("units", [1, 2, 4, 8, 16])
def test_the_probability_of_a_unit_is_the_mean_over_all_choices_of_experts(units):
    hit = choices = 0
    for groups in combinations(range(4), 2):
        candidates = [expert for expert in range(16) if expert // 4 in groups]
        for experts in combinations(candidates, 4):
            hit += any(expert * units // 16 == 0 for expert in experts)  # the first unit is like all others
            choices += 1
    assert hit_probability(TOY, units) == pytest.approx(hit / choices, rel=1e-12)


def test_the_load_of_the_busiest_rank_lies_that_of_the_largest_of_normal_values_above_the_mean():
    of_a_rank = 0.1 / 2  # of four experts, of an expert's 0.1
    assert busiest_rank(TOY, 4, CLUSTER) == pytest.approx(1 + of_a_rank * (2 * log(4)) ** 0.5, rel=1e-12)


TOKENS = 100
ROW, RESULT = 256 + 2 * 4, 2 * 256  # bytes: FP8 with two scales, BF16


def test_within_a_node_a_row_goes_once_to_each_rank_and_the_result_of_each_expert_returns():
    cluster = replace(CLUSTER, nvlink=replace(CLUSTER.nvlink, bandwidth=1e6))  # senders and receivers are slower
    times = exchange(TOY, TOKENS, 4, cluster, is_balanced=True)
    ranks = 4 * hit_probability(TOY, 4) * 3 / 4  # other ranks that a token reaches
    assert times.dispatch == pytest.approx(0.5 + TOKENS * ranks * ROW / 300, rel=1e-12)
    assert times.combine == pytest.approx(0.5 + TOKENS * 4 * 3 / 4 * RESULT / 200, rel=1e-12)
    assert times.total == times.dispatch + times.combine


def test_a_slow_link_within_a_node_limits_the_exchange():
    rate = 250 * EFFICIENCIES["nvlink"]  # below dispatch_rate and combine_rate
    times = exchange(TOY, TOKENS, 4, replace(CLUSTER, nvlink=replace(CLUSTER.nvlink, bandwidth=250.0)), True)
    assert times.dispatch == pytest.approx(0.5 + TOKENS * 4 * hit_probability(TOY, 4) * 3 / 4 * ROW / rate, rel=1e-12)
    assert times.combine == pytest.approx(0.5 + TOKENS * 3 * RESULT / rate, rel=1e-12)


def test_between_nodes_a_row_goes_once_to_each_node():
    times = exchange(TOY, TOKENS, 8, CLUSTER, is_balanced=True)
    nodes = 2 * hit_probability(TOY, 2) / 2  # other nodes that a token reaches
    rate = 100 * EFFICIENCIES["network"]
    assert times.dispatch == pytest.approx(0.75 + TOKENS * nodes * ROW / rate, rel=1e-12)
    assert times.combine == pytest.approx(0.75 + TOKENS * nodes * RESULT / rate, rel=1e-12)


def test_between_nodes_nvlink_may_take_longer_than_the_network():
    fast = replace(CLUSTER, network=replace(CLUSTER.network, bandwidth=1e6))
    times = exchange(TOY, TOKENS, 8, fast, is_balanced=True)
    ranks = 8 * hit_probability(TOY, 8) * 3 / 4  # of the nodes that a token reaches, all but the one of the same index
    assert times.dispatch == pytest.approx(0.5 + TOKENS * ranks * ROW / 300, rel=1e-12)
    assert times.combine == pytest.approx(0.5 + TOKENS * ranks * RESULT / 200, rel=1e-12)


def test_all_ranks_wait_for_the_busiest_ones_rows_but_not_for_its_latency():
    balanced, measured = (exchange(TOY, TOKENS, 8, CLUSTER, is_balanced) for is_balanced in (True, False))
    load = busiest_rank(TOY, 8, CLUSTER)
    assert measured.dispatch - 0.75 == pytest.approx(load * (balanced.dispatch - 0.75), rel=1e-12)
    assert measured.combine - 0.75 == pytest.approx(load * (balanced.combine - 0.75), rel=1e-12)
