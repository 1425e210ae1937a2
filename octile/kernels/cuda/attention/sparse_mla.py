"""Launcher of Hopper's sparse latent attention, as `octile.ops.sparse_attention` specifies it.

    sparse_mla      thread blocks attend to lists of positions, or to parts of them, for 64 heads each
    sparse_merge    adds the partial results of lists that several thread blocks share, in the order of the entries

Launches follow from shapes and the GPU, not from values, so they can be captured in a CUDA graph; the first call of a
kind compiles and loads kernels, which cannot be.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from octile.kernels.cuda.attention.mla_decode import (
    LATENT,
    MERGE_THREADS,
    PAGE,
    ROTARY,
    TILE,
    TILES,
    WIDTH,
    headers_64,
    rows_at_once,
)
from octile.kernels.cuda.gemm import num_sms, request
from octile.kernels.cuda.jit import specialize
from octile.kernels.cuda.jit.prepared import BoundedCache, PreparedKernel
from octile.kernels.memory_layout import VECTOR

HEADS, STEP_KEYS = 64, 128  # of a thread block, and entries of a list that it attends to together
# of a thread block, as sparse_mla.cu divides it
SHARED = (3 * TILES + 1) * TILE + 6 * HEADS * 4 + 2 * STEP_KEYS * 4 + 2 * 16 + 17 * 8
THREADS = 384  # two consumer warpgroups and one of producers
REGISTERS = {True: (88, 208), False: (40, 232)}  # of producers and consumers, by whether rows are FP8
FEW_STEPS = 16  # of a thread block, whose conversion is a loop: instructions come from memory at first
MAX_SPLITS = 128
ITEM_COST, SPLIT_COST = 1, 1  # steps that take as long as an item's beginning and end, and more if its list is divided
MAX_KEYS = 1024


class LaunchPlan(NamedTuple):
    """The kernels of a call and their launches.

    Attributes:
        constants, headers: constants and headers of sparse_mla.
        grid, cluster, ranges: thread blocks of sparse_mla, of a cluster, and of one block of heads.
        n_splits: parts of a list; more than one are merged.
    """

    constants: Mapping[str, int | bool]
    headers: Mapping[str, str]
    grid: int
    cluster: int
    ranges: int
    n_splits: int
    kernel: str = "sparse_mla"


def why_unsupported(q: Tensor, latents: Tensor, positions: Tensor, latent_dim: int) -> str | None:
    """Return why these kernels do not support a call; None: they do.

    Args:
        q, positions, latent_dim: as for `octile.ops.sparse_attention.sparse_attention`.
        latents: rows in bfloat16 or FP8, or pages of them.
    """
    if q.dtype != torch.bfloat16 or latents.dtype not in (torch.bfloat16, torch.uint8):
        return f"q is {q.dtype} and the latents {latents.dtype}, not bfloat16 and bfloat16 or FP8 rows"
    if (latent_dim, q.shape[2]) != (LATENT, WIDTH):
        return f"rows have {latent_dim} + {q.shape[2] - latent_dim} channels, not {LATENT} + {ROTARY}"
    if not q.numel() or not positions.shape[1] or not len(latents):
        return "there are no queries, heads, positions or latents"
    if not q.is_contiguous() or not latents.is_contiguous():
        return "q or the latents are not contiguous"
    if q.data_ptr() % VECTOR or latents.data_ptr() % VECTOR:
        return f"q or the latents do not begin at a multiple of {VECTOR} bytes"
    return request.why_not_on(q.device)


def launch(
    q: Tensor,
    latents: Tensor,
    positions: Tensor,
    pages: Tensor | None,
    scale: float,
    n_splits: int,
    lse: Tensor | None = None,
) -> Tensor:
    """Attend from q [S, H, 576] to the rows of latents at positions [S, K] → o [S, H, 512] bfloat16.

    Args:
        latents: [T, 576 channels or 656 bytes]; with pages, [P, 64, the same].
        pages: int32 [S, M] of each query's text, or None.
        n_splits: parts of a list; 0: chosen by shapes.
        lse: float32 [S, H], contiguous: where log-sum-exps of the scores are written. n_splits must be 1 then.
    """
    rows, n_heads, _ = q.shape
    if positions.stride(1) != 1:
        positions = positions.contiguous()
    if pages is not None and pages.stride(1) != 1:
        pages = pages.contiguous()
    o = q.new_empty(rows, n_heads, LATENT)
    at_once = rows_at_once(rows, n_heads, min(n_splits, -(-positions.shape[1] // STEP_KEYS)))
    for first in range(0, rows, at_once):
        part = slice(first, first + at_once)
        part_pages = None if pages is None else pages[part]
        part_lse = None if lse is None else lse[part]
        launch_part(q[part], positions[part], part_pages, o[part], latents, scale, n_splits, part_lse)
    return o


def launch_part(
    q: Tensor,
    positions: Tensor,
    pages: Tensor | None,
    o: Tensor,
    latents: Tensor,
    scale: float,
    n_splits: int,
    lse: Tensor | None,
) -> None:
    """Attend from some queries at once, into o and lse."""
    (rows, n_heads, _), k = q.shape, positions.shape[1]
    is_fp8, is_paged = latents.dtype == torch.uint8, pages is not None
    key = (rows, n_heads, k, is_fp8, is_paged, n_splits, q.device)
    prepared = _prepared[key]
    if prepared is None:
        made = plan(*key[:-1], num_sms.multiprocessors(q.device))
        prepared = _prepared[key] = _Prepared(made, rows * n_heads, q.device)
    made = prepared.made
    partial_address, lse_address = 0, 0 if lse is None else lse.data_ptr()
    if made.n_splits > 1:
        partials = q.new_empty(rows * made.n_splits, n_heads, LATENT, dtype=torch.float32)
        sums = q.new_empty(rows * made.n_splits, n_heads, dtype=torch.float32)
        partial_address, lse_address = partials.data_ptr(), sums.data_ptr()
    page_address, page_step, n_positions = 0, 0, len(latents)
    if pages is not None:
        page_address, page_step, n_positions = pages.data_ptr(), pages.stride(0), PAGE * pages.shape[1]
    prepared.attend.launch_at(
        (latents.data_ptr(), q.data_ptr(), positions.data_ptr(), page_address, o.data_ptr(), partial_address,
         lse_address, scale, n_heads, rows, k, positions.stride(0), page_step, n_positions, len(latents),
         made.n_splits, made.ranges)
    )()  # fmt: skip
    if prepared.merge is not None:
        prepared.merge.launch_at((partial_address, lse_address, o.data_ptr(), n_heads, made.n_splits))()


def plan(rows: int, n_heads: int, k: int, is_fp8: bool, is_paged: bool, n_splits: int, n_sms: int) -> LaunchPlan:
    """Plan the launches for tensors that the kernels support; n_sms: of the GPU."""
    head_blocks = -(-n_heads // HEADS)
    ranges = max(n_sms // head_blocks, 1)
    steps = -(-k // STEP_KEYS)
    splits = min(n_splits, steps) or best_splits(rows, steps, ranges)
    cluster = 2 if is_fp8 and head_blocks % 2 == 0 else 1  # thread blocks that share converted rows
    producer, consumer = REGISTERS[is_fp8]
    steps_of_block = -(-rows * splits // ranges) * -(-steps // splits)
    constants: dict[str, int | bool] = {
        "fp8": is_fp8, "paged": is_paged, "cluster": cluster, "producer_registers": producer,
        "consumer_registers": consumer, "shared_bytes": SHARED,
        "unrolled_parts": 2 if cluster > 1 and steps_of_block > FEW_STEPS else 1,
    }  # fmt: skip
    ranges = min(ranges, rows * splits)
    return LaunchPlan(constants, headers_64(), ranges * head_blocks, cluster, ranges, splits)


@lru_cache(MAX_KEYS)
def best_splits(rows: int, steps: int, ranges: int) -> int:
    """Return into how many parts lists of `steps` are divided, so that `ranges` thread blocks are done first."""

    def time(splits: int) -> int:
        items = -(-rows * splits // ranges)
        return items * (-(-steps // splits) + ITEM_COST + SPLIT_COST * (splits > 1))

    return min(range(1, min(steps, MAX_SPLITS) + 1), key=time)


class _Prepared:
    def __init__(self, made: LaunchPlan, merges: int, device: torch.device) -> None:
        self.made = made
        kernel = specialize.load(made.kernel, made.constants, device, made.headers)
        self.attend = PreparedKernel(kernel, made.grid, made.cluster, THREADS, int(made.constants["shared_bytes"]))
        self.merge = None
        if made.n_splits > 1:
            merge = specialize.load("sparse_merge", {}, device)
            self.merge = PreparedKernel(merge, merges, 1, MERGE_THREADS, 0)


_prepared: BoundedCache[_Prepared] = BoundedCache(MAX_KEYS)
