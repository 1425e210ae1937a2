"""Tests of the attention operator: equal to torch's, with the gradients of autograd."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octile.ops.attention import attention, attention_backward
from tests.ops.operators import assert_fake_is_true, assert_well_formed

SCALE = 0.3
Shape = tuple[int, int, int, int, int]  # B, S, H, X, V
every_shape = pytest.mark.parametrize("shape", [(2, 7, 3, 24, 16), (1, 1, 1, 8, 8), (1, 33, 2, 5, 9)], ids=str)


def inputs(shape: Shape = (2, 7, 3, 24, 16), dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v and the gradient of o."""
    torch.manual_seed(0)
    b, s, h, x, v = shape
    return [torch.randn(b, s, h, width).to(dtype) for width in (x, x, v, v)]


def torchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE).transpose(1, 2)


@every_shape
def test_forward_equals_torchs(shape: Shape):
    q, k, v, _ = inputs(shape)
    o, lse = attention(q, k, v, SCALE)
    torch.testing.assert_close(o, torchs(q, k, v), rtol=1e-5, atol=1e-5)
    last = (q[:, -1, :, None] * k.transpose(1, 2)).sum(-1) * SCALE
    torch.testing.assert_close(lse[..., -1], last.logsumexp(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_keys", [1, 5, 150])
@every_shape
def test_attention_to_all_keys_is_the_references(shape: Shape, n_keys: int, dtype: torch.dtype):
    q, k, v, _ = inputs(shape, dtype)
    k, v = (torch.randn(len(q), n_keys, *t.shape[2:]).to(dtype) for t in (k, v))
    expected = attention.reference(q, k, v, SCALE, False)
    s_BHSL = SCALE * q.transpose(1, 2).float() @ k.transpose(1, 2).float().mT
    torch.testing.assert_close(expected[1], s_BHSL.logsumexp(-1))
    torch.testing.assert_close(expected[0].float(), (s_BHSL.softmax(-1) @ v.transpose(1, 2).float()).transpose(1, 2),
                               rtol=1e-5 if dtype == torch.float32 else 2**-8, atol=1e-5)  # fmt: skip
    found = attention(q, k, v, SCALE, False)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)
    atol = 1e-5 if dtype == torch.float32 else 2**-7 * float(v.abs().max())  # BF16 weights of a softmax
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=atol)


@every_shape
def test_backward_equals_autograd(shape: Shape):
    *qkv, do = inputs(shape)
    wide = [t.double().requires_grad_() for t in qkv]
    expected = torch.autograd.grad(torchs(*wide), wide, do.double())
    found = attention_backward(do, *qkv, *attention(*qkv, SCALE), SCALE)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


def test_backward_reads_the_output_that_it_is_given():
    *qkv, do = inputs()
    o, lse = attention(*qkv, SCALE)
    dq, dk, dv = attention_backward(do, *qkv, o, lse, SCALE)
    other = attention_backward(do, *qkv, 2 * o, lse, SCALE)
    assert torch.equal(other[2], dv)
    assert not torch.allclose(other[0], dq)
    assert not torch.allclose(other[1], dk)


def test_scores_of_later_keys_do_not_reach_a_query_even_if_they_overflow():
    q, k, v, _ = inputs()
    o, lse = attention(q, k, v, SCALE)
    k[:, -1] = q[:, -2].sign() * 3e38  # the last key: its scores overflow to +Inf
    found, found_lse = attention(q, k, v, SCALE)
    assert torch.equal(found[:, :-1], o[:, :-1])
    assert torch.equal(found_lse[..., :-1], lse[..., :-1])


def test_half_precision_is_rounded_at_the_end():
    *qkv, do = inputs(dtype=torch.bfloat16)
    o, lse = attention(*qkv, SCALE)
    wide_o, wide_lse = attention(*(t.float() for t in qkv), SCALE)
    assert torch.equal(o, wide_o.bfloat16())
    assert torch.equal(lse, wide_lse)
    wide = attention_backward(*(t.float() for t in (do, *qkv, o)), lse, SCALE)
    for ours, theirs in zip(attention_backward(do, *qkv, o, lse, SCALE), wide, strict=True):
        assert torch.equal(ours, theirs.bfloat16())


def test_autocast_changes_nothing():
    qkv = inputs()[:3]
    plain = attention(*qkv, SCALE)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(attention(*qkv, SCALE), plain, strict=True))


CALLS: dict[str, Any] = {
    "forward": lambda: (attention, (*inputs()[:3], SCALE)),
    "to all keys": lambda: (attention, (inputs()[0], *(torch.randn(2, 5, 3, n) for n in (24, 16)), SCALE, False)),
    "of views": lambda: (attention, (*(torch.randn(2, 7, 3, 2 * n)[..., n:] for n in (24, 24, 16)), SCALE)),
    "backward": lambda: (
        attention_backward,
        ((i := inputs())[3], *i[:3], *attention(*i[:3], SCALE), SCALE),
    ),
}


@pytest.mark.one_case
@pytest.mark.parametrize("name", CALLS)
def test_operators_are_well_formed(name: str):
    assert_well_formed(*CALLS[name]())


@pytest.mark.parametrize("name", CALLS)
def test_meta_tensors_have_the_shapes_and_strides_of_real_ones(name: str):
    assert_fake_is_true(*CALLS[name]())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda q, k, v: (q.double(), k, v), TypeError, "q must be float32, bfloat16 or float16, not torch.float64"),
        (lambda q, k, v: (q, k.half(), v), TypeError, "k must be torch.float32 as q, not torch.float16"),
        (lambda q, k, v: (q[0], k, v), ValueError, r"q must be \[B, S, H, X\], not \(7, 3, 24\)"),
        (lambda q, k, v: (q, k[..., 1:], v), ValueError, r"k must be \(2, 7, 3, 24\), not \(2, 7, 3, 23\)"),
        (lambda q, k, v: (q, k, v[:, 1:]), ValueError, r"v must be \(2, 7, 3, 16\), not \(2, 6, 3, 16\)"),
        (lambda q, k, v: (q, k, v[0, 0, 0, 0]), ValueError, r"v must be \[B, L, H, V\], not \(\)"),
    ],
    ids=["dtype", "dtypes", "dimensions", "k", "v", "scalar v"],
)
def test_arguments_that_do_not_fit_are_refused(change: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        attention(*change(*inputs()[:3]), SCALE)


@pytest.mark.parametrize(("queries", "heads"), [(0, 3), (7, 0)])
def test_attention_to_all_keys_of_no_queries_or_heads_is_empty(queries: int, heads: int):
    q, k, v, _ = inputs()
    o, lse = attention(q[:, :queries, :heads], k[:, :, :heads], v[:, :, :heads], SCALE, False)
    assert o.shape == (2, queries, heads, 16)
    assert lse.shape == (2, heads, queries)


def test_attention_to_no_key_is_refused():
    q, k, v, _ = inputs()
    with pytest.raises(ValueError, match=r"k must have a key, not \(2, 0, 3, 24\)"):
        attention(q, k[:, :0], v[:, :0], SCALE, False)


def test_a_log_sum_exp_of_another_shape_is_refused():
    *qkv, do = inputs()
    o, lse = attention(*qkv, SCALE)
    with pytest.raises(ValueError, match=r"lse must be float32 \(2, 3, 7\), not torch.float32 \(2, 7, 3\)"):
        attention_backward(do, *qkv, o, lse.mT, SCALE)


def test_a_log_sum_exp_of_another_dtype_is_refused():
    *qkv, do = inputs()
    o, lse = attention(*qkv, SCALE)
    with pytest.raises(TypeError, match=r"lse must be float32, not torch\.float64"):
        attention_backward(do, *qkv, o, lse.double(), SCALE)
