"""Tests of the rotary operators: equal to the unfused steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from octile.nn.rope import CosSin, Rope
from octile.ops.rope import latent_keys, latent_keys_backward, rotate_, rotate_and_copy_, rotate_halves, rotated
from tests.ops.operators import assert_well_formed

B, S, H, N, R, V = 2, 7, 3, 10, 8, 6
COS_SIN = Rope(R, factor=4.0, original_max_position_embeddings=16).cos_sin(torch.arange(S))


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def rotate(x: Tensor, cos_sin: CosSin) -> Tensor:
    return rotated(x, *cos_sin).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_channels_are_rotated_in_place(dtype: torch.dtype):
    x = tensor(B, S, H, N + R, dtype=dtype)
    expected = torch.cat((x[..., :N], rotate(x[..., N:], COS_SIN)), dim=-1)
    rotate_(x, *COS_SIN)
    assert torch.equal(x, expected)


def test_minus_sin_rotates_back():
    cos, sin = Rope(R).cos_sin(torch.arange(S))
    x = tensor(B, S, H, N + R)
    before = x.clone()
    rotate_(x, cos, sin)
    rotate_(x, cos, -sin)
    torch.testing.assert_close(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_are_their_own_channels_followed_by_the_shared_ones(dtype: torch.dtype):
    kv, k_rope = tensor(B, S, H, N + V, dtype=dtype), tensor(B, S, R, dtype=dtype)
    shared = rotate(k_rope[:, :, None], COS_SIN).expand(-1, -1, H, -1)
    assert torch.equal(latent_keys(kv, k_rope, *COS_SIN, N), torch.cat((kv[..., :N], shared), dim=-1))


def test_gradients_of_keys_equal_autograd():
    kv, k_rope = tensor(B, S, H, N + V).requires_grad_(), tensor(B, S, R).requires_grad_()
    dk, dv = tensor(B, S, H, N + R), tensor(B, S, H, V)
    shared = rotate(k_rope[:, :, None], COS_SIN).expand(-1, -1, H, -1)
    k = torch.cat((kv[..., :N], shared), dim=-1)
    expected = torch.autograd.grad((k * dk).sum() + (kv[..., N:] * dv).sum(), (kv, k_rope))
    for ours, theirs in zip(latent_keys_backward(dk, dv, *COS_SIN), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def halves(dtype: torch.dtype = torch.float32, rotary: int = R) -> tuple[Tensor, ...]:
    """q and k [B, H, S, X] as views of [B, S, H, X]; cos and sin [B, S, R], whose halves differ."""
    q, k = (tensor(B, S, heads, R + 4, dtype=dtype).transpose(1, 2) for heads in (H, 1))
    return q, k, tensor(B, S, rotary, dtype=dtype), -tensor(B, S, rotary, dtype=dtype)


def by_rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What transformers' models compute, in float32."""
    r = cos.shape[-1]
    a, b = x[..., : r // 2], x[..., r // 2 : r]
    rotated = x[..., :r].float() * cos[:, None].float() + torch.cat((-b, a), dim=-1).float() * sin[:, None].float()
    return torch.cat((rotated.to(x.dtype), x[..., r:]), dim=-1)


every_rotary = pytest.mark.parametrize("rotary", [0, 2, R, R + 4])


@every_rotary
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_halves_are_rotated_as_by_rotate_half_and_rounded_once(rotary: int, dtype: torch.dtype):
    q, k, cos, sin = halves(dtype, rotary)
    for found, x in zip(rotate_halves(q, k, cos, sin), (q, k), strict=True):
        assert torch.equal(found, by_rotate_half(x, cos, sin))
        assert found.stride() == x.stride()


@every_rotary
def test_the_transposed_rotation_of_halves_is_the_gradient(rotary: int):
    q, k, cos, sin = halves(rotary=rotary)
    dq, dk = torch.randn_like(q), torch.randn_like(k)
    q.requires_grad_(), k.requires_grad_()
    dot = (by_rotate_half(q, cos, sin) * dq).sum() + (by_rotate_half(k, cos, sin) * dk).sum()
    for found, expected in zip(rotate_halves(dq, dk, cos, sin, True), torch.autograd.grad(dot, (q, k)), strict=True):
        torch.testing.assert_close(found, expected)


CALLS: dict[str, Any] = {
    "halves": lambda: (rotate_halves, halves()),
    "transposed halves": lambda: (rotate_halves, (*halves(torch.bfloat16, 2), True)),
    "rotate_": lambda: (rotate_, (tensor(B, S, H, N + R), *COS_SIN)),
    "rotate_and_copy_": lambda: (rotate_and_copy_, (tensor(B, S, H, N + R), tensor(B, S, H, R + 1), *COS_SIN)),
    "keys": lambda: (latent_keys, (tensor(B, S, H, N + V), tensor(B, S, R), *COS_SIN, N)),
    "gradients": lambda: (latent_keys_backward, (tensor(B, S, H, N + R), tensor(B, S, H, V), *COS_SIN)),
    "gradients in other strides": lambda: (
        latent_keys_backward,
        (*(tensor(B, H, n, S).permute(0, 3, 1, 2) for n in (N + R, V)), *COS_SIN),
    ),
    "no rotary channels": lambda: (latent_keys, (tensor(B, S, H, V), tensor(B, S, 0), *(t[:, :0] for t in COS_SIN), 3)),
}


@pytest.mark.one_case
@pytest.mark.parametrize("name", CALLS)
def test_operators_are_well_formed(name: str):
    assert_well_formed(*CALLS[name]())


HALVES = halves()


@pytest.mark.parametrize(
    ("operator", "arguments", "error", "message"),
    [
        (rotate_, (tensor(B, S, H, 9).double(), *COS_SIN), TypeError, "x must be float32, bfloat16 or float16, not"),
        (rotate_, (tensor(B, S, 9), *COS_SIN), ValueError, r"x must have 4 dimensions, not the shape \(2, 7, 9\)"),
        (rotate_, (tensor(B, 6, H, 9), *COS_SIN), ValueError, r"cos must be \(6, R/2\) for x \(2, 6, 3, 9\), not"),
        (rotate_, (tensor(B, S, H, 7), *COS_SIN), ValueError, r"cos must be \(7, R/2\) for x \(2, 7, 3, 7\), not"),
        (rotate_, (tensor(B, S, H, 9), COS_SIN[0].double(), COS_SIN[1]), TypeError, "cos must be float32, not"),
        (
            rotate_and_copy_,
            (tensor(B, S, H, 9), tensor(B, S, H, 7), *COS_SIN),
            ValueError,
r"out must be \(2, 7, 3\) and at least 8 channels, not \(2, 7, 3, 7\)",
        ),
        (rotate_and_copy_, (tensor(B, S, H, 9), tensor(B, S, H, 9).half(), *COS_SIN), TypeError, "out must be torch"),
        (
            latent_keys,
            (tensor(B, S, H, 5), tensor(B, S, R), *COS_SIN, N),
            ValueError,
            r"kv must be \[B, S, H, N \+ V\]",
        ),
        (latent_keys, (tensor(B, S, H, 16), tensor(B, R), *COS_SIN, N), ValueError, "k_rope must be"),
        (latent_keys, (tensor(B, S, H, 16), tensor(B, S, 9), *COS_SIN, N), ValueError, "half of k_rope's 9 channels"),
        (
            latent_keys_backward,
            (tensor(B, S, H, 18), tensor(B, S, 1, V), *COS_SIN),
            ValueError,
            r"dv must be \[B, S, H, V\]",
        ),
        (rotate_halves, (*HALVES[:3], HALVES[3].double()), TypeError, "sin must be torch.float32 as q, not"),
        (rotate_halves, (HALVES[0][0], *HALVES[1:]), ValueError, r"q must be \[B, H, S, X\], not \(3, 7, 12\)"),
        (rotate_halves, (HALVES[0], HALVES[1][:, :, :5], *HALVES[2:]), ValueError, r"k must be \(2, H, 7, 12\) for q"),
        (rotate_halves, (*HALVES[:2], HALVES[2][:1], HALVES[3]), ValueError, r"cos must be \(2, 7, R\), R even and at"),
        (rotate_halves, (*HALVES[:2], *[t[..., :5] for t in HALVES[2:]]), ValueError, "R even and at most 12, not"),
    ],
    ids=[
        "dtype", "dimensions", "positions", "channels", "angles", "out", "out's dtype", "kv", "k_rope", "half", "dv",
        "sin", "q", "k", "cos", "odd",
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_are_refused(operator: Any, arguments: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        operator(*arguments)
