"""Which dispatcher sends rows to experts, and the one for several nodes: across them by a transport, inside by kernels.

A row goes once to each node that has one of its experts, to the rank of the same index there, and from it to the ranks
of the node (`octile.parallel.symmetric_memory`); results go the same way back.

    transport across nodes     the numbers of rows are read by the host
    `CollectiveTransport`      yes: `all_to_all_single`
    `NvshmemTransport`         no: NVSHMEM (`octile.parallel.nvshmem`)

Shapes: as in `octile.parallel.symmetric_memory`; G nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from octile.formats import TILE
from octile.nn.dispatcher import InFlight, RoutingPlan
from octile.ops.permute import count_tokens
from octile.parallel import nvshmem, symmetric_memory
from octile.parallel.experts import Across, ExpertDispatcher, Hop, Ranks, begin_exchange, exchange, plan_hop
from octile.parallel.links import ALL_TO_ALL, NVSHMEM_EXCHANGE, PEER_KERNELS
from octile.parallel.nvshmem import NvshmemMemory, NvshmemTransport
from octile.parallel.symmetric_memory import Handle, PeerDispatcher, PeerMemory
from octile.scaled import ScaledTensor


def choose_dispatcher(
    ranks: Ranks,
    groups: Sequence[dist.ProcessGroup],
    across: Across,
    num_sms: int | None,
    max_tokens: int,
    max_rows: int | None,
    too_many_rows: Tensor | None,
) -> tuple[str, Callable[[int, int, int], ExpertDispatcher]]:
    """Choose what exchanges rows whose number on each rank is limited. All ranks call it, and get the same.

    Args:
        ranks, across, num_sms, max_tokens, max_rows, too_many_rows: as in `octile.parallel.shard_experts`.
        groups: the ranks of each hop.

    Returns:
        what exchanges the rows, and why not otherwise; and what makes a dispatcher of n_experts, n_chosen and
        hidden_size.

    Raises:
        ValueError: across is "nvshmem", and the ranks cannot use it.
    """
    why_not = symmetric_memory.why_not_peers(groups)
    if across == "nvshmem":
        why_not_across = why_not or nvshmem.why_not_nvshmem(groups)
        if why_not_across:
            raise ValueError(f"across nvshmem cannot be used, since {why_not_across}")
    if why_not:
        return f"{ALL_TO_ALL}, since {why_not}", partial(ExpertDispatcher, ranks=ranks)
    limits: dict[str, Any] = {"max_tokens": max_tokens, "max_rows": max_rows, "too_many_rows": too_many_rows}
    if not isinstance(ranks, DeviceMesh) or len(groups) == 1:
        memory = PeerMemory(groups[-1], num_sms)
        return PEER_KERNELS, partial(PeerDispatcher, memory=memory, ranks=ranks, **limits)
    why_not = None if across == ALL_TO_ALL else nvshmem.why_not_nvshmem(groups)
    transport: Transport = CollectiveTransport(groups[0])
    name = ALL_TO_ALL
    if across != ALL_TO_ALL and why_not is None:
        transport, name = NvshmemTransport(NvshmemMemory(groups[0], num_sms), max_tokens), NVSHMEM_EXCHANGE
    make = partial(NodeDispatcher, transport, memory=PeerMemory(groups[-1], num_sms), ranks=ranks, **limits)
    return f"{PEER_KERNELS} inside a node, {name} across" + (f", since {why_not}" if why_not else ""), make


class Transport(Protocol):
    """What sends rows across nodes, between the ranks of the same index.

    A hop that `plan` returns has `index_X`, int32: a token's results come back sorted by node, and result x, sorted by
    token, is the index_X[x]-th.
    """

    waits_for_device: bool

    def plan(self, rows_TC: Tensor, per_node: int) -> tuple[Any, Tensor]:
        """Plan a hop, and make it with what describes the rows.

        Args:
            rows_TC: int32 [T, K + 1], the chosen experts of each token, and its rank.
            per_node: experts of a node.

        Returns:
            the hop, and the same for the rows that come to this rank, with the experts of its node counted from the
            first there; −1 for others, and for all of a row that is none.
        """

    def send(self, rows: Sequence[Tensor], hop: Any) -> list[Tensor]:
        """Send rows of several tensors [T, C] across, in the order of `plan`. Those that are none have any values.

        The results are valid until the next exchange; launches on the stream of exchanges may read them.
        """

    def begin_send_back(
        self, results: InFlight[Tensor], hop: Any, y_RD: Tensor, overlaps: bool, lasts: bool
    ) -> InFlight[Tensor]:
        """Begin to send results [S · K, D] to the nodes of their tokens: [T · K, D].

        Args:
            results: what this rank's node has computed for the rows that came to this rank.
            hop: the way of these rows.
            y_RD: what the results were sent from, which may be in use until they come.
            overlaps, lasts: as in `PeerDispatcher.begin_send_back`.
        """


class _CollectiveHop(NamedTuple):
    """A hop of `CollectiveTransport`, and which of the S · K results go back, int32."""

    hop: Hop
    result_X: Tensor

    @property
    def index_X(self) -> Tensor:
        return self.hop.index_X


class CollectiveTransport:
    """`all_to_all_single` across nodes, for whose numbers of rows the host waits.

    Args:
        group: the ranks of the same index of all nodes.
    """

    waits_for_device = True

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def plan(self, rows_TC: Tensor, per_node: int) -> tuple[_CollectiveHop, Tensor]:
        """Plan a hop; see `Transport`."""
        hop, rows_SC = plan_hop(rows_TC, per_node, self.group)
        result_X = (rows_SC[:, :-1].flatten() >= 0).nonzero().squeeze(1).to(torch.int32)
        return _CollectiveHop(hop, result_X), rows_SC

    def send(self, rows: Sequence[Tensor], hop: _CollectiveHop) -> list[Tensor]:
        """Send rows; see `Transport`."""
        row_S, rows_out, rows_in = hop.hop.row_S, hop.hop.rows_out, hop.hop.rows_in
        return [exchange(x_TC.index_select(0, row_S), rows_out, rows_in, self.group) for x_TC in rows]

    def begin_send_back(
        self, results: InFlight[Tensor], hop: _CollectiveHop, y_RD: Tensor, overlaps: bool, lasts: bool
    ) -> InFlight[Tensor]:
        """Begin to send results back; see `Transport`."""
        found = results.wait(switches=False).index_select(0, hop.result_X)
        return begin_exchange(found, hop.hop.results_in, hop.hop.results_out, self.group)


class NodeDispatcher(PeerDispatcher):
    """A `PeerDispatcher` for several nodes: two hops, across nodes by a transport, inside a node by kernels.

    Args:
        transport: across the nodes.
        n_experts, n_chosen, hidden_size, memory, max_tokens, max_rows, too_many_rows, ranks: as in `PeerDispatcher`;
            ranks is a mesh [nodes, ranks of a node], and the memory is of the ranks of this node.
    """

    def __init__(
        self,
        transport: Transport,
        n_experts: int,
        n_chosen: int,
        hidden_size: int,
        memory: PeerMemory,
        max_tokens: int,
        max_rows: int | None,
        too_many_rows: Tensor | None,
        ranks: DeviceMesh,
    ):
        super().__init__(n_experts, n_chosen, hidden_size, memory, max_tokens, max_rows, too_many_rows, ranks)
        self.transport, self.waits_for_device = transport, transport.waits_for_device
        self._per_node = self.n_experts // dist.get_world_size(self.groups[0])

    def plan(self, experts_TK: Tensor, load_E: Tensor) -> RoutingPlan:
        """Plan where rows go, and tell the other ranks: experts_TK are the experts of each token.

        Raises:
            ValueError, RuntimeError: as `PeerDispatcher.plan`.
        """
        self._check_tokens(experts_TK)
        t, k = experts_TK.shape
        rows_TC = torch.cat([experts_TK, experts_TK.new_full((t, 1), self.rank)], dim=1).to(torch.int32)
        hop, rows_SC = self.transport.plan(rows_TC, self._per_node)
        experts_SK, gathered_NC = rows_SC[:, :-1].contiguous(), self._gather(rows_SC)
        local_NK, rank_N1 = self._count_from_here(gathered_NC[:, :-1].contiguous()), gathered_NC[:, -1:].clamp(min=0)
        # an expert's rows, sorted by the rank of their tokens: they came from each peer, and to it from each node
        order_R = (local_NK * self.n_ranks + rank_N1).flatten().argsort(stable=True).to(torch.int32)
        local = self.n_experts // self.n_ranks
        offs_E = count_tokens(local_NK, local + 1)[0].cumsum(0).to(torch.int32)[:local]
        return self._plan(hop.index_X.view(t, k), order_R, offs_E, Handle(experts_SK, local_NK, None, hop))

    def total_load(self, load_E: Tensor, plan: RoutingPlan) -> Tensor:
        """Return the number of tokens that all ranks send to each expert, of all E experts."""
        return ExpertDispatcher.total_load(self, load_E, plan)

    def begin_send(self, x_TD: Tensor, plan: RoutingPlan, overlaps: bool = True) -> InFlight[Tensor]:
        """Send each row once to every node that has one of its experts, and begin to send them on: [N, D]."""
        (x_SD,) = self.transport.send([x_TD], plan.handle.hop)
        out, _ = self._send(x_SD, None, plan, overlaps)
        return self.memory.in_flight(out, x_TD, x_SD, plan, overlaps=overlaps)

    def begin_send_quantized(
        self, x_TD: ScaledTensor, plan: RoutingPlan, overlaps: bool = True
    ) -> InFlight[ScaledTensor]:
        """Send rows in 1×128 tiles as `begin_send` does: [N, D]."""
        data, scale = self.transport.send([x_TD.data.view(torch.uint8), x_TD.scale], plan.handle.hop)
        out, out_scale = self._send(data.view(x_TD.data.dtype), scale, plan, overlaps)
        assert out_scale is not None
        sent = ScaledTensor(out, out_scale, TILE)
        return self.memory.in_flight(sent, x_TD, data, scale, plan, overlaps=overlaps)

    def begin_send_back(
        self, y_RD: Tensor, plan: RoutingPlan, overlaps: bool = True, lasts: bool = False
    ) -> InFlight[Tensor]:
        """Send each result to this node's rank of its token's index, and begin to send it across: [T·K, D]."""
        results = super().begin_send_back(y_RD, plan, overlaps=overlaps and not self.waits_for_device)
        return self.transport.begin_send_back(results, plan.handle.hop, y_RD, overlaps, lasts)
