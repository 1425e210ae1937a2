"""Tests of attention within packed texts: bit for bit that of each text alone, with the gradients of autograd."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octile.ops.attention import attention, attention_backward
from octile.ops.packed_attention import packed_attention, packed_attention_backward
from tests.ops.operators import assert_fake_is_true, assert_well_formed

SCALE = 0.3
H, X, V = 2, 12, 8


def inputs(rows: int = 9, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v and the gradient of o."""
    torch.manual_seed(0)
    return [torch.randn(rows, H, width).to(dtype) for width in (X, X, V, V)]


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def strided(t: Tensor) -> Tensor:
    """The same values, every other element of a wider tensor."""
    return t.repeat_interleave(2, dim=-1)[..., ::2]


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.sampled_from([torch.float32, torch.bfloat16]))
def test_each_text_has_the_results_and_gradients_that_it_has_alone(lengths: list[int], dtype: torch.dtype):
    q, k, v, do = inputs(sum(lengths), dtype)
    texts = starts(lengths), SCALE
    o, lse = packed_attention(q, k, v, *texts)
    gradients = packed_attention_backward(do, q, k, v, o, lse, *texts)
    for start, length in zip(starts(lengths).tolist(), lengths, strict=False):
        if length:
            rows = slice(start, start + length)
            alone = attention(q[None, rows], k[None, rows], v[None, rows], SCALE)
            assert torch.equal(o[rows], alone[0][0])
            assert torch.equal(lse[:, rows], alone[1][0])
            expected = attention_backward(*(t[None, rows] for t in (do, q, k, v)), *alone, SCALE)
            assert all(torch.equal(found[rows], one[0]) for found, one in zip(gradients, expected, strict=True))


def backward_case() -> tuple[Any, ...]:
    (*qkv, do), texts = inputs(), (starts([4, 0, 5]), SCALE)
    return packed_attention_backward, (do, *qkv, *packed_attention(*qkv, *texts), *texts, 4)


CALLS: dict[str, Any] = {
    "forward": lambda: (packed_attention, (*inputs()[:3], starts([4, 0, 5]), SCALE, 4)),
    "backward": backward_case,
}


@pytest.mark.parametrize("name", CALLS)
def test_operators_are_well_formed(name: str):
    assert_well_formed(*CALLS[name]())
    assert_fake_is_true(*CALLS[name]())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda q, k, v: (q[None], k, v, starts([9])), ValueError, r"q must be \[T, H, X\], not \(1, 9, 2, 12\)"),
        (lambda q, k, v: (q, k.half(), v, starts([9])), TypeError, "k must be torch.float32 as q"),
        (lambda q, k, v: (q, k, v[1:], starts([9])), ValueError, r"v must be \(9, 2, 8\), not \(8, 2, 8\)"),
        (lambda q, k, v: (q, k, v, starts([9]).long()), TypeError, "cu_seqlens must be int32"),
        (lambda q, k, v: (q, k, v, starts([8])), ValueError, r"cu_seqlens must be nondecreasing from 0 to 9"),
        (lambda q, k, v: (q, strided(k), v, starts([9])), ValueError, "the channels of k must be contiguous"),
        (lambda q, k, v: (q, k, v, strided(starts([9]))), ValueError, "cu_seqlens must be contiguous"),
    ],
    ids=["dimensions", "dtype", "shape", "dtype of starts", "starts", "channels", "strides of starts"],
)
def test_arguments_that_do_not_fit_are_refused(change: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        packed_attention(*change(*inputs()[:3]), SCALE)


@pytest.mark.parametrize(
    ("operand", "message"),
    [(0, "the channels of do must be"), (4, "the channels of o must be"), (5, "lse must be")],
    ids=["do", "o", "lse"],
)
def test_operands_of_the_gradients_that_a_kernel_would_misread_are_refused(operand: int, message: str):
    operator, operands = backward_case()
    misread = [strided(t) if i == operand else t for i, t in enumerate(operands)]
    with pytest.raises(ValueError, match=f"{message} contiguous, not have strides"):
        operator(*misread)


def test_a_log_sum_exp_of_another_dtype_is_refused():
    operator, operands = backward_case()
    with pytest.raises(TypeError, match=r"lse must be float32, not torch\.float64"):
        operator(*operands[:5], operands[5].double(), *operands[6:])
