"""Attention within texts of various lengths by torch's kernels of FlashAttention-2, forward and backward apart.

They are slower than cuDNN's kernels for whole sequences. ms forward · backward of 4 sequences of 4,096 tokens, in BF16
on one H100 with torch 2.11:

    heads, channels of q and v    whole sequences, cuDNN    whole    41 texts    texts of 256 tokens
    16, 192 and 128               0.60 · 2.07               2.3 · 6.9    1.3 · 4.1    1.1 · 3.6
    8, 64 and 64                  0.19 · 0.53               0.5 · 1.4    0.3 · 1.0    0.2 · 0.9

Shapes: T rows, H heads, X channels of a query and a key, V of a value.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_CHANNELS = 256
CHANNELS = 8  # their number is a multiple of it
aten = torch.ops.aten


def why_not(q: Tensor, v: Tensor) -> str | None:
    """Return why q [T, H, X] and v [T, H, V] are left to the reference; None: the kernels take them."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return "the kernels are for BF16 and FP16"
    if max(q.shape[-1], v.shape[-1]) > MAX_CHANNELS:
        return f"a head has more than {MAX_CHANNELS} channels"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "the kernels need compute capability 8.0"
    return None if q.numel() else "there are no rows"


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return o [T, H, V], contiguous, and lse [H, T] float32."""
    padded = _padded(q, k, v)
    o, lse, *_ = aten._flash_attention_forward(
        *padded, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, True, False, scale=scale
    )
    return o[..., : v.shape[-1]].contiguous(), lse


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cu_seqlens: Tensor, max_seqlen: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk [T, H, X] and dv [T, H, V], contiguous."""
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # the seed and offset of dropout
    do, q_padded, k_padded, v_padded, o = _padded(do, q, k, v, o)
    grads = aten._flash_attention_backward(
        do, q_padded, k_padded, v_padded, o, lse, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, True, unused,
        unused, scale=scale,
    )  # fmt: skip
    dq, dk, dv = (d[..., : t.shape[-1]].contiguous() for d, t in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


def _padded(*tensors: Tensor) -> list[Tensor]:
    """Append zeros to the channels, so that all have equally many."""
    width = -(-max(t.shape[-1] for t in tensors) // CHANNELS) * CHANNELS
    return [F.pad(t, (0, width - t.shape[-1])) for t in tensors]
