"""`octile bench dispatch`: dispatch and combine between GPUs vs. a copy to a peer and vs. plain `all_to_all_single`.

Started by `torchrun --nproc-per-node 2 -m octile bench dispatch`, one rank per GPU of one host. Every rank has 4096
tokens of width 7168, whose 8 experts of 256 are in 4 of 8 groups, as DeepSeek-V3 chooses them.

    dispatch    each row once to each rank that has one of its experts, in FP8 with its scales, and the copy out of the
                buffer that other ranks write to
    combine     each result in BF16 to the rank of its token
    plain       each row in BF16 to each of its experts, and the results back, by `all_to_all_single`: alone, and with
                the permutation of the rows before the first one and of the results after the second one
    copy        to the memory of the next rank, by all ranks at the same time

The speed is that of the bytes that leave a rank's GPU, the mean of all ranks. Kernels on symmetric memory are captured
in a CUDA graph.

Source: DeepSeek-V3 (arXiv 2412.19437) §2.1.2 and §3.2.2.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from octile.bench.goals import BOTH_WAYS, COMBINE_BF16, DISPATCH_FP8, dispatch_verdicts
from octile.bench.rows import LEGEND, Row, compare, table_with
from octile.nn.dispatcher import RoutingPlan
from octile.ops.quantize import quantize
from octile.parallel.experts import ExpertDispatcher, exchange
from octile.parallel.ranks import world
from octile.parallel.symmetric_memory import PeerDispatcher, PeerMemory, why_not_peers
from octile.scaled import ScaledTensor
from octile.torchrun import count_ranks

TOKENS, HIDDEN, CHOSEN, EXPERTS, GROUPS, LIMIT = 4096, 7168, 8, 256, 8, 4
SMS = (8, 16, 24, 32, 48, 64, 96, 128)
BLOCKS = ((8192, 8), (8192, 16), (16384, 8), (16384, 16), (32768, 16), (16384, 32))  # words at a time, warps
COPY_BYTES = 256 * 2**20
GEMM = 8192, 4096, 7168
CALLS, ROUNDS = 10, 5


class Exchange(NamedTuple):
    """A call, and the bytes that it sends from this GPU to others."""

    call: Callable[[], object]
    n_bytes: int


def rows() -> Iterator[Row]:
    """Measure on all ranks, and yield the rows on rank 0.

    Raises:
        ValueError: torchrun has not started two or more ranks, or their GPUs cannot write to each other's memory.
    """
    if count_ranks() < 2 or not torch.cuda.is_available():
        raise ValueError("dispatch is measured on 2 or more GPUs: torchrun --nproc-per-node 2 -m octile bench dispatch")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    try:
        if why_not := why_not_peers([world()]):
            raise ValueError(f"dispatch is measured on GPUs that write to each other's memory: {why_not}")
        for row in _measure(device):
            if dist.get_rank() == 0:
                yield row
    finally:
        dist.destroy_process_group()


def show(rows: Sequence[Row]) -> str:
    """Format the table, and the verdicts on the goals."""
    return "\n\n".join((table_with(LEGEND, rows), dispatch_verdicts(rows)))


def _measure(device: torch.device) -> Iterator[Row]:
    torch.manual_seed(dist.get_rank())
    experts_TK, load_E = choose_experts(device)
    x = torch.randn(TOKENS, HIDDEN, device=device, dtype=torch.bfloat16)
    data, scale = quantize(x, 1, 128, "e4m3", True)
    q = ScaledTensor(data, scale, (1, 128))
    memory = PeerMemory(world())
    peers = PeerDispatcher(EXPERTS, CHOSEN, HIDDEN, memory, TOKENS)
    collectives = ExpertDispatcher(EXPERTS, CHOSEN, HIDDEN)

    copy = Exchange(*_peer_copy(memory, device))
    copy_speed = gb_per_s(copy, call_seconds(copy.call))
    plain = _plain(experts_TK, x, False)
    plain_seconds = {
        "plain": call_seconds(plain.call),
        "plain, permuted": call_seconds(_plain(experts_TK, x, True).call),
    }
    yield Row("copy to a peer", f"{megabytes(copy)}", copy_speed, "GB/s")
    speed = gb_per_s(plain, plain_seconds["plain"])
    yield compare("plain all_to_all_single", f"BF16 and back, {megabytes(plain)}", speed, "GB/s", "copy", copy_speed)

    plan = collectives.plan(experts_TK, load_E)
    y = torch.randn(len(plan.order_R), HIDDEN, device=device, dtype=torch.bfloat16)
    both = [dispatch(collectives, q, plan, experts_TK), combine(collectives, y, plan, experts_TK)]
    times = [call_seconds(e.call) for e in both]
    for what, e, seconds in zip((DISPATCH_FP8, COMBINE_BF16), both, times, strict=True):
        yield compare("all_to_all_single", f"{what}, {megabytes(e)}", gb_per_s(e, seconds), "GB/s", "copy", copy_speed)
    yield from _vs_plain("all_to_all_single", sum(times), plain_seconds)

    plan = peers.plan(experts_TK, load_E)
    y = torch.randn(len(plan.order_R), HIDDEN, device=device, dtype=torch.bfloat16)
    both = [dispatch(peers, q, plan, experts_TK), combine(peers, y, plan, experts_TK)]
    gemm, (m, n, k) = _gemm(device), GEMM
    gemms = captured(gemm)
    alone = graph_seconds(gemms.replay)
    for num_sms in sorted({*SMS, memory.num_sms}):
        _use_sms(memory, num_sms)
        is_default = num_sms == memory.num_sms
        case = f"symmetric memory, {num_sms} SMs" + " (default)" * is_default
        graphs = [captured(e.call) for e in both]
        times = [graph_seconds(graph.replay) for graph in graphs]
        for what, e, seconds in zip((DISPATCH_FP8, COMBINE_BF16), both, times, strict=True):
            goal = what if is_default else None
            yield compare(case, f"{what}, {megabytes(e)}", gb_per_s(e, seconds), "GB/s", "copy", copy_speed, goal)
        yield from _vs_plain(case, sum(times), plain_seconds, is_default)
        together, exchanged = _seconds_together(gemms.replay, graphs[1].replay)
        during, otherwise = (2e-12 * m * n * k / seconds for seconds in (together, alone))
        yield compare(case, "GEMM during combine", during, "TFLOPS", "alone", otherwise)
        yield compare(case, "combine during GEMM", gb_per_s(both[1], exchanged), "GB/s", "copy", copy_speed)
    _use_sms(memory, memory.num_sms)
    for what, call in (("plan", partial(peers.plan, experts_TK, load_E)), ("barrier", memory.barrier)):
        yield Row("symmetric memory", what, 1e6 * graph_seconds(captured(call).replay), "µs")
    for words, warps in BLOCKS:
        with _blocks(words, warps):
            for what, e in zip((DISPATCH_FP8, COMBINE_BF16), both, strict=True):
                seconds = graph_seconds(captured(e.call).replay)
                case = f"{words // 256} KB at a time, {warps} warps"
                yield compare(case, f"{what}, {megabytes(e)}", gb_per_s(e, seconds), "GB/s", "copy", copy_speed)


def choose_experts(device: torch.device) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token at random, in LIMIT of GROUPS groups: int64 [T, K], and their loads [E]."""
    scores = torch.rand(TOKENS, EXPERTS, device=device)
    groups = torch.rand(TOKENS, GROUPS, device=device).topk(LIMIT).indices
    is_chosen = torch.zeros(TOKENS, GROUPS, dtype=torch.bool, device=device).scatter_(1, groups, True)
    scores.masked_fill_(~is_chosen.repeat_interleave(EXPERTS // GROUPS, 1), -1.0)
    experts = scores.topk(CHOSEN).indices
    return experts, experts.flatten().bincount(minlength=EXPERTS)


def _is_to(experts_TK: Tensor) -> Tensor:
    """Which rank each of a token's experts is on: [W, T, K]."""
    ranks = torch.arange(dist.get_world_size(), device=experts_TK.device)
    return experts_TK // (EXPERTS // len(ranks)) == ranks[:, None, None]


def _others(counts_W: Tensor) -> int:
    return int(counts_W.sum() - counts_W[dist.get_rank()])


def dispatch(dispatcher: ExpertDispatcher, q: ScaledTensor, plan: RoutingPlan, experts_TK: Tensor) -> Exchange:
    """Make the dispatch of FP8 rows q [T, D], and count the bytes that leave this rank."""
    rows_out = _others(_is_to(experts_TK).any(2).sum(1))
    return Exchange(lambda: dispatcher.send_quantized(q, plan), rows_out * (HIDDEN + 4 * q.scale.shape[1]))


def combine(dispatcher: ExpertDispatcher, y_RD: Tensor, plan: RoutingPlan, experts_TK: Tensor) -> Exchange:
    """Make the combine of expert results y [R, D], and count the bytes that leave this rank."""
    counts = _is_to(experts_TK).sum((1, 2))
    sent = [torch.empty_like(counts) for _ in counts]
    dist.all_gather(sent, counts)
    results_out = _others(torch.stack(sent)[:, dist.get_rank()])
    return Exchange(lambda: dispatcher.send_back(y_RD, plan), results_out * HIDDEN * 2)


def _plain(experts_TK: Tensor, x: Tensor, permuted: bool) -> Exchange:
    counts = _is_to(experts_TK).sum((1, 2))
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts)
    out, into = counts.tolist(), arriving.tolist()
    order = experts_TK.flatten().argsort(stable=True)
    token, row_ids, sent = order // CHOSEN, order.argsort(), x.repeat_interleave(CHOSEN, 0)

    def there_and_back() -> None:
        rows = x.index_select(0, token) if permuted else sent
        results = exchange(exchange(rows, out, into, world()), into, out, world())
        if permuted:
            results.index_select(0, row_ids)

    return Exchange(there_and_back, (_others(counts) + _others(arriving)) * HIDDEN * 2)


def _peer_copy(memory: PeerMemory, device: torch.device) -> tuple[Callable[[], object], int]:
    memory.reserve(2 * COPY_BYTES, device)
    peer = (dist.get_rank() + 1) % dist.get_world_size()
    there = memory.handle.get_buffer(peer, (COPY_BYTES,), torch.uint8, COPY_BYTES)
    here = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    return partial(there.copy_, here), COPY_BYTES


def _gemm(device: torch.device) -> Callable[[], object]:
    m, n, k = GEMM
    a, b = (torch.randn(s, k, device=device, dtype=torch.bfloat16) for s in (m, n))
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    return partial(torch.mm, a, b.mT, out=out)


def call_seconds(call: Callable[[], object]) -> float:
    """Measure the median time of a call, in CALLS calls after one another; the slowest rank's."""
    return graph_seconds(lambda: [call() for _ in range(CALLS)])


def graph_seconds(calls: Callable[[], object]) -> float:
    """Measure the same where `calls` makes all of them."""
    for _ in range(2):
        calls()
    found = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        start.record()
        calls()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / 1e3 / CALLS)
    return _slowest(median(found))


def _seconds_together(first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
    """Measure CALLS calls of two kinds in two streams at the same time: the time of a call of each."""
    streams = torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-1)
    found: list[tuple[float, float]] = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        dist.barrier()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in streams]
        for (start, _), stream in zip(events, streams, strict=True):
            start.record(stream)
        for calls, stream in zip((first, second), streams, strict=True):
            with torch.cuda.stream(stream):
                calls()
        for (_, end), stream in zip(events, streams, strict=True):
            end.record(stream)
        torch.cuda.synchronize()
        times = [start.elapsed_time(end) / 1e3 / CALLS for start, end in events]
        found.append((times[0], times[1]))
    return _slowest(median(a for a, _ in found)), _slowest(median(b for _, b in found))


def _slowest(seconds: float) -> float:
    found = torch.tensor(seconds, dtype=torch.float64, device="cuda")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.item()


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture CALLS calls after one another."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return graph


def _use_sms(memory: PeerMemory, num_sms: int) -> None:
    memory.peers = memory.peers._replace(num_sms=num_sms)


@contextmanager
def _blocks(words: int, warps: int) -> Iterator[None]:
    """Use other sizes of what a program sends at a time."""
    from octile.kernels.triton.launch_config import PEER_ROWS

    before = dict(PEER_ROWS)
    PEER_ROWS.update(words=words, num_warps=warps)
    try:
        yield
    finally:
        PEER_ROWS.update(before)


def gb_per_s(e: Exchange, seconds: float) -> float:
    """Compute GB/s of a rank, the mean of all ranks."""
    n_bytes = torch.tensor(float(e.n_bytes), dtype=torch.float64, device="cuda")
    dist.all_reduce(n_bytes)
    return n_bytes.item() / dist.get_world_size() / seconds / 1e9


def _vs_plain(case: str, seconds: float, plain: Mapping[str, float], is_judged: bool = False) -> Iterator[Row]:
    ours, goal = 1e-6 * TOKENS / seconds, BOTH_WAYS if is_judged else None
    for peer, theirs in plain.items():
        yield compare(case, BOTH_WAYS, ours, "Mtokens/s", peer, 1e-6 * TOKENS / theirs, goal)


def megabytes(e: Exchange) -> str:
    """Format the bytes that leave this rank."""
    return f"{e.n_bytes / 1e6:.0f} MB"
