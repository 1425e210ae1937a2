"""`octile bench indexer`: the lightning indexer's logits vs. DeepGEMM's, and the choice of keys.

Queries see all keys before them, and logits are FP32; what a query does not see is not stored.

    logits          FLOPs in a second: two for each channel of each head of a query and each key that it sees, as
                    DeepGEMM's test counts them
    bandwidth       of logits in pages: bytes of keys and logits in a second
    choice of keys  bytes of logits in a second

Peers:

    DeepGEMM            where it can be imported, on the same operands, interleaved
    DeepGEMM, recorded  its figures on an H200 of 20 November 2026, on an H200 only

On a CPU the reference is measured, with few queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octile.bench import goals
from octile.bench.kernel_time import work_seconds
from octile.bench.rows import LEGEND_OF_SPEEDS, Row, byte_rate, flop_rate, table_with
from octile.kernels.cuda.attention.mqa_logits import HEAD_DIMS, HEADS
from octile.ops.mqa_logits import PAGE, mqa_logits, paged_mqa_logits, paged_mqa_schedule
from octile.ops.top_keys import top_keys

ROUNDS = 20
CHOSEN = 2048  # keys, of DeepSeek-V3.2
Call = Callable[[], object]


class Size(NamedTuple):
    """What is measured: queries and keys; sequences in pages and their mean length."""

    queries: int
    keys: int
    sequences: int
    length: int


SIZES = {"cuda": Size(2048, 65536, 256, 8192), "cpu": Size(16, 512, 4, 256)}
CHOICES = {"cuda": ((2048, 65536), (4096, 8192), (128, 32768), (1, 131072)), "cpu": ((16, 512),)}  # queries and keys


def rows() -> Iterator[Row]:
    """Measure logits of contiguous keys, of keys in pages, and the choice of keys."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = SIZES[device]
    for heads in reversed(HEADS):
        for head_dim in reversed(HEAD_DIMS):
            yield from _contiguous(heads, head_dim, size, device)
    for heads in reversed(HEADS):
        for next_n in (1, 2):
            yield from _paged(heads, next_n, size, device)
    for queries, keys in CHOICES[device]:
        yield from _choice(queries, keys, device)


def show(found: Sequence[Row]) -> str:
    """Return the rows as a table, and the verdicts on the goals."""
    return "\n\n".join(filter(None, (table_with(LEGEND_OF_SPEEDS, found), goals.indexer_verdicts(found))))


def _contiguous(heads: int, head_dim: int, size: Size, device: str) -> Iterator[Row]:
    q, k, scale, weights = _operands(size.queries, size.keys, heads, head_dim, device)
    ends = torch.arange(size.keys - size.queries, size.keys, dtype=torch.int32, device=device)
    starts = torch.zeros_like(ends)
    ours = partial(mqa_logits, q, k, scale, weights, starts, ends, 0, False, torch.float32)
    peer = _deep_gemm(device)
    theirs = peer and partial(peer.fp8_mqa_logits, q, (k, scale), weights, starts, ends, clean_logits=False)
    flops = 2 * int(ends.sum()) * heads * head_dim
    yield from _compared(goals.indexer_case(heads, head_dim), flops, ours, theirs)


def _paged(heads: int, next_n: int, size: Size, device: str) -> Iterator[Row]:
    b, head_dim = size.sequences, 128
    generator = torch.Generator(device).manual_seed(0)
    draw = partial(torch.randint, generator=generator, device=device, dtype=torch.int32)
    lengths = draw(int(0.7 * size.length), int(1.3 * size.length), (b, 1)).expand(b, next_n).contiguous()
    width = -(-int(1.3 * size.length) // PAGE) * PAGE
    n_pages = b * size.length // PAGE
    q, k, scale, weights = _operands(b * next_n, n_pages * PAGE, heads, head_dim, device)
    cache = torch.cat([t.view(torch.uint8).view(n_pages, -1) for t in (k, scale)], 1)
    pages, queries = draw(0, n_pages, (b, width // PAGE)), q.view(b, next_n, heads, head_dim)
    blocks = torch.cuda.get_device_properties().multi_processor_count if device == "cuda" else 1
    arguments = lengths, pages, paged_mqa_schedule(lengths, blocks)
    ours = partial(paged_mqa_logits, queries, cache, weights, *arguments, width, False, torch.float32)
    theirs, peer = None, _deep_gemm(device)
    if peer:
        metadata = peer.get_paged_mqa_logits_metadata(lengths, PAGE, peer.get_num_sms())
        in_pages = cache.view(n_pages, PAGE, 1, head_dim + 4)
        theirs = partial(peer.fp8_paged_mqa_logits, queries, in_pages, weights, lengths, pages, metadata, width)
    seen = int(lengths.sum())
    case = f"logits in pages, {b} sequences, {next_n} × {heads} heads of {head_dim}"
    times = yield from _compared(case, 2 * seen * heads * head_dim, ours, theirs)
    n_bytes = seen // next_n * (head_dim + 4) + seen * 4
    yield byte_rate(case, goals.BANDWIDTH, n_bytes / times["octile"], device == "cuda")


def _choice(queries: int, keys: int, device: str) -> Iterator[Row]:
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(queries, keys, generator=generator, device=device)
    ends = torch.full((queries,), keys, dtype=torch.int32, device=device)
    count = min(CHOSEN, keys // 4)
    calls = {
        "octile": partial(top_keys, logits, torch.zeros_like(ends), ends, count),
        "torch.topk": partial(torch.topk, logits, count),  # of equal logits it takes any
    }
    times = work_seconds(calls, ROUNDS)
    speeds = {name: logits.nbytes / taken for name, taken in times.items()}
    case = f"{queries} queries, {count} of {keys} keys"
    peer = "torch.topk", speeds["torch.topk"]
    yield byte_rate(case, "choice of keys", speeds["octile"], device == "cuda", peer)


def _compared(case: str, flops: int, ours: Call, theirs: Call | None) -> Generator[Row, None, Mapping[str, float]]:
    """Yield the speed of logits vs. each peer; return the times by name."""
    times = work_seconds({"octile": ours, **({goals.DEEP_GEMM: theirs} if theirs else {})}, ROUNDS)
    speeds = {name: flops / taken for name, taken in times.items()}
    peers: Mapping[str, float] = {name: speed for name, speed in speeds.items() if name != "octile"}
    gpu = torch.cuda.is_available()
    if gpu and "H200" in torch.cuda.get_device_name() and case in goals.INDEXER_FIGURES:
        peers = {**peers, goals.RECORDED: goals.INDEXER_FIGURES[case] * 1e12}
    for peer in peers.items() or (None,):
        yield flop_rate(case, "logits", speeds["octile"], gpu, peer)
    return times


def _operands(s: int, t: int, heads: int, head_dim: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    random = partial(torch.randn, generator=generator, device=device)
    q, k = (random(*shape).to(torch.float8_e4m3fn) for shape in ((s, heads, head_dim), (t, head_dim)))
    return q, k, random(t).exp(), random(s, heads)


def _deep_gemm(device: str) -> Any:
    """Return the module of DeepGEMM, or None without one or without a GPU."""
    return import_module("deep_gemm") if device == "cuda" and find_spec("deep_gemm") else None
