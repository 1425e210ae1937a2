"""Rows sent between ranks that are simulated one after the other, in one process."""

import pytest
import torch
from torch import Tensor

from octile.kernels.memory_layout import new_scale
from octile.kernels.triton import peer_rows as kernel
from octile.ops.permute import count_tokens, routing_plan
from octile.ops.quantize import quantize
from tests.kernels.triton.comparison import extreme
from tests.kernels.triton.gpus import any_gpu

E, K, M = 8, 3, 11  # experts, experts per token, most tokens of a rank
TOKENS = {1: [11], 2: [11, 4], 4: [0, 11, 5, 1]}
every_world = pytest.mark.parametrize("world", TOKENS)

pytestmark = [pytest.mark.usefixtures("gpu"), any_gpu]


class World:
    """Ranks with random experts for each token, that come to each barrier together."""

    def __init__(self, world: int):
        torch.manual_seed(world)
        self.local = E // world
        self.experts = [torch.rand(t, E).topk(K).indices for t in TOKENS[world]]
        self.buffers = [torch.zeros(2**18, dtype=torch.uint8) for _ in range(world)]
        self.flags = [torch.zeros(kernel.num_flags(world), dtype=torch.int32) for _ in range(world)]
        addresses = [torch.tensor([t.data_ptr() for t in tensors]) for tensors in (self.buffers, self.flags)]
        self.peers = [
            kernel.Peers(rank, *addresses, torch.zeros(2, dtype=torch.int32), num_sms=2) for rank in range(world)
        ]

    def barrier(self) -> None:
        for peers in self.peers:
            kernel.launch_barrier(peers, wait=False)
        for peers in self.peers:
            kernel.launch_barrier(peers, signal=False)

    def local_experts(self) -> list[Tensor]:
        """The experts of all tokens, counted from the first of each rank."""
        for experts_TK, peers in zip(self.experts, self.peers, strict=True):
            kernel.launch_send_experts(experts_TK, M, peers)
        self.barrier()
        count = len(self.peers) * M
        found = [b[: count * K * 4].view(torch.int32).view(count, K) for b in self.buffers]
        return [kernel.launch_local_experts(t, rank * self.local, self.local) for rank, t in enumerate(found)]

    def expected_local_experts(self, rank: int) -> Tensor:
        experts = torch.full((len(self.peers), M, K), -1)
        for w, experts_TK in enumerate(self.experts):
            experts[w, : len(experts_TK)] = experts_TK
        of_rank = experts.view(-1, K) - rank * self.local
        return torch.where((of_rank >= 0) & (of_rank < self.local), of_rank, self.local).to(torch.int32)


@every_world
def test_each_rank_numbers_the_experts_of_all_tokens(world: int):
    ranks = World(world)
    for rank, found in enumerate(ranks.local_experts()):
        assert torch.equal(found, ranks.expected_local_experts(rank))


@pytest.mark.one_case
@every_world
@pytest.mark.parametrize(("dtype", "width"), [(torch.float32, 160), (torch.bfloat16, 7), (torch.bfloat16, 2056)])
def test_rows_arrive_where_their_experts_are(world: int, dtype: torch.dtype, width: int):
    ranks = World(world)
    rows = [torch.randn(t, width).to(dtype) for t in TOKENS[world]]
    out = [torch.full((world * M + 1, width), 9.0, dtype=dtype) for _ in rows]
    _send(ranks, [x.view(torch.uint8) for x in rows], None, [t.view(torch.uint8) for t in out], None)
    for rank, found in enumerate(out):
        expected = torch.full_like(found, 9.0)
        expected[-1] = 0.0
        for n in _is_needed(ranks, rank):
            expected[n] = rows[n // M][n % M]
        assert torch.equal(found, expected)


@every_world
def test_quantized_rows_arrive_with_their_scales(world: int):
    ranks = World(world)
    rows = [quantize(extreme(t, 200), 1, 128, "e4m3", True) for t in TOKENS[world]]
    out = [torch.full((world * M + 1, 200), 9, dtype=torch.uint8) for _ in rows]
    scales = [new_scale(t, 1, 128).fill_(9.0) for t in out]
    _send(ranks, [data.view(torch.uint8) for data, _ in rows], [scale for _, scale in rows], out, scales)
    for rank, (found, found_scale) in enumerate(zip(out, scales, strict=True)):
        expected, expected_scale = torch.full_like(found, 9), torch.full_like(found_scale, 9.0)
        expected[-1], expected_scale[-1] = 0, 1.0
        for n in _is_needed(ranks, rank):
            data, scale = rows[n // M]
            expected[n], expected_scale[n] = data.view(torch.uint8)[n % M], scale[n % M]
        assert torch.equal(found, expected)
        assert torch.equal(found_scale, expected_scale)


@every_world
def test_each_result_arrives_at_its_place(world: int):
    ranks, width = World(world), 72
    results, expected = [], [torch.zeros(t * K, width, dtype=torch.bfloat16) for t in TOKENS[world]]
    for rank in range(world):
        local = ranks.expected_local_experts(rank)
        _, order, offs = routing_plan(local, count_tokens(local, ranks.local + 1)[0])
        y = torch.randn(len(order), width, dtype=torch.bfloat16)
        results.append((y.view(torch.uint8), order, offs[: ranks.local]))
        for r in range(int(offs[ranks.local - 1])):
            expected[order[r] // (M * K)][order[r] % (M * K)] = y[r]
    for peers, (y, order, offs) in zip(ranks.peers, results, strict=True):
        kernel.launch_send_back(y, order, offs, M * K, peers)
    for buffer, sums in zip(ranks.buffers, expected, strict=True):
        assert torch.equal(buffer[: sums.nbytes].view(torch.bfloat16).view(sums.shape), sums)


def test_each_barrier_counts_one_more():
    ranks = World(2)
    for passed in (1, 2):
        ranks.barrier()
        assert [peers.barriers.tolist() for peers in ranks.peers] == [[passed, 0], [passed, 0]]


@every_world
def test_the_buffer_begins_at_a_cache_line(world: int):
    assert kernel.num_flags(world) * 4 % kernel.CACHE_LINE == 0


def _send(
    ranks: World, rows: list[Tensor], scales: list[Tensor] | None, out: list[Tensor], out_scales: list[Tensor] | None
) -> None:
    ranks.barrier()
    for half in ({"receive": False}, {"send": False}):
        for rank, peers in enumerate(ranks.peers):
            scale, out_scale = (None if t is None else t[rank] for t in (scales, out_scales))
            own = ranks.experts[rank], ranks.expected_local_experts(rank), ranks.local, ranks.buffers[rank]
            kernel.launch_exchange(rows[rank], scale, *own, out[rank], out_scale, M, peers, **half)


def _is_needed(ranks: World, rank: int) -> list[int]:
    """The rows that have an expert on a rank."""
    return (ranks.expected_local_experts(rank) < ranks.local).any(1).nonzero().flatten().tolist()
