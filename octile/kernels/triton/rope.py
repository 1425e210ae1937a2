# mypy: allow-untyped-defs
"""Rotary position embedding of latent attention, bit for bit as `octile.ops.rope` except for the order of one sum."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton.launch_config import EXACT, ROPE


def launch(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate the last channels of x [B, S, H, X], any strides, in place."""
    b, s, h, width = x.shape
    r = 2 * cos.shape[1]
    if x.numel() and r:
        with torch.cuda.device_of(x):
            rotate[(b * s * triton.cdiv(h, ROPE["HEADS"]),)](
                x, cos, sin, s, h, width - r, *x.stride(), *cos.stride(), *sin.stride(),
                R=r, RS=triton.next_power_of_2(r), **ROPE, **EXACT,
            )  # fmt: skip


def launch_keys(kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor, n: int) -> Tensor:
    """Assemble keys: kv [B, S, H, N + V], k_rope [B, S, R], any strides → k [B, S, H, N + R]."""
    b, s, h, _ = kv.shape
    r = k_rope.shape[-1]
    k = kv.new_empty(b, s, h, n + r)
    if k.numel():
        with torch.cuda.device_of(kv):
            latent_keys[(b * s * triton.cdiv(h, ROPE["HEADS"]),)](
                kv, k_rope, cos, sin, k, s, h, *kv.stride(), *k_rope.stride(), *cos.stride(), *sin.stride(),
                N=n, NS=_columns(n), R=r, RS=_columns(r), **ROPE, **EXACT,
            )  # fmt: skip
    return k


def launch_keys_backward(dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """dk [B, S, H, N + R] and dv [B, S, H, V], any strides → gradients of kv [B, S, H, N + V] and k_rope [B, S, R]."""
    b, s, h, width = dk.shape
    r, v = 2 * cos.shape[1], dv.shape[-1]
    dkv, dk_rope = dk.new_empty(b, s, h, width - r + v), dk.new_empty(b, s, r)
    if b * s:
        with torch.cuda.device_of(dk):
            latent_keys_backward[(b * s,)](
                dk, dv, cos, sin, dkv, dk_rope, s, h, *dk.stride(), *dv.stride(), *cos.stride(), *sin.stride(),
                N=width - r, NS=_columns(width - r), R=r, RS=_columns(r), V=v, VS=_columns(v), **ROPE, **EXACT,
            )  # fmt: skip
    return dkv, dk_rope


def _columns(n: int) -> int:
    return max(triton.next_power_of_2(n), 2)


@triton.jit
def rotate(
    x, cos, sin, S, H, N, x_batch, x_row, x_head, x_col, cos_row, cos_col, sin_row, sin_col,
    R: tl.constexpr, RS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """A program takes HEADS heads of a token."""
    batch, s, h = _program_heads(tl.program_id(0), S, H, HEADS)
    r = tl.arange(0, RS)
    at = x + batch * x_batch + s * x_row + h.to(tl.int64)[:, None] * x_head + (N + r)[None, :] * x_col
    inside = (h < H)[:, None] & (r < R)[None, :]
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    value = _rotated(value, cos + s * cos_row, sin + s * sin_row, cos_col, sin_col, 1.0, R, RS)
    tl.store(at, value.to(x.dtype.element_ty), mask=inside)


@triton.jit
def latent_keys(
    kv, k_rope, cos, sin, k, S, H, kv_batch, kv_row, kv_head, kv_col, rope_batch, rope_row, rope_col,
    cos_row, cos_col, sin_row, sin_col,
    N: tl.constexpr, NS: tl.constexpr, R: tl.constexpr, RS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """A program takes HEADS heads of a token."""
    batch, s, h = _program_heads(tl.program_id(0), S, H, HEADS)
    n = tl.arange(0, NS)
    r = tl.arange(0, RS)
    out = k + ((batch * S + s) * H + h.to(tl.int64))[:, None] * (N + R)
    own = tl.load(
        kv + batch * kv_batch + s * kv_row + h.to(tl.int64)[:, None] * kv_head + n[None, :] * kv_col,
        mask=(h < H)[:, None] & (n < N)[None, :],
    )
    tl.store(out + n[None, :], own, mask=(h < H)[:, None] & (n < N)[None, :])
    shared = tl.load(k_rope + batch * rope_batch + s * rope_row + r * rope_col, mask=r < R, other=0.0)
    shared = _rotated(
        shared.to(tl.float32)[None, :], cos + s * cos_row, sin + s * sin_row, cos_col, sin_col, 1.0, R, RS
    )  # fmt: skip
    expanded = tl.broadcast_to(shared.to(k.dtype.element_ty), [HEADS, RS])
    tl.store(out + (N + r)[None, :], expanded, mask=(h < H)[:, None] & (r < R)[None, :])


@triton.jit
def latent_keys_backward(
    dk, dv, cos, sin, dkv, dk_rope, S, H, dk_batch, dk_row, dk_head, dk_col, dv_batch, dv_row, dv_head, dv_col,
    cos_row, cos_col, sin_row, sin_col,
    N: tl.constexpr, NS: tl.constexpr, R: tl.constexpr, RS: tl.constexpr, V: tl.constexpr, VS: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """A program takes a token, HEADS heads at a time."""
    token = tl.program_id(0).to(tl.int64)
    batch = token // S
    s = token % S
    n = tl.arange(0, NS)
    r = tl.arange(0, RS)
    v = tl.arange(0, VS)
    total = tl.zeros([RS], tl.float32)
    for first in range(0, H, HEADS):
        h = first + tl.arange(0, HEADS)
        there = (h < H)[:, None]
        keys = dk + batch * dk_batch + s * dk_row + h.to(tl.int64)[:, None] * dk_head
        out = dkv + (token * H + h)[:, None] * (N + V)
        own = tl.load(keys + n[None, :] * dk_col, mask=there & (n < N)[None, :])
        tl.store(out + n[None, :], own, mask=there & (n < N)[None, :])
        values = dv + batch * dv_batch + s * dv_row + h.to(tl.int64)[:, None] * dv_head
        value = tl.load(values + v[None, :] * dv_col, mask=there & (v < V)[None, :])
        tl.store(out + (N + v)[None, :], value, mask=there & (v < V)[None, :])
        rope = tl.load(keys + (N + r)[None, :] * dk_col, mask=there & (r < R)[None, :], other=0.0)
        total += tl.sum(rope.to(tl.float32), axis=0)
    rotated_back = _rotated(total[None, :], cos + s * cos_row, sin + s * sin_row, cos_col, sin_col, -1.0, R, RS)
    at = dk_rope + token * R + r[None, :]
    tl.store(at, rotated_back.to(dk_rope.dtype.element_ty), mask=(r < R)[None, :])


@triton.jit
def _program_heads(program, S, H, HEADS: tl.constexpr):
    """The batch, position and heads of a program."""
    parts = tl.cdiv(H, HEADS)
    token = (program // parts).to(tl.int64)
    return token // S, token % S, program % parts * HEADS + tl.arange(0, HEADS)


@triton.jit
def _rotated(value, cos, sin, cos_col, sin_col, SIGN: tl.constexpr, R: tl.constexpr, RS: tl.constexpr):
    """Rotate the pairs of value [heads, RS], float32, by SIGN times the angles of a position."""
    pair = tl.arange(0, RS // 2)
    c = tl.load(cos + pair * cos_col, mask=pair < R // 2, other=0.0)[None, :]
    s = tl.load(sin + pair * sin_col, mask=pair < R // 2, other=0.0)[None, :] * SIGN
    a, b = tl.split(tl.reshape(value, [value.shape[0], RS // 2, 2]))
    return tl.reshape(tl.join(a * c - b * s, a * s + b * c), [value.shape[0], RS])
