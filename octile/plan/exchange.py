"""What dispatch and combine send, and how long they take.

Between nodes a row goes once to every node that has one of its experts, to the GPU of the same index, and from there
over NVLink to the experts' GPUs; results come back summed for each node (DeepSeek-V3 §3.2.2). Within one node octile
sends a row once to every GPU, and the result of every expert back (`octile.parallel.symmetric_memory`). Rows are in FP8
with their scales, results in BF16. In the backward pass gradients take the same ways: FP8 out, BF16 back.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb, log, sqrt

from octile.models.config import ModelConfig
from octile.plan.hardware import Cluster
from octile.plan.work import tiles


@dataclass(frozen=True)
class Exchange:
    """The exchange of a layer's rows in one direction of a pass.

    Attributes:
        dispatch, combine: seconds.
    """

    dispatch: float
    combine: float

    @property
    def total(self) -> float:
        """Both, in seconds."""
        return self.dispatch + self.combine


def exchange(c: ModelConfig, tokens: int, ep: int, cluster: Cluster, is_balanced: bool = False) -> Exchange:
    """The times to send the rows of a micro-batch to the experts, and their results back, without computation.

    Args:
        c: the model.
        tokens: tokens of a micro-batch on one rank.
        ep: ranks of expert parallelism.
        cluster: cluster of the ranks.
        is_balanced: whether all ranks' experts have as many rows; otherwise the busiest rank's take as long as all.
    """
    if ep == 1:
        return Exchange(0.0, 0.0)
    load = 1.0 if is_balanced else busiest_rank(c, ep, cluster)
    e, node = cluster.reached, cluster.gpus_per_node
    nodes = max(1, ep // node)
    ranks_hit = ep * hit_probability(c, ep)
    if nodes == 1:
        rows_nvlink, results_nvlink = ranks_hit * (ep - 1) / ep, c.num_experts_per_tok * (ep - 1) / ep
        rows_network = 0.0
    else:
        rows_nvlink = results_nvlink = ranks_hit * (node - 1) / node
        rows_network = nodes * hit_probability(c, nodes) * (nodes - 1) / nodes
    nvlink = cluster.nvlink.bandwidth * e.nvlink

    def seconds(row_bytes: float, rows: float, rate: float) -> float:
        over_nvlink = cluster.nvlink.latency + load * tokens * rows * row_bytes / min(rate, nvlink)
        if not rows_network or cluster.network is None:
            return over_nvlink
        network = cluster.network.bandwidth * e.network
        return max(over_nvlink, cluster.network.latency + load * tokens * rows_network * row_bytes / network)

    d = c.hidden_size
    return Exchange(seconds(tiles(d), rows_nvlink, e.dispatch_rate), seconds(2 * d, results_nvlink, e.combine_rate))


def hit_probability(c: ModelConfig, units: int) -> float:
    """The probability that a token has an expert on a certain one of `units` GPUs or nodes, which share the experts.

    The token's groups are equally likely, and so are the experts of its groups.
    """
    size = c.n_routed_experts // c.n_group  # experts of a group
    candidates, chosen = c.topk_group * size, c.num_experts_per_tok
    if units >= c.n_group:  # a unit has a part of one group
        part = c.n_routed_experts // units
        return c.topk_group / c.n_group * (1 - comb(candidates - part, chosen) / comb(candidates, chosen))
    per_unit, others = c.n_group // units, c.n_group - c.n_group // units
    missed = 0.0
    for groups in range(min(per_unit, c.topk_group) + 1):
        ways = comb(per_unit, groups) * comb(others, c.topk_group - groups) / comb(c.n_group, c.topk_group)
        missed += ways * comb(candidates - groups * size, chosen) / comb(candidates, chosen)
    return 1 - missed


def busiest_rank(c: ModelConfig, ep: int, cluster: Cluster) -> float:
    """The rows of the busiest rank's experts, of the mean over ranks; all others wait for it.

    Loads of experts count as independent and normal with the measured `expert_deviation`. A rank has the sum of its
    experts' loads, and the largest of n ranks lies √(2 ln n) standard deviations above the mean.
    """
    deviation = cluster.reached.expert_deviation / sqrt(c.n_routed_experts / ep)
    return 1 + deviation * sqrt(2 * log(ep))


def experts_at_equal_cost(c: ModelConfig, cluster: Cluster) -> tuple[float, float]:
    """How many experts a token can have at the price of one hop over the network.

    NVLink is r times as fast as the network: while a row crosses the network to a node, NVLink forwards r rows there.

    Returns:
        The experts per node, and those on all nodes of a token: 3.2 and 12.8 for DeepSeek-V3 on H800 (§3.2.2).

    Raises:
        ValueError: the cluster has one node.
    """
    if cluster.network is None:
        raise ValueError(f"cluster {cluster.name} has no network between nodes")
    per_node = cluster.nvlink.bandwidth / cluster.network.bandwidth
    return per_node, per_node * c.topk_group
