"""Causal attention of the last rows of several texts of any lengths, in one call.

The queries of all texts are one after the other, and so are their keys and values. Those of a text are at its last
positions: the last row attends to all keys, the one before it to all but the last.

On a GPU the softmax's weights are rounded to q's dtype before they are multiplied; the order of sums is unspecified.
torch's attention takes cuDNN's kernel on Hopper, for texts of one length. It is the fastest, but builds a plan for each
new shape, for 40 to 63 ms on the host of an H200. So it computes texts that all have the same multiple of 1,024 rows,
and these keys alone, which few shapes have. A kernel of octile's own, without plans, computes all others.

Source: FlashAttention-2 (arXiv 2307.08691).
Shapes: B texts, T rows, L keys, H heads, X channels of a query and a key, V of a value.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.ops.attention import attention
from octile.ops.operator import operator
from octile.ops.quantize import check_device, check_input_dtype

PLANNED_ROWS = 1024  # to texts of multiples of which, all of one length, torch's attention is applied


@operator(writes=("out",))
def ragged_attention(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    row_starts: Tensor,
    key_starts: Tensor,
    max_rows: int,
    max_keys: int,
    scale: float,
) -> None:
    """Attend causally from the rows of each text to its keys.

    Args:
        out: [T, H, V] in q's dtype, channels contiguous; what is computed is written to it.
        q: [T, H, X], float32, bfloat16 or float16, channels contiguous.
        k: [L, H, X] in q's dtype, channels contiguous.
        v: [L, H, V] in q's dtype, channels contiguous.
        row_starts, key_starts: int32 [B + 1], the first row and the first key of each text, then T and L. A text has at
            least one row, and at least as many keys.
        max_rows, max_keys: the most rows and keys of a text.
        scale: the factor of q · k.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes or devices do not fit together; on a CPU, the starts are not such ones.
    """
    _check(out, q, k, v, row_starts, key_starts)
    for rows, keys in _texts(row_starts, key_starts, len(q), len(k)):
        n, length = rows.stop - rows.start, keys.stop - keys.start
        s_HNL = torch.einsum("nhx,lhx->hnl", q[rows].float() * scale, k[keys].float())
        is_future_NL = torch.ones(n, length, dtype=torch.bool, device=q.device).triu(length - n + 1)
        p_HNL = s_HNL.masked_fill_(is_future_NL, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hnl,lhv->nhv", p_HNL, v[keys].float()).to(q.dtype)


@ragged_attention.register_fake
def _(out, q, k, v, row_starts, key_starts, max_rows, max_keys, scale):
    return None


@ragged_attention.register_kernel("cpu")
def _(out, q, k, v, row_starts, key_starts, max_rows, max_keys, scale):
    _check(out, q, k, v, row_starts, key_starts)
    for rows, keys in _texts(row_starts, key_starts, len(q), len(k)):
        n, length = rows.stop - rows.start, keys.stop - keys.start
        q_1NHX, k_1LHX, v_1LHV = q[rows][None], k[keys][None], v[keys][None]
        if n == length:
            out[rows] = attention(q_1NHX, k_1LHX, v_1LHV, scale)[0][0]
            continue
        mask_NL = torch.ones(n, length, dtype=torch.bool).tril(length - n)
        q_1HNX, k_1HLX, v_1HLV = (t.transpose(1, 2) for t in (q_1NHX, k_1LHX, v_1LHV))
        o_1HNV = F.scaled_dot_product_attention(q_1HNX, k_1HLX, v_1HLV, mask_NL, scale=scale)
        out[rows] = o_1HNV[0].transpose(0, 1)


@ragged_attention.register_kernel("cuda")
def _(out, q, k, v, row_starts, key_starts, max_rows, max_keys, scale):
    from octile.kernels.triton import ragged_attention as kernel  # late: a machine without a GPU has no Triton

    _check(out, q, k, v, row_starts, key_starts)
    texts = len(row_starts) - 1
    if len(q) == len(k) == texts * max_rows and not max_rows % PLANNED_ROWS:
        q_BSHX, k_BSHX, v_BSHV = (t.unflatten(0, (texts, max_rows)) for t in (q, k, v))
        out.copy_(attention(q_BSHX, k_BSHX, v_BSHV, scale)[0].flatten(0, 1))
        return
    kernel.launch(out, q, k, v, row_starts, key_starts, max_rows, scale)


def _texts(row_starts: Tensor, key_starts: Tensor, rows: int, keys: int) -> list[tuple[slice, slice]]:
    """Return the rows and keys of each text; raise ValueError if the starts are not such ones."""
    found = []
    for name, starts, end in (("row_starts", row_starts.tolist(), rows), ("key_starts", key_starts.tolist(), keys)):
        if starts[0] != 0 or starts[-1] != end or starts != sorted(starts):
            raise ValueError(f"{name} must be nondecreasing from 0 to {end}, not {starts}")
        found.append([slice(a, b) for a, b in pairwise(starts)])
    for i, (text_rows, text_keys) in enumerate(zip(*found, strict=True)):
        n, length = text_rows.stop - text_rows.start, text_keys.stop - text_keys.start
        if not 1 <= n <= length:
            raise ValueError(f"text {i} must have a row, and at least as many keys, not {n} rows and {length} keys")
    return list(zip(*found, strict=True))


def _check(out: Tensor, q: Tensor, k: Tensor, v: Tensor, row_starts: Tensor, key_starts: Tensor) -> None:
    check_input_dtype("q", q)
    for name, t in (("q", q), ("k", k), ("v", v), ("out", out)):
        if t.dtype != q.dtype:
            raise TypeError(f"{name} must be {q.dtype} as q, not {t.dtype}")
        if t.dim() != 3 or (t.numel() and t.stride(-1) != 1):
            raise ValueError(f"{name} must be [rows, H, channels], channels contiguous, not {tuple(t.shape)}")
        check_device("q", q, name, t)
    (rows, heads, width), (keys, _, values) = q.shape, v.shape
    shapes = ("k", k, (keys, heads, width)), ("v", v, (keys, heads, values)), ("out", out, (rows, heads, values))
    for name, t, shape in shapes:
        if tuple(t.shape) != shape:
            raise ValueError(f"{name} must be {shape}, not {tuple(t.shape)}")
    for name, t in (("row_starts", row_starts), ("key_starts", key_starts)):
        if t.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, not {t.dtype}")
        if t.dim() != 1 or len(t) < 2 or len(t) != len(row_starts):
            raise ValueError(f"{name} must have the first of each text and the end, not {tuple(t.shape)}")
        check_device("q", q, name, t)
