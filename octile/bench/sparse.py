"""`octile bench sparse`: attention over top-k positions vs. torch's gather and products, compiled.

Each query has its own random positions. In prefill and in training all queries read one text's latents, contiguous and
in BF16. In decoding, texts of equal context have pages anywhere in a cache, in BF16 or FP8, and each has two queries,
as where one draft is verified. Training has a forward pass with log-sum-exps, a backward pass, and the weights with
which the indexer is aligned.

    FLOPs       those of the GEMMs in a second: two forward (scores, weighted values), five in the backward pass, and
                one for the weights (scores)
    gathered    bytes of the rows that are read in a second: the L2 cache has many of them in prefill

Peers:

    torch.compile           gathers rows in BF16, then multiplies, on the same operands, interleaved
    FlashMLA                the same, where it can be imported
    FlashMLA, published     otherwise, what its README says of the best shape on an H800; on the same architecture only
    TileLang, published     the same of its example's backward pass on an H200, which adds by atomics

In training, torch's speed is that of both passes together, since its compiled backward pass can run once only, and with
fewer queries, as it holds their gathered rows and the gradients of these.

On a CPU the reference is measured, with few queries and positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from octile.bench import flash_mla, goals
from octile.bench.kernel_time import work_seconds
from octile.bench.model_shapes import LATENT, ROTARY
from octile.bench.rows import LEGEND_OF_SPEEDS, Row, byte_rate, flop_rate, table_with
from octile.ops.latent_cache import PAGE, row_bytes, write_latents
from octile.ops.sparse_attention import paged_sparse_attention, sparse_attention, sparse_attention_with_lse
from octile.ops.sparse_attention_backward import sparse_attention_backward
from octile.ops.sparse_attention_weights import sparse_attention_weights

SCALE = (LATENT + ROTARY) ** -0.5
ROUNDS = 10
QUERIES_OF_TEXT = 2  # in decoding
FORMS = {"BF16": torch.bfloat16, "FP8": torch.uint8}
PUBLISHED, PUBLISHED_BACKWARD = "FlashMLA, published", "TileLang, published"
TILELANG = 115e12  # examples/deepseek_v32/README.md of https://github.com/tile-ai/tilelang
TORCH_QUERIES = 256  # in training
FLASH_MLA = {goals.SPARSE_PREFILL: 640e12, goals.SPARSE_DECODING: 410e12}  # README of September 2025
Call = Callable[[], Tensor]


class Shape(NamedTuple):
    """Queries of a prompt, or texts in decoding; positions of a text, heads, and top-k positions."""

    texts: int
    context: int
    heads: int
    top_k: int


PREFILL = {
    "cuda": (
        *(Shape(4096, context, 128, 2048) for context in (8192, 32768, 131072)),
        *(Shape(4096, 32768, heads, 2048) for heads in (64, 16)),
    ),
    "cpu": (Shape(4, 256, 16, 64),),
}
TRAINING = {
    "cuda": tuple(Shape(8192, 8192, heads, 2048) for heads in (128, 64, 16)),
    "cpu": (Shape(4, 256, 16, 64),),
}
DECODING = {
    "cuda": tuple(Shape(texts, 32768, heads, 2048) for heads in (128, 64, 16) for texts in (128, 1)),
    "cpu": (Shape(2, 256, 16, 64),),
}


def rows() -> Iterator[Row]:
    """Measure each shape, and yield its rows."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for shape in PREFILL[device]:
        yield from _prefill(shape, device)
    for shape in TRAINING[device]:
        yield from _training(shape, device)
    for shape in DECODING[device]:
        for form in FORMS:
            yield from _decoding(shape, form, device)


def show(found: Sequence[Row]) -> str:
    """Format the table, and where FlashMLA was measured, the verdicts on the goals against it."""
    return "\n\n".join(filter(None, (table_with(LEGEND_OF_SPEEDS, found), goals.flash_mla_verdicts(found))))


def flops(queries: int, shape: Shape) -> int:
    """Count the FLOPs of the scores and of the weighted values."""
    return 2 * queries * shape.heads * shape.top_k * (2 * LATENT + ROTARY)


def _prefill(shape: Shape, device: str) -> Iterator[Row]:
    generator = torch.Generator(device).manual_seed(0)
    latents = torch.randn(shape.context, LATENT + ROTARY, generator=generator, device=device).bfloat16()
    q, positions = _queries(shape.texts, shape, generator)
    ours = partial(sparse_attention, q, latents, positions, LATENT, SCALE)
    theirs: dict[str, Call] = {_torch(): partial(_compiled(), q, latents, positions)}
    theirs |= flash_mla.prefill(ours, q, latents, positions, SCALE)
    case = f"prefill, {shape.texts} queries, {shape.heads} heads, {shape.top_k} of {shape.context}"
    yield from _measured(case, goals.SPARSE_PREFILL, "BF16", shape, shape.texts, ours, theirs)


def _training(shape: Shape, device: str) -> Iterator[Row]:
    generator = torch.Generator(device).manual_seed(0)
    latents = torch.randn(shape.context, LATENT + ROTARY, generator=generator, device=device).bfloat16()
    q, positions = _queries(shape.texts, shape, generator)
    do = torch.randn(*q.shape[:2], LATENT, generator=generator, device=device).bfloat16()
    o, lse = sparse_attention_with_lse(q, latents, positions, LATENT, SCALE)
    theirs = _torch()
    calls: dict[str, Callable[[], object]] = {
        "forward": partial(sparse_attention_with_lse, q, latents, positions, LATENT, SCALE),
        "backward": partial(sparse_attention_backward, do, q, latents, positions, o, lse, LATENT, SCALE),
        "weights": partial(sparse_attention_weights, q, latents, positions, lse, LATENT, SCALE),
        theirs: _torch_gradients(do[:TORCH_QUERIES], q[:TORCH_QUERIES], latents, positions[:TORCH_QUERIES]),
    }
    times = work_seconds(calls, ROUNDS)
    gpu, width = torch.cuda.is_available(), LATENT + ROTARY
    work = 2 * shape.heads * shape.top_k  # for a channel of a query
    channels = {"forward": width + LATENT, "backward": 3 * width + 2 * LATENT, "weights": width}
    both = channels["forward"] + channels["backward"]
    peers = {theirs: work * both * min(TORCH_QUERIES, shape.texts) / times[theirs]}
    if gpu and shape.heads == 128 and torch.cuda.get_device_capability() == (9, 0):
        peers[PUBLISHED_BACKWARD] = TILELANG
    for name, n in channels.items():
        case = f"training, {name}, {shape.texts} queries, {shape.heads} heads, {shape.top_k} of {shape.context}"
        for peer in peers.items() if name == "backward" else (None,):
            yield flop_rate(case, "FLOPs", shape.texts * work * n / times[name], gpu, peer)


def _decoding(shape: Shape, form: str, device: str) -> Iterator[Row]:
    generator = torch.Generator(device).manual_seed(0)
    n_pages = shape.texts * shape.context // PAGE
    width = row_bytes(LATENT, ROTARY) if form == "FP8" else LATENT + ROTARY
    cache = torch.empty(n_pages, PAGE, width, dtype=FORMS[form], device=device)
    for slots in torch.arange(n_pages * PAGE, device=device).split(2**18):
        latent, rope = (torch.randn(len(slots), n, generator=generator, device=device) for n in (LATENT, ROTARY))
        write_latents(cache, slots, latent.bfloat16(), rope.bfloat16())
    pages = torch.randperm(n_pages, generator=generator, device=device).int().view(shape.texts, -1)
    pages = pages.repeat_interleave(QUERIES_OF_TEXT, 0)
    q, positions = _queries(QUERIES_OF_TEXT * shape.texts, shape, generator)
    ours = partial(paged_sparse_attention, q, cache, pages, positions, LATENT, SCALE)
    slots = flash_mla.look_up(pages, positions)
    if form == "BF16":
        theirs: dict[str, Call] = {_torch(): partial(_compiled(), q, cache.flatten(0, 1), slots)}
    else:
        theirs = flash_mla.sparse_decoding(ours, q, cache, slots, shape.texts, SCALE)
    texts = "1 text" if shape.texts == 1 else f"{shape.texts} texts"
    case = f"decoding, {texts}, {shape.heads} heads, {shape.top_k} of {shape.context}, {form}"
    goal = goals.SPARSE_DECODING if form == "FP8" else None
    yield from _measured(case, goal, form, shape, len(q), ours, theirs)


def _queries(count: int, shape: Shape, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw queries and lists of different positions."""
    device = generator.device
    q = torch.randn(count, shape.heads, LATENT + ROTARY, generator=generator, device=device).bfloat16()
    parts = [
        torch.rand(len(part), shape.context, generator=generator, device=device).topk(shape.top_k).indices.int()
        for part in torch.arange(count).split(256)
    ]
    return q, torch.cat(parts)


def _measured(
    case: str, goal: str | None, form: str, shape: Shape, queries: int, ours: Call, theirs: Mapping[str, Call]
) -> Iterator[Row]:
    times = work_seconds({"octile": ours, **theirs}, ROUNDS)
    gpu = torch.cuda.is_available()
    work = flops(queries, shape)
    peers = {name: work / taken for name, taken in times.items() if name != "octile"}
    goal = goal if shape.heads == goals.FLASH_MLA_HEADS else None
    has_published = shape.texts > 1 and gpu and torch.cuda.get_device_capability() == (9, 0)
    if goal and has_published and goals.FLASH_MLA not in peers:
        peers[PUBLISHED] = FLASH_MLA[goal]
    for peer in peers.items() or (None,):
        yield replace(flop_rate(case, "FLOPs", work / times["octile"], gpu, peer), goal=goal)
    width = row_bytes(LATENT, ROTARY) if form == "FP8" else 2 * (LATENT + ROTARY)
    yield byte_rate(case, "gathered", queries * shape.top_k * width / times["octile"], gpu)


def _gather_and_attend(q: Tensor, latents: Tensor, positions: Tensor) -> Tensor:
    keys = latents[positions.long()]
    weights = (torch.bmm(q, keys.mT).float() * SCALE).softmax(-1).to(q.dtype)
    return torch.bmm(weights, keys[..., :LATENT])


def _torch_gradients(do: Tensor, q: Tensor, latents: Tensor, positions: Tensor) -> Callable[[], object]:
    """Return both passes of torch's attention over gathered rows."""
    q, latents, attend = q.detach().requires_grad_(), latents.detach().requires_grad_(), _compiled()
    return lambda: torch.autograd.grad(attend(q, latents, positions), (q, latents), do)


def _torch() -> str:
    """Name what `_compiled` returns."""
    return "torch.compile" if torch.cuda.is_available() else "torch, not compiled"


def _compiled() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return torch's attention over gathered rows: compiled on a GPU, where it is a peer."""
    return torch.compile(_gather_and_attend, dynamic=True) if torch.cuda.is_available() else _gather_and_attend
