"""Causal attention with its backward pass as a separate operator, so that the caller chooses what to save for backward.

    s = scale · q · kᵀ, −∞ for keys after the query      p = softmax(s)      o = p · v

Forward can also attend to all keys (`causal` false). With `lse` the results of several parts of the keys can be merged.

Backward recomputes p from q, k and the logarithm of the softmax's denominator (`lse`), and reads o:

    dv = pᵀ · do      dp = do · vᵀ      ds = p · (dp − Σ do · o)      dq = scale · ds · k      dk = scale · dsᵀ · q

torch's attention saves q, k, v and o in high precision. DeepSeek-V3 saves only o, in E5M6, for this operator and for
the output projection after it, and recomputes q, k and v.

On a GPU these are the kernels of cuDNN or FlashAttention that `torch.nn.functional.scaled_dot_product_attention` takes,
or those of flash-attn-4, where it is installed and faster than cuDNN (`octile.kernels.flash_attn_4`). Results are not
bit for bit those of the reference: the order of sums is unspecified.

`ragged_attention` attends from the last rows of several texts of any lengths, in one call. The queries of all texts are
one after the other, and so are their keys and values. Those of a text are at its last positions: the last row attends
to all keys, the one before it to all but the last. On a GPU the softmax's weights are rounded to q's dtype before they
are multiplied. flash-attn-4's kernel is the fastest, where it is installed. Without it a kernel of octile's own
computes texts of any lengths. cuDNN's, which torch's attention takes for texts of one length on Hopper, is faster than
that, but builds a plan for each new shape, for 40 to 63 ms on the host of an H200. So it computes texts that all have
the same multiple of 1,024 rows, and these keys alone, which few shapes have.

Sources: Dao et al. (arXiv 2205.14135) for the backward pass; FlashAttention-2 (arXiv 2307.08691)
for ragged texts; DeepSeek-V3 (arXiv 2412.19437) §3.3.3.
Shapes: B batch or texts, S sequence, T rows, L keys, H heads, X channels of a query and a key, V of a value.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.kernels import attention as kernels
from octile.kernels import flash_attn_4
from octile.ops.matmul import without_autocast
from octile.ops.operator import operator
from octile.ops.quantize import check_device, check_input_dtype

PLANNED_ROWS = 1024  # to texts of multiples of which, all of one length, torch's attention is applied


@operator()
def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = True) -> tuple[Tensor, Tensor]:
    """Compute attention: each query attends to the keys at its own and earlier positions, or to all keys.

    Args:
        q: [B, S, H, X], float32, bfloat16 or float16, channels contiguous.
        k: [B, L, H, X] in q's dtype, channels contiguous; L is S if causal.
        v: [B, L, H, V] in q's dtype, channels contiguous.
        scale: the factor of q · k, usually 1 / √X.
        causal: whether keys after the query are left out.

    Returns:
        o [B, S, H, V] in q's dtype, contiguous, and lse [B, H, S] float32.

    Raises:
        TypeError: q, k or v has another dtype, or they differ in dtype.
        ValueError: shapes or devices do not fit together.
    """
    _check(q, k, v, causal)
    return _attention(q, k, v, scale, causal)


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    s_BHSL = _scores(q, k, scale)
    if causal:
        is_future_SS = torch.ones(s_BHSL.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        max_BHS1 = s_BHSL.masked_fill(is_future_SS, float("-inf")).amax(-1, keepdim=True)
        p_BHSL = s_BHSL.sub_(max_BHS1).exp_().tril_()  # exp of −∞ would take twice the time
    else:
        max_BHS1 = s_BHSL.amax(-1, keepdim=True)
        p_BHSL = s_BHSL.sub_(max_BHS1).exp_()
    sum_BHS1 = p_BHSL.sum(-1, keepdim=True)
    with without_autocast(q.device):
        o_BHSV = (p_BHSL @ v.transpose(1, 2).float()).div_(sum_BHS1)
    return o_BHSV.transpose(1, 2).to(q.dtype).contiguous(), (max_BHS1 + sum_BHS1.log()).squeeze(-1)


@attention.register_fake
def _(q, k, v, scale, causal=True):
    b, s, h, _ = q.shape
    return q.new_empty(b, s, h, v.shape[-1]), q.new_empty(b, h, s, dtype=torch.float32)


@attention.register_kernel("cpu")
def _(q, k, v, scale, causal=True):
    _check(q, k, v, causal)
    # torch's kernel has no matrix of scores, which many keys make large
    return _attention(q, k, v, scale, True) if causal else kernels.forward_to_all_on_cpu(q, k, v, scale)


@attention.register_kernel("cuda")
def _(q, k, v, scale, causal=True):
    _check(q, k, v, causal)
    return _attention_on_gpu(q, k, v, scale, causal, kernels.choose_for_training(q, k, v, scale, causal))


def _attention_on_gpu(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, choice: kernels.Choice | None
) -> tuple[Tensor, Tensor]:
    return kernels.forward(q, k, v, scale, choice, causal) if choice else _attention(q, k, v, scale, causal)


@operator()
def attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v.

    Args:
        do: [B, S, H, V] in q's dtype, the gradient of o.
        q, k, v, scale: as in `attention`.
        o: [B, S, H, V] in q's dtype, the result of `attention`; it may have been saved in fewer bits.
        lse: [B, H, S] float32, from `attention`.

    Returns:
        dq, dk [B, S, H, X] and dv [B, S, H, V] in q's dtype, contiguous.

    Raises:
        TypeError: a tensor has another dtype, or they differ in dtype.
        ValueError: shapes or devices do not fit together.
    """
    _check_backward(do, q, k, v, o, lse)
    return _attention_backward(do, q, k, v, o, lse, scale)


def _attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    s_BHSS = _scores(q, k, scale)
    q_BHSX, k_BHSX, v_BHSV, o_BHSV, do_BHSV = (t.transpose(1, 2).float() for t in (q, k, v, o, do))
    with without_autocast(q.device):
        p_BHSS = s_BHSS.sub_(lse[..., None]).exp_().tril_()
        dv_BHSV = p_BHSS.mT @ do_BHSV
        dp_BHSS = do_BHSV @ v_BHSV.mT
        ds_BHSS = dp_BHSS.sub_((do_BHSV * o_BHSV).sum(-1, keepdim=True)).mul_(p_BHSS).mul_(scale)
        gradients = ds_BHSS @ k_BHSX, ds_BHSS.mT @ q_BHSX, dv_BHSV
    dq, dk, dv = (t.transpose(1, 2).to(q.dtype).contiguous() for t in gradients)
    return dq, dk, dv


@attention_backward.register_fake
def _(do, q, k, v, o, lse, scale):
    return q.new_empty(q.shape), q.new_empty(k.shape), q.new_empty(v.shape)


@attention_backward.register_kernel("cuda")
def _(do, q, k, v, o, lse, scale):
    _check_backward(do, q, k, v, o, lse)
    if choice := kernels.choose_for_training(q, k, v, scale):
        return kernels.backward(do, q, k, v, o, lse, scale, choice)
    return _attention_backward(do, q, k, v, o, lse, scale)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """The attention scores scale · q · kᵀ, float32 [B, H, S, L], also those of keys after the query."""
    with without_autocast(q.device):
        s_BHSL = q.transpose(1, 2).float() @ k.transpose(1, 2).float().mT
    return s_BHSL.mul_(scale)


def _check_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> None:
    _check(q, k, v)
    check_like("do", do, q, tuple(v.shape))
    check_like("o", o, q, tuple(v.shape))
    b, s, h, _ = q.shape
    check_lse(lse, q, (b, h, s))


def _check(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> None:
    check_input_dtype("q", q)
    if q.dim() != 4:
        raise ValueError(f"q must be [B, S, H, X], not {tuple(q.shape)}")
    b, s, h, x = q.shape
    n_keys = s if causal or k.dim() != 4 else k.shape[1]
    if not n_keys:
        raise ValueError(f"k must have a key, not {tuple(k.shape)}")
    check_like("k", k, q, (b, n_keys, h, x))
    if v.dim() != 4:
        raise ValueError(f"v must be [B, L, H, V], not {tuple(v.shape)}")
    check_like("v", v, q, (b, n_keys, h, v.shape[-1]))


def check_lse(lse: Tensor, q: Tensor, shape: tuple[int, ...]) -> None:
    """Raise TypeError or ValueError if lse is not float32 of this shape on q's device."""
    if lse.dtype != torch.float32:
        raise TypeError(f"lse must be float32, not {lse.dtype}")
    if lse.shape != shape:
        raise ValueError(f"lse must be float32 {shape}, not {lse.dtype} {tuple(lse.shape)}")
    check_device("q", q, "lse", lse)


def check_like(name: str, t: Tensor, q: Tensor, shape: tuple[int, ...]) -> None:
    """Raise TypeError or ValueError if t, called name in messages, has not q's dtype and device, and this shape."""
    if t.dtype != q.dtype:
        raise TypeError(f"{name} must be {q.dtype} as q, not {t.dtype}")
    if tuple(t.shape) != shape:
        raise ValueError(f"{name} must be {shape}, not {tuple(t.shape)}")
    check_device("q", q, name, t)


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
    _check_texts(out, q, k, v, row_starts, key_starts)
    for rows, keys in _slices(row_starts, key_starts, len(q), len(k)):
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
    _check_texts(out, q, k, v, row_starts, key_starts)
    for rows, keys in _slices(row_starts, key_starts, len(q), len(k)):
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

    _check_texts(out, q, k, v, row_starts, key_starts)
    if flash_attn_4.why_not_prompts(q, v, row_starts) is None:
        flash_attn_4.forward_prompts(out, q, k, v, row_starts, key_starts, scale)
        return
    texts = len(row_starts) - 1
    if len(q) == len(k) == texts * max_rows and not max_rows % PLANNED_ROWS:
        q_BSHX, k_BSHX, v_BSHV = (t.unflatten(0, (texts, max_rows)) for t in (q, k, v))
        choice = kernels.choose(q_BSHX, k_BSHX, v_BSHV, scale)
        out.copy_(_attention_on_gpu(q_BSHX, k_BSHX, v_BSHV, scale, True, choice)[0].flatten(0, 1))
        return
    kernel.launch(out, q, k, v, row_starts, key_starts, scale)


def _slices(row_starts: Tensor, key_starts: Tensor, rows: int, keys: int) -> list[tuple[slice, slice]]:
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


def _check_texts(out: Tensor, q: Tensor, k: Tensor, v: Tensor, row_starts: Tensor, key_starts: Tensor) -> None:
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
        if not t.is_contiguous():
            raise ValueError(f"{name} must be contiguous, not have strides {t.stride()}")
        check_device("q", q, name, t)
