"""Hopper's MLA decode attention, run in the emulator."""

import math
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from octile.kernels.cuda.attention import mla_decode
from octile.kernels.cuda.jit.launch import only_activations_are_new, overlapping_launches
from tools import emulator


def decode(
    q: Tensor, cache: Tensor, pages: Tensor, lengths: Tensor, part: int, scale: float, seed: int = 0, n_sms: int = 3,
    arithmetic: Literal["float32", "hopper"] = "float32", early: bool = False, older_cache: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Run both kernels on an emulated GPU of few SMs.

    Args:
        early: whether each begins before the previous one has written queries and cache, or partial results.
        older_cache: whether the cache was written before, and is loaded early.

    Returns:
        o [rows, H, 512], partial results [slots, H, 512], lse [slots, H] and lse of rows [rows, H]; NaN where there are
        none.
    """
    rows, n_heads, _ = q.shape
    is_fp8 = cache.dtype == torch.uint8
    with (
        overlapping_launches() if early else nullcontext(),
        only_activations_are_new() if older_cache else nullcontext(),
    ):
        made = mla_decode.plan(rows, n_heads, is_fp8, part, len(lengths) // rows, n_sms)
    o = torch.full((rows, n_heads, 512), math.nan, dtype=torch.bfloat16)
    max_parts = mla_decode.parts_of(pages.shape[1], part)
    slots = rows * max_parts if part else made.slots
    partials = torch.full((slots, n_heads, 512), math.nan)
    lse, starts = torch.full((slots, n_heads), math.nan), torch.full((rows + 1,), -1, dtype=torch.int32)
    lse_of_rows = torch.full((rows, n_heads), math.nan)
    described: Any = made.map_of(len(cache), is_fp8)
    described = bytes(128) if described is None else described._replace(pointer=cache.data_ptr())
    steps, others = (pages.stride(0), lengths.stride(0)), (rows, max_parts, made.ranges)
    emulator.run(
        made.kernel,
        made.constants,
        grid=made.grid,
        cluster=made.cluster,
        threads=mla_decode.THREADS,
        shared_bytes=int(made.constants["shared_bytes"]),
        arguments=[described, cache, q, pages, lengths, o, partials, lse, starts, scale, n_heads, *steps, *others],
        headers=made.headers,
        previous=[q, *([] if older_cache else [cache.view(torch.uint8)])] if early else [],
        seed=seed,
        arithmetic=arithmetic,
    )
    emulator.run(
        "mla_merge",
        made.merge_constants,
        grid=made.merge_grid,
        threads=mla_decode.MERGE_THREADS,
        shared_bytes=0,
        arguments=[partials, lse, lengths, starts, o, lse_of_rows, n_heads, steps[1], rows, max_parts],
        previous=[partials, lse, starts] if early else [],
    )
    return o, partials, lse, lse_of_rows
