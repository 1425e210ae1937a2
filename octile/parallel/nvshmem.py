"""Rows of tokens across nodes by NVSHMEM: torch's `all_to_all_vdev` on symmetric memory, for which no host waits.

The numbers of rows stay on the devices, and each rank reads what others send it from their memory. So all tensors have
capacity for any distribution of tokens, and a step can be captured in a CUDA graph. One exchange is

    barrier      an exchange of no rows: nobody reads the rows of the exchange before any more
    copies       of the rows into the memory that is read, sorted by node; only of those that are sent
    exchanges    of data and scales, one after the other

on the stream on which the kernels inside the nodes run, too (`octile.parallel.symmetric_memory`).

NVSHMEM is a backend of torch's symmetric memory, and a process has one backend: the kernels inside a node then store to
memory of NVSHMEM, too, which gives the addresses of peers of the same host. It allocates for all ranks of a job
together. They must all allocate alike, and so run the same passes; memory is freed when the process ends.

Shapes: as in `octile.parallel.nodes`.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from octile.kernels.memory_layout import VECTOR
from octile.nn.dispatcher import InFlight
from octile.ops.permute import inverse
from octile.parallel.links import has_nvshmem
from octile.parallel.messages import all_gather_messages
from octile.parallel.symmetric_memory import NO_MULTICAST, NVSHMEM, ExchangeMemory

LINE = 128  # bytes; where tensors begin in the memory
PARTS = 2  # tensors of an exchange at most: data and scales
BLOCKS = "TORCH_SYMMMEM_NBLOCKS"  # torch reads it at the first exchange of a process
BLOCKS_ON_NVLINK = 64  # of a launch for each rank
BLOCKS_ON_NETWORK = 16  # for all ranks, as torch has them


def why_not_nvshmem(groups: Sequence[dist.ProcessGroup]) -> str | None:
    """Return why the ranks cannot exchange rows across nodes by NVSHMEM; None: they can, and from now on do.

    All ranks call it, and get the same. It makes NVSHMEM the backend of torch's symmetric memory in this process.

    Args:
        groups: across nodes, and inside a node.

    Raises:
        RuntimeError: it is the backend on some ranks now, and cannot be on others; on all ranks.
    """
    if len(groups) != 2:
        return "the ranks are not a mesh of nodes"
    if dist.get_world_size(groups[0]) == 1:
        return "there is one node"
    reasons = _gather(_why_not_here(groups), groups)
    if not any(reasons):
        reasons = _gather(_choose_backend(), groups)  # which cannot be taken back
        if any(reasons) and not all(reasons):
            raise RuntimeError(f"on some ranks, not on all, {next(filter(None, reasons))}")
    return next(filter(None, reasons), None)


def _gather(own: str | None, groups: Sequence[dist.ProcessGroup]) -> list[str | None]:
    """Return the reasons of all ranks of all nodes."""
    reasons = [own]
    for group in groups:
        gathered = all_gather_messages(reasons, list[str | None], group)
        reasons = [reason for rank_reasons in gathered for reason in rank_reasons]
    return reasons


def _why_not_here(groups: Sequence[dist.ProcessGroup]) -> str | None:
    if not torch.cuda.is_available():
        return "the ranks are not on GPUs"
    if not has_nvshmem():
        return "this torch has no NVSHMEM"
    for group in groups:
        ranks = dist.get_process_group_ranks(group)
        if len({after - before for before, after in pairwise(ranks)}) > 1:
            return f"the ranks of a group must be evenly numbered, not {ranks}"
    return None


def _choose_backend() -> str | None:
    """Make NVSHMEM the backend of this process, or return why it cannot be."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    os.environ |= NO_MULTICAST
    try:
        symmetric_memory.set_backend(NVSHMEM)
    except RuntimeError:
        return (
            "this process has symmetric memory of torch's other backend already: "
            f"shard_experts must come before, or the environment have TORCH_SYMMMEM={NVSHMEM}"
        )
    return None


class NvshmemMemory(ExchangeMemory):
    """Memory of each rank that the ranks of its index on other nodes read.

    Args:
        group: the ranks of the same index of all nodes.
        num_sms: SMs that GEMMs leave, as in `ExchangeMemory`; torch chooses the blocks of an exchange.

    Attributes:
        splits: for the barrier and for each part of an exchange, int64 [G] and [2, G]: how many rows go to each rank,
            and how many come from each, and where they begin.
        blocks: thread blocks of a launch for each rank. They must divide the bytes of a row, and do so in vectors of 16
            bytes where rows are long enough: others are copied byte by byte.
    """

    splits: list[tuple[Tensor, Tensor]]

    def __init__(self, group: dist.ProcessGroup, num_sms: int | None = None):
        super().__init__(group, num_sms)
        self.blocks = max(_blocks(group) // dist.get_world_size(group), 1)

    def _in_use(self) -> object:
        return self.buffer, self.handle, self.splits

    def _grow(self, n_bytes: int, device: torch.device) -> None:
        ranks = dist.get_world_size(self.group)
        each = [_lines(ranks * 8), _lines(2 * ranks * 8)] * (PARTS + 1)
        whole, _ = self.allocate(sum(each) + n_bytes, device)
        *parts, self.buffer = whole.split([*each, len(whole) - sum(each)])
        whole[: sum(each)] = 0
        numbers = [part.view(torch.int64) for part in parts]
        self.splits = [
            (out[:ranks], found[: 2 * ranks].view(2, ranks))
            for out, found in zip(numbers[::2], numbers[1::2], strict=True)
        ]

    def all_to_all(
        self, rows: Sequence[Tensor], index: Tensor | None, splits_G: Tensor, sent: int, received: int
    ) -> tuple[list[Tensor], Tensor]:
        """Launch an exchange, in the context of `exchange` with `n_bytes` or more.

        Args:
            rows: PARTS tensors [M, C] at most, of any dtypes.
            index: int32, the rows that are sent, sorted by rank; None: all from the first on.
            splits_G: int64, how many go to each rank; the index may have more entries.
            sent, received: how many rows are sent, and come, at most; the same on all ranks.

        Returns:
            [received, C] of each tensor, in this memory, the rows that have come first, sorted by rank; and int64
            [2, G], how many come from each rank, and where they begin.
        """
        at, exchanges = 0, []
        self.barrier()
        for x, (out, found) in zip(rows, self.splits[1:], strict=False):
            width = self._width(x)
            outgoing = self.buffer[at:][: sent * width].view(sent, width)
            at += _lines(sent * width)
            incoming = self.buffer[at:][: received * width].view(received, width)
            at += _lines(received * width)
            _gather_rows(x, index, splits_G, outgoing[:, : _row_bytes(x)])
            out.copy_(splits_G)
            exchanges.append((outgoing, incoming, out, found))
        for parts in exchanges:
            all_to_all_vdev(*parts, self.group)
        came = zip(rows, exchanges, strict=True)
        return [incoming[:, : _row_bytes(x)].view(x.dtype) for x, (_, incoming, _, _) in came], exchanges[0][3]

    def n_bytes(self, rows: Sequence[Tensor], sent: int, received: int) -> int:
        """The bytes of an exchange."""
        return sum(_lines(count * self._width(x)) for x in rows for count in (sent, received))

    def is_dense(self, x: Tensor) -> bool:
        """Whether rows as those of x have no gaps between them in the memory."""
        return self._width(x) == _row_bytes(x)

    def _width(self, x: Tensor) -> int:
        """The bytes from row to row in the memory."""
        vectors = VECTOR * self.blocks
        multiple = vectors if _row_bytes(x) >= vectors else math.lcm(VECTOR, self.blocks)
        return -(-_row_bytes(x) // multiple) * multiple

    def barrier(self) -> None:
        """Have the device wait until all ranks have come here."""
        nothing = self.buffer[:VECTOR].view(1, VECTOR)
        all_to_all_vdev(nothing, nothing, *self.splits[0], self.group)


def all_to_all_vdev(
    outgoing: Tensor, incoming: Tensor, splits: Tensor, found: Tensor, group: dist.ProcessGroup
) -> None:
    """Launch an exchange of rows, all four tensors in symmetric memory.

    Args:
        outgoing: uint8 [·, C], rows sorted by rank.
        incoming: uint8 [·, C], into which the ranks' rows are written one after the other.
        splits: int64 [G], how many rows go to each rank.
        found: int64 [2, G], into which it is written how many rows come from each rank, and where they begin.
        group: the ranks.
    """
    torch.ops.symm_mem.all_to_all_vdev(outgoing, incoming, splits, found, group.group_name)


class NvshmemHop(NamedTuple):
    """Rows that are sent across nodes, and their results.

    Attributes:
        row_S: int32, the rows that are sent, sorted by node; others follow.
        rows_G: int64, how many rows go to each node.
        result_X: int32, which of the S · K results go back, sorted by node; others follow.
        results_G: int64, how many results go back to each node.
        index_X: int32, defined by `octile.parallel.nodes.Transport`.
        n_chosen: K.
    """

    row_S: Tensor
    rows_G: Tensor
    result_X: Tensor
    results_G: Tensor
    index_X: Tensor
    n_chosen: int


class NvshmemTransport:
    """NVSHMEM across nodes. The host waits for nothing.

    Args:
        memory: memory of the ranks of the same index of all nodes.
        max_tokens: the most tokens of a rank.
    """

    waits_for_device = False

    def __init__(self, memory: NvshmemMemory, max_tokens: int):
        self._memory, self.max_tokens, self.nodes = memory, max_tokens, dist.get_world_size(memory.group)

    @property
    def memory(self) -> NvshmemMemory:
        """The memory that the current pass uses."""
        return self._memory.for_pass()

    def plan(self, rows_TC: Tensor, per_node: int) -> tuple[NvshmemHop, Tensor]:
        """Plan a hop; see `octile.parallel.nodes.Transport`."""
        t, k, device = len(rows_TC), rows_TC.shape[1] - 1, rows_TC.device
        experts_TK, copies = rows_TC[:, :-1], min(self.nodes, k)
        node_TK = experts_TK.div(per_node, rounding_mode="floor")
        is_of_GTK = node_TK == torch.arange(self.nodes, dtype=torch.int32, device=device)[:, None, None]
        is_of_GT = is_of_GTK.any(2)
        sent_S = _true_first(is_of_GT)[: t * copies]
        node_S, row_S = sent_S // max(t, 1), sent_S % max(t, 1)
        experts_SK = experts_TK[row_S] - (node_S * per_node)[:, None].to(torch.int32)
        described_SC = torch.cat([experts_SK.masked_fill(~is_of_GTK[node_S, row_S], -1), rows_TC[row_S, -1:]], dim=1)

        rows_G = is_of_GT.sum(1)
        most, memory = (self.max_tokens * copies, self.max_tokens * self.nodes), self.memory
        with memory.exchange(memory.n_bytes([described_SC], *most), device):
            (came_SC,), found_2G = memory.all_to_all([described_SC], None, rows_G, *most)
        memory.in_flight(None, described_SC, rows_G).wait(switches=False)
        counts_G, starts_G = found_2G
        is_row_S = torch.arange(most[1], device=device) < counts_G.sum()
        rows_SC = came_SC.masked_fill(~is_row_S[:, None], -1)

        is_result_SK = rows_SC[:, :-1] >= 0
        before_S = torch.nn.functional.pad(is_result_SK.sum(1).cumsum(0), (1, 0))
        results_G = before_S[starts_G + counts_G] - before_S[starts_G]
        result_X = _true_first(is_result_SK)[: most[1] * min(k, per_node)].to(torch.int32)
        index_X = inverse(node_TK.flatten().argsort(stable=True))
        return NvshmemHop(row_S.to(torch.int32), rows_G, result_X, results_G, index_X, k), rows_SC

    def send(self, rows: Sequence[Tensor], hop: NvshmemHop) -> list[Tensor]:
        """Send rows; see `octile.parallel.nodes.Transport`."""
        most = self.max_tokens * min(self.nodes, hop.n_chosen), self.max_tokens * self.nodes
        memory = self.memory
        with memory.exchange(memory.n_bytes(rows, *most), rows[0].device):
            (first, *others), (counts_G, _) = memory.all_to_all(rows, hop.row_S, hop.rows_G, *most)
            return [_dense(first, counts_G), *others]

    def begin_send_back(
        self, results: InFlight[Tensor], hop: NvshmemHop, y_RD: Tensor, overlaps: bool, lasts: bool
    ) -> InFlight[Tensor]:
        """Begin to send results back; see `octile.parallel.nodes.Transport`."""
        y, count, memory = results.result, len(hop.index_X), self.memory  # y is read on the stream on which it comes
        most = len(hop.result_X), self.max_tokens * hop.n_chosen
        own = y.new_empty(count, y.shape[1]) if lasts or not memory.is_dense(y) else None
        with memory.exchange(memory.n_bytes([y], *most), y.device):
            (found,), _ = memory.all_to_all([y], hop.result_X, hop.results_G, *most)
            found = found[:count] if own is None else own.copy_(found[:count])
        return memory.in_flight(found, y_RD, hop, overlaps=overlaps, holds_results=own is None)


def _blocks(group: dist.ProcessGroup) -> int:
    """The blocks of an exchange, which torch reads from the environment: they are chosen here if nobody else did."""
    if BLOCKS not in os.environ:
        hosts = all_gather_messages(socket.gethostname(), str, group)
        on_nvlink = len(set(hosts)) == 1
        os.environ[BLOCKS] = str(BLOCKS_ON_NVLINK * len(hosts) if on_nvlink else max(BLOCKS_ON_NETWORK, len(hosts)))
    return int(os.environ[BLOCKS])


def _gather_rows(x: Tensor, index: Tensor | None, counts: Tensor, out: Tensor) -> None:
    """Copy the rows of an index, of which as many are used as the counts add up to, to rows of bytes."""
    from octile.kernels.triton import gather_rows

    x = x.contiguous()
    x = x if x.data_ptr() % VECTOR == 0 else x.clone()
    gather_rows.launch(x.view(torch.uint8), index, counts, out)


def _dense(x: Tensor, counts: Tensor) -> Tensor:
    """Copy rows that are longer in memory, as many as the counts add up to; the others have any values."""
    from octile.kernels.triton import gather_rows

    if x.is_contiguous():
        return x
    found = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    gather_rows.launch(x.view(torch.uint8), None, counts, found.view(torch.uint8))
    return found


def _row_bytes(x: Tensor) -> int:
    return x.shape[1] * x.itemsize


def _true_first(mask: Tensor) -> Tensor:
    """The indices of a mask's elements, int64: first those that are true, in order, then the others."""
    return mask.logical_not().flatten().to(torch.uint8).argsort(stable=True)


def _lines(n_bytes: int) -> int:
    return -(-n_bytes // LINE) * LINE
