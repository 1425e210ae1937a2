"""Tests of the cross-entropy of logits: torch's in FP64, rounded once, and zero where no label counts."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octile.ops.cross_entropy import IGNORED, cross_entropy, cross_entropy_backward
from tests.ops.operators import assert_fake_is_true, assert_well_formed

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


def inputs(m: int = 20, v: int = 300, dtype: torch.dtype = torch.float32, size: float = 4.0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(v, (m,))
    labels[3:5] = IGNORED
    return (size * torch.randn(m, v)).to(dtype), labels


def exact(logits: Tensor, labels: Tensor, dlosses: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and the gradient of the logits in FP64."""
    x = logits.double().requires_grad_()
    losses = F.cross_entropy(x, labels, ignore_index=IGNORED, reduction="none")
    (dlogits,) = torch.autograd.grad(losses, x, dlosses.double())
    return losses.detach(), dlogits


@every_dtype
@given(m=st.integers(6, 20), v=st.integers(1, 400), size=st.sampled_from([1e-3, 1.0, 30.0, 1e4]), seed=st.integers(0))
@settings(max_examples=30, deadline=None)
def test_losses_and_gradients_are_exact_up_to_one_rounding(dtype: torch.dtype, m: int, v: int, size: float, seed: int):
    torch.manual_seed(seed % 2**32)
    logits, dlosses = (size * torch.randn(m, v)).clamp(-6e4, 6e4).to(dtype), torch.randn(m)
    labels = torch.randint(v, (m,)).masked_fill(torch.rand(m) < 0.2, IGNORED)
    losses, lse = cross_entropy(logits, labels)
    dlogits = cross_entropy_backward(dlosses, logits, labels, lse)
    assert (losses.dtype, lse.dtype, dlogits.dtype) == (torch.float32, torch.float32, dtype)
    expected, gradient = exact(logits, labels, dlosses)
    rounding = 2.0**-22 * (1 + float(logits.float().abs().max()) + math.log(v))  # of lse, at its largest
    torch.testing.assert_close(losses.double(), expected, rtol=0, atol=2 * rounding)
    torch.testing.assert_close(lse.double(), logits.double().logsumexp(-1), rtol=0, atol=2 * rounding)
    spacing = torch.finfo(dtype).eps * gradient.abs() + 4 * rounding * dlosses.abs().double()[:, None]
    assert ((dlogits.double() - gradient).abs() <= spacing + torch.finfo(dtype).smallest_normal).all()


def test_the_gradient_is_rounded_once():
    logits, labels = inputs(dtype=torch.bfloat16)
    lse, dlosses = cross_entropy(logits, labels)[1], torch.randn(20)
    in_float32 = cross_entropy_backward(dlosses, logits.float(), labels, lse)
    assert torch.equal(cross_entropy_backward(dlosses, logits, labels, lse), in_float32.bfloat16())


def test_an_ignored_row_has_neither_loss_nor_gradient():
    logits, labels = inputs()
    logits[3], logits[4, 7] = float("inf"), float("nan")
    losses, lse = cross_entropy(logits, labels)
    dlogits = cross_entropy_backward(torch.full((20,), float("nan")), logits, labels, lse)
    assert losses[3:5].tolist() == [0, 0]
    assert not dlogits[3:5].any()
    assert dlogits[5:].isnan().all()


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf", "all -inf"])
def test_nan_and_inf_give_what_torch_gives(bad: str):
    logits, labels = inputs()
    logits[7, :: 1 if bad.startswith("all") else 17] = float(bad.removeprefix("all "))
    labels[7] = 1  # a finite logit unless all are −Inf
    losses, lse = cross_entropy(logits, labels)
    dlogits = cross_entropy_backward(torch.ones(20), logits, labels, lse)
    expected, gradient = exact(logits, labels, torch.ones(20))
    for found, right in ((losses, expected), (dlogits, gradient)):
        torch.testing.assert_close(found.double(), right, equal_nan=True, rtol=1e-5, atol=1e-5)
    assert bool(losses[7].isnan()) == (bad != "-inf")


def test_a_label_without_probability_has_an_infinite_loss():
    logits, labels = inputs()
    logits[7, labels[7]] = -float("inf")
    assert cross_entropy(logits, labels)[0][7] == float("inf")


def test_no_rows_give_no_rows():
    logits, labels = torch.empty(0, 5), torch.empty(0, dtype=torch.int64)
    losses, lse = cross_entropy(logits, labels)
    assert (losses.shape, lse.shape) == ((0,), (0,))
    assert cross_entropy_backward(losses, logits, labels, lse).shape == (0, 5)


def test_strides_change_nothing():
    logits, labels = inputs()
    dlosses = torch.randn(())
    expected = cross_entropy(logits, labels)
    gradient = cross_entropy_backward(dlosses.repeat(20), logits, labels, expected[1])
    strided, steps = logits.mT.contiguous().mT, torch.stack((labels, labels), 1)[:, 0]
    for found, right in zip(cross_entropy(strided, steps), expected, strict=True):
        torch.testing.assert_close(found, right)
    found = cross_entropy_backward(dlosses.expand(20), strided, steps, expected[1])
    assert found.is_contiguous()
    torch.testing.assert_close(found, gradient)


CALLS: dict[str, Any] = {
    "forward": lambda: (cross_entropy, inputs(dtype=torch.bfloat16)),
    "backward": lambda: (cross_entropy_backward, (torch.rand(20), *inputs(dtype=torch.bfloat16), torch.rand(20))),
}


@pytest.mark.parametrize("name", CALLS)
def test_operators_are_well_formed(name: str):
    assert_well_formed(*CALLS[name]())


@pytest.mark.parametrize("name", CALLS)
def test_meta_tensors_have_the_shapes_and_strides_of_real_ones(name: str):
    assert_fake_is_true(*CALLS[name]())


@pytest.mark.parametrize("label", [5, -1])
def test_a_label_out_of_range_is_refused(label: int):
    logits, labels = torch.zeros(2, 5), torch.tensor([0, label])
    with pytest.raises(IndexError, match=str(label)):
        cross_entropy(logits, labels)
    with pytest.raises(IndexError, match=f"labels must be from 0 to 4, or -100, not {label}"):
        cross_entropy_backward(torch.ones(2), logits, labels, torch.ones(2))


X, LABELS = torch.zeros(2, 5), torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("logits", "labels", "error", "message"),
    [
        (X.double(), LABELS, TypeError, "logits must be float32, bfloat16 or float16, not torch.float64"),
        (X[0], LABELS, ValueError, r"logits must be a matrix \[M, V\] with V at least 1, not \(5,\)"),
        (X[:, :0], LABELS, ValueError, r"with V at least 1, not \(2, 0\)"),
        (X, LABELS.int(), TypeError, "labels must be int64, not torch.int32"),
        (X, LABELS[:1], ValueError, r"labels must be \(2,\), one for each row of logits, not \(1,\)"),
    ],
    ids=["dtype", "vector", "no classes", "labels' dtype", "labels"],
)
def test_wrong_arguments_are_refused(logits: Tensor, labels: Tensor, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        cross_entropy(logits, labels)
    with pytest.raises(error, match=message):
        cross_entropy_backward(torch.ones(2), logits, labels, torch.ones(2))


@pytest.mark.parametrize("name", ["dlosses", "lse"])
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (torch.ones(2).bfloat16(), TypeError, "must be float32, not"),
        (torch.ones(3), ValueError, r"must be \(2,\), one"),
    ],
    ids=["dtype", "shape"],
)
def test_wrong_arguments_of_backward_are_refused(name: str, given: Tensor, error: type[Exception], message: str):
    arguments = {"dlosses": torch.ones(2), "lse": torch.ones(2)} | {name: given}
    with pytest.raises(error, match=f"{name} {message}"):
        cross_entropy_backward(arguments["dlosses"], X, LABELS, arguments["lse"])
