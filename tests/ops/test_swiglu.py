"""SwiGLU's casts are torch's functions in FP32, then the cast."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octile.ops.quantize import quantize
from octile.ops.swiglu import swiglu_backward_quantize, swiglu_quantize
from octile.ops.transpose import quantize_rows_and_columns

M, H = 20, 256


def inputs(m: int = M, h: int = H, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """dh, and gate and up as halves of one product's result."""
    torch.manual_seed(0)
    return [torch.randn(m, h).to(dtype), *(4 * torch.randn(m, 2 * h)).to(dtype).chunk(2, 1)]


def assert_equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
        assert torch.equal(ours.float(), theirs.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("h", [256, 100])
def test_forward_rounds_only_to_the_codes(h: int, dtype: torch.dtype):
    _, gate, up = inputs(h=h, dtype=dtype)
    expected = quantize(F.silu(gate.float()) * up.float(), 1, 128, "e4m3", True)
    assert_equal(swiglu_quantize(gate, up, "e4m3", True), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_is_what_autograd_finds(dtype: torch.dtype):
    dh, gate, up = inputs(dtype=dtype)
    wide = [t.float().detach().requires_grad_() for t in (gate, up)]
    gradients = torch.autograd.grad(F.silu(wide[0]) * wide[1], wide, dh.float())
    expected = quantize_rows_and_columns(torch.cat(gradients, 1), "e4m3", False)
    assert_equal(swiglu_backward_quantize(dh, gate, up, "e4m3", False), expected)


def test_each_half_is_the_cast_of_one_gradient():
    dh, gate, up = inputs()
    data, scale, data_t, scale_t = swiglu_backward_quantize(dh, gate, up, "e4m3", False)
    d_up = quantize_rows_and_columns(dh * F.silu(gate), "e4m3", False)
    for found, expected in zip((data[:, H:], scale[:, H // 128 :], data_t[H:], scale_t[H:]), d_up, strict=True):
        assert torch.equal(found.float(), expected.float())


def test_no_rows_give_no_rows():
    assert swiglu_quantize(*inputs(0)[1:], "e4m3", False)[0].shape == (0, H)
    assert [t.shape for t in swiglu_backward_quantize(*inputs(0), "e4m3", False)] == [
        (0, 2 * H),
        (0, 2 * H // 128),
        (2 * H, 0),
        (2 * H, 0),
    ]


CALLS: dict[str, Any] = {
    "forward": lambda: (swiglu_quantize, (*inputs()[1:], "int8", False)),
    "backward": lambda: (swiglu_backward_quantize, (*inputs(), "int8", False)),
}


@pytest.mark.parametrize("name", CALLS)
def test_they_are_well_formed_operators(name: str):
    operator, arguments = CALLS[name]()
    torch.library.opcheck(operator.overload, arguments)


@pytest.mark.parametrize("name", CALLS)
def test_meta_tensors_have_the_shapes_and_strides_of_real_ones(name: str):
    operator, arguments = CALLS[name]()
    meta = operator(*(a.to("meta") if isinstance(a, Tensor) else a for a in arguments))
    for m, real in zip(meta, operator(*arguments), strict=True):
        assert (m.shape, m.dtype, m.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize(
    ("gate", "up", "fmt", "error", "message"),
    [
        (
            torch.zeros(2, 2, dtype=torch.float64),
            torch.zeros(2, 2),
            "e4m3",
            TypeError,
            "gate must be float32, bfloat16",
        ),
        (torch.zeros(2, 2), torch.zeros(2, 2).half(), "e4m3", TypeError, "up must be torch.float32 as gate, not"),
        (torch.zeros(2), torch.zeros(2), "e4m3", ValueError, r"gate must be a matrix \[M, H\], not \(2,\)"),
        (torch.zeros(2, 2), torch.zeros(2, 3), "e4m3", ValueError, r"up must be \(2, 2\) as gate, not \(2, 3\)"),
        (torch.zeros(2, 2), torch.zeros(2, 2), "e5m6", ValueError, "fmt must be 'e4m3', 'e5m2' or 'int8', not 'e5m6'"),
    ],
    ids=["dtype", "dtypes", "vector", "shapes", "format"],
)
def test_what_does_not_fit_is_refused(gate: Tensor, up: Tensor, fmt: str, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        swiglu_quantize(gate, up, fmt, False)


def test_tiles_that_would_hold_both_gradients_are_refused():
    with pytest.raises(ValueError, match="multiple of 128 columns, not 100"):
        swiglu_backward_quantize(*inputs(h=100), "e4m3", False)
