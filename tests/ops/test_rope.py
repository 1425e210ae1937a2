"""Tests of the rotary operators of latent attention: equal to the unfused steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from octile.nn.rope import CosSin, Rope
from octile.ops.rope import latent_keys, latent_keys_backward, rotate_, rotated
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


CALLS: dict[str, Any] = {
    "rotate_": lambda: (rotate_, (tensor(B, S, H, N + R), *COS_SIN)),
    "keys": lambda: (latent_keys, (tensor(B, S, H, N + V), tensor(B, S, R), *COS_SIN, N)),
    "gradients": lambda: (latent_keys_backward, (tensor(B, S, H, N + R), tensor(B, S, H, V), *COS_SIN)),
    "no rotary channels": lambda: (latent_keys, (tensor(B, S, H, V), tensor(B, S, 0), *(t[:, :0] for t in COS_SIN), 3)),
}


@pytest.mark.parametrize("name", CALLS)
def test_operators_are_well_formed(name: str):
    assert_well_formed(*CALLS[name]())


@pytest.mark.parametrize(
    ("operator", "arguments", "error", "message"),
    [
        (rotate_, (tensor(B, S, H, 9).double(), *COS_SIN), TypeError, "x must be float32, bfloat16 or float16, not"),
        (rotate_, (tensor(B, S, 9), *COS_SIN), ValueError, r"x must have 4 dimensions, not the shape \(2, 7, 9\)"),
        (rotate_, (tensor(B, 6, H, 9), *COS_SIN), ValueError, r"cos must be \(6, R/2\) for x \(2, 6, 3, 9\), not"),
        (rotate_, (tensor(B, S, H, 7), *COS_SIN), ValueError, r"cos must be \(7, R/2\) for x \(2, 7, 3, 7\), not"),
        (rotate_, (tensor(B, S, H, 9), COS_SIN[0].double(), COS_SIN[1]), TypeError, "cos must be float32, not"),
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
    ],
    ids=["dtype", "dimensions", "positions", "channels", "angles", "kv", "k_rope", "half", "dv"],
)
def test_arguments_that_do_not_fit_are_refused(operator: Any, arguments: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        operator(*arguments)
