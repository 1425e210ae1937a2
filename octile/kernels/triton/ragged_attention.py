# mypy: allow-untyped-defs
"""Causal attention of the last rows of several texts, as `octile.ops.attention` specifies.

A program takes a block of a text's rows of one head. It multiplies them by the keys that all of them see, then by those
that some see, with a running maximum of the scores. Channels of queries and keys are two powers of two, such as the 128
and 64 of latent attention, the second of which may be padded.

Source: FlashAttention-2 (arXiv 2307.08691).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.hopper import SHARED_BYTES
from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton.device import device_properties
from octile.kernels.triton.launch_config import RAGGED_ATTENTION, RAGGED_ATTENTION_LEAST, RAGGED_ATTENTION_SMALL

MAX_CHANNELS = 320  # of a key and its value, with which large tiles fit
LOG2E, LN2 = tl.constexpr(1.4426950408889634), tl.constexpr(0.6931471805599453)


def launch(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_starts: Tensor,
    key_starts: Tensor,
    scale: float,
    lse: Tensor | None = None,
) -> None:
    """Attend from q [T, H, X] to k [L, H, X] and v [L, H, V], text by text → out [T, H, V], and lse [H, T] float32."""
    rows, heads, texts = *q.shape[:2], len(row_starts) - 1
    blocks = choose_blocks(q, v, RAGGED_ATTENTION, RAGGED_ATTENTION_SMALL, RAGGED_ATTENTION_LEAST)
    with torch.cuda.device_of(q):
        attend_texts[count_programs(rows, texts, blocks["ROWS"]), heads](
            q, k, v, out, lse, row_starts, key_starts, texts, scale,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2], rows,
            **constants(q, v), **blocks,
        )  # fmt: skip


def count_programs(rows: int, texts: int, size: int) -> int:
    """At least as many programs as there are blocks of `size` rows of texts that have so many rows together."""
    return rows // size + texts


def choose_blocks(
    q: Tensor, v: Tensor, large: dict[str, int], small: dict[str, int], least: dict[str, int]
) -> dict[str, int]:
    """Choose a kernel's blocks: small ones for GPUs with less shared memory, the least for float32 or many channels."""
    if q.dtype == torch.float32 or q.shape[2] + v.shape[2] > MAX_CHANNELS:
        return least
    return large if device_properties(q.device).shared_bytes >= SHARED_BYTES else small


def constants(q: Tensor, v: Tensor) -> dict[str, Any]:
    """Channels of queries and keys, as two powers of two, those of values, and the precision of products."""
    x, values = q.shape[2], v.shape[2]
    first = max(triton.next_power_of_2(x + 1) // 2, 16)
    second = max(triton.next_power_of_2(x - first), 16) if x > first else 0
    precision = "ieee" if q.dtype == torch.float32 else "tf32"
    sizes = {"X": x, "FIRST": first, "SECOND": second, "V": values, "VS": max(triton.next_power_of_2(values), 16)}
    return {**sizes, "PRECISION": precision}


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""
    out, q = cases.empty(cases.T, 16, 128), cases.empty(4096, 128, 192)[:, :16]
    v, ends = cases.empty(4096, 16, 256)[..., 128:], cases.empty(cases.GROUPS, dtype=torch.int32)
    return {"attention of prompts": lambda: launch(out, q, q, v, ends, ends, 0.1)}


@triton.jit(do_not_specialize=["texts", "lse_head"])  # they differ from step to step
def attend_texts(
    q, k, v, out, lse, row_starts, key_starts, texts, scale, q_row, q_head, k_row, k_head, v_row, v_head, out_row,
    out_head, lse_head, X: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, V: tl.constexpr, VS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the results of a block of rows, the last rows of a text first, which see the most keys."""
    head = tl.program_id(1).to(tl.int64)
    text, block = find_block(row_starts, texts, ROWS)
    first_row, rows = span(row_starts, text)
    first_key, keys = span(key_starts, text)
    begin = (tl.cdiv(rows, ROWS) - 1 - block) * ROWS
    if begin < 0:
        return
    row = begin + tl.arange(0, ROWS)
    position = keys - rows + row
    c = tl.arange(0, FIRST)
    value = tl.arange(0, VS)
    key = tl.arange(0, KEYS)
    q_at = q + (first_row + row)[:, None] * q_row + head * q_head
    inside = (row < rows)[:, None]
    q_1 = tl.load(q_at + c[None, :], mask=inside & (c < X)[None, :], other=0.0)
    k_at = k + (first_key + key)[None, :] * k_row + head * k_head
    v_at = v + (first_key + key)[:, None] * v_row + head * v_head
    if SECOND:
        d = FIRST + tl.arange(0, SECOND)
        q_2 = tl.load(q_at + d[None, :], mask=inside & (d < X)[None, :], other=0.0)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, VS], tl.float32)
    seen_by_all = (keys - rows + begin + 1) // KEYS * KEYS
    end = tl.minimum(keys - rows + begin + ROWS, keys)
    for phase in tl.static_range(2):
        for start in range(0 if phase == 0 else seen_by_all, seen_by_all if phase == 0 else end, KEYS):
            here = start + key < keys
            first = tl.cast(start, tl.int64)  # long texts of many heads have 2³¹ elements and more
            k_1 = load(k_at + first * k_row + c[:, None], here[None, :], (c < X)[:, None], phase == 1 or X < FIRST)
            score = tl.dot(q_1, k_1, input_precision=PRECISION)
            if SECOND:
                at = k_at + first * k_row + d[:, None]
                k_2 = load(at, here[None, :], (d < X)[:, None], phase == 1 or X < FIRST + SECOND)
                score += tl.dot(q_2, k_2, input_precision=PRECISION)
            score *= scale * LOG2E
            if phase == 1:
                score = tl.where((start + key)[None, :] <= position[:, None], score, float("-inf"))
            new_highest = tl.maximum(highest, tl.max(score, axis=1))
            weight = tl.exp2(score - new_highest[:, None])
            correction = tl.exp2(highest - new_highest)
            total = total * correction + tl.sum(weight, axis=1)
            at = v_at + first * v_row + value[None, :]
            values = load(at, here[:, None], (value < V)[None, :], phase == 1 or V < VS)
            sums = sums * correction[:, None]
            sums = tl.dot(weight.to(values.dtype), values, sums, input_precision=PRECISION)
            highest = new_highest
    result = (sums / total[:, None]).to(out.dtype.element_ty)
    out_at = out + (first_row + row)[:, None] * out_row + head * out_head + value[None, :]
    tl.store(out_at, result, mask=inside & (value < V)[None, :])
    if lse is not None:
        tl.store(lse + head * lse_head + first_row + row, (highest + tl.log2(total)) * LN2, mask=row < rows)


@triton.jit
def find_block(starts, texts, SIZE: tl.constexpr):
    """Return the text of this program, and the number of its block of SIZE rows, which the text may not have.

    Text n has the programs from start // SIZE + n on: at least as many before the next text's as it has blocks.
    """
    program = tl.program_id(0)
    text = -1
    for first in range(0, texts, 256):
        n = first + tl.arange(0, 256)
        begins = tl.load(starts + n, mask=n < texts, other=0) // SIZE + n <= program
        text += tl.sum((begins & (n < texts)).to(tl.int32))
    return text, program - (tl.load(starts + text) // SIZE + text)


@triton.jit
def span(starts, text):
    """Return the first row of a text, and how many it has."""
    first = tl.load(starts + text).to(tl.int64)
    return first, (tl.load(starts + text + 1) - first).to(tl.int32)


@triton.jit
def load(at, are_keys, are_channels, MASKED: tl.constexpr):
    """Load channels of keys; with MASKED, zeros for what is beyond either."""
    if MASKED:
        return tl.load(at, mask=are_keys & are_channels, other=0.0)
    return tl.load(at)
