"""Operators of exact mode computed on any machine as a Hopper GPU adds up: its tensor core, its order of sums.

    FP8 GEMMs                            wgmma, promotion every 128 products
    GEMMs in BF16 of independent rows    wgmma in steps of 16 along K; parts of 512, added in FP32
    the gate                             the same, of the weight's three BF16 terms; then the reference's choice
    attention over a paged cache         wgmma for scores and results, 64 keys at a time, with a running maximum

What no tensor core sums is computed by this machine's operators: norms, exponentials, the softmax's denominator,
SwiGLU. Attention is that of Triton's kernel with parts (`octile.kernels.triton.paged_attention`), for latents of up to
256 channels and texts of one part; other calls are this machine's.

Shapes: T rows, H heads, L positions, C latent, W = C + rotary key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.kernels.row_invariant import CHUNK, WIDE
from octile.lab.tensor_core import tensor_core, tensor_core_matmul
from octile.ops.absorbed_attention import PART
from octile.ops.gate import bfloat16_terms, gate, route
from octile.ops.paged_attention import paged_attention, paged_attention_with_lse
from octile.ops.row_invariant import row_invariant_matmul_nt, row_invariant_matmul_nt_out

ARCH, PROMOTE_EVERY = "sm_90", 128
TERMS = 3  # of an FP32 weight
KEYS, MAX_LATENT = 64, 256  # as in `octile.kernels.triton.paged_attention`, of rows that attend together
LOG2E = 1.4426950408889634


class Softmax(NamedTuple):
    """What the softmax of attention is made of.

    Attributes:
        exp2: 2ˣ.
        sum: sums rows of `KEYS` columns.
        divide: a / b.
    """

    exp2: Callable[[Tensor], Tensor]
    sum: Callable[[Tensor], Tensor]
    divide: Callable[[Tensor, Tensor], Tensor]


OWN_SOFTMAX = Softmax(torch.exp2, lambda values_RK: values_RK.sum(1), torch.div)  # of this machine


@contextmanager
def hopper_fp8() -> Iterator[None]:
    """Context in which FP8 GEMMs are summed as octile's kernels for Hopper sum them."""
    with tensor_core(ARCH, PROMOTE_EVERY):
        yield


def compute(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute an operator with Hopper's sums where this module has them, and call it otherwise.

    It is a `Compute` of `octile.lab.operators`. FP8 GEMMs have them inside `hopper_fp8`.
    """
    if func is row_invariant_matmul_nt.overload and _are_bf16(*args[:2]):
        return multiply(*args[:2]).to(args[2])
    if func is row_invariant_matmul_nt_out.overload and _are_bf16(*args[1:3]):
        args[0].copy_(multiply(*args[1:3]))
        return None
    if func is gate.overload and is_row_invariant_gate(args):
        return choose_experts(*args[:10])
    if func in (paged_attention.overload, paged_attention_with_lse.overload) and is_modeled(args):
        results = attend(*args[:6])
        return results if func is paged_attention_with_lse.overload else results[0]
    return func(*args, **kwargs)


def _are_bf16(*tensors: Tensor) -> bool:
    return all(t.dtype == torch.bfloat16 for t in tensors)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a[B, M, K] · b[B, N, K]ᵀ in BF16 → float32 [B, M, N], as `octile.kernels.triton.row_invariant` does."""
    k, part = a.shape[2], CHUNK if b.shape[1] < WIDE else max(a.shape[2], 1)
    out = a.new_zeros(*a.shape[:2], b.shape[1], dtype=torch.float32)
    for batch in range(len(a)):
        for start in range(0, k, part):
            columns = slice(start, start + part)
            out[batch] += tensor_core_matmul(a[batch, :, columns], b[batch, :, columns], arch=ARCH)
    return out


def is_row_invariant_gate(args: Sequence[Any]) -> bool:
    """Whether arguments are those of a gate in exact mode with activations in BF16."""
    return _are_bf16(args[0]) and len(args) > 10 and bool(args[10])


def gate_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x[T, D] in BF16 by the terms of a gate's weight [E, D], and add the products: float32 [T, E]."""
    terms = weight if weight.dtype == torch.bfloat16 else bfloat16_terms(weight, [*range(TERMS)])
    products = multiply(x[None], terms[None])[0].unflatten(1, (-1, len(weight)))
    logits = products[:, 0]
    for term in range(1, products.shape[1]):
        logits = logits + products[:, term]
    return logits


def choose_experts(
    x: Tensor, weight: Tensor, bias: Tensor | None, n_chosen: int, n_group: int, topk_group: int, best: int,
    scoring_func: str, norm_topk_prob: bool, routed_scaling_factor: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Choose experts as `octile.ops.gate.gate` with row_invariant, from logits that tensor cores have summed."""
    logits = gate_logits(x, weight)
    choice = n_chosen, n_group, topk_group, best
    return *route(logits, bias, *choice, scoring_func, norm_topk_prob, routed_scaling_factor), logits


def is_modeled(args: Sequence[Any]) -> bool:
    """Whether `attend` adds up a call of attention as the kernel that a GPU runs for it."""
    q, cache, _, lengths, latent_dim = args[:5]
    return (
        _are_bf16(q, cache)
        and len(args) > 6
        and args[6] == PART
        and latent_dim <= MAX_LATENT
        and (not lengths.numel() or int(lengths.max()) <= PART)
    )


def attend(
    q: Tensor,
    cache: Tensor,
    pages: Tensor,
    lengths: Tensor,
    latent_dim: int,
    scale: float,
    softmax: Softmax = OWN_SOFTMAX,
) -> tuple[Tensor, Tensor]:
    """Attend as `paged_attention_with_lse`: o [T, H, C] and lse [T, H]; a text's rows at once, KEYS keys at a time."""
    o_THC = q.new_zeros(*q.shape[:2], latent_dim)
    lse_TH = q.new_full(q.shape[:2], float("-inf"), dtype=torch.float32)
    firsts = [0, *((pages[1:] != pages[:-1]).any(1).nonzero()[:, 0] + 1).tolist(), len(q)]
    for first, end in pairwise(firsts):
        rows = slice(first, end)
        text = q[rows], cache, pages[first], lengths[rows]
        o_THC[rows], lse_TH[rows] = _attend_text(*text, latent_dim, scale, softmax)
    return o_THC, lse_TH


def _attend_text(
    q_THW: Tensor,
    cache: Tensor,
    pages: Tensor,
    lengths_T: Tensor,
    latent_dim: int,
    scale: float,
    softmax: Softmax,
) -> tuple[Tensor, Tensor]:
    t, h, _ = q_THW.shape
    n, c = int(lengths_T.max()) if t else 0, latent_dim
    keys_LW = cache[pages.long()].flatten(0, 1)[: -(-n // KEYS) * KEYS]
    own_R = lengths_T.repeat_interleave(h)  # of the T · H rows of scores
    q_RW = q_THW.flatten(0, 1)
    factor = torch.tensor(scale) * torch.tensor(LOG2E)
    highest_R = q_RW.new_full((t * h,), torch.finfo(torch.float32).min, dtype=torch.float32)
    total_R, sums_RC = torch.zeros(t * h), torch.zeros(t * h, c)
    for start in range(0, n, KEYS):
        keys_KW = keys_LW[start : start + KEYS]
        keys_KW = F.pad(keys_KW, (0, 0, 0, KEYS - len(keys_KW)))
        latent = tensor_core_matmul(q_RW[:, :c], keys_KW[:, :c], arch=ARCH)
        score_RK = tensor_core_matmul(q_RW[:, c:], keys_KW[:, c:], latent, arch=ARCH)
        is_own_RK = start + torch.arange(KEYS) < own_R[:, None]
        score_RK = (score_RK * factor).masked_fill(~is_own_RK, float("-inf"))
        new_R = torch.maximum(highest_R, score_RK.amax(1))
        weight_RK = softmax.exp2(score_RK - new_R[:, None])
        correction_R = softmax.exp2(highest_R - new_R)
        total_R = (total_R.double() * correction_R + softmax.sum(weight_RK)).float()  # a fused multiply-add
        before_RC = sums_RC * correction_R[:, None]
        sums_RC = tensor_core_matmul(weight_RK.bfloat16(), keys_KW[:, :c].mT, before_RC, arch=ARCH)
        highest_R = new_R
    result_RC = softmax.divide(sums_RC, torch.where(total_R > 0, total_R, 1.0)[:, None]) + 0.0
    lse_R = (highest_R + total_R.log2()) * torch.tensor(0.6931471805599453)
    return result_RC.to(q_THW.dtype).view(t, h, c), lse_R.view(t, h)
