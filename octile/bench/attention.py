"""`octile bench attention`: attention of decoding over the paged latent cache vs. a copy of as many bytes.

Every text has the same context, its pages are anywhere in the cache, and each call reads all of it. Bytes are those of
the cache, the queries and the results. With 16 heads, a rank's share of 128 on 8 GPUs, memory bounds the kernel, so its
speed is compared with a copy's; with all 128 heads the products bound it, whose speed is shown, too.

As in decoding, calls are replayed in a CUDA graph, several in one, as a model has layers. So times include the gaps
between kernels. As many copies are measured in turn, without a graph: in one, a copy of 500 MB reaches 2.8 TB/s on an
H200 instead of 4.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from octile.bench import goals
from octile.bench.casts import halves
from octile.bench.rows import LEGEND, Row, compare, table
from octile.bench.timing import seconds
from octile.ops.latent_cache import PAGE, row_bytes, write_latents
from octile.ops.paged_attention import paged_attention

LATENT, ROTARY = 512, 64  # channels
CALLS, ROUNDS = 8, 8  # of a graph, and replays
FORMS = {"BF16": torch.bfloat16, "FP8": torch.uint8}


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
        for form, dtype in FORMS.items():
            attend, moved = _case(shape, dtype, device)
            source, target = halves(moved, device.type)
            attention = _graph(attend).replay if gpu else partial(_repeat, attend)
            times = seconds({"attend": attention, "copy": partial(_repeat, partial(target.copy_, source))}, ROUNDS)
            speed, copy = (n / (times[name] / CALLS) for name, n in (("attend", moved), ("copy", 2 * source.nbytes)))
            case = f"{shape.texts} texts of {shape.context}, {shape.heads} heads, {form}"
            yield compare(case, "bytes", speed / 1e9, "GB/s", "copy", copy / 1e9)
            yield Row(case, "products", flops(shape) / moved * speed / 1e12, "TFLOP/s")


def flops(shape: Shape) -> int:
    """Count the FLOPs of the scores and of the weighted values."""
    return 2 * shape.texts * shape.context * shape.heads * (2 * LATENT + ROTARY)


def show(rows: Sequence[Row]) -> str:
    """Format the table, and on a GPU the verdicts on the goals."""
    verdicts = goals.attention_verdicts(rows) if torch.cuda.is_available() else ""
    return "\n\n".join(filter(None, (table(rows), LEGEND, verdicts)))


def _case(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Callable[[], Tensor], int]:
    """Return a call of the operator and its bytes."""
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
    attend = partial(paged_attention, q, cache, pages, lengths, LATENT, (LATENT + ROTARY) ** -0.5)
    return attend, cache.nbytes + q.nbytes + attend().nbytes


def _repeat(call: Callable[[], object]) -> None:
    for _ in range(CALLS):
        call()


def _graph(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture the repeated call."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _repeat(call)
    return graph
