"""Rotary positions as differentiable functions: equal to the formula, with right derivatives."""

import pytest
import torch
from torch import Tensor

from octile.nn.fused.rotary import latent_keys_and_values, rotate, rotate_halves, why_not_rotate_halves
from octile.nn.rope import Rope
from octile.ops.rope import rotated

B, S, H, N, R, V = 2, 7, 3, 10, 8, 6
COS_SIN = Rope(R).cos_sin(torch.arange(S))
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def rotate_by_torch(x: Tensor) -> Tensor:
    return torch.cat((x[..., :-R], rotated(x[..., -R:], *COS_SIN).to(x.dtype)), dim=-1)


def keys_by_torch(kv: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
    shared = rotated(k_rope[:, :, None], *COS_SIN).to(kv.dtype).expand(-1, -1, H, -1)
    return torch.cat((kv[..., :N], shared), dim=-1), kv[..., N:]


def keys(kv: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
    return latent_keys_and_values(kv, k_rope, COS_SIN, N)


@every_dtype
@pytest.mark.parametrize("shape", [(B, S, H, N + R), (S, H, R), (2, 3, S, H, R), (0, S, H, R)], ids=str)
def test_the_last_channels_are_rotated(shape: tuple[int, ...], dtype: torch.dtype):
    x, dy = torch.randn(shape).to(dtype).requires_grad_(), torch.randn(shape).to(dtype)
    y, expected = rotate(x, COS_SIN), rotate_by_torch(x)
    assert torch.equal(y, expected)
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(expected, x, dy)[0])


def test_the_input_and_its_gradient_are_not_written():
    x, dy = torch.randn(2, B, S, H, R).unbind(0)
    x.requires_grad_()
    before, dy_before = x.detach().clone(), dy.clone()
    rotate(x, COS_SIN).backward(dy)
    assert torch.equal(x, before)
    assert torch.equal(dy, dy_before)


@every_dtype
def test_keys_and_values_of_latent_attention(dtype: torch.dtype):
    kv, k_rope = torch.randn(B, S, H, N + V).to(dtype), torch.randn(B, S, R + 4).to(dtype)[..., 4:]
    for ours, theirs in zip(keys(kv, k_rope), keys_by_torch(kv, k_rope), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("used", [(0, 1), (0,), (1,)], ids=str)
def test_gradients_of_keys_and_values(used: tuple[int, ...]):
    inputs = torch.randn(B, S, H, N + V, requires_grad=True), torch.randn(B, S, R, requires_grad=True)
    dys = [(torch.randn(B, S, H, N + R), torch.randn(B, S, H, V))[i] for i in used]
    found, expected = (
        torch.autograd.grad([f(*inputs)[i] for i in used], inputs, dys, materialize_grads=True)
        for f in (keys, keys_by_torch)
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_gradient_of_the_shared_key_is_rounded_once():
    kv, k_rope = torch.randn(B, S, 64, N + V).bfloat16(), torch.randn(B, S, R).bfloat16().requires_grad_()
    dk = torch.randn(B, S, 64, N + R).bfloat16()
    (found,) = torch.autograd.grad(keys(kv, k_rope)[0], k_rope, dk)
    exact = rotated(dk[..., N:].float().sum(2, keepdim=True), COS_SIN[0], -COS_SIN[1])[:, :, 0]
    assert torch.equal(found, exact.bfloat16())


def test_second_derivatives_are_right():
    def of_rotation(x: Tensor, _: Tensor) -> Tensor:
        return rotate(x[..., : N + R], COS_SIN)

    def of_rotation_by_torch(x: Tensor, _: Tensor) -> Tensor:
        return rotate_by_torch(x[..., : N + R])

    def of_keys(kv: Tensor, k_rope: Tensor) -> Tensor:
        return torch.cat(keys(kv, k_rope), dim=-1)

    def of_keys_by_torch(kv: Tensor, k_rope: Tensor) -> Tensor:
        return torch.cat(keys_by_torch(kv, k_rope), dim=-1)

    for ours, by_torch in ((of_rotation, of_rotation_by_torch), (of_keys, of_keys_by_torch)):
        inputs = torch.randn(B, S, H, N + 8, requires_grad=True), torch.randn(B, S, R, requires_grad=True)
        results = []
        for f in (ours, by_torch):
            first = torch.autograd.grad(f(*inputs).sin().sum(), inputs, create_graph=True, materialize_grads=True)
            results.append(torch.autograd.grad(sum(g.square().sum() for g in first), inputs, materialize_grads=True))
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected)


def test_other_dtypes_are_the_formulas():
    x = torch.randn(B, S, H, N + R).double()
    assert torch.equal(rotate(x, COS_SIN), rotate_by_torch(x))
    mixed = keys(torch.randn(B, S, H, N + V), torch.randn(B, S, R).bfloat16())
    assert [t.dtype for t in mixed] == [torch.float32, torch.float32]


def halves(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q and k as attention has them, and cos and sin of one sequence for all of the batch."""
    q, k = (torch.randn(B, S, h, N).to(dtype).transpose(1, 2).requires_grad_() for h in (H, 1))
    return [q, k, torch.randn(1, S, R).to(dtype), torch.randn(1, S, R).to(dtype)]


def rotate_halves_by_torch(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    def rotated(x: Tensor) -> Tensor:
        x = x.float()
        a, b = x[..., : R // 2], x[..., R // 2 : R]
        y = x[..., :R] * cos[:, None].float() + torch.cat((-b, a), dim=-1) * sin[:, None].float()
        return torch.cat((y, x[..., R:]), dim=-1).to(q.dtype)

    return rotated(q), rotated(k)


@every_dtype
@pytest.mark.parametrize("used", [(0, 1), (0,), (1,)], ids=str)
def test_halves_are_rotated_and_their_gradients_rotated_back(used: tuple[int, ...], dtype: torch.dtype):
    inputs, dys = halves(dtype), [torch.randn(B, h, S, N).to(dtype) for h in (H, 1)]
    results = []
    for function in (rotate_halves, rotate_halves_by_torch):
        y = function(*inputs)
        found = [y[i] for i in used], [dys[i] for i in used]
        results.append([*y, *torch.autograd.grad(found[0], inputs[:2], found[1], materialize_grads=True)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_halves_have_second_derivatives():
    q, k, cos, sin = halves()
    results = []
    for function in (rotate_halves, rotate_halves_by_torch):
        y = function(q, k, cos, sin)
        dq, dk = torch.autograd.grad(sum((t**3).sum() for t in y), (q, k), create_graph=True)
        results.append(torch.autograd.grad((dq**2).sum() + (dk**2).sum(), (q, k)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda q, k, cos, sin: (q, k, cos.double(), sin.double()), "dtypes"),
        (lambda q, k, cos, sin: (q, k.bfloat16(), cos, sin), "dtypes"),
        (lambda q, k, cos, sin: (q, k, cos.requires_grad_(), sin), "gradients"),
        (lambda q, k, cos, sin: (q, k[:, :, :1], cos, sin), "q and k have other shapes"),
        (lambda q, k, cos, sin: (q[0], k[0], cos, sin), "q and k have other shapes"),
        (lambda q, k, cos, sin: (q, k, cos[0], sin[0]), "cos and sin have other shapes"),
        (lambda q, k, cos, sin: (q, k, cos[..., :5], sin[..., :5]), "an odd number"),
    ],
)
def test_what_rotate_halves_does_not_take_has_a_reason(change, reason):
    inputs = halves()
    assert why_not_rotate_halves(*inputs) is None
    assert reason in why_not_rotate_halves(*change(*inputs))


@pytest.mark.oldest_torch
def test_a_compiled_rotation_keeps_its_gradient():
    """Fails with torch 2.11 alone, where an input that was copied into an empty tensor and rotated there had none."""
    x, dy = torch.randn(2, B, S, H, R).unbind(0)
    gradients = []
    for function in (rotate, torch.compile(rotate, fullgraph=True, backend="eager")):
        leaf = x.clone().requires_grad_()
        function(leaf, COS_SIN).backward(dy)
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)
