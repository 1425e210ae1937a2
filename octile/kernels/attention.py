"""Causal attention on a GPU by the kernels that torch brings, called apart so that the backward pass reads what it is
given.

torch's own choice is asked (`torch.nn.attention.sdpa_kernel` steers it, and deterministic mode leaves cuDNN out).
FlashAttention wants as many channels in a value as in a key, and a multiple of 8 of them: where it would be refused for
that alone, as it is for MLA's 192 and 128, channels of zeros are appended.

Shapes: B batch, S sequence, H heads, X channels of a query and a key, V of a value.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

FLASH, EFFICIENT, CUDNN = (
    backend.value
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
)
EFFICIENT_LSE = 32  # its sums are stored in rows of whole multiples
aten = torch.ops.aten


def choose(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[int, int] | None:
    """The kernel, and how many channels its operands are filled up to, 0: none; None: there is none for these.

    Args:
        q, k: [B, S, H, X]; v: [B, S, H, V].
    """
    found = _allowed(q, k, v, scale)
    if found in (FLASH, CUDNN):
        return found, 0
    width = -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
    empty = q.new_empty(*q.shape[:-1], width)
    filled = _allowed(empty, empty, empty, scale)
    if filled in (FLASH, CUDNN):
        return filled, width
    return (EFFICIENT, 0) if found == EFFICIENT else None


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, choice: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """o [B, S, H, V], contiguous, and lse [B, H, S] float32."""
    kernel, width = choice
    s = q.shape[1]
    q_BHSX, k_BHSX, v_BHSV = (_filled(t, width).transpose(1, 2) for t in (q, k, v))
    if kernel == CUDNN:
        o, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q_BHSX, k_BHSX, v_BHSV, None, True, 0.0, True, False, scale=scale
        )
        lse = lse.squeeze(-1)
    elif kernel == FLASH:
        o, lse, *_ = aten._scaled_dot_product_flash_attention(q_BHSX, k_BHSX, v_BHSV, 0.0, True, False, scale=scale)
    else:
        o, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q_BHSX, k_BHSX, v_BHSV, None, True, 0.0, True, scale=scale
        )
    return o.transpose(1, 2)[..., : v.shape[-1]].contiguous(), lse[..., :s].contiguous()


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, choice: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk [B, S, H, X] and dv [B, S, H, V], contiguous."""
    kernel, width = choice
    s = q.shape[1]
    q_BHSX, k_BHSX, v_BHSV, o_BHSV, do_BHSV = (_filled(t, width).transpose(1, 2) for t in (q, k, v, o, do))
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # a seed of dropout, of which there is none
    if kernel == CUDNN:
        found = aten._scaled_dot_product_cudnn_attention_backward(
            do_BHSV, q_BHSX, k_BHSX, v_BHSV, o_BHSV, lse[..., None], unused, unused, None, None, None, s, s, 0.0, True,
            scale=scale,
        )  # fmt: skip
    elif kernel == FLASH:
        found = aten._scaled_dot_product_flash_attention_backward(
            do_BHSV, q_BHSX, k_BHSX, v_BHSV, o_BHSV, lse, None, None, s, s, 0.0, True, unused, unused, scale=scale
        )
    else:
        lse = F.pad(lse, (0, -s % EFFICIENT_LSE), value=float("inf"))
        found = aten._scaled_dot_product_efficient_attention_backward(
            do_BHSV, q_BHSX, k_BHSX, v_BHSV, None, o_BHSV, lse, unused, unused, 0.0, [True, True, True, False], True,
            scale=scale,
        )  # fmt: skip
    dq, dk, dv = (d.transpose(1, 2)[..., : t.shape[-1]].contiguous() for d, t in zip(found, (q, k, v), strict=False))
    return dq, dk, dv


def _allowed(q: Tensor, k: Tensor, v: Tensor, scale: float) -> int:
    q_BHSX, k_BHSX, v_BHSV = (t.transpose(1, 2) for t in (q, k, v))
    return torch._fused_sdp_choice(q_BHSX, k_BHSX, v_BHSV, is_causal=True, scale=scale)


def _filled(t: Tensor, width: int) -> Tensor:
    """With zeros behind its channels, up to so many."""
    return F.pad(t, (0, width - t.shape[-1])) if width > t.shape[-1] else t
