"""Tests of RMSNorm fused with quantization: torch's norm in FP32, then quantization; gradients equal autograd."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octile.ops.norm import rms_norm, rms_norm_backward, rms_norm_quantize
from octile.ops.quantize import quantize
from tests.ops.operators import assert_fake_is_true, assert_well_formed


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(20, 300).to(dtype), (torch.rand(300) + 0.5).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_rounded_only_by_quantization(dtype: torch.dtype):
    x, weight = inputs(dtype)
    data, scale, rstd, y = rms_norm_quantize(x, weight, 1e-6, "e4m3", True)
    expected = quantize(F.rms_norm(x.float(), weight.shape, weight.float(), 1e-6), 1, 128, "e4m3", True)
    assert torch.equal(data.float(), expected[0].float())
    assert torch.equal(scale, expected[1])
    torch.testing.assert_close(rstd, x.float().square().mean(-1).add(1e-6).rsqrt(), rtol=0, atol=0)
    assert y.shape == (0, 300)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_quantization_the_norm_is_rounded_once(dtype: torch.dtype):
    x, weight = inputs(dtype)
    y, rstd = rms_norm(x, weight, 1e-6)
    assert torch.equal(y, F.rms_norm(x.float(), weight.shape, weight.float(), 1e-6).to(dtype))
    assert torch.equal(rstd, rms_norm_quantize(x, weight, 1e-6, "e4m3", True)[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_norm_is_returned_on_request(dtype: torch.dtype):
    x, weight = inputs(dtype)
    y = rms_norm_quantize(x, weight, 1e-6, "e4m3", True, True)[3]
    assert torch.equal(y, F.rms_norm(x.float(), weight.shape, weight.float(), 1e-6).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_equal_autograd(dtype: torch.dtype):
    x, weight = inputs(dtype)
    dy = torch.randn(20, 300).to(dtype)
    rstd = rms_norm_quantize(x, weight, 1e-6, "e4m3", True)[2]
    wide = [t.double().requires_grad_() for t in (x, weight)]
    expected = torch.autograd.grad(F.rms_norm(wide[0], (300,), wide[1], 1e-6), wide, dy.double())
    dx, dweight = rms_norm_backward(dy, x, weight, rstd)
    assert (dx.dtype, dweight.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(dx.double(), expected[0], rtol=1e-5 if dtype == torch.float32 else 2.0**-8, atol=1e-5)
    torch.testing.assert_close(dweight.double(), expected[1], rtol=1e-5, atol=1e-5)


def test_another_gradient_is_added_before_the_rounding():
    x, weight = inputs(torch.bfloat16)
    dy, rstd, add = torch.randn(20, 300).bfloat16(), torch.rand(20), torch.randn(20, 300).bfloat16()
    exact = rms_norm_backward(dy, x.float(), weight.float(), rstd)[0] + add.float()
    assert torch.equal(rms_norm_backward(dy, x, weight, rstd, add)[0], exact.bfloat16())


@pytest.mark.parametrize("given", [(True, False), (False, True), (True, True)], ids=["second", "third", "both"])
def test_gradients_of_other_readers_are_added_before_the_rounding(given: tuple[bool, bool]):
    x, weight = inputs(torch.bfloat16)
    dy, *others = torch.randn(3, 20, 300).bfloat16()
    others = [dy if is_given else None for dy, is_given in zip(others, given, strict=True)]
    rstd, add = torch.rand(20), torch.randn(20, 300).bfloat16()
    exact = dy.float() + sum(dy.float() for dy in others if dy is not None)
    expected = rms_norm_backward(exact, x, weight, rstd, add)
    for found, of_sum in zip(rms_norm_backward(dy, x, weight, rstd, add, *others), expected, strict=True):
        assert torch.equal(found, of_sum)


def test_no_rows_give_no_rows():
    data, scale, rstd, y = rms_norm_quantize(torch.empty(0, 128), torch.ones(128), 1e-6, "e4m3", False, True)
    assert (data.shape, scale.shape, rstd.shape, y.shape) == ((0, 128), (0, 1), (0,), (0, 128))
    dx, dweight = rms_norm_backward(y, torch.empty(0, 128), torch.ones(128), rstd)
    assert dx.shape == (0, 128)
    assert torch.equal(dweight, torch.zeros(128))


CALLS: dict[str, Any] = {
    "in high precision": lambda: (rms_norm, (*inputs(), 1e-6)),
    "norm": lambda: (rms_norm_quantize, (*inputs(), 1e-6, "int8", False)),
    "with values": lambda: (rms_norm_quantize, (*inputs(), 1e-6, "int8", False, True)),
    "gradients": lambda: (rms_norm_backward, (torch.randn(20, 300), *inputs(), torch.rand(20))),
    "gradients, added": lambda: (
        rms_norm_backward,
        (torch.randn(20, 300), *inputs(), torch.rand(20), torch.randn(20, 300)),
    ),
    "gradients of three readers": lambda: (
        rms_norm_backward,
        (torch.randn(20, 300), *inputs(), torch.rand(20), *torch.randn(3, 20, 300)),
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
    ("x", "weight", "fmt", "error", "message"),
    [
        (torch.zeros(2, 2).double(), torch.ones(2), "e4m3", TypeError, "x must be float32, bfloat16 or float16, not"),
        (torch.zeros(2, 2), torch.ones(2).double(), "e4m3", TypeError, "weight must be float32, bfloat16 or float16"),
        (torch.zeros(2), torch.ones(2), "e4m3", ValueError, r"x must be a matrix \[M, K\] .* not \(2,\)"),
        (torch.zeros(1, 40000), torch.ones(40000), "e4m3", ValueError, "K at most 32768, not"),
        (torch.zeros(2, 2), torch.ones(3), "e4m3", ValueError, r"weight must be \(2,\), not \(3,\)"),
        (torch.zeros(2, 2), torch.ones(2), "e5m6", ValueError, "not 'e5m6'"),
    ],
    ids=["dtype", "weight's dtype", "vector", "too long", "weight", "format"],
)
def test_arguments_that_do_not_fit_are_refused(
    x: Tensor, weight: Tensor, fmt: str, error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        rms_norm_quantize(x, weight, 1e-6, fmt, False)


@pytest.mark.parametrize(
    ("dy", "rstd", "error", "message"),
    [
        (torch.zeros(2, 3).double(), torch.ones(2), TypeError, "dy must be float32, bfloat16 or float16, not"),
        (torch.zeros(2, 3), torch.ones(2).double(), TypeError, r"rstd must be float32, not torch\.float64"),
        (torch.zeros(3, 2), torch.ones(2), ValueError, r"dy must be \(2, 3\) as x, not \(3, 2\)"),
        (torch.zeros(2, 3), torch.ones(3), ValueError, r"rstd must be \(2,\), one for each row of x, not \(3,\)"),
    ],
    ids=["dtype", "rstd's dtype", "shape", "rstd"],
)
def test_gradients_that_do_not_fit_are_refused(dy: Tensor, rstd: Tensor, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        rms_norm_backward(dy, torch.zeros(2, 3), torch.ones(3), rstd)


@pytest.mark.parametrize(
    ("add", "error", "message"),
    [
        (torch.zeros(2, 3).bfloat16(), TypeError, r"add must be torch\.float32 as x, not torch\.bfloat16"),
        (torch.zeros(3, 3), ValueError, r"add must be \(2, 3\) as x, not \(3, 3\)"),
    ],
    ids=["dtype", "shape"],
)
def test_an_addend_that_does_not_fit_is_refused(add: Tensor, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        rms_norm_backward(torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(3), torch.ones(2), add)


@pytest.mark.parametrize(
    ("dy2", "dy3", "error", "message"),
    [
        (torch.zeros(2, 3).double(), None, TypeError, "dy2 must be float32, bfloat16 or float16, not"),
        (None, torch.zeros(3, 3), ValueError, r"dy3 must be \(2, 3\) as x, not \(3, 3\)"),
        (None, torch.zeros(2, 3, device="meta"), ValueError, "dy3"),
    ],
    ids=["dtype", "shape", "device"],
)
def test_gradients_of_other_readers_that_do_not_fit_are_refused(
    dy2: Tensor | None, dy3: Tensor | None, error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        rms_norm_backward(
            torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(3), torch.ones(2), torch.zeros(2, 3), dy2, dy3
        )
