"""`octile bench attention`: attention of decoding over the paged latent cache vs. a copy of as many bytes.

Every text has the same context, its pages are anywhere in the cache, and each call reads all of it.

    bandwidth    the bytes of the cache, the queries and the results in a second, and a copy's: with 16 heads, a rank's
                 share of 128 on 8 GPUs, memory bounds the kernel
    FLOPs        those of the scores and of the weighted values in a second: they bound it with all 128 heads; vs.
                 FlashMLA's, with a cache in BF16, where it can be imported

As in decoding, calls are replayed in a CUDA graph, several in one, as a model has layers. So times include the gaps
between kernels. As many copies are replayed in turn. They are made by a kernel that inverts the bits of integers: what
torch's `copy_` of contiguous tensors launches, a memcpy, reached 4.2 TB/s on an H200 or 2.8, whatever the size. A copy
that is slow all the same is named below the table, and the fastest of the run is judged by in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from octile.bench import flash_mla, goals
from octile.bench.casts import halves
from octile.bench.model_shapes import LATENT, ROTARY
from octile.bench.rows import LEGEND_OF_SPEEDS, Row, byte_rate, flop_rate, table_with
from octile.bench.timing import seconds
from octile.ops.latent_cache import PAGE, row_bytes, write_latents
from octile.ops.paged_attention import paged_attention

CALLS, ROUNDS = 8, 8  # of a graph, and replays
CACHE_DTYPES = dict(zip(goals.CACHE_FORMATS, (torch.bfloat16, torch.uint8), strict=True))


class Shape(NamedTuple):
    """Texts, positions of each, and heads."""

    texts: int
    context: int
    heads: int


GPU_SHAPES = tuple(Shape(128, context, heads) for context in (4096, 8192, 32768) for heads in (16, 128))
CPU_SHAPES = (Shape(4, 256, 16),)


def rows() -> Iterator[Row]:
    """Measure each shape with a cache in BF16 and in FP8, and yield its rows."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda" if gpu else "cpu")
    for shape in GPU_SHAPES if gpu else CPU_SHAPES:
        for cache_format, dtype in CACHE_DTYPES.items():
            attend, moved, theirs = _case(shape, dtype, device)
            source, target = halves(moved, device.type)
            record = _graph if gpu else _repeated
            calls = {"attend": attend, goals.COPY: copying(source, target), **theirs}
            times = seconds({name: record(call) for name, call in calls.items()}, ROUNDS)
            speed = moved / (times["attend"] / CALLS)
            copy = 2 * source.nbytes / (times[goals.COPY] / CALLS)
            goal = goals.attention_goal(shape.heads, cache_format)
            case = f"{shape.texts} texts of {shape.context}, {goal}"
            yield replace(byte_rate(case, goals.BANDWIDTH, speed, gpu, (goals.COPY, copy)), goal=goal)
            work = flops(shape)
            yield replace(flop_rate(case, goals.FLOPS, work / moved * speed, gpu), goal=goal)
            for name in theirs:
                peer = name, work / (times[name] / CALLS)
                row = flop_rate(case, goals.FLOPS, work / moved * speed, gpu, peer)
                yield replace(row, goal=goals.DENSE_DECODING if shape.heads == goals.FLASH_MLA_HEADS else None)


def copying(source: Tensor, target: Tensor) -> Callable[[], object]:
    """Return a call of a kernel that reads the source and writes its inverted bits to the target; never a memcpy."""
    wide = torch.int64 if source.nbytes % 8 == 0 else torch.uint8
    return partial(torch.bitwise_not, source.view(wide), out=target.view(wide))


def flops(shape: Shape) -> int:
    """Count the FLOPs of the scores and of the weighted values."""
    return 2 * shape.texts * shape.context * shape.heads * (2 * LATENT + ROTARY)


def show(rows: Sequence[Row]) -> str:
    """Format the table, and on a GPU the verdicts on the goals."""
    judges = goals.slow_copies, goals.attention_verdicts, goals.flash_mla_verdicts
    verdicts = [judge(rows) for judge in judges] if torch.cuda.is_available() else []
    return "\n\n".join(filter(None, (table_with(LEGEND_OF_SPEEDS, rows), *verdicts)))


def _case(
    shape: Shape, dtype: torch.dtype, device: torch.device
) -> tuple[Callable[[], Tensor], int, dict[str, Callable[[], Tensor]]]:
    """Return a call of the operator, its bytes, and FlashMLA's call."""
    torch.manual_seed(0)
    n_pages = shape.texts * shape.context // PAGE
    width = row_bytes(LATENT, ROTARY) if dtype == torch.uint8 else LATENT + ROTARY
    cache = torch.empty(n_pages, PAGE, width, dtype=dtype, device=device)
    for first in range(0, n_pages * PAGE, 2**18):
        slots = torch.arange(first, min(first + 2**18, n_pages * PAGE), device=device)
        latent, rope = (torch.randn(len(slots), n, device=device).bfloat16() for n in (LATENT, ROTARY))
        write_latents(cache, slots, latent, rope)
    pages = torch.randperm(n_pages, device=device).to(torch.int32).view(shape.texts, -1)
    lengths = torch.full((shape.texts,), shape.context, dtype=torch.int32, device=device)
    q = torch.randn(shape.texts, shape.heads, LATENT + ROTARY, device=device).bfloat16()
    scale = (LATENT + ROTARY) ** -0.5
    attend = partial(paged_attention, q, cache, pages, lengths, LATENT, scale)
    theirs = {}
    if dtype == torch.bfloat16 and shape.heads >= 64:
        theirs = flash_mla.decoding(attend, q, cache, pages, lengths, scale)
    return attend, cache.nbytes + q.nbytes + attend().nbytes, theirs


def _repeated(call: Callable[[], object]) -> Callable[[], object]:
    def repeat() -> None:
        for _ in range(CALLS):
            call()

    return repeat


def _graph(call: Callable[[], object]) -> Callable[[], object]:
    """Capture the repeated call."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _repeated(call)()
    return graph.replay
