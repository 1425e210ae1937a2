"""Causal attention with its backward pass as a separate operator, so that the caller chooses what to save for backward.

    s = scale · q · kᵀ, −∞ for keys after the query      p = softmax(s)      o = p · v

Forward can also attend to all keys (`causal` false). With `lse` the results of several parts of the keys can be merged.

Backward recomputes p from q, k and the logarithm of the softmax's denominator (`lse`), and reads o:

    dv = pᵀ · do      dp = do · vᵀ      ds = p · (dp − Σ do · o)      dq = scale · ds · k      dk = scale · dsᵀ · q

torch's attention saves q, k, v and o in high precision. DeepSeek-V3 saves only o, in E5M6, for this operator and for
the output projection after it, and recomputes q, k and v.

On a GPU these are the kernels of cuDNN or FlashAttention that `torch.nn.functional.scaled_dot_product_attention` takes.
Results are not bit for bit those of the reference: the order of sums is unspecified.

Sources: Dao et al. (arXiv 2205.14135) for the backward pass; DeepSeek-V3 (arXiv 2412.19437) §3.3.3.
Shapes: B batch, S sequence, L keys, H heads, X channels of a query and a key, V of a value.
"""

import torch
from torch import Tensor

from octile.kernels import attention as kernels
from octile.ops.matmul import without_autocast
from octile.ops.operator import operator
from octile.ops.quantize import check_device, check_input_dtype


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
    choice = kernels.choose(q, k, v, scale, causal)
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
    if choice := kernels.choose(q, k, v, scale):
        return kernels.backward(do, q, k, v, o, lse, scale, choice)
    return _attention_backward(do, q, k, v, o, lse, scale)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """The attention scores scale · q · kᵀ, float32 [B, H, S, L], also those of keys after the query."""
    with without_autocast(q.device):
        s_BHSL = q.transpose(1, 2).float() @ k.transpose(1, 2).float().mT
    return s_BHSL.mul_(scale)


def _check_backward(do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> None:
    _check(q, k, v)
    _check_like("do", do, q, tuple(v.shape))
    _check_like("o", o, q, tuple(v.shape))
    b, s, h, _ = q.shape
    if lse.dtype != torch.float32 or lse.shape != (b, h, s):
        raise ValueError(f"lse must be float32 {(b, h, s)}, not {lse.dtype} {tuple(lse.shape)}")
    check_device("q", q, "lse", lse)


def _check(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> None:
    check_input_dtype("q", q)
    if q.dim() != 4:
        raise ValueError(f"q must be [B, S, H, X], not {tuple(q.shape)}")
    b, s, h, x = q.shape
    n_keys = s if causal or k.dim() != 4 else k.shape[1]
    if not n_keys:
        raise ValueError(f"k must have a key, not {tuple(k.shape)}")
    _check_like("k", k, q, (b, n_keys, h, x))
    _check_like("v", v, q, (b, n_keys, h, v.shape[-1]))


def _check_like(name: str, t: Tensor, q: Tensor, shape: tuple[int, ...]) -> None:
    if t.dtype != q.dtype:
        raise TypeError(f"{name} must be {q.dtype} as q, not {t.dtype}")
    if tuple(t.shape) != shape:
        raise ValueError(f"{name} must be {shape}, not {tuple(t.shape)}")
    check_device("q", q, name, t)
