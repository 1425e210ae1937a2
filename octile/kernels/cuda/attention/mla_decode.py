"""Launcher of Hopper's MLA decode attention, as `octile.ops.paged_attention` specifies it.

    mla_decode      thread blocks attend to parts of the rows' positions, for 16 or 32 heads each
    mla_decode_64   the same for 64 heads each, where multiplying takes longer than reading the cache; rows in FP8 are
                    converted to BF16 once for 64 heads, or by a cluster of two thread blocks once for 128
    mla_merge       adds the partial results of rows that several thread blocks share, in the order of the positions

With parts mla_decode_64 attends from any number of heads: so a row's bits are the same whether it is alone, as where
texts are decoded, or shares a thread block with rows of its text, as in prompts and in training.

Grids follow from shapes and the GPU. How the rows' positions are divided is computed on the GPU from their lengths, so
a launch can be captured in a CUDA graph; the first call of a kind compiles and loads kernels, which cannot be.

Within `only_activations_are_new` mla_decode loads pages before it waits for the previous kernel. mla_decode_64, which
multiplies longer than it reads, does not.
"""

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octile.kernels.cuda.gemm import num_sms, request
from octile.kernels.cuda.jit import specialize, tensor_map, wgmma
from octile.kernels.cuda.jit.launch import loads_others_early, overlaps
from octile.kernels.cuda.jit.prepared import BoundedCache, PreparedKernel
from octile.kernels.cuda.jit.tensor_map import TensorMap
from octile.kernels.hopper import SHARED_BYTES
from octile.kernels.memory_layout import VECTOR

LATENT, ROTARY, PAGE = 512, 64, 64  # channels, and positions of a page
WIDTH = LATENT + ROTARY
TILES, TILE = WIDTH // 64, 64 * 64 * 2  # of a page in BF16: 64 channels each, and its bytes
SCALES = LATENT // 128  # of a row in FP8, and its bytes
ROW_BYTES = LATENT + 4 * SCALES + 2 * ROTARY
THREADS = 384  # two consumer warpgroups, and one with the producer warp or, for FP8, four converter warps
MIN_PAGES = 2  # of a thread block, unless there are fewer: one for each warpgroup
# A thread block may have more pages than others, so that rows of one length are not cut: by at most this part
# of its own, and by so many, since cutting a row costs the time of a few pages, whatever its length. Few heads
# wait for memory, which fewer thread blocks keep busy, too.
SPARE_PART, SPARE_PART_64, SPARE_PAGES = 16, 32, 3
HEADS = 64  # of a thread block at most
MAX_TEXT_HEADS = 4 * HEADS  # of the rows of a text that are one row, if each of them has HEADS or more
MAX_KEYS = 1024
MERGE_THREADS = LATENT // 4
MAX_PARTIALS = 3 * 2**19  # of a launch with parts, of one head each: 3 GiB
MERGE_BLOCKS = 2**14  # of more heads, several have a thread block: most have nothing to merge where there are so many
MERGE_HEADS = 8


class LaunchPlan(NamedTuple):
    """The kernels of a call and their launches.

    Attributes:
        kernel, constants, headers: name, constants and headers of the kernel that attends.
        merge_constants: constants of mla_merge.
        grid, cluster, ranges: thread blocks of the kernel, of a cluster, and of one block of heads.
        merge_grid: thread blocks of mla_merge.
        slots: partial results of all heads, of a launch without parts.
    """

    kernel: str
    constants: Mapping[str, int | bool]
    headers: Mapping[str, str]
    merge_constants: Mapping[str, int | bool]
    grid: int
    cluster: int
    ranges: int
    merge_grid: int
    slots: int

    def map_of(self, n_pages: int, is_fp8: bool) -> TensorMap | None:
        """Describe a cache of unknown address as the kernel loads it by TMA; None: it does not."""
        if self.kernel == "mla_decode_64":
            return rotary_map(n_pages) if is_fp8 else page_map(n_pages, 1)
        return None if is_fp8 else page_map(n_pages, TILES)


def why_unsupported(
    q: Tensor,
    cache: Tensor,
    pages: Tensor,
    lengths: Tensor,
    latent_dim: int,
    scale: float,
    part: int,
    rows_per_text: int,
) -> str | None:
    """Return why these kernels do not support a call; None: they do."""
    if q.dtype != torch.bfloat16 or cache.dtype not in (torch.bfloat16, torch.uint8):
        return f"q is {q.dtype} and the cache {cache.dtype}, not bfloat16 and bfloat16 or FP8 rows"
    if (latent_dim, q.shape[2]) != (LATENT, WIDTH):
        return f"rows have {latent_dim} + {q.shape[2] - latent_dim} channels, not {LATENT} + {ROTARY}"
    if not q.numel() or not pages.shape[1] or not cache.shape[0]:
        return "there are no rows, heads or pages"
    if q.data_ptr() % VECTOR or cache.data_ptr() % VECTOR:
        return f"q or the cache does not begin at a multiple of {VECTOR} bytes"
    return request.why_not_on(q.device)


def launch(
    q: Tensor,
    cache: Tensor,
    pages: Tensor,
    lengths: Tensor,
    latent_dim: int,
    scale: float,
    part: int,
    rows_per_text: int,
) -> Tensor:
    """Attend from q [R, H, 576] to the first lengths [R] positions of pages [R, M] → o [R, H, 512] bfloat16.

    Rows of a text are one row with the heads of all of them, which reads its pages once: all of its rows, unless
    these fill many thread blocks, or with parts those that fill one thread block.
    """
    o = q.new_empty(*q.shape[:2], latent_dim)
    _launch(q, cache, pages, lengths, o, None, scale, part, rows_per_text)
    return o


def launch_with_lse(
    q: Tensor,
    cache: Tensor,
    pages: Tensor,
    lengths: Tensor,
    latent_dim: int,
    scale: float,
    part: int,
    rows_per_text: int,
) -> tuple[Tensor, Tensor]:
    """Attend as `launch` with parts; also return the logarithm of each softmax's denominator, float32 [R, H]."""
    o, lse = q.new_empty(*q.shape[:2], latent_dim), q.new_empty(q.shape[:2], dtype=torch.float32)
    _launch(q, cache, pages, lengths, o, lse, scale, part, rows_per_text)
    return o, lse


def _launch(
    q: Tensor,
    cache: Tensor,
    pages: Tensor,
    lengths: Tensor,
    o: Tensor,
    lse: Tensor | None,
    scale: float,
    part: int,
    rows_per_text: int,
) -> None:
    together = rows_together(q.shape[1], cache.dtype == torch.uint8, part, rows_per_text)
    text_queries, text_pages = q.view(-1, together * q.shape[1], WIDTH), pages[::together]
    rows, n_heads, _ = text_queries.shape
    o_RHC, lse_RH = o.view(rows, n_heads, LATENT), None if lse is None else lse.view(rows, n_heads)
    at_once = rows_at_once(rows, n_heads, parts_of(pages.shape[1], part))
    for first in range(0, rows, at_once):
        end = min(first + at_once, rows)
        texts = text_queries[first:end], text_pages[first:end], lengths[first * together : end * together]
        results = o_RHC[first:end], None if lse_RH is None else lse_RH[first:end]
        launch_rows(*texts, *results, cache, scale, part)


def rows_together(n_heads: int, is_fp8: bool, part: int, rows_per_text: int) -> int:
    """Return how many of a text's consecutive rows are one row with the heads of all of them."""
    if part:
        most = max(HEADS // n_heads, 1)
        return max(n for n in range(1, most + 1) if rows_per_text % n == 0)
    max_heads = 0 if is_fp8 else MAX_TEXT_HEADS
    return rows_per_text if n_heads < HEADS or rows_per_text * n_heads <= max_heads else 1


def parts_of(max_pages: int, part: int) -> int:
    """Return how many parts of `part` positions a text of max_pages pages has; 0: it is divided otherwise."""
    return -(-max_pages * PAGE // part) if part else 0


def launch_rows(
    q: Tensor,
    pages: Tensor,
    lengths: Tensor,
    o: Tensor,
    lse: Tensor | None,
    cache: Tensor,
    scale: float,
    part: int,
) -> None:
    """Attend from some rows at once, into o and lse; of a row with several queries, lengths has one for each."""
    rows, n_heads, _ = q.shape
    is_fp8 = cache.dtype == torch.uint8
    key = (rows, n_heads, is_fp8, part, len(lengths) // rows, q.device, overlaps(), loads_others_early())
    prepared = _prepared[key]
    if prepared is None:
        made = plan(*key[:-3], num_sms.multiprocessors(q.device))
        prepared = _prepared[key] = _Prepared(made, q.device)
    made, max_parts = prepared.made, parts_of(pages.shape[1], part)
    slots = rows * max_parts if part else made.slots
    partials = q.new_empty(0 if max_parts == 1 else slots, n_heads, LATENT, dtype=torch.float32)
    lse_of_slots = q.new_empty(slots, n_heads, dtype=torch.float32)
    starts = q.new_empty(rows + 1, dtype=torch.int32)
    map_of_cache = made.map_of(cache.shape[0], is_fp8) or bytes(tensor_map.BYTES)
    pointers = (t.data_ptr() for t in (q, pages, lengths, o, partials, lse_of_slots, starts))
    steps = pages.stride(0), lengths.stride(0)
    prepared.decode.launch_at(
        (map_of_cache, cache.data_ptr(), *pointers, scale, n_heads, *steps, rows, max_parts, made.ranges)
    )()
    merged = (t.data_ptr() for t in (partials, lse_of_slots, lengths, starts, o))
    to_lse = 0 if lse is None else lse.data_ptr()
    prepared.merge.launch_at((*merged, to_lse, n_heads, steps[1], rows, max_parts))()


def rows_at_once(rows: int, n_heads: int, max_parts: int) -> int:
    """Return how many of the rows attend in one launch, as many in each: several parts of them have partial results.

    How a row is divided into parts does not depend on other rows, so neither do its bits.
    """
    most = max(MAX_PARTIALS // (max_parts * n_heads), 1) if max_parts > 1 else rows
    return -(-rows // -(-rows // most))


def plan(rows: int, n_heads: int, is_fp8: bool, part: int, queries: int, n_sms: int) -> LaunchPlan:
    """Plan the launches for tensors that the kernels support; n_heads: of all queries of a row; n_sms: of the GPU."""
    heads = 64 if part or n_heads > 32 else 32 if n_heads > 16 else 16  # of a thread block
    head_blocks = -(-n_heads // heads)
    ranges = max(n_sms // head_blocks, 1)
    spare_part = SPARE_PART_64 if heads == 64 else SPARE_PART
    splits: dict[str, int | bool] = {
        "part_pages": part // PAGE, "min_pages": MIN_PAGES, "spare_part": spare_part, "spare_pages": SPARE_PAGES,
        "queries": queries, "programmatic": overlaps(),
    }  # fmt: skip
    cluster = 2 if heads == 64 and is_fp8 and head_blocks % 2 == 0 else 1  # thread blocks that share converted pages
    specialized = _plan_64(is_fp8, cluster) if heads == 64 else _plan_few(heads, is_fp8)
    merge_heads = 1 if rows * n_heads <= MERGE_BLOCKS else MERGE_HEADS
    return LaunchPlan(
        specialized.name,
        specialized.constants | splits,
        specialized.headers,
        splits | {"heads": merge_heads, "shared_bytes": 0},
        ranges * head_blocks,
        cluster,
        ranges,
        rows * -(-n_heads // merge_heads),
        2 * ranges,
    )


class _Specialized(NamedTuple):
    """A template, its constants and generated headers."""

    name: str
    constants: dict[str, int | bool]
    headers: Mapping[str, str]


def _plan_64(is_fp8: bool, cluster: int) -> _Specialized:
    shared = (3 * TILES + 1) * TILE + 8 * 64 * 4 + (2 * 2 * 3 + 5) * 8  # mla_decode_64.cu divides it
    return _Specialized("mla_decode_64", {"fp8": is_fp8, "cluster": cluster, "shared_bytes": shared}, headers_64())


@lru_cache(1)
def headers_64() -> Mapping[str, str]:
    """Return the headers of kernels that attend for 64 heads together."""
    header = partial(wgmma.header, a="bf16", b="bf16")
    return {
        "wgmma.cuh": header(64),
        "wgmma_registers.cuh": header(64, name="wgmma_registers", a_in_registers=True),
        "wgmma_values.cuh": header(256, name="wgmma_values", b_transposed=True),
        "wgmma_values_registers.cuh": header(
            256, name="wgmma_values_registers", a_in_registers=True, b_transposed=True
        ),
    }


def _plan_few(heads: int, is_fp8: bool) -> _Specialized:
    stages = (SHARED_BYTES - _shared_bytes(heads, is_fp8, 0)) // _shared_bytes_of_stage(is_fp8)
    constants: dict[str, int | bool] = {
        "heads": heads, "fp8": is_fp8, "stages": stages, "exchanged": _exchanged(heads, is_fp8),
        "together": 32 // heads, "shared_bytes": _shared_bytes(heads, is_fp8, stages),
        "loads_early": loads_others_early(),
    }  # fmt: skip
    headers = {
        "wgmma.cuh": wgmma.header(heads, "bf16", "bf16"),
        "wgmma_values.cuh": wgmma.header(heads, "bf16", "bf16", name="wgmma_values", a_transposed=True),
        "wgmma_f16.cuh": wgmma.header(heads, "f16", "f16", name="wgmma_f16", a_in_registers=True),
        "wgmma_bf16.cuh": wgmma.header(heads, "bf16", "bf16", name="wgmma_bf16", a_in_registers=True),
    }
    return _Specialized("mla_decode", constants, headers)


def _shared_bytes(heads: int, is_fp8: bool, stages: int) -> int:
    """Return the shared memory of a thread block, as mla_decode.cu divides it."""
    tiles = SCALES if is_fp8 else 0
    weights = 2 * max(tiles, 1) * heads * 128
    exchange = 2 * _exchanged(heads, is_fp8) * (heads // 2) * 128 * 4
    maxima = 2 * 4 * (heads + tiles) * 4
    return stages * _shared_bytes_of_stage(is_fp8) + TILES * heads * 128 + weights + exchange + maxima + 6 * heads * 4


def _shared_bytes_of_stage(is_fp8: bool) -> int:
    """Return the bytes of a page and of its two mbarriers."""
    return PAGE * (ROW_BYTES if is_fp8 else 2 * WIDTH) + 16


def _exchanged(heads: int, is_fp8: bool) -> int:
    """Return how many blocks of 64 channels a warpgroup gives to the other one at a time, when they merge results."""
    return 32 // heads if is_fp8 else 64 // heads


class _PreparedDecode(PreparedKernel):
    def arguments(self, values: tuple[Any, ...]) -> list[Any]:
        """Return the kernel's arguments: a described tensor map becomes that of the cache's address."""
        described, cache, *others = values
        if isinstance(described, TensorMap):
            with self.kernel.in_context():
                described = tensor_map.encode(described, cache)
        return [described, cache, *others]


class _Prepared:
    def __init__(self, made: LaunchPlan, device: torch.device) -> None:
        self.made = made
        decode = specialize.load(made.kernel, made.constants, device, made.headers)
        merge = specialize.load("mla_merge", made.merge_constants, device)
        shared_bytes, early = int(made.constants["shared_bytes"]), bool(made.constants["programmatic"])
        self.decode = _PreparedDecode(decode, made.grid, made.cluster, THREADS, shared_bytes, early)
        self.merge = PreparedKernel(merge, made.merge_grid, 1, MERGE_THREADS, 0, early)


_prepared: BoundedCache[_Prepared] = BoundedCache(MAX_KEYS)


def page_map(n_pages: int, tiles: int) -> TensorMap:
    """Describe a cache [P, 64, 576] bfloat16 of unknown address as [9, 64·P, 64]; a box is some tiles of a page."""
    return TensorMap(VECTOR, torch.bfloat16, (TILES, n_pages * PAGE, 64), (64, WIDTH, 1), (tiles, PAGE, 64), 128)


def rotary_map(n_pages: int) -> TensorMap:
    """Describe a cache [P, 64, 656] uint8 of unknown address as [1, 64·P, 328] bfloat16; a box is 64 rows of a tile."""
    rows, width = n_pages * PAGE, ROW_BYTES // 2
    return TensorMap(VECTOR, torch.bfloat16, (1, rows, width), (rows * width, width, 1), (1, PAGE, 64), 128)
