"""Rotary positions where latent attention needs them: turned in place, and keys put together in one pass.

The last R channels of a query and of a key are pairs (x₀, x₁), (x₂, x₃), … that turn with the position:

    y₀ = x₀ · cos − x₁ · sin      y₁ = x₀ · sin + x₁ · cos      in FP32, each product and sum rounded

A key of latent attention has N channels of its own and R that it shares with all heads. Done in single steps the shared
ones are turned, spread over the heads and written beside the others, each a pass over memory of its own.

Source: RoFormer (arXiv 2104.09864); DeepSeek-V2 (arXiv 2405.04434) §2.1.3.
Shapes: B batch, S sequence, H heads, R rotary channels, N the rest of a key, V a value, X = N + R.
"""

import torch
from torch import Tensor

from octile.ops.operator import operator
from octile.ops.quantize import INPUT_DTYPES


def rotated(x_SHR: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """The pairs of x [..., S, H, R] turned by their angles [S, R/2], float32 [..., S, H, R]."""
    cos_S1R, sin_S1R = cos_SR[:, None], sin_SR[:, None]
    a, b = x_SHR.float().unflatten(-1, (x_SHR.shape[-1] // 2, 2)).unbind(-1)
    return torch.stack((a * cos_S1R - b * sin_S1R, a * sin_S1R + b * cos_S1R), dim=-1).flatten(-2)


@operator(writes=("x",))
def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Turns the last R channels of x in place.

    Args:
        x: [B, S, H, X], float32, bfloat16 or float16.
        cos, sin: float32 [S, R/2], R at most X. Minus sin turns back.

    Raises:
        TypeError: x, cos or sin is of another dtype.
        ValueError: their shapes or devices do not fit together.
    """
    _check("x", x, cos, sin)
    rope = x[..., x.shape[-1] - 2 * cos.shape[1] :]
    rope.copy_(rotated(rope, cos, sin))


@rotate_.register_fake
def _(x, cos, sin):
    return None


@rotate_.register_kernel("cuda")
def _(x, cos, sin):
    from octile.kernels.triton import rope  # late: a machine without a GPU has no Triton

    _check("x", x, cos, sin)
    rope.launch(x, cos, sin)


@operator()
def latent_keys(kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor, nope_dim: int) -> Tensor:
    """Keys [B, S, H, N + R]: each head's own channels of kv, beside them the shared ones, turned.

    Args:
        kv: [B, S, H, N + V], float32, bfloat16 or float16: keys and values of each head.
        k_rope: [B, S, R], of one of these dtypes.
        cos, sin: float32 [S, R/2].
        nope_dim: N.

    Raises:
        TypeError, ValueError: as `rotate_`; k_rope or nope_dim does not fit.
    """
    _check_keys(kv, k_rope, cos, sin, nope_dim)
    shared = rotated(k_rope[:, :, None], cos, sin).to(kv.dtype).expand(-1, -1, kv.shape[2], -1)
    return torch.cat((kv[..., :nope_dim], shared), dim=-1)


@latent_keys.register_fake
def _(kv, k_rope, cos, sin, nope_dim):
    return kv.new_empty(*kv.shape[:3], nope_dim + k_rope.shape[-1])


@latent_keys.register_kernel("cuda")
def _(kv, k_rope, cos, sin, nope_dim):
    from octile.kernels.triton import rope

    _check_keys(kv, k_rope, cos, sin, nope_dim)
    return rope.launch_keys(kv, k_rope, cos, sin, nope_dim)


@operator()
def latent_keys_backward(dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of kv and of k_rope; over the heads the latter is summed in FP32, in no particular order.

    Args:
        dk: [B, S, H, N + R], of the keys; dv: [B, S, H, V], of the values: float32, bfloat16 or float16, both the same.
        cos, sin: as in `latent_keys`.

    Returns:
        [B, S, H, N + V] and [B, S, R] in dk's dtype.

    Raises:
        TypeError, ValueError: as `rotate_`; dv does not fit dk.
    """
    _check_gradients(dk, dv, cos, sin)
    n = dk.shape[-1] - 2 * cos.shape[1]
    of_shared = rotated(dk[..., n:].sum(2, keepdim=True, dtype=torch.float32), cos, -sin)[:, :, 0]
    return torch.cat((dk[..., :n], dv), dim=-1), of_shared.to(dk.dtype)


@latent_keys_backward.register_fake
def _(dk, dv, cos, sin):
    b, s, h, x = dk.shape
    r = 2 * cos.shape[1]
    return dk.new_empty(b, s, h, x - r + dv.shape[-1]), dk.new_empty(b, s, r)


@latent_keys_backward.register_kernel("cuda")
def _(dk, dv, cos, sin):
    from octile.kernels.triton import rope

    _check_gradients(dk, dv, cos, sin)
    return rope.launch_keys_backward(dk, dv, cos, sin)


def _check(name: str, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"{name} must be float32, bfloat16 or float16, not {x.dtype}")
    if x.dim() != 4:
        raise ValueError(f"{name} must have 4 dimensions, not the shape {tuple(x.shape)}")
    for angle, t in (("cos", cos), ("sin", sin)):
        if t.dtype != torch.float32:
            raise TypeError(f"{angle} must be float32, not {t.dtype}")
        if t.dim() != 2 or t.shape != cos.shape or len(t) != x.shape[1] or 2 * t.shape[1] > x.shape[-1]:
            raise ValueError(f"{angle} must be ({x.shape[1]}, R/2) for {name} {tuple(x.shape)}, not {tuple(t.shape)}")
        if t.device != x.device:
            raise ValueError(f"{name} lies on {x.device} but {angle} on {t.device}")


def _check_keys(kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor, nope_dim: int) -> None:
    if kv.dim() != 4 or not 0 <= nope_dim <= kv.shape[-1]:
        raise ValueError(f"kv must be [B, S, H, N + V] with N = {nope_dim}, not {tuple(kv.shape)}")
    if k_rope.shape[:-1] != kv.shape[:2]:
        raise ValueError(
            f"k_rope must be {(*kv.shape[:2], 'R')} beside kv {tuple(kv.shape)}, not {tuple(k_rope.shape)}"
        )
    _check("k_rope", k_rope[:, :, None], cos, sin)
    if 2 * cos.shape[1] != k_rope.shape[-1]:
        raise ValueError(f"cos must have half of k_rope's {k_rope.shape[-1]} channels, not {cos.shape[1]}")
    if kv.dtype not in INPUT_DTYPES:
        raise TypeError(f"kv must be float32, bfloat16 or float16, not {kv.dtype}")
    if kv.device != k_rope.device:
        raise ValueError(f"kv lies on {kv.device} but k_rope on {k_rope.device}")


def _check_gradients(dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> None:
    _check("dk", dk, cos, sin)
    if dv.dtype != dk.dtype:
        raise TypeError(f"dv must be {dk.dtype} as dk, not {dv.dtype}")
    if dv.dim() != 4 or dv.shape[:3] != dk.shape[:3]:
        raise ValueError(f"dv must be [B, S, H, V] beside dk {tuple(dk.shape)}, not {tuple(dv.shape)}")
    if dv.device != dk.device:
        raise ValueError(f"dk lies on {dk.device} but dv on {dv.device}")
