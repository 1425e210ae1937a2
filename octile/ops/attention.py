"""Causal attention with its backward pass as a separate operator, so that the caller chooses what to save for backward.

    s = scale · q · kᵀ, −∞ for keys after the query      p = softmax(s)      o = p · v

Backward recomputes p from q, k and the logarithm of the softmax's denominator (`lse`), and reads o:

    dv = pᵀ · do      dp = do · vᵀ      ds = p · (dp − Σ do · o)      dq = scale · ds · k      dk = scale · dsᵀ · q

torch's attention saves q, k, v and o in high precision. DeepSeek-V3 saves only o, in E5M6, for this operator and for
the output projection after it, and recomputes q, k and v.

On a GPU these are the kernels of cuDNN or FlashAttention that `torch.nn.functional.scaled_dot_product_attention` takes.
Results are not bit for bit those of the reference: the order of sums is unspecified.

Sources: Dao et al. (arXiv 2205.14135) for the backward pass; DeepSeek-V3 (arXiv 2412.19437) §3.3.3.
Shapes: B batch, S sequence, H heads, X channels of a query and a key, V of a value.
"""

import torch
from torch import Tensor

from octile.kernels import attention as kernels
from octile.ops.matmul import without_autocast
from octile.ops.operator import operator
from octile.ops.quantize import check_device, check_input_dtype


@operator()
def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute causal attention: each query attends to the keys at its own and earlier positions.

    Args:
        q, k: [B, S, H, X], float32, bfloat16 or float16, channels contiguous.
        v: [B, S, H, V] in q's dtype, channels contiguous.
        scale: the factor of q · k, usually 1 / √X.

    Returns:
        o [B, S, H, V] in q's dtype, contiguous, and lse [B, H, S] float32.

    Raises:
        TypeError: q, k or v has another dtype, or they differ in dtype.
        ValueError: shapes or devices do not fit together.
    """
    _check(q, k, v)
    return _attention(q, k, v, scale)


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    s_BHSS = _scores(q, k, scale)
    is_future_SS = torch.ones(s_BHSS.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    max_BHS1 = s_BHSS.masked_fill(is_future_SS, float("-inf")).amax(-1, keepdim=True)
    p_BHSS = s_BHSS.sub_(max_BHS1).exp_().tril_()  # exp of −∞ would take twice the time
    sum_BHS1 = p_BHSS.sum(-1, keepdim=True)
    with without_autocast(q.device):
        o_BHSV = (p_BHSS @ v.transpose(1, 2).float()).div_(sum_BHS1)
    return o_BHSV.transpose(1, 2).to(q.dtype).contiguous(), (max_BHS1 + sum_BHS1.log()).squeeze(-1)


@attention.register_fake
def _(q, k, v, scale):
    b, s, h, _ = q.shape
    return q.new_empty(v.shape), q.new_empty(b, h, s, dtype=torch.float32)


@attention.register_kernel("cuda")
def _(q, k, v, scale):
    _check(q, k, v)
    choice = kernels.choose(q, k, v, scale)
    return kernels.forward(q, k, v, scale, choice) if choice else _attention(q, k, v, scale)


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
    if choice := kernels.choose(q, k, v, scale):
        return kernels.backward(do, q, k, v, o, lse, scale, choice)
    return _attention_backward(do, q, k, v, o, lse, scale)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """The attention scores scale · q · kᵀ, float32 [B, H, S, S], also those of keys after the query."""
    with without_autocast(q.device):
        s_BHSS = q.transpose(1, 2).float() @ k.transpose(1, 2).float().mT
    return s_BHSS.mul_(scale)


def _check_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> None:
    _check(q, k, v)
    _check_like("do", do, q, tuple(v.shape))
    _check_like("o", o, q, tuple(v.shape))
    b, s, h, _ = q.shape
    if lse.dtype != torch.float32 or lse.shape != (b, h, s):
        raise ValueError(f"lse must be float32 {(b, h, s)}, not {lse.dtype} {tuple(lse.shape)}")
    check_device("q", q, "lse", lse)


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_input_dtype("q", q)
    if q.dim() != 4:
        raise ValueError(f"q must be [B, S, H, X], not {tuple(q.shape)}")
    _check_like("k", k, q, tuple(q.shape))
    _check_like("v", v, q, (*q.shape[:3], v.shape[-1]))


def _check_like(name: str, t: Tensor, q: Tensor, shape: tuple[int, ...]) -> None:
    if t.dtype != q.dtype:
        raise TypeError(f"{name} must be {q.dtype} as q, not {t.dtype}")
    if tuple(t.shape) != shape:
        raise ValueError(f"{name} must be {shape}, not {tuple(t.shape)}")
    check_device("q", q, name, t)
