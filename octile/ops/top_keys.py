"""The top-k keys that sparse attention reads: those with the highest logits.

The order of keys is by logit, then by position, so that the choice is the same at every call and on every device: of
equal logits, the key that comes first is among them. NaN is the highest logit, so that it is not lost.

Each logit and its position become one 64-bit integer, of which the K largest are taken. On Hopper a kernel does it,
which reads a row of logits once if a sample of it tells which may be among them. Elsewhere, and for more than 4096
keys, torch does it.

Source: DeepSeek-V3.2-Exp §2 (https://github.com/deepseek-ai/DeepSeek-V3.2-Exp), which chooses 2048 keys.
Shapes: S queries, W columns of the logits, K top-k keys.
"""

import torch
from torch import Tensor

from octile.kernels.cuda.attention import top_keys as kernel
from octile.ops.operator import operator
from octile.ops.quantize import check_device, check_input_dtype

ABSENT = -1  # stands where a query has fewer than K keys
BEFORE_ALL = torch.iinfo(torch.int64).min
MAX_ELEMENTS = 2**24  # whose integers are in memory at the same time


@operator()
def top_keys(logits: Tensor, starts: Tensor, ends: Tensor, k: int) -> Tensor:
    """Choose the K columns with the highest logits, of those from starts[s] to before ends[s].

    Args:
        logits: [S, W] float32, bfloat16 or float16. Other columns of a row are not looked at, whatever they hold.
        starts, ends: [S] int32. A start below 0 counts as 0, an end beyond W as W.
        k: number of columns, at least 1.

    Returns:
        int32 [S, K]: columns by descending logit, of equal logits by ascending column; −1 where there are no more.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes or devices do not fit together, or k is less than 1.
    """
    _check(logits, starts, ends, k)
    return _top_keys(logits, starts, ends, k)


def _top_keys(logits: Tensor, starts: Tensor, ends: Tensor, k: int) -> Tensor:
    s, w = logits.shape
    top_k = torch.full((s, k), ABSENT, dtype=torch.int32, device=logits.device)
    column = torch.arange(w, device=logits.device)
    rows = max(MAX_ELEMENTS // max(w, 1), 1)
    for first in range(0, s, rows):
        part = slice(first, first + rows)
        keys = _order(logits[part]) * 2**32 + (2**32 - 1 - column)
        outside = (column < starts[part, None]) | (column >= ends[part, None])
        highest, columns = keys.masked_fill_(outside, BEFORE_ALL).topk(min(k, w), sorted=True)
        top_k[part, : columns.shape[1]] = columns.masked_fill_(highest == BEFORE_ALL, ABSENT).int()
    return top_k


@top_keys.register_fake
def _(logits, starts, ends, k):
    return logits.new_empty(logits.shape[0], k, dtype=torch.int32)


@top_keys.register_kernel("cuda")
def _(logits, starts, ends, k):
    _check(logits, starts, ends, k)
    choose = _top_keys if kernel.why_unsupported(logits, k) else kernel.launch
    return choose(logits, starts, ends, k)


def _order(logits: Tensor) -> Tensor:
    """Return int64 that are ordered as the logits are: 0 equals −0, and NaN comes last."""
    bits = (logits.float() + 0.0).view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ordered.masked_fill_(logits.isnan(), 0x7FFFFFFF).long()


def _check(logits: Tensor, starts: Tensor, ends: Tensor, k: int) -> None:
    check_input_dtype("logits", logits)
    if logits.dim() != 2:
        raise ValueError(f"logits must be a matrix, not {tuple(logits.shape)}")
    for name, t in (("starts", starts), ("ends", ends)):
        if t.dtype != torch.int32:
            raise TypeError(f"{name} must be int32, not {t.dtype}")
        if t.shape != (len(logits),):
            raise ValueError(f"{name} must be ({len(logits)},), one for each query, not {tuple(t.shape)}")
        check_device("logits", logits, name, t)
    if k < 1:
        raise ValueError(f"k must be at least 1, not {k}")
