"""Expert parallelism: each rank has a part of the experts of a mixture, and the rows of tokens are sent to them.

Each of W ranks has its own tokens and E/W consecutive experts.

                send                                        send back
    forward     rows, or FP8 data with their scales         each expert's result, BF16 under autocast or a recipe
    backward    gradients of the sums, in the same formats  gradients of the rows

**Rows are sent once.** A row that several experts of a rank need is sent to it once and copied there.

**Results are bit-exact.** Each result of an expert is sent back, and the rank of the token sums them in FP32 in
the order of its chosen experts. One process does the same, to which the tokens of all ranks are one batch. The sum of a
rank's results would be less to send, but rounded before it is added. The rows of an expert are sorted by the rank and
the position of their tokens, so that the weights' gradients have the same bits, too. (The gate computes a rank's own
tokens, and its last bits can depend on their number: on a CPU by torch's functions, and on a GPU because few tokens
take other kernels than many.)

**Two hops.** On a mesh [nodes, ranks of a node] a row goes once to each node that has one of its experts, to the rank
of the same index, and from there to the ranks of the node. Results go the same way back. A gate that limits the nodes
of a token (`topk_group`) thereby limits what crosses between nodes.

The host waits for the numbers of rows of each forward pass, once per hop: torch's all-to-all needs them.

Source: DeepSeek-V3 (arXiv 2412.19437) §3.2.2 and §3.3.3.
Shapes: T tokens of this rank, K chosen experts, D model, E experts, W ranks; N rows that were sent to this rank,
R results of its experts; in a hop between G ranks, M rows before it and S rows that are sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from octile.formats import TILE
from octile.kernels.memory_layout import new_scale
from octile.nn.dispatcher import InFlight, LocalDispatcher, RoutingPlan
from octile.ops.permute import inverse, unpermute_backward
from octile.parallel.messages import all_gather_messages
from octile.scaled import ScaledTensor

Ranks = dist.ProcessGroup | DeviceMesh | None
Across = Literal["auto", "nvshmem", "all_to_all_single"]


class ExpertDispatcher(LocalDispatcher):
    """Dispatch and combine between ranks, which all must call it in the same order; `shard_experts` makes it.

    Args:
        n_experts: E, of all ranks together; rank w has the experts from w · E/W to (w + 1) · E/W, exclusive.
        n_chosen: K.
        hidden_size: D.
        ranks: a process group; or a mesh [nodes, ranks of a node], whose ranks are numbered node by node; None: all.

    Raises:
        RuntimeError: torch.distributed is not initialized.
        ValueError: the ranks disagree about a size, or W does not divide E.
    """

    waits_for_device = True
    exchanges = True

    def __init__(self, n_experts: int, n_chosen: int, hidden_size: int, ranks: Ranks = None):
        self.groups = groups_of(ranks)
        sizes = f"{n_experts} experts, {n_chosen} of them chosen, hidden_size {hidden_size}"
        check_agreement("the sizes of a mixture", sizes, self.groups)
        check_divisible(n_experts, self.groups)
        self.n_experts, self.n_chosen = n_experts, n_chosen
        self.rank, self.n_ranks = rank_among(self.groups)

    @property
    def local_experts(self) -> slice:
        """The experts of this rank."""
        return experts_of(self.n_experts, self.rank, self.n_ranks)

    def plan(self, experts_TK: Tensor, load_E: Tensor) -> RoutingPlan:
        """Plan where rows go, and tell the other ranks: experts_TK are the experts of each token.

        The host waits for the numbers of rows. offs_E of the plan are those of this rank's experts.
        """
        n_chosen, local = experts_TK.shape[1], self.n_experts // self.n_ranks
        rank_T1 = experts_TK.new_full((len(experts_TK), 1), self.rank)
        rows_MC = torch.cat([experts_TK, rank_T1], dim=1).to(torch.int32)
        hops, per_destination = [], self.n_experts
        for group in self.groups:
            per_destination //= dist.get_world_size(group)
            hop, rows_MC = plan_hop(rows_MC, per_destination, group)
            hops.append(hop)

        experts_NK, rank_N = rows_MC[:, :-1], rows_MC[:, -1]
        entry_R = (experts_NK.flatten() >= 0).nonzero().squeeze(1)  # as the results go back: sorted by rank and token
        expert_R = experts_NK.flatten()[entry_R]
        order_R = (expert_R * self.n_ranks + rank_N[entry_R // n_chosen]).argsort(stable=True)
        expert = torch.arange(local, dtype=torch.int32, device=experts_TK.device)
        offs_E = torch.searchsorted(expert_R[order_R], expert, right=True, out_int32=True)
        handle = _Handle(tuple(hops), inverse(order_R))
        return RoutingPlan(hops[0].index_X.view(experts_TK.shape), entry_R[order_R].to(torch.int32), offs_E, handle)

    def combine_backward(
        self, dx_TD: Tensor, y_RD: Tensor, weights_TK: Tensor, plan: RoutingPlan
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of y and of the weights of `combine`; dx, that of its result, is sent once to a rank."""
        sent_weights = self.begin_send(weights_TK, plan)
        dx_RD = self.send(dx_TD, plan).index_select(0, plan.token_R)
        weight_R1 = self.dispatch_weights(sent_weights, plan)[:, None]
        row_R1 = torch.arange(len(y_RD), dtype=torch.int32, device=y_RD.device)[:, None]
        dy_RD, dweight_R1 = unpermute_backward(dx_RD, y_RD, row_R1, weight_R1)  # as if of tokens with one row each
        return dy_RD, self.combine_weights(self.begin_send_back(dweight_R1, plan, overlaps=False), plan)

    def begin_send(self, x_TD: Tensor, plan: RoutingPlan, overlaps: bool = True) -> InFlight[Tensor]:
        """Begin to send each row once to every rank that has one of its experts: [N, D]."""
        *hops, last = plan.handle.hops
        for hop in hops:
            x_TD = exchange(x_TD.index_select(0, hop.row_S), hop.rows_out, hop.rows_in, hop.group)
        return begin_exchange(x_TD.index_select(0, last.row_S), last.rows_out, last.rows_in, last.group)

    def begin_send_quantized(
        self, x_TD: ScaledTensor, plan: RoutingPlan, overlaps: bool = True
    ) -> InFlight[ScaledTensor]:
        """Begin to send data and scales of rows in 1×128 tiles, as `begin_send` does: [N, D]."""
        sent = self.begin_send(x_TD.data.view(torch.uint8), plan), self.begin_send(x_TD.scale, plan)
        data = sent[0].result.view(x_TD.data.dtype)
        scale = new_scale(data, *TILE)

        def arrive() -> None:
            for part in sent:
                part.wait(switches=False)
            scale.copy_(sent[1].result)

        return InFlight(ScaledTensor(data, scale, TILE), arrive)

    def begin_send_back(
        self, y_RD: Tensor, plan: RoutingPlan, overlaps: bool = True, lasts: bool = False
    ) -> InFlight[Tensor]:
        """Begin to send each result to the rank of its token: [T·K, D], ordered by the plan's row_ids_TK."""
        y_RD = y_RD.index_select(0, plan.handle.result_R)
        first, *hops = plan.handle.hops
        for hop in reversed(hops):
            y_RD = exchange(y_RD, hop.results_in, hop.results_out, hop.group).index_select(0, hop.index_X)
        return begin_exchange(y_RD, first.results_in, first.results_out, first.group)

    def dispatch_quantized(self, x_ND: ScaledTensor, plan: RoutingPlan) -> ScaledTensor:
        """Copy every row that `send_quantized` returned to each of its experts of this rank: [R, D]."""
        token_R = plan.token_R
        data = x_ND.data.view(torch.uint8).index_select(0, token_R).view(x_ND.data.dtype)
        return in_tiles(data, x_ND.scale.index_select(0, token_R))

    def total_load(self, load_E: Tensor, plan: RoutingPlan) -> Tensor:
        """Return the number of tokens that all ranks send to each expert, of all E experts."""
        load_E = load_E.clone()
        for group in self.groups:
            dist.all_reduce(load_E, group=group)
        return load_E


def exchange(rows: Tensor, out: Sequence[int], into: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Send consecutive rows to the ranks of a group, and return those that the ranks send here, in their order.

    Args:
        rows: [Σ out, C] of any dtype.
        out: how many rows go to each rank.
        into: how many rows come from each rank.

    Returns:
        [Σ into, C].
    """
    return begin_exchange(rows, out, into, group).wait(switches=False)


def begin_exchange(rows: Tensor, out: Sequence[int], into: Sequence[int], group: dist.ProcessGroup) -> InFlight[Tensor]:
    """Begin an `exchange`."""
    sent = rows.contiguous().view(torch.uint8)  # gloo has no FP8
    received = sent.new_empty(sum(into), sent.shape[1])
    work = dist.all_to_all_single(received, sent, list(into), list(out), group=group, async_op=True)
    return InFlight(received.view(rows.dtype), work.wait)


def check_agreement(what: str, own: str, groups: Sequence[dist.ProcessGroup]) -> None:
    """Compare a description on all ranks of the groups.

    Raises:
        ValueError: two ranks have different ones; all ranks raise it.
    """
    described = [(dist.get_rank(), own)]
    for group in groups:
        gathered = all_gather_messages(described, list[tuple[int, str]], group)
        described = [item for items in gathered for item in items]
    described.sort()
    (first_rank, first), *others = described
    for rank, other in others:
        if other != first:
            raise ValueError(
                f"{what} must be the same on all ranks: rank {first_rank} has {first or 'none'}, "
                f"but rank {rank} has {other or 'none'}"
            )


def check_divisible(n_experts: int, groups: Sequence[dist.ProcessGroup]) -> None:
    """Raise ValueError unless the ranks of the groups divide the number of experts."""
    n_ranks = math.prod(dist.get_world_size(group) for group in groups)
    if n_experts % n_ranks:
        raise ValueError(f"the number of experts must be a multiple of the {n_ranks} ranks, not {n_experts}")


class Hop(NamedTuple):
    """An exchange of rows between the ranks of a group, and of their results on the way back.

    Attributes:
        group: the ranks.
        row_S: int32, the rows that are sent, sorted by destination.
        rows_out, rows_in: how many rows go to each rank, and come from it.
        results_out, results_in: how many results these rows have; they go the other way.
        index_X: int32; results come back sorted by destination, and result x, sorted by row, is the index_X[x]-th.
    """

    group: dist.ProcessGroup
    row_S: Tensor
    rows_out: list[int]
    rows_in: list[int]
    results_out: list[int]
    results_in: list[int]
    index_X: Tensor


class _Handle(NamedTuple):
    """The way of a plan's rows: the hops, and the row of each result in the order in which results go back, int32."""

    hops: tuple[Hop, ...]
    result_R: Tensor


def plan_hop(rows_MC: Tensor, per_destination: int, group: dist.ProcessGroup) -> tuple[Hop, Tensor]:
    """Plan a hop, and make it with what describes the rows.

    Args:
        rows_MC: int32 [M, K + 1]: the chosen experts of each row, counted from the first of the group, −1 for those
            that are reached otherwise; and the rank of its token.
        per_destination: number of experts that a rank of the group leads to.

    Returns:
        the hop and the same for the rows that are sent to this rank, experts counted from the first it leads to.
    """
    n_ranks = dist.get_world_size(group)
    experts_MK = rows_MC[:, :-1]
    rank_MK = experts_MK.div(per_destination, rounding_mode="floor")  # −1 stays −1
    is_of_GMK = rank_MK == torch.arange(n_ranks, dtype=torch.int32, device=rows_MC.device)[:, None, None]
    counts_G2 = torch.stack([is_of_GMK.any(2).sum(1), is_of_GMK.sum((1, 2))], dim=1)
    ones = [1] * n_ranks
    both_2G2 = torch.stack([counts_G2, exchange(counts_G2, ones, ones, group)])
    (rows_out, results_out), (rows_in, results_in) = both_2G2.mT.tolist()  # the host waits

    rank_S, row_S = is_of_GMK.any(2).nonzero(as_tuple=True)
    is_rank_SK = is_of_GMK[rank_S, row_S]
    experts_SK = experts_MK[row_S] - (rank_S * per_destination)[:, None].to(torch.int32)
    described_SC = torch.cat([experts_SK.masked_fill(~is_rank_SK, -1), rows_MC[row_S, -1:]], dim=1)
    rank_X = rank_MK.flatten()[(experts_MK.flatten() >= 0).nonzero().squeeze(1)]
    index_X = inverse(rank_X.argsort(stable=True))
    hop = Hop(group, row_S.to(torch.int32), rows_out, rows_in, results_out, results_in, index_X)
    return hop, exchange(described_SC, rows_out, rows_in, group)


def groups_of(ranks: Ranks) -> list[dist.ProcessGroup]:
    """Return the group of each hop: across nodes, if there are several, and inside a node."""
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed must be initialized before expert parallelism is used")
    if isinstance(ranks, DeviceMesh):
        groups = [ranks.get_group(dimension) for dimension in range(ranks.ndim)]
    else:
        groups = [group for group in (ranks or dist.group.WORLD,) if group is not None]
    if any(dist.get_rank(group) < 0 for group in groups):
        raise ValueError(f"ranks must contain this rank, {dist.get_rank()}")
    return groups


def rank_among(groups: Sequence[dist.ProcessGroup]) -> tuple[int, int]:
    """Return the number of this rank in the groups of all hops, and how many ranks there are."""
    rank, n_ranks = 0, 1
    for group in groups:
        rank, n_ranks = rank * dist.get_world_size(group) + dist.get_rank(group), n_ranks * dist.get_world_size(group)
    return rank, n_ranks


def experts_of(n_experts: int, rank: int, n_ranks: int) -> slice:
    """Return which experts a rank has."""
    local = n_experts // n_ranks
    return slice(rank * local, (rank + 1) * local)


def in_tiles(data: Tensor, scale: Tensor) -> ScaledTensor:
    """Lay the scales of rows in 1×128 tiles out as `quantize` returns them."""
    return ScaledTensor(data, new_scale(data, *TILE).copy_(scale), TILE)
