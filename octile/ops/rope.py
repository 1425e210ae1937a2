"""Rotary position embedding (RoPE): rotation in place, keys of latent attention (MLA) in one pass, rotation of halves.

In DeepSeek's layout the last R channels of a query and of a key are pairs (x₀, x₁), (x₂, x₃), … that rotate by angles
of the position:

    y₀ = x₀ · cos − x₁ · sin      y₁ = x₀ · sin + x₁ · cos      in FP32, each product and sum rounded

In the layout of Llama and of most models of transformers ("rotate_half") the pairs are channel i and channel i + R/2 of
the first R channels: `rotate_halves`.

A key of latent attention has N channels of its own head and R rotary channels that all heads share. Unfused, the shared
channels would be rotated, expanded over the heads and concatenated, each in a pass over memory.

Source: RoFormer (arXiv 2104.09864); DeepSeek-V2 (arXiv 2405.04434) §2.1.3.
Shapes: B batch, S sequence, H heads, R rotary channels, N other channels of a key, V channels of a value, X = N + R.
"""

import torch
from torch import Tensor

from octile.ops.operator import operator
from octile.ops.quantize import check_device, check_input_dtype


def rotated(x_SHR: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
    """Rotate the pairs of x [..., S, H, R] by angles with cos and sin [S, R/2]; returns float32 [..., S, H, R]."""
    cos_S1R, sin_S1R = cos_SR[:, None], sin_SR[:, None]
    a, b = x_SHR.float().unflatten(-1, (x_SHR.shape[-1] // 2, 2)).unbind(-1)
    return torch.stack((a * cos_S1R - b * sin_S1R, a * sin_S1R + b * cos_S1R), dim=-1).flatten(-2)


@operator(writes=("x",))
def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the last R channels of x in place.

    Args:
        x: [B, S, H, X], float32, bfloat16 or float16.
        cos, sin: float32 [S, R/2], R at most X. With −sin the rotation is reversed.

    Raises:
        TypeError: x, cos or sin has another dtype.
        ValueError: shapes or devices do not fit together.
    """
    check_angles("x", x, cos, sin)
    rope = x[..., x.shape[-1] - 2 * cos.shape[1] :]
    rope.copy_(rotated(rope, cos, sin))


@rotate_.register_fake
def _(x, cos, sin):
    return None


@rotate_.register_kernel("cuda")
def _(x, cos, sin):
    from octile.kernels.triton import rope  # late: a machine without a GPU has no Triton

    check_angles("x", x, cos, sin)
    rope.launch(x, cos, sin)


@operator(writes=("x", "out"))
def rotate_and_copy_(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the last R channels of x in place, and copy them to the last R channels of out.

    Args:
        x, cos, sin: as in `rotate_`.
        out: [B, S, H, Y] in x's dtype, Y at least R; it does not overlap x.

    Raises:
        TypeError, ValueError: as there, or out has another dtype or shape.
    """
    _check_copy(x, out, cos, sin)
    r = 2 * cos.shape[1]
    rope = x[..., x.shape[-1] - r :]
    rope.copy_(rotated(rope, cos, sin))
    out[..., out.shape[-1] - r :] = rope


@rotate_and_copy_.register_fake
def _(x, out, cos, sin):
    return None


@rotate_and_copy_.register_kernel("cuda")
def _(x, out, cos, sin):
    from octile.kernels.triton import rope

    _check_copy(x, out, cos, sin)
    rope.launch(x, cos, sin, out)


@operator()
def latent_keys(kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor, nope_dim: int) -> Tensor:
    """Assemble keys: the first N channels of kv for each head, then k_rope, rotated and shared by all heads.

    Args:
        kv: [B, S, H, N + V], float32, bfloat16 or float16: keys without position, and values, of each head.
        k_rope: [B, S, R], float32, bfloat16 or float16.
        cos, sin: float32 [S, R/2].
        nope_dim: N, the number of channels without position.

    Returns:
        keys [B, S, H, N + R] in kv's dtype.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes or devices do not fit together, or nope_dim exceeds kv's channels.
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
    """Compute the gradients of kv and k_rope. That of k_rope is summed over the heads in FP32, in unspecified order.

    Args:
        dk: [B, S, H, N + R], float32, bfloat16 or float16, the gradient of the keys.
        dv: [B, S, H, V] in dk's dtype, the gradient of the values.
        cos, sin: as in `latent_keys`.

    Returns:
        the gradients of kv [B, S, H, N + V] and of k_rope [B, S, R], in dk's dtype.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes or devices do not fit together.
    """
    _check_gradients(dk, dv, cos, sin)
    n = dk.shape[-1] - 2 * cos.shape[1]
    dk_rope = rotated(dk[..., n:].sum(2, keepdim=True, dtype=torch.float32), cos, -sin)[:, :, 0]
    return torch.cat((dk[..., :n], dv), dim=-1).contiguous(), dk_rope.to(dk.dtype)


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


@operator()
def rotate_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, transposed: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate the first R channels of queries and keys, the pairs of which are channels i and i + R/2.

    Args:
        q, k: [B, H, S, X], each with heads of its own number, float32, bfloat16 or float16, any strides.
        cos, sin: [B, S, R] in q's dtype, R even and at most X; the two halves of a row may differ.
        transposed: whether to multiply with the transposed matrix of the rotation, as the backward pass does.

    Returns:
        both rotated, in q's dtype and, where its memory has no gaps, in the layout of the argument.

    Raises:
        TypeError: a tensor has another dtype.
        ValueError: shapes or devices do not fit together.
    """
    _check_halves(q, k, cos, sin)
    return _rotated_halves(q, cos, sin, transposed), _rotated_halves(k, cos, sin, transposed)


def _rotated_halves(x: Tensor, cos: Tensor, sin: Tensor, transposed: bool) -> Tensor:
    r = cos.shape[-1]
    halves = (t.float().unflatten(-1, (2, r // 2)).unbind(-2) for t in (x[..., :r], cos[:, None], sin[:, None]))
    (a, b), (cos_a, cos_b), (sin_a, sin_b) = halves
    if transposed:
        sin_a, sin_b = -sin_b, -sin_a
    y = torch.empty_like(x)
    y[..., :r].copy_(torch.cat((a * cos_a - b * sin_a, b * cos_b + a * sin_b), dim=-1))
    y[..., r:].copy_(x[..., r:])
    return y


@rotate_halves.register_fake
def _(q, k, cos, sin, transposed=False):
    return torch.empty_like(q), torch.empty_like(k)


@rotate_halves.register_kernel("cuda")
def _(q, k, cos, sin, transposed=False):
    from octile.kernels.triton import rope

    _check_halves(q, k, cos, sin)
    return rope.launch_halves(q, k, cos, sin, transposed)


def check_angles(name: str, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise TypeError or ValueError if cos and sin [S, R/2] do not fit x [B, S, H, X], called name in messages."""
    check_input_dtype(name, x)
    if x.dim() != 4:
        raise ValueError(f"{name} must have 4 dimensions, not the shape {tuple(x.shape)}")
    for factor, t in (("cos", cos), ("sin", sin)):
        if t.dtype != torch.float32:
            raise TypeError(f"{factor} must be float32, not {t.dtype}")
        if t.dim() != 2 or t.shape != cos.shape or len(t) != x.shape[1] or 2 * t.shape[1] > x.shape[-1]:
            raise ValueError(f"{factor} must be ({x.shape[1]}, R/2) for {name} {tuple(x.shape)}, not {tuple(t.shape)}")
        check_device(name, x, factor, t)


def _check_copy(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_angles("x", x, cos, sin)
    if out.dtype != x.dtype:
        raise TypeError(f"out must be {x.dtype} as x, not {out.dtype}")
    r = 2 * cos.shape[1]
    if out.shape[:-1] != x.shape[:-1] or out.shape[-1] < r:
        raise ValueError(f"out must be {tuple(x.shape[:-1])} and at least {r} channels, not {tuple(out.shape)}")
    check_device("x", x, "out", out)


def _check_keys(kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor, nope_dim: int) -> None:
    if kv.dim() != 4 or not 0 <= nope_dim <= kv.shape[-1]:
        raise ValueError(f"kv must be [B, S, H, N + V] with N = {nope_dim}, not {tuple(kv.shape)}")
    if k_rope.shape[:-1] != kv.shape[:2]:
        raise ValueError(f"k_rope must be {(*kv.shape[:2], 'R')} for kv {tuple(kv.shape)}, not {tuple(k_rope.shape)}")
    check_angles("k_rope", k_rope[:, :, None], cos, sin)
    if 2 * cos.shape[1] != k_rope.shape[-1]:
        raise ValueError(f"cos must have half of k_rope's {k_rope.shape[-1]} channels, not {cos.shape[1]}")
    check_input_dtype("kv", kv)
    check_device("kv", kv, "k_rope", k_rope)


def _check_gradients(dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_angles("dk", dk, cos, sin)
    if dv.dtype != dk.dtype:
        raise TypeError(f"dv must be {dk.dtype} as dk, not {dv.dtype}")
    if dv.dim() != 4 or dv.shape[:3] != dk.shape[:3]:
        raise ValueError(f"dv must be [B, S, H, V] for dk {tuple(dk.shape)}, not {tuple(dv.shape)}")
    check_device("dk", dk, "dv", dv)


def _check_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    check_input_dtype("q", q)
    for name, t in (("k", k), ("cos", cos), ("sin", sin)):
        if t.dtype != q.dtype:
            raise TypeError(f"{name} must be {q.dtype} as q, not {t.dtype}")
        check_device("q", q, name, t)
    if q.dim() != 4:
        raise ValueError(f"q must be [B, H, S, X], not {tuple(q.shape)}")
    b, _, s, x = q.shape
    if k.dim() != 4 or (k.shape[0], *k.shape[2:]) != (b, s, x):
        raise ValueError(f"k must be ({b}, H, {s}, {x}) for q {tuple(q.shape)}, not {tuple(k.shape)}")
    for name, t in (("cos", cos), ("sin", sin)):
        if t.dim() != 3 or t.shape != cos.shape or t.shape[:2] != (b, s) or t.shape[2] > x or t.shape[2] % 2:
            raise ValueError(f"{name} must be ({b}, {s}, R), R even and at most {x}, not {tuple(t.shape)}")
