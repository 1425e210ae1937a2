"""Causal attention within each of several texts that follow each other, with its backward pass as another operator.

Texts of any lengths are packed into one sequence of rows. A query attends to the keys of its own text up to its own
position, as `octile.ops.attention` computes it for that text alone.

On a GPU these are Triton kernels, deterministic ones, whose sums have another order than the reference's, or
flash-attn-4's, where it is installed and texts are long: they are faster, and add the gradients of queries in no fixed
order. Deterministic mode excludes them.

Source: FlashAttention-2 (arXiv 2307.08691).
Shapes: T rows, N texts, H heads, X channels of a query and a key, V of a value.
"""

from itertools import pairwise

import torch
from torch import Tensor

from octile.kernels import flash_attn_4
from octile.ops.attention import attention, attention_backward, check_like, check_lse
from octile.ops.operator import operator
from octile.ops.quantize import check_device, check_input_dtype


@operator()
def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, mean_seqlen: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute attention within each text.

    Args:
        q, k: [T, H, X], float32, bfloat16 or float16, channels contiguous.
        v: [T, H, V] in q's dtype, channels contiguous.
        cu_seqlens: int32 [N + 1], contiguous, the first row of each text, and T; nondecreasing from 0. A text may be
            empty.
        scale: the factor of q · k, usually 1 / √X.
        mean_seqlen: the mean rows of a text that is not empty, such as that of a whole data set, which chooses the
            kernel on a GPU; None: T / N.

    Returns:
        o [T, H, V] in q's dtype, contiguous, and lse [H, T] float32.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes, strides or devices do not fit together; on a CPU, cu_seqlens are not such ones.
    """
    _check(q, k, v, cu_seqlens)
    o, lse = q.new_empty(v.shape), q.new_empty(q.shape[1], len(q), dtype=torch.float32)
    for text in _texts(cu_seqlens, len(q)):
        o_1SHV, lse_1HS = attention.reference(q[None, text], k[None, text], v[None, text], scale)
        o[text], lse[:, text] = o_1SHV[0], lse_1HS[0]
    return o, lse


@packed_attention.register_fake
def _(q, k, v, cu_seqlens, scale, mean_seqlen=None):
    return q.new_empty(v.shape), q.new_empty(q.shape[1], len(q), dtype=torch.float32)


@packed_attention.register_kernel("cuda")
def _(q, k, v, cu_seqlens, scale, mean_seqlen=None):
    from octile.kernels.triton import packed_attention as kernels  # late: a machine without a GPU has no Triton

    _check(q, k, v, cu_seqlens)
    if flash_attn_4.why_not_packed(q, v, cu_seqlens, mean_seqlen) is None:
        return flash_attn_4.forward(q, k, v, scale, cu_seqlens)
    return kernels.forward(q, k, v, cu_seqlens, scale)


@operator()
def packed_attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    mean_seqlen: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v.

    Args:
        do: [T, H, V] in q's dtype, channels contiguous, the gradient of o.
        q, k, v, cu_seqlens, scale, mean_seqlen: as in `packed_attention`.
        o: [T, H, V] in q's dtype, channels contiguous, the result of `packed_attention`; it may have been saved in
            fewer bits.
        lse: [H, T] float32, contiguous, from `packed_attention`.

    Returns:
        dq, dk [T, H, X] and dv [T, H, V] in q's dtype, contiguous.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes, strides or devices do not fit together; on a CPU, cu_seqlens are not such ones.
    """
    _check_backward(do, q, k, v, o, lse, cu_seqlens)
    gradients = q.new_empty(q.shape), q.new_empty(k.shape), q.new_empty(v.shape)
    for text in _texts(cu_seqlens, len(q)):
        operands = (t[None, text] for t in (do, q, k, v, o))
        found = attention_backward.reference(*operands, lse[None, :, text], scale)
        for gradient, part in zip(gradients, found, strict=True):
            gradient[text] = part[0]
    return gradients


@packed_attention_backward.register_fake
def _(do, q, k, v, o, lse, cu_seqlens, scale, mean_seqlen=None):
    return q.new_empty(q.shape), q.new_empty(k.shape), q.new_empty(v.shape)


@packed_attention_backward.register_kernel("cuda")
def _(do, q, k, v, o, lse, cu_seqlens, scale, mean_seqlen=None):
    from octile.kernels.triton import packed_attention as kernels  # late, as above

    _check_backward(do, q, k, v, o, lse, cu_seqlens)
    if flash_attn_4.why_not_packed(q, v, cu_seqlens, mean_seqlen) is None:
        return flash_attn_4.backward(do, q, k, v, o, lse, scale, cu_seqlens)
    return kernels.backward(do, q, k, v, o, lse, cu_seqlens, scale)


def _texts(cu_seqlens: Tensor, rows: int) -> list[slice]:
    """Return the rows of each text that has some; raise ValueError if cu_seqlens are not such ones."""
    starts = cu_seqlens.tolist()
    if starts[0] != 0 or starts[-1] != rows or starts != sorted(starts):
        raise ValueError(f"cu_seqlens must be nondecreasing from 0 to {rows}, not {starts}")
    return [slice(a, b) for a, b in pairwise(starts) if a < b]


def _check_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cu_seqlens: Tensor) -> None:
    _check(q, k, v, cu_seqlens)
    check_like("do", do, q, tuple(v.shape))
    check_like("o", o, q, tuple(v.shape))
    check_lse(lse, q, (q.shape[1], len(q)))
    _check_strides({"do": do, "o": o}, {"lse": lse})


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> None:
    check_input_dtype("q", q)
    if q.dim() != 3:
        raise ValueError(f"q must be [T, H, X], not {tuple(q.shape)}")
    check_like("k", k, q, tuple(q.shape))
    check_like("v", v, q, (*q.shape[:2], v.shape[-1]))
    if cu_seqlens.dtype != torch.int32:
        raise TypeError(f"cu_seqlens must be int32, not {cu_seqlens.dtype}")
    if cu_seqlens.dim() != 1 or not len(cu_seqlens):
        raise ValueError(f"cu_seqlens must have the first row of each text and the end, not {tuple(cu_seqlens.shape)}")
    check_device("q", q, "cu_seqlens", cu_seqlens)
    _check_strides({"q": q, "k": k, "v": v}, {"cu_seqlens": cu_seqlens})


def _check_strides(operands: dict[str, Tensor], others: dict[str, Tensor]) -> None:
    """Raise ValueError if channels of an operand, or one of the others, is not contiguous: kernels would misread it."""
    for name, t in operands.items():
        if t.numel() and t.stride(-1) != 1:
            raise ValueError(f"the channels of {name} must be contiguous, not have strides {t.stride()}")
    for name, t in others.items():
        if not t.is_contiguous():
            raise ValueError(f"{name} must be contiguous, not have strides {t.stride()}")
