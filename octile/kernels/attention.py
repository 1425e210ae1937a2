"""Attention by torch's kernels and flash-attn-4's, with forward and backward called separately.

torch chooses the kernel: `torch.nn.attention.sdpa_kernel` controls it, and deterministic mode excludes cuDNN. In
training flash-attn-4 takes cuDNN's place where it is installed and faster (`octile.kernels.flash_attn_4`).
FlashAttention needs equally many channels in keys and values, a multiple of 8. Where this is all that excludes it, as
for the 192 and 128 channels of MLA, zeros are appended to the channels.

Shapes: B batch, S sequence, L keys, H heads, X channels of a query and a key, V of a value.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from octile.kernels import flash_attn_4

FLASH, EFFICIENT, CUDNN = (
    backend.value
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
)
FLASH_ATTN_4 = flash_attn_4.PACKAGE
EFFICIENT_LSE = 32  # the memory-efficient kernel pads rows of lse to a multiple of it
aten = torch.ops.aten
# The kernel, as the value of its `SDPBackend` or FLASH_ATTN_4, and the number of channels to which its operands must be
# padded, or 0 for no padding.
Choice = tuple[int | str, int]


def choose(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = True) -> Choice | None:
    """Choose one of torch's kernels for q [B, S, H, X], k [B, L, H, X] and v [B, L, H, V] on a GPU.

    Returns:
        the choice; None if no kernel supports these operands.
    """
    kernel = _chosen_by_torch(q, k, v, scale, causal)
    if kernel in (FLASH, CUDNN):
        return kernel, 0
    width = -(-max(q.shape[-1], v.shape[-1]) // 8) * 8
    padded_q, padded_k = (t.new_empty(*t.shape[:-1], width) for t in (q, k))
    kernel_if_padded = _chosen_by_torch(padded_q, padded_k, padded_k, scale, causal)
    if kernel_if_padded in (FLASH, CUDNN):
        return kernel_if_padded, width
    return (EFFICIENT, 0) if kernel == EFFICIENT else None


def choose_for_training(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = True) -> Choice | None:
    """Choose as `choose` does, also from flash-attn-4's kernels, which compile at their first use."""
    choice = choose(q, k, v, scale, causal)
    if choice == (CUDNN, 0) and flash_attn_4.why_not(q, v, causal) is None:
        return FLASH_ATTN_4, 0
    return choice


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, choice: Choice, causal: bool = True
) -> tuple[Tensor, Tensor]:
    """Run the kernel of a choice; returns o [B, S, H, V], contiguous, and lse [B, H, S] float32."""
    kernel, width = choice
    if kernel == FLASH_ATTN_4:
        return flash_attn_4.forward(q, k, v, scale)
    s = q.shape[1]
    q_BHSX, k_BHLX, v_BHLV = (_pad_channels(t, width).transpose(1, 2) for t in (q, k, v))
    if kernel == CUDNN:
        o, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q_BHSX, k_BHLX, v_BHLV, None, True, 0.0, causal, False, scale=scale
        )
        lse = lse.squeeze(-1)
    elif kernel == FLASH:
        o, lse, *_ = aten._scaled_dot_product_flash_attention(q_BHSX, k_BHLX, v_BHLV, 0.0, causal, False, scale=scale)
    else:
        o, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q_BHSX, k_BHLX, v_BHLV, None, True, 0.0, causal, scale=scale
        )
    return o.transpose(1, 2)[..., : v.shape[-1]].contiguous(), lse[..., :s].contiguous()


def forward_to_all_on_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attend to all keys on a CPU; returns o [B, S, H, V], contiguous, and lse [B, H, S] float32."""
    b, s, h, _ = q.shape
    if not s or not h:  # torch 2.13 divides by them, which ends the process
        return q.new_empty(b, s, h, v.shape[-1]), q.new_empty(b, h, s, dtype=torch.float32)
    width = max(q.shape[-1], v.shape[-1])
    q_BHSX, k_BHLX, v_BHLV = (_pad_channels(t, width).transpose(1, 2) for t in (q, k, v))
    o, lse = aten._scaled_dot_product_flash_attention_for_cpu(q_BHSX, k_BHLX, v_BHLV, 0.0, False, scale=scale)
    return o.transpose(1, 2)[..., : v.shape[-1]].contiguous(), lse.contiguous()


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, choice: Choice
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward kernel of a choice; returns dq, dk [B, S, H, X] and dv [B, S, H, V], contiguous."""
    kernel, width = choice
    if kernel == FLASH_ATTN_4:
        return flash_attn_4.backward(do, q, k, v, o, lse, scale)
    s = q.shape[1]
    q_BHSX, k_BHSX, v_BHSV, o_BHSV, do_BHSV = (_pad_channels(t, width).transpose(1, 2) for t in (q, k, v, o, do))
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # the seed and offset of dropout
    if kernel == CUDNN:
        grads = aten._scaled_dot_product_cudnn_attention_backward(
            do_BHSV, q_BHSX, k_BHSX, v_BHSV, o_BHSV, lse[..., None], unused, unused, None, None, None, s, s, 0.0, True,
            scale=scale,
        )  # fmt: skip
    elif kernel == FLASH:
        grads = aten._scaled_dot_product_flash_attention_backward(
            do_BHSV, q_BHSX, k_BHSX, v_BHSV, o_BHSV, lse, None, None, s, s, 0.0, True, unused, unused, scale=scale
        )
    else:
        lse = F.pad(lse, (0, -s % EFFICIENT_LSE), value=float("inf"))
        grads = aten._scaled_dot_product_efficient_attention_backward(
            do_BHSV, q_BHSX, k_BHSX, v_BHSV, None, o_BHSV, lse, unused, unused, 0.0, [True, True, True, False], True,
            scale=scale,
        )  # fmt: skip
    dq, dk, dv = (d.transpose(1, 2)[..., : t.shape[-1]].contiguous() for d, t in zip(grads, (q, k, v), strict=False))
    return dq, dk, dv


def _chosen_by_torch(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> int:
    q_BHSX, k_BHLX, v_BHLV = (t.transpose(1, 2) for t in (q, k, v))
    return torch._fused_sdp_choice(q_BHSX, k_BHLX, v_BHLV, is_causal=causal, scale=scale)


def _pad_channels(t: Tensor, width: int) -> Tensor:
    """Pad the last dimension of t with zeros to width."""
    return F.pad(t, (0, width - t.shape[-1])) if width > t.shape[-1] else t
