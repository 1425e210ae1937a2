"""Expert parallelism by kernels on symmetric memory: rows are stored to the memory of other GPUs, over NVLink.

The host waits for nothing, so a step can be captured in a CUDA graph. Every tensor has capacity for any distribution
of tokens, even for all tokens on one rank: no token is dropped. Each row has a fixed slot in the memory of every rank
(`octile.kernels.triton.peer_rows`), and all counts stay on the device:

    send         barrier, stores to the ranks that have one of a row's experts, and copies of what has come
    send_back    barrier, stores to the ranks of the tokens, barrier; the sums read the results where they have come

The exchanges of a GPU run on one stream of their own, in the order in which they are begun. Each runs after what the
current stream was asked to do before. It also runs after what was asked of the stream that reads the results of the
exchange before in the same memory. With `begin_…` the current stream goes on meanwhile, and as many GEMMs as run in
the time of the exchange leave it the SMs that it uses. Of two passes that are interleaved (`octile.nn.interleave`)
each has a buffer of its own.

A barrier says that all ranks have come to an exchange, and so read nothing of the one before it any more. Ranks that
run the same passes come to the same exchanges in the same order.

Results have the same bits as by `all_to_all_single`: the rows of an expert have the same order, and the rank of a token
sums them. Rows of zeros follow those of the last expert.

Between nodes rows cross otherwise (`octile.parallel.nodes`); these kernels then send them on inside each node.

Shapes: as in `octile.parallel.experts`; M the most tokens of a rank, N = W · M + 1, R = W · M · K or less. Across nodes
S rows come to a rank, at most M from each node.
"""

from __future__ import annotations

import ctypes
import os
import socket
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from octile.formats import TILE
from octile.kernels.cuda.gemm import num_sms as gemm_sms
from octile.kernels.memory_layout import VECTOR, new_scale, padded
from octile.nn.dispatcher import InFlight, RoutingPlan
from octile.nn.interleave import is_first
from octile.ops.permute import count_tokens, routing_plan
from octile.parallel.experts import ExpertDispatcher, Ranks
from octile.parallel.links import can_access
from octile.parallel.messages import all_gather_messages
from octile.scaled import ScaledTensor

if TYPE_CHECKING:
    from octile.kernels.triton.peer_rows import Peers

T = TypeVar("T")

NVSHMEM: Final = "NVSHMEM"  # torch's name of the backend
NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


class ExchangeMemory:
    """Memory of each rank of a group that other ranks access. All exchanges of the group use it, one after the other.

    Args:
        group: the ranks.
        num_sms: how many SMs an exchange uses; None: as many as were fastest on two H200s, and fewer if GEMMs overlap,
            but no more than the GPU has.
    """

    def __init__(self, group: dist.ProcessGroup, num_sms: int | None = None):
        from octile.kernels.triton.launch_config import PEER_SMS, PEER_SMS_OVERLAPPED  # late: needs Triton

        self.group = group
        on_gpu = torch.cuda.is_available()
        there = gemm_sms.multiprocessors(torch.cuda.current_device()) if on_gpu else PEER_SMS
        self.num_sms = num_sms or min(PEER_SMS, there)
        self.num_sms_overlapped = num_sms or min(PEER_SMS_OVERLAPPED, there)
        self.buffer = torch.empty(0, dtype=torch.uint8)
        self.handle: Any = None  # of torch, which keeps the buffers of all ranks mapped
        self._is_captured = False  # whether a CUDA graph may have the addresses of the buffer and what belongs to it
        self._captured: list[object] = []  # smaller buffers that graphs may still use, with what belongs to them
        self._n_bytes = 0  # of the last exchange
        self._first: Self | None = None  # of two interleaved passes
        self._reader: torch.cuda.Stream | None = None  # that reads the results of the last exchange
        self._results: weakref.ref[InFlight[Any]] | None = None  # those in the buffer that were not waited for

    def for_pass(self) -> Self:
        """Return this memory, or another one in the first of two interleaved passes: both have exchanges under way."""
        if not is_first():
            return self
        if self._first is None:
            self._first = type(self)(self.group)
            self._first.num_sms, self._first.num_sms_overlapped = self.num_sms, self.num_sms_overlapped
        return self._first

    def reserve(self, n_bytes: int, device: torch.device) -> None:
        """Have at least so many bytes. All ranks call it with the same number; the first calls wait for each other.

        A smaller buffer that a captured exchange used stays as long as this object: the graph has its addresses.

        Raises:
            RuntimeError: the memory is too small, and a CUDA graph is being captured.
        """
        is_capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if len(self.buffer) >= n_bytes:
            self._is_captured |= is_capturing
            return
        if is_capturing:
            raise RuntimeError(
                f"an exchange needs {n_bytes:,} bytes of symmetric memory, of which there are {len(self.buffer):,}: "
                "run it once before it is captured in a CUDA graph"
            )
        if self._is_captured:
            self._captured.append(self._in_use())
            self._is_captured = False
        self.synchronize()  # nobody uses the smaller buffer any more
        self._grow(n_bytes, device)
        self.synchronize()  # nobody uses the larger one before

    def _in_use(self) -> object:
        """Return what a captured exchange uses."""
        return self.buffer, self.handle

    def _grow(self, n_bytes: int, device: torch.device) -> None:
        """Allocate a buffer of at least so many bytes."""
        raise NotImplementedError

    @contextmanager
    def exchange(self, n_bytes: int, device: torch.device) -> Iterator[None]:
        """Launch an exchange that needs so many bytes inside, on the stream of exchanges.

        Raises:
            RuntimeError: the results of a `begin_send_back` were not waited for.
        """
        if self._results is not None and self._results() is not None:
            raise RuntimeError("an exchange must not begin before the results of the one before it are read")
        self.reserve(n_bytes, device)
        self._n_bytes = n_bytes
        if device.type != "cuda":
            yield
            return
        stream, current, reader = _stream(device), torch.cuda.current_stream(device), self._reader
        stream.wait_stream(current)
        if reader is not None and reader != current and _is_capturing(reader) == _is_capturing(current):
            stream.wait_stream(reader)
        self._reader = current
        with torch.cuda.stream(stream):
            yield

    def in_flight(self, result: T, *used: object, overlaps: bool = False, holds_results: bool = False) -> InFlight[T]:
        """Return the result of the exchange that was launched last.

        Args:
            result: result of the exchange.
            used: the tensors that it reads.
            overlaps: whether GEMMs leave SMs to it, as long as it should take, or until it is waited for.
            holds_results: whether the result lies in the buffer.
        """
        from octile.kernels.triton.launch_config import PEER_FLOPS_PER_BYTE  # late: needs Triton

        device, read = self.buffer.device, [used]
        event = _stream(device).record_event() if device.type == "cuda" else None

        def arrive() -> None:
            if event is not None:
                event.wait()
            if restore_gemms is not None:
                restore_gemms()
            read.clear()
            if holds_results:
                self._results = None

        flight, restore_gemms = InFlight(result, arrive), None
        if overlaps and event is not None:  # GEMMs get their SMs back after a failure, too
            flops = PEER_FLOPS_PER_BYTE * self._n_bytes
            restore_gemms = weakref.finalize(flight, gemm_sms.leave_free(self.num_sms_overlapped, flops))
        if holds_results:
            self._results = weakref.ref(flight)
        return flight

    def allocate(self, n_bytes: int, device: torch.device) -> tuple[Tensor, list[int]]:
        """Allocate memory on each rank: this rank's, and the addresses of all ranks', 0 where they have none here."""
        os.environ |= NO_MULTICAST
        from torch.distributed import _symmetric_memory as symmetric_memory

        if dist.get_world_size(self.group) == 1:  # NVSHMEM makes no team of one
            memory = torch.empty(n_bytes, dtype=torch.uint8, device=device)
            return memory, [memory.data_ptr()]
        memory = symmetric_memory.empty(n_bytes, dtype=torch.uint8, device=device)
        if symmetric_memory.get_backend(device) == NVSHMEM:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))  # never freed: that waits for all ranks
        self.handle = symmetric_memory.rendezvous(memory, self.group.group_name)
        addresses = self.handle.buffer_ptrs
        offset = memory.data_ptr() - addresses[dist.get_rank(self.group)]  # the same on all ranks
        return memory, [address and address + offset for address in addresses]

    def synchronize(self) -> None:
        """Wait until all ranks have done what they were asked to do before."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        dist.barrier(self.group)


class PeerMemory(ExchangeMemory):
    """Memory of each rank of a group that all ranks write to.

    Args:
        group: ranks on GPUs of one host that can access each other's memory.
        num_sms: as in `ExchangeMemory`.
    """

    peers: Peers

    def _in_use(self) -> object:
        return self.buffer, self.handle, self.peers

    def _grow(self, n_bytes: int, device: torch.device) -> None:
        from octile.kernels.triton.peer_rows import Peers, num_flags

        flag_bytes = padded(num_flags(dist.get_world_size(self.group)) * 4)
        whole, addresses = self.allocate(flag_bytes + padded(n_bytes), device)
        if not all(addresses):
            raise RuntimeError(
                "symmetric memory has no address of a peer's buffer, although GPUs can access each other's"
            )
        whole[:flag_bytes] = 0
        self.buffer = whole[flag_bytes:]
        flags = torch.tensor(addresses, dtype=torch.int64, device=device)
        barriers = torch.zeros(2, dtype=torch.int32, device=device)
        self.peers = Peers(dist.get_rank(self.group), flags + flag_bytes, flags, barriers, self.num_sms)

    def peers_of(self, overlaps: bool) -> Peers:
        """The peers, for an exchange that overlaps with GEMMs, or for one alone."""
        return self.peers._replace(num_sms=self.num_sms_overlapped) if overlaps else self.peers

    def barrier(self) -> None:
        """Have the device wait until all ranks have come here."""
        from octile.kernels.triton import peer_rows

        peer_rows.launch_barrier(self.peers)


class Handle(NamedTuple):
    """The way of a plan's rows.

    Attributes:
        experts_SK: the experts of the rows that this rank sends to its peers, its tokens if there is one node.
        local_NK: those of the rows that all peers send, counted from the first expert of this rank.
        load_E: how many tokens of all ranks each of all experts has, int64, if there is one node.
        hop: across nodes, if there are several; as `octile.parallel.nodes` plans it.
    """

    experts_SK: Tensor
    local_NK: Tensor
    load_E: Tensor | None
    hop: Any = None


class PeerDispatcher(ExpertDispatcher):
    """An `ExpertDispatcher` by kernels on symmetric memory, for ranks of one host.

    Args:
        n_experts, n_chosen, hidden_size: as in `ExpertDispatcher`.
        memory: memory of the ranks, or of those of this rank's node.
        max_tokens: M, the most tokens that a rank has in a forward pass.
        max_rows: R, the most rows of this rank's experts in a forward pass; None: W · M · K, which always suffice.
        too_many_rows: float32 [] on the device, or None, as in `shard_experts`.
        ranks: as in `ExpertDispatcher`; those of the memory if not given.

    Attributes:
        max_rows: may be raised, on all ranks alike, to at most enough_rows.
        enough_rows: W · M · K.

    Raises:
        ValueError: the ranks disagree about a size, W does not divide E, or max_tokens or max_rows is less than 1.
    """

    waits_for_device = False

    def __init__(
        self,
        n_experts: int,
        n_chosen: int,
        hidden_size: int,
        memory: PeerMemory,
        max_tokens: int,
        max_rows: int | None = None,
        too_many_rows: Tensor | None = None,
        ranks: Ranks = None,
    ):
        for name, value in (("max_tokens", max_tokens), ("max_rows", max_rows)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        super().__init__(n_experts, n_chosen, hidden_size, memory.group if ranks is None else ranks)
        self._memory, self.max_tokens = memory, max_tokens
        peers = dist.get_world_size(memory.group)
        self._max_sent = max_tokens * (self.n_ranks // peers)  # rows that a rank sends to its peers
        self.enough_rows = self.n_ranks * max_tokens * n_chosen
        self.max_rows = self.enough_rows if max_rows is None else min(self.enough_rows, max_rows)
        self.too_many_rows = too_many_rows

    def with_max_tokens(self, max_tokens: int) -> PeerDispatcher:
        """Return this dispatcher for at most so many tokens of any rank, in the same memory: fewer rows.

        All ranks must use the same one of them.

        Raises:
            ValueError: this dispatcher is of fewer tokens.
        """
        if not 1 <= max_tokens <= self.max_tokens:
            raise ValueError(f"max_tokens must be from 1 to {self.max_tokens}, not {max_tokens}")
        smaller = copy(self)
        smaller.max_tokens = max_tokens
        smaller._max_sent = self._max_sent // self.max_tokens * max_tokens
        smaller.enough_rows = self.enough_rows // self.max_tokens * max_tokens
        smaller.max_rows = min(self.max_rows, smaller.enough_rows)
        return smaller

    @property
    def memory(self) -> PeerMemory:
        """The memory that the current pass uses."""
        return self._memory.for_pass()

    def plan(self, experts_TK: Tensor, load_E: Tensor) -> RoutingPlan:
        """Plan where rows go, and tell the other ranks: experts_TK are the experts of each token.

        Raises:
            ValueError: there are more tokens than max_tokens.
            RuntimeError: the experts of this rank have more than max_rows rows, and too_many_rows was not given. On a
                GPU it is raised when the host next waits, and what uses the plan is not computed.
        """
        self._check_tokens(experts_TK)
        experts_TK = experts_TK.contiguous()
        local = self.n_experts // self.n_ranks
        gathered_NK = self._gather(experts_TK)
        local_NK = self._count_from_here(gathered_NK)
        total_E = count_tokens(gathered_NK + 1, self.n_experts + 1)[0, 1:]  # −1 for tokens that a rank does not have
        _, order_R, offs_E = routing_plan(local_NK, count_tokens(local_NK, local + 1)[0])
        row_ids = torch.arange(experts_TK.numel(), dtype=torch.int32, device=order_R.device)
        handle = Handle(experts_TK, local_NK, total_E)
        return self._plan(row_ids.view(experts_TK.shape), order_R, offs_E[:local], handle)

    def _check_tokens(self, experts_TK: Tensor) -> None:
        if len(experts_TK) > self.max_tokens:
            raise ValueError(f"a rank must have at most max_tokens = {self.max_tokens} tokens, not {len(experts_TK)}")

    def _gather(self, rows_SC: Tensor) -> Tensor:
        """Gather rows of integers of all peers as int32 [N, C], −1 in those that a peer has not; valid until sent."""
        from octile.kernels.triton import peer_rows

        n, c = dist.get_world_size(self.memory.group) * self._max_sent, rows_SC.shape[1]
        with self.memory.exchange(n * c * 4, rows_SC.device):
            self.memory.barrier()
            peer_rows.launch_send_experts(rows_SC, self._max_sent, self.memory.peers)
            self.memory.barrier()
        self.memory.in_flight(None).wait(switches=False)
        return self.memory.buffer[: n * c * 4].view(torch.int32).view(n, c)

    def _count_from_here(self, experts_NK: Tensor) -> Tensor:
        """Number experts, of which the first is the first peer's, from the first of this rank; others become E/W."""
        from octile.kernels.triton import peer_rows

        local = self.n_experts // self.n_ranks
        return peer_rows.launch_local_experts(experts_NK, dist.get_rank(self.memory.group) * local, local)

    def _plan(self, row_ids_TK: Tensor, order_R: Tensor, offs_E: Tensor, handle: Handle) -> RoutingPlan:
        """Make the plan of sorted rows, of which there may be too many."""
        fits = offs_E[-1] <= self.max_rows
        if self.too_many_rows is None:
            torch._assert_async(fits, f"the experts of a rank have more than {self.max_rows} rows")
        else:
            self.too_many_rows.masked_fill_(~fits, 1.0)
            offs_E = offs_E.clamp(max=self.max_rows)  # so that nothing is read or written beyond the tensors
        row_R = torch.arange(self.max_rows, dtype=torch.int32, device=order_R.device)
        after = handle.local_NK.numel()  # after the last expert: the row of zeros
        return RoutingPlan(row_ids_TK, torch.where(row_R < offs_E[-1], order_R[: self.max_rows], after), offs_E, handle)

    def total_load(self, load_E: Tensor, plan: RoutingPlan) -> Tensor:
        """Return the number of tokens that all ranks send to each expert, which `plan` has counted."""
        return plan.handle.load_E

    def begin_send(self, x_TD: Tensor, plan: RoutingPlan, overlaps: bool = True) -> InFlight[Tensor]:
        """Begin to send each row once to every rank that has one of its experts: [N, D], the last row zeros.

        Rows that no expert of this rank needs are not written.
        """
        out, _ = self._send(x_TD, None, plan, overlaps)
        return self.memory.in_flight(out, x_TD, plan, overlaps=overlaps)

    def begin_send_quantized(
        self, x_TD: ScaledTensor, plan: RoutingPlan, overlaps: bool = True
    ) -> InFlight[ScaledTensor]:
        """Begin to send rows in 1×128 tiles as `begin_send` does: [N, D]."""
        data, scale = self._send(x_TD.data, x_TD.scale, plan, overlaps)
        assert scale is not None
        return self.memory.in_flight(ScaledTensor(data, scale, TILE), x_TD, plan, overlaps=overlaps)

    def begin_send_back(
        self, y_RD: Tensor, plan: RoutingPlan, overlaps: bool = True, lasts: bool = False
    ) -> InFlight[Tensor]:
        """Begin to send each result to the rank of its token: [T·K, D], ordered by row_ids_TK.

        It is valid until the next exchange, unless it lasts.
        """
        from octile.kernels.triton import peer_rows

        rows, k = plan.handle.experts_SK.shape
        results, row_bytes = self._max_sent * k, y_RD.shape[1] * y_RD.itemsize
        own = y_RD.new_empty(rows * k, y_RD.shape[1]) if lasts else None
        with self.memory.exchange(results * row_bytes, y_RD.device):
            self.memory.barrier()
            peers = self.memory.peers_of(overlaps)
            peer_rows.launch_send_back(_bytes(y_RD), plan.order_R, plan.offs_E, results, peers)
            self.memory.barrier()
            found = self.memory.buffer[: rows * k * row_bytes].view(y_RD.dtype).view(rows * k, y_RD.shape[1])
            found = found if own is None else own.copy_(found)
        return self.memory.in_flight(found, y_RD, plan, overlaps=overlaps, holds_results=not lasts)

    def _send(
        self, x_TD: Tensor, scale: Tensor | None, plan: RoutingPlan, overlaps: bool
    ) -> tuple[Tensor, Tensor | None]:
        from octile.kernels.triton import peer_rows

        experts_SK, local_NK, *_ = plan.handle
        out = x_TD.new_empty(len(local_NK) + 1, x_TD.shape[1])  # of the current stream's memory, as it is read there
        out_scale = None if scale is None else new_scale(out, *TILE)
        local, data_bytes = self.n_experts // self.n_ranks, _bytes(out)
        n_bytes = peer_rows.scales_at(len(local_NK), data_bytes.shape[1])
        n_bytes += 0 if out_scale is None else out_scale.numel() * out_scale.itemsize
        with self.memory.exchange(n_bytes, x_TD.device):
            peer_rows.launch_exchange(
                _bytes(x_TD), scale, experts_SK, local_NK, local, self.memory.buffer, data_bytes, out_scale,
                self._max_sent, self.memory.peers_of(overlaps),
            )  # fmt: skip
        return out, out_scale


def why_not_peers(groups: Sequence[dist.ProcessGroup]) -> str | None:
    """Return why the ranks of a dispatcher, or of a node, cannot write to each other's memory; None: they can.

    All ranks call it, and get the same.

    Args:
        groups: those of the hops: across nodes, if there are several, and inside a node, which is the last.
    """
    if len(groups) > 2:
        return "the mesh of ranks has more than two dimensions"
    why_not = _why_not_peers_of_a_node(groups[-1])
    for across in groups[:-1]:
        why_not = next(filter(None, all_gather_messages(why_not, str | None, across)), None)
    return why_not


def _why_not_peers_of_a_node(group: dist.ProcessGroup) -> str | None:
    if not torch.cuda.is_available() or "nccl" not in dist.get_backend(group):
        return "the ranks are not on GPUs with NCCL"
    device = torch.cuda.current_device()
    own = socket.gethostname(), str(torch.cuda.get_device_properties(device).uuid)
    found = all_gather_messages(own, tuple[str, str], group)
    if len({host for host, _ in found}) > 1:
        return "the ranks are on several hosts"
    if len(set(found)) < len(found):
        return "two ranks share a GPU"
    others = [other for other in range(torch.cuda.device_count()) if other != device]
    can = all(can_access(device, other) for other in others)
    return None if all(all_gather_messages(can, bool, group)) else "a GPU cannot access another one's memory"


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all exchanges of a GPU; its kernels have few blocks, for which another GPU waits."""
    return torch.cuda.Stream(device, priority=-2)


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def _bytes(x: Tensor) -> Tensor:
    x = x.contiguous()
    return (x if x.data_ptr() % VECTOR == 0 else x.clone()).view(torch.uint8)
