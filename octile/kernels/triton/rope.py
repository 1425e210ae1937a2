# mypy: allow-untyped-defs
"""Rotary position embedding, bit for bit as `octile.ops.rope` except for the order of one sum."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.kernels.triton import compile_cases as cases
from octile.kernels.triton.launch_config import EXACT, ROPE, ROPE_HALVES, ROTATE


def launch(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> None:
    """Rotate the last channels of x [B, S, H, X], any strides, in place; copy them to those of out, if it is given."""
    b, s, h, width = x.shape
    r = 2 * cos.shape[1]
    if x.numel() and r:
        shape = _tile(h, _columns(r), ROTATE)
        with torch.cuda.device_of(x):
            rotate[(triton.cdiv(b * s, shape["TOKENS"]) * triton.cdiv(h, shape["HEADS"]),)](
                x, x if out is None else out, cos, sin, b * s, s, h, width - r,
                0 if out is None else out.shape[-1] - r, *x.stride(), *(x if out is None else out).stride(),
                *cos.stride(), *sin.stride(), R=r, RS=_columns(r), COPIES=out is not None, **shape, **EXACT,
            )  # fmt: skip


def launch_keys(kv: Tensor, k_rope: Tensor, cos: Tensor, sin: Tensor, n: int) -> Tensor:
    """Assemble keys: kv [B, S, H, N + V], k_rope [B, S, R], any strides → k [B, S, H, N + R]."""
    b, s, h, _ = kv.shape
    r = k_rope.shape[-1]
    k = kv.new_empty(b, s, h, n + r)
    if k.numel():
        shape = _tile(h, _columns(n), ROPE)
        with torch.cuda.device_of(kv):
            latent_keys[(triton.cdiv(b * s, shape["TOKENS"]) * triton.cdiv(h, shape["HEADS"]),)](
                kv, k_rope, cos, sin, k, b * s, s, h, *kv.stride(), *k_rope.stride(), *cos.stride(), *sin.stride(),
                N=n, NS=_columns(n), R=r, RS=_columns(r), **shape, **EXACT,
            )  # fmt: skip
    return k


def launch_keys_backward(dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """dk [B, S, H, N + R] and dv [B, S, H, V], any strides → gradients of kv [B, S, H, N + V] and k_rope [B, S, R]."""
    b, s, h, width = dk.shape
    r, v = 2 * cos.shape[1], dv.shape[-1]
    dkv, dk_rope = dk.new_empty(b, s, h, width - r + v), dk.new_empty(b, s, r)
    if b * s:
        shape = _tile(h, max(_columns(width - r), _columns(v)), ROPE)
        with torch.cuda.device_of(dk):
            latent_keys_backward[(triton.cdiv(b * s, shape["TOKENS"]),)](
                dk, dv, cos, sin, dkv, dk_rope, b * s, s, h,
                *dk.stride(), *dv.stride(), *cos.stride(), *sin.stride(),
                N=width - r, NS=_columns(width - r), R=r, RS=_columns(r), V=v, VS=_columns(v), **shape, **EXACT,
            )  # fmt: skip
    return dkv, dk_rope


def launch_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Rotate the halves of the first channels of q and k [B, H, S, X], any strides → both, in their layouts."""
    b, _, s, width = q.shape
    r = cos.shape[-1]
    rotated = torch.empty_like(q), torch.empty_like(k)
    if q.numel() + k.numel():
        heads = min(max(triton.next_power_of_2(min(q.shape[1], k.shape[1])), 8), ROPE_HALVES["MAX_HEADS"])
        tokens = max(ROPE_HALVES["ELEMENTS"] // (heads * _columns(width)), 1)
        parts = triton.cdiv(q.shape[1], heads) + triton.cdiv(k.shape[1], heads)
        with torch.cuda.device_of(q):
            rotate_halves[(triton.cdiv(b * s, tokens) * parts,)](
                q, k, cos, sin, *rotated, b * s, s, q.shape[1], k.shape[1],
                *q.stride(), *k.stride(), *cos.stride(), *sin.stride(), *rotated[0].stride(), *rotated[1].stride(),
                HALF=r // 2, HS=_columns(r // 2), N=width - r, NS=_columns(width - r), TRANSPOSED=transposed,
                TOKENS=tokens, HEADS=heads, num_warps=ROPE_HALVES["num_warps"], **EXACT,
            )  # fmt: skip
    return rotated


def _columns(n: int) -> int:
    return max(triton.next_power_of_2(n), 2)


def _tile(h: int, columns: int, most: dict[str, int]) -> dict[str, int]:
    """The tokens and heads of a program, which takes as many tokens as it can load at a time."""
    heads = min(triton.next_power_of_2(max(h, 1)), most["MAX_HEADS"])
    tokens = max(most["ELEMENTS"] // (heads * columns), 1)
    return {"TOKENS": tokens, "HEADS": heads, "num_warps": most["num_warps"]}


def compile_cases() -> cases.CompileCases:
    """The launches that `compile_all` compiles."""
    heads, cos = cases.empty(2, 4096, 128, 192), cases.empty(4096, 32, dtype=cases.FP32)
    q, angles = cases.empty(2, 4096, 32, 128).transpose(1, 2), cases.empty(2, 4096, 128)
    kv, k_rope, dv = cases.empty(2, 4096, 128, 256), cases.empty(2, 4096, 64), cases.empty(2, 4096, 128, 128)
    return {
        "rotate": lambda: launch(heads, cos, cos),
        "rotate and copy": lambda: launch(heads, cos, cos, cases.empty(2, 4096, 128, 576)),
        "rotate halves": lambda: launch_halves(q, q[:, ::4], angles, angles, False),
        "latent keys": lambda: launch_keys(kv, k_rope, cos, cos, 128),
        "latent keys backward": lambda: launch_keys_backward(heads, dv, cos, cos),
    }


@triton.jit(do_not_specialize=["tokens"])
def rotate(
    x, out, cos, sin, tokens, S, H, N, out_N, x_batch, x_row, x_head, x_col, out_batch, out_row, out_head, out_col,
    cos_row, cos_col, sin_row, sin_col,
    R: tl.constexpr, RS: tl.constexpr, COPIES: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """A program takes HEADS heads of TOKENS tokens; COPIES: it also writes them to out, from channel out_N on.

    It writes parts of cache lines. That these are evicted first makes it faster by a tenth on an H200.
    """
    parts = tl.cdiv(H, HEADS)
    token, batch, s = _positions(tl.program_id(0) // parts, S, TOKENS)
    h = _heads(tl.program_id(0) % parts * HEADS, HEADS)
    r = _channels(RS)
    at = x + batch * x_batch + s * x_row + h * x_head + (N + r) * x_col
    inside = (token < tokens) & (h < H) & (r < R)
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    value = _rotated(value, cos, sin, s, token < tokens, cos_row, cos_col, sin_row, sin_col, 1.0, R)
    tl.store(at, value.to(x.dtype.element_ty), mask=inside, eviction_policy="evict_first")
    if COPIES:
        to = out + batch * out_batch + s * out_row + h * out_head + (out_N + r) * out_col
        tl.store(to, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "S"])  # which depend on the step's rows in serving
def latent_keys(
    kv, k_rope, cos, sin, k, tokens, S, H, kv_batch, kv_row, kv_head, kv_col, rope_batch, rope_row, rope_col,
    cos_row, cos_col, sin_row, sin_col,
    N: tl.constexpr, NS: tl.constexpr, R: tl.constexpr, RS: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """A program takes HEADS heads of TOKENS tokens."""
    parts = tl.cdiv(H, HEADS)
    token, batch, s = _positions(tl.program_id(0) // parts, S, TOKENS)
    h = _heads(tl.program_id(0) % parts * HEADS, HEADS)
    n = _channels(NS)
    r = _channels(RS)
    there = (token < tokens) & (h < H)
    out = k + (token.to(tl.int64) * H + h) * (N + R)
    own = tl.load(kv + batch * kv_batch + s * kv_row + h * kv_head + n * kv_col, mask=there & (n < N))
    shared_at = k_rope + batch * rope_batch + s * rope_row + r * rope_col
    shared = tl.load(shared_at, mask=(token < tokens) & (r < R), other=0.0).to(tl.float32)
    tl.store(out + n, own, mask=there & (n < N))
    shared = _rotated(shared, cos, sin, s, token < tokens, cos_row, cos_col, sin_row, sin_col, 1.0, R)
    expanded = tl.broadcast_to(shared.to(k.dtype.element_ty), [TOKENS, HEADS, RS])
    tl.store(out + (N + r), expanded, mask=there & (r < R))


@triton.jit(do_not_specialize=["tokens"])
def latent_keys_backward(
    dk, dv, cos, sin, dkv, dk_rope, tokens, S, H,
    dk_batch, dk_row, dk_head, dk_col, dv_batch, dv_row, dv_head, dv_col, cos_row, cos_col, sin_row, sin_col,
    N: tl.constexpr, NS: tl.constexpr, R: tl.constexpr, RS: tl.constexpr, V: tl.constexpr, VS: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """A program takes TOKENS tokens, HEADS heads at a time."""
    token, batch, s = _positions(tl.program_id(0), S, TOKENS)
    n = _channels(NS)
    r = _channels(RS)
    v = _channels(VS)
    total = tl.zeros([TOKENS, RS], tl.float32)
    for first in range(0, H, HEADS):
        h = _heads(first, HEADS)
        there = (token < tokens) & (h < H)
        keys = dk + batch * dk_batch + s * dk_row + h * dk_head
        values = dv + batch * dv_batch + s * dv_row + h * dv_head
        out = dkv + (token.to(tl.int64) * H + h) * (N + V)
        own = tl.load(keys + n * dk_col, mask=there & (n < N))
        value = tl.load(values + v * dv_col, mask=there & (v < V))
        rope = tl.load(keys + (N + r) * dk_col, mask=there & (r < R), other=0.0)
        tl.store(out + n, own, mask=there & (n < N))
        tl.store(out + (N + v), value, mask=there & (v < V))
        total += tl.sum(rope.to(tl.float32), axis=1)
    back = _rotated(total[:, None, :], cos, sin, s, token < tokens, cos_row, cos_col, sin_row, sin_col, -1.0, R)
    at = dk_rope + token.to(tl.int64) * R + r
    tl.store(at, back.to(dk_rope.dtype.element_ty), mask=(token < tokens) & (r < R))


@triton.jit(do_not_specialize=["tokens"])
def rotate_halves(
    q, k, cos, sin, q_out, k_out, tokens, S, Q, K,
    q_batch, q_head, q_row, q_col, k_batch, k_head, k_row, k_col,
    cos_batch, cos_row, cos_col, sin_batch, sin_row, sin_col,
    q_out_batch, q_out_head, q_out_row, q_out_col, k_out_batch, k_out_head, k_out_row, k_out_col,
    HALF: tl.constexpr, HS: tl.constexpr, N: tl.constexpr, NS: tl.constexpr, TRANSPOSED: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """A program takes HEADS heads of TOKENS tokens, of the Q heads of q or of the K heads of k."""
    q_parts = tl.cdiv(Q, HEADS)
    parts = q_parts + tl.cdiv(K, HEADS)
    part = tl.program_id(0) % parts
    token, batch, s = _positions(tl.program_id(0) // parts, S, TOKENS)
    there = token < tokens
    i = _channels(HS)
    inside = there & (i < HALF)
    at = cos + batch * cos_batch + s * cos_row + i * cos_col
    cos_a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    cos_b = tl.load(at + HALF * cos_col, mask=inside, other=0.0).to(tl.float32)
    at = sin + batch * sin_batch + s * sin_row + i * sin_col
    sin_a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    sin_b = tl.load(at + HALF * sin_col, mask=inside, other=0.0).to(tl.float32)
    if part < q_parts:
        h = _heads(part * HEADS, HEADS)
        own = there & (h < Q)
        x = q + batch * q_batch + s * q_row + h * q_head
        y = q_out + batch * q_out_batch + s * q_out_row + h * q_out_head
        _rotate_halves(x, y, q_col, q_out_col, own, cos_a, cos_b, sin_a, sin_b, HALF, HS, N, NS, TRANSPOSED)
    else:
        h = _heads((part - q_parts) * HEADS, HEADS)
        own = there & (h < K)
        x = k + batch * k_batch + s * k_row + h * k_head
        y = k_out + batch * k_out_batch + s * k_out_row + h * k_out_head
        _rotate_halves(x, y, k_col, k_out_col, own, cos_a, cos_b, sin_a, sin_b, HALF, HS, N, NS, TRANSPOSED)


@triton.jit
def _rotate_halves(
    x, y, x_col, y_col, own, cos_a, cos_b, sin_a, sin_b,
    HALF: tl.constexpr, HS: tl.constexpr, N: tl.constexpr, NS: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Rotate the heads that begin at x [tokens, heads, 1] into y; N channels after the rotary ones are copied."""
    i = _channels(HS)
    inside = own & (i < HALF)
    a = tl.load(x + i * x_col, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + (HALF + i) * x_col, mask=inside, other=0.0).to(tl.float32)
    if TRANSPOSED:
        first = a * cos_a + b * sin_b
        second = b * cos_b - a * sin_a
    else:
        first = a * cos_a - b * sin_a
        second = b * cos_b + a * sin_b
    tl.store(y + i * y_col, first.to(y.dtype.element_ty), mask=inside)
    tl.store(y + (HALF + i) * y_col, second.to(y.dtype.element_ty), mask=inside)
    if N:
        n = 2 * HALF + _channels(NS)
        rest = own & (n < 2 * HALF + N)
        tl.store(y + n * y_col, tl.load(x + n * x_col, mask=rest), mask=rest)


@triton.jit
def _positions(program, S, TOKENS: tl.constexpr):
    """The tokens of a program, their batches and positions, [TOKENS, 1, 1]."""
    token = (program * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    return token, (token // S).to(tl.int64), (token % S).to(tl.int64)


@triton.jit
def _heads(first, HEADS: tl.constexpr):
    """HEADS heads from the first one, [1, HEADS, 1]."""
    return (first + tl.arange(0, HEADS)).to(tl.int64)[None, :, None]


@triton.jit
def _channels(COLUMNS: tl.constexpr):
    """[1, 1, COLUMNS]."""
    return tl.arange(0, COLUMNS)[None, None, :]


@triton.jit
def _rotated(value, cos, sin, s, there, cos_row, cos_col, sin_row, sin_col, SIGN: tl.constexpr, R: tl.constexpr):
    """Rotate the pairs of value [tokens, heads, channels], float32, by SIGN times the angles of the positions s."""
    shape: tl.constexpr = value.shape
    pair = _channels(shape[2] // 2)
    inside = there & (pair < R // 2)
    c = tl.load(cos + s * cos_row + pair * cos_col, mask=inside, other=0.0)
    sine = tl.load(sin + s * sin_row + pair * sin_col, mask=inside, other=0.0) * SIGN
    return rotate_pairs(value, c, sine)


@triton.jit
def rotate_pairs(value, c, sine):
    """Rotate the pairs of value [tokens, heads, channels], float32, by angles with these cosines and sines."""
    shape: tl.constexpr = value.shape
    a, b = tl.split(tl.reshape(value, [shape[0], shape[1], shape[2] // 2, 2]))
    return tl.reshape(tl.join(a * c - b * sine, a * sine + b * c), [shape[0], shape[1], shape[2]])
