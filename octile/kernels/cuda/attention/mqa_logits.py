"""Launcher of Hopper's kernel for the logits of the lightning indexer, of contiguous keys and of pages.

A launch depends on shapes and strides, never on values, so it can be captured in a CUDA graph; the first call of a kind
compiles and loads a kernel, which cannot be captured.
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from octile.kernels.cuda.gemm import num_sms, request
from octile.kernels.cuda.jit import wgmma
from octile.kernels.cuda.jit.mapped import MappedKernel, MappedLaunch
from octile.kernels.cuda.jit.prepared import BoundedCache
from octile.kernels.cuda.jit.tensor_map import TensorMap
from octile.kernels.memory_layout import VECTOR

KEYS = 64  # of a tile, and of a page
HEADS, HEAD_DIMS = (32, 64), (32, 64, 128)
MAX_COLUMNS = 256  # of a wgmma: the heads of the queries of a tile
Q_STAGES = 2
MAX_KEYS = 1024
UNKNOWN = VECTOR  # stands for a map's pointer until the launch; it is aligned


class Tile(NamedTuple):
    """What decides on the kernel's speed.

    Attributes:
        columns: most heads of a tile.
        warpgroups: consumers of a thread block.
        stages: tiles of keys in shared memory, a multiple of the warpgroups.
    """

    columns: int
    warpgroups: int
    stages: int


TILE = Tile(MAX_COLUMNS, 2, 8)
NARROW, WIDE = Tile(128, 4, 12), Tile(MAX_COLUMNS, 2, 12)  # of pages, by the heads of a sequence's queries
REGISTERS = {2: (32, 232), 3: (32, 160), 4: (32, 112)}  # of producer and consumers, by the number of consumers


def why_unsupported(q: Tensor) -> str | None:
    """Return why this kernel does not compute the logits of q [..., H, D]; None: it does."""
    if q.shape[-2] not in HEADS or q.shape[-1] not in HEAD_DIMS:
        return f"{q.shape[-2]} heads of {q.shape[-1]} channels are not {HEADS} heads of {HEAD_DIMS} channels"
    return request.why_not_on(q.device)


def queries_of_tile(heads: int, columns: int, most: int) -> int:
    """Return how many queries a tile has: a power of two that is not more than needed for `most`."""
    return min(columns // heads, 1 << (most - 1).bit_length())


def _constants(
    heads: int, head_dim: int, queries: int, tile: Tile, **modes: bool
) -> tuple[dict[str, int | bool], dict[str, str]]:
    columns = queries * heads
    producer, consumer = REGISTERS[tile.warpgroups]
    item = 4 * (4 + 3 * queries)
    shared = (
        Q_STAGES * columns * (head_dim + 4)
        + tile.stages * KEYS * (head_dim + 4)
        + Q_STAGES * item
        + 16 * (tile.stages + Q_STAGES)
    )
    constants: dict[str, int | bool] = {
        "heads": heads, "head_dim": head_dim, "queries": queries, "warpgroups": tile.warpgroups, "stages": tile.stages,
        "producer_registers": producer, "consumer_registers": consumer, "shared_bytes": shared, **modes,
    }  # fmt: skip
    return constants, {"wgmma.cuh": wgmma.header(columns)}


def plan(
    q: Tensor, keys: Tensor, weights: Tensor, width: int, compressed: bool, clean: bool, bfloat16: bool, sms: int,
    tile: Tile = TILE,
) -> MappedLaunch:  # fmt: skip
    """Plan the launch for q [S, H, D], keys [T, D] and weights [S, H]; `width` is that of the result."""
    (n, heads, head_dim), t = q.shape, len(keys)
    queries = queries_of_tile(heads, tile.columns, MAX_COLUMNS)
    constants, headers = _constants(
        heads, head_dim, queries, tile, paged=False, compressed=compressed, clean=clean, bfloat16_out=bfloat16
    )
    q_tiles = -(-n // queries)
    chunk = _chunk(q_tiles, t, sms)
    items = q_tiles * -(-t // chunk)
    maps = (
        *_query_maps(q, weights, queries),
        TensorMap(UNKNOWN, keys.dtype, (1, t, head_dim), (VECTOR, head_dim, 1), (1, KEYS, head_dim), head_dim),
        TensorMap(UNKNOWN, torch.float32, (1, 1, t), (4, 4, 1), (1, 1, KEYS)),
    )
    sizes = n, t, width, q_tiles, items, chunk, 0, 1
    return MappedLaunch("mqa_logits", constants, headers, min(items, sms), 128 * (tile.warpgroups + 1), maps, sizes)


def plan_paged(
    q: Tensor, cache: Tensor, weights: Tensor, pages_stride: int, width: int, bfloat16: bool, blocks: int,
) -> MappedLaunch:  # fmt: skip
    """Plan the launch for q [B, next_n, H, D], a cache [P, 64·(D + 4)] and weights [B·next_n, H]."""
    b, next_n, heads, head_dim = q.shape
    queries = queries_of_tile(heads, MAX_COLUMNS, next_n)
    tile = NARROW if queries * heads <= NARROW.columns else WIDE
    constants, headers = _constants(
        heads, head_dim, queries, tile, paged=True, compressed=False, clean=False, bfloat16_out=bfloat16
    )
    page, sides = cache.stride(0), (KEYS, head_dim)
    maps = (
        *_query_maps(q.flatten(0, 1), weights, queries),
        TensorMap(UNKNOWN, torch.uint8, (len(cache), *sides), (page, head_dim, 1), (1, *sides), head_dim),
        TensorMap(UNKNOWN, torch.float32, (len(cache), 1, KEYS), (page // 4, page // 4, 1), (1, 1, KEYS)),
    )
    sizes = b * next_n, 0, width, 0, 0, 0, pages_stride, next_n
    return MappedLaunch("mqa_logits", constants, headers, blocks, 128 * (tile.warpgroups + 1), maps, sizes)


def _query_maps(q: Tensor, weights: Tensor, queries: int) -> tuple[TensorMap, TensorMap]:
    n, heads, head_dim = q.shape
    q_box = (1, queries * heads, head_dim)
    return (
        TensorMap(UNKNOWN, q.dtype, (1, n * heads, head_dim), (VECTOR, head_dim, 1), q_box, head_dim),
        TensorMap(UNKNOWN, torch.float32, (1, n, heads), (4, weights.stride(0), 1), (1, queries, heads)),
    )


@functools.lru_cache(MAX_KEYS)
def _chunk(q_tiles: int, keys: int, sms: int) -> int:
    """Return how many keys an item has: so few that all SMs have as much to do, so many that its start costs little."""

    def cost(chunks: int) -> float:
        tiles = math.ceil(keys / KEYS / chunks)
        return math.ceil(q_tiles * chunks / sms) * (tiles + 4)

    best = min(range(1, max(2, keys // 2048 + 1)), key=cost)
    return math.ceil(keys / KEYS / best) * KEYS


_prepared: BoundedCache[MappedKernel] = BoundedCache(MAX_KEYS)


def launch(
    q: Tensor, keys: Tensor, key_scales: Tensor, weights: Tensor, starts: Tensor, ends: Tensor, out: Tensor,
    compressed: bool, clean: bool,
) -> None:  # fmt: skip
    """Write the logits of q for contiguous keys to out, whose rows are contiguous."""
    q, keys, weights, key_scales = _aligned(q), _aligned(keys), _aligned(weights), _aligned(key_scales)
    sms, bfloat16 = num_sms.num_sms(q.device), out.dtype == torch.bfloat16
    key = q.shape, keys.shape, weights.stride(), out.shape, compressed, clean, bfloat16, sms, q.device
    prepared = _prepared[key]
    if prepared is None:
        made = plan(q, keys, weights, out.shape[1], compressed, clean, bfloat16, sms)
        prepared = _prepared[key] = MappedKernel(made, q.device)
    tensors = q, weights, keys, key_scales, starts, ends
    prepared.launch_at((*(t.data_ptr() for t in tensors), 0, 0, out.data_ptr(), out.stride(0)))()


def launch_paged(
    q: Tensor, cache: Tensor, weights: Tensor, lengths: Tensor, pages: Tensor, schedule: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """Write the logits of q for the pages of its sequences to out."""
    q, weights, bfloat16 = _aligned(q), _aligned(weights), out.dtype == torch.bfloat16
    width = min(out.shape[1], KEYS * pages.shape[1])
    key = (
        q.shape, cache.shape, cache.stride(0), weights.stride(), pages.stride(0), width, bfloat16, len(schedule),
        q.device,
    )  # fmt: skip
    prepared = _prepared[key]
    if prepared is None:
        made = plan_paged(q, cache, weights, pages.stride(0), width, bfloat16, len(schedule) - 1)
        prepared = _prepared[key] = MappedKernel(made, q.device)
    scales = cache.data_ptr() + KEYS * q.shape[-1]
    tensors = lengths, pages, schedule, out
    pointers = q.data_ptr(), weights.data_ptr(), cache.data_ptr(), scales
    prepared.launch_at((*pointers, 0, *(t.data_ptr() for t in tensors), out.stride(0)))()


def _aligned(t: Tensor) -> Tensor:
    """Return t, or a copy if it or its rows do not begin at multiples of 16 bytes, as TMA needs it."""
    has_rows = t.dim() == 1 or (t.stride(0) >= t.shape[1] and t.stride(0) * t.itemsize % VECTOR == 0)
    return t if has_rows and t.data_ptr() % VECTOR == 0 else t.clone(memory_format=torch.contiguous_format)
