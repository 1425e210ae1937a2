"""Rotary positions in high precision, with one kernel each way: queries, and the keys of latent attention.

The formulas in torch's functions are called where the operators cannot be, as in `octile.nn.fused.elementwise`.

Source: RoFormer (arXiv 2104.09864); DeepSeek-V2 (arXiv 2405.04434) §2.1.3.
Shapes: B batch, S sequence, H heads, X channels, the last R of them rotary, N the others of a key, V of a value.
"""

import math
from typing import Any

import torch
from torch import Tensor

from octile.nn.fused.elementwise import can_use_operators
from octile.ops import rope


def rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the last R channels of x [..., S, H, X] in FP32; differentiable in x.

    Args:
        x: queries or keys.
        cos_sin: cosines and sines of the S positions, each [S, R/2] float32.

    Returns:
        [..., S, H, X] in x's dtype, rounded once.
    """
    if can_use_operators(x, *cos_sin):
        return _Rotate.apply(x, *cos_sin)
    n = x.shape[-1] - 2 * cos_sin[0].shape[-1]
    rotated = rope.rotated(x[..., n:], *cos_sin).to(x.dtype)
    return torch.cat((x[..., :n], rotated), dim=-1) if n else rotated


def latent_keys_and_values(
    kv: Tensor, k_rope: Tensor, cos_sin: tuple[Tensor, Tensor], nope_dim: int
) -> tuple[Tensor, Tensor]:
    """Return keys, each followed by the rotated key that all heads share, and values; differentiable.

    Args:
        kv: [B, S, H, N + V], keys without position, and values.
        k_rope: [B, S, R], not yet rotated.
        cos_sin: as in `rotate`.
        nope_dim: N.

    Returns:
        keys [B, S, H, N + R] and values [B, S, H, V].
    """
    if can_use_operators(kv, k_rope, *cos_sin) and kv.dtype == k_rope.dtype:
        return _LatentKeys.apply(kv, k_rope, *cos_sin, nope_dim)
    rotated = rotate(k_rope[:, :, None], cos_sin).expand(-1, -1, kv.shape[2], -1)
    return torch.cat((kv[..., :nope_dim], rotated), dim=-1), kv[..., nope_dim:]


def why_not_rotate_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    """Return why `rotate_halves` does not take these tensors; None: it does."""
    if not can_use_operators(q, k, cos, sin) or {k.dtype, cos.dtype, sin.dtype} != {q.dtype}:
        return "their types or dtypes differ"
    if cos.requires_grad or sin.requires_grad:
        return "cos and sin need gradients"
    if q.dim() != 4 or k.dim() != 4 or (k.shape[0], *k.shape[2:]) != (q.shape[0], *q.shape[2:]):
        return "q and k have other shapes"
    b, _, s, x = q.shape
    if cos.dim() != 3 or cos.shape != sin.shape or cos.shape[0] not in (1, b) or cos.shape[1] != s:
        return "cos and sin have other shapes"
    return "cos has more channels than q, or an odd number" if cos.shape[2] > x or cos.shape[2] % 2 else None


def rotate_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate the first R channels of queries and keys, the pairs of which are channels i and i + R/2; differentiable.

    Args:
        q, k: [B, H, S, X], each with heads of its own number.
        cos, sin: [B, S, R] or [1, S, R] in the same dtype; they get no gradient.

    Returns:
        both in FP32 arithmetic, rounded once, in their dtype and layout.
    """
    shape = (q.shape[0], -1, -1)
    return _RotateHalves.apply(q, k, cos.expand(shape), sin.expand(shape), False)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        # not copied into an empty tensor: torch 2.11's compiler gave what is rotated there in place no gradient
        y = x.clone(memory_format=torch.contiguous_format)
        rope.rotate_(y.view(math.prod(y.shape[:-3]), *y.shape[-3:]), cos, sin)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotate.apply(dy, cos, -sin), None, None


class _LatentKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor, nope_dim: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return rope.latent_keys(kv, k_rope, cos, sin, nope_dim), kv[..., nope_dim:]

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        return *_LatentKeysGradients.apply(dk, dv, *ctx.saved_tensors), None, None, None


class _LatentKeysGradients(torch.autograd.Function):
    """The backward pass of `_LatentKeys`, which is its own: both are linear."""

    @staticmethod
    def forward(ctx: Any, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.nope_dim = dk.shape[-1] - 2 * cos.shape[-1]
        return rope.latent_keys_backward(dk, dv, cos, sin)

    @staticmethod
    def backward(ctx: Any, ddkv: Tensor, ddk_rope: Tensor) -> tuple[Tensor | None, ...]:
        return *_LatentKeys.apply(ddkv, ddk_rope, *ctx.saved_tensors, ctx.nope_dim), None, None


class _RotateHalves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.transposed = transposed
        return rope.rotate_halves(q, k, cos, sin, transposed)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor | None, ...]:
        return *_RotateHalves.apply(dq, dk, *ctx.saved_tensors, not ctx.transposed), None, None, None
