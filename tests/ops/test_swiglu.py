"""Tests of SwiGLU: torch's functions in FP32, then quantization or one rounding."""

from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from octile.ops.groups import align_groups, take_tiles
from octile.ops.quantize import dequantize, quantize
from octile.ops.swiglu import (
    silu,
    swiglu,
    swiglu_backward,
    swiglu_backward_quantize,
    swiglu_quantize,
    swiglu_quantize_and_save,
)
from octile.ops.transpose import quantize_rows_and_columns
from tests.ops.operators import assert_fake_is_true, assert_well_formed

M, H = 20, 256


def inputs(m: int = M, h: int = H, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """dh, and gate and up as halves of one GEMM's output."""
    torch.manual_seed(0)
    return [torch.randn(m, h).to(dtype), *(4 * torch.randn(m, 2 * h)).to(dtype).chunk(2, 1)]


def assert_equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())
        assert torch.equal(ours.float(), theirs.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_quantization_every_result_is_rounded_once(dtype: torch.dtype):
    dh, gate, up = inputs(h=100, dtype=dtype)
    wide = [t.float().detach().requires_grad_() for t in (gate, up)]
    h = F.silu(wide[0]) * wide[1]
    assert_equal((swiglu(gate, up),), ((silu(gate.float()) * up.float()).to(dtype),))
    gradients = torch.autograd.grad(h, wide, dh.float())
    assert_equal((swiglu_backward(dh, gate, up),), (torch.cat(gradients, dim=1).to(dtype),))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("h", [256, 100])
def test_forward_rounds_only_when_it_quantizes(h: int, dtype: torch.dtype):
    _, gate, up = inputs(h=h, dtype=dtype)
    expected = quantize(silu(gate.float()) * up.float(), 1, 128, "e4m3", True)
    assert_equal(swiglu_quantize(gate, up, "e4m3", True), expected)


@pytest.mark.parametrize("h", [256, 100])
def test_inputs_are_saved_in_tiles_of_their_own(h: int):
    _, gate, up = inputs(h=h)
    weight = torch.rand(M)
    *h_quantized, saved, saved_scale = swiglu_quantize_and_save(gate, up, "e4m3", True, "int8", False, weight)
    assert_equal(tuple(h_quantized), swiglu_quantize(gate, up, "e4m3", True, weight))
    assert_equal((saved, saved_scale), quantize(torch.stack([gate, up]), 1, 128, "int8", False))
    for half, x in enumerate((gate, up)):
        assert_equal((saved[half], saved_scale[half]), quantize(x, 1, 128, "int8", False))


def test_a_row_weight_multiplies_the_row_before_quantization():
    _, gate, up = inputs()
    weight = torch.rand(M)
    expected = quantize(silu(gate) * up * weight[:, None], 1, 128, "e4m3", True)
    assert_equal(swiglu_quantize(gate, up, "e4m3", True, weight), expected)


QUANTIZATIONS = ("e4m3", False, "e4m3", True)  # of the gradients and of h


def columns(x: Tensor, fmt: str, power_of_2: bool) -> tuple[Tensor, Tensor]:
    """x quantized in tiles along its columns, transposed."""
    return quantize_rows_and_columns(x, fmt, power_of_2)[2:]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_equals_autograd(dtype: torch.dtype):
    dh, gate, up = inputs(dtype=dtype)
    wide = [t.float().detach().requires_grad_() for t in (gate, up)]
    h = F.silu(wide[0]) * wide[1]
    gradients = torch.autograd.grad(h, wide, dh.float())
    *found, dweight = swiglu_backward_quantize(dh, gate, up, None, None, None, *QUANTIZATIONS)
    expected = *quantize_rows_and_columns(torch.cat(gradients, 1), "e4m3", False), *columns(h.detach(), "e4m3", True)
    assert_equal(tuple(found), expected)
    assert dweight.shape == (0,)


def test_a_row_weight_has_a_gradient():
    dh, gate, up = inputs()
    weight = torch.rand(M)
    wide = [t.clone().requires_grad_() for t in (gate, up, weight)]
    h = F.silu(wide[0]) * wide[1] * wide[2][:, None]
    *gradients, dweight = torch.autograd.grad(h, wide, dh)
    *found, found_weight = swiglu_backward_quantize(dh, gate, up, None, None, weight, *QUANTIZATIONS)
    both = torch.cat(swiglu_gradients(dh * weight[:, None], gate, up), 1)
    expected = *quantize_rows_and_columns(both, "e4m3", False), *columns(h.detach(), "e4m3", True)
    assert_equal(tuple(found), expected)
    torch.testing.assert_close(both, torch.cat(gradients, 1))
    torch.testing.assert_close(found_weight, dweight)


def swiglu_gradients(dh: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.aten.silu_backward(dh * up, gate), dh * F.silu(gate)


def test_saved_inputs_are_read_by_their_values():
    dh, gate, up = inputs()
    *_, saved, saved_scale = swiglu_quantize_and_save(gate, up, "e4m3", True, "e4m3", False)
    values = dequantize(saved, saved_scale, 1, 128, torch.float32)
    found = swiglu_backward_quantize(dh, *saved, *saved_scale, torch.ones(M), *QUANTIZATIONS)
    assert_equal(found, swiglu_backward_quantize(dh, *values, None, None, torch.ones(M), *QUANTIZATIONS))


def test_each_half_is_one_quantized_gradient():
    dh, gate, up = inputs()
    data, scale, data_t, scale_t, *_ = swiglu_backward_quantize(dh, gate, up, None, None, None, *QUANTIZATIONS)
    d_up = quantize_rows_and_columns(dh * F.silu(gate), "e4m3", False)
    for found, expected in zip((data[:, H:], scale[:, H // 128 :], data_t[H:], scale_t[H:]), d_up, strict=True):
        assert torch.equal(found.float(), expected.float())


def test_groups_have_tiles_of_their_own():
    dh, gate, up = inputs()
    tiles, _ = align_groups(torch.tensor([3, M - 5], dtype=torch.int32), M)
    found = swiglu_backward_quantize(dh, gate, up, None, None, None, *QUANTIZATIONS, tiles)
    both = torch.cat(swiglu_gradients(dh, gate, up), 1)
    h_columns = quantize_rows_and_columns(silu(gate) * up, "e4m3", True, tiles)[2:]
    assert_equal(found[:6], (*quantize_rows_and_columns(both, "e4m3", False, tiles), *h_columns))


@pytest.mark.parametrize("is_grouped", [False, True], ids=["", "groups"])
def test_h_may_have_blocks(is_grouped: bool):
    dh, gate, up = inputs()
    tiles = TILES if is_grouped else None
    *found, h_t, h_scale_t, dweight = swiglu_backward_quantize(
        dh, gate, up, None, None, None, *QUANTIZATIONS, tiles, True
    )
    *expected, _, _, dweight_too = swiglu_backward_quantize(dh, gate, up, None, None, None, *QUANTIZATIONS, tiles)
    assert_equal((*found, dweight), (*expected, dweight_too))
    h = silu(gate) * up
    blocks, scale = quantize(h if tiles is None else take_tiles(h, tiles), 128, 128, "e4m3", True)
    assert torch.equal(h_t.float(), blocks.mT.float())
    assert torch.equal(h_scale_t, scale.mT)


def test_no_rows_give_no_rows():
    dh, gate, up = inputs(0)
    assert swiglu_quantize(gate, up, "e4m3", False)[0].shape == (0, H)
    assert swiglu_quantize_and_save(gate, up, "e4m3", False, "e4m3", False)[2].shape == (2, 0, H)
    found = swiglu_backward_quantize(dh, gate, up, None, None, torch.ones(0), *QUANTIZATIONS)
    shapes = [(0, 2 * H), (0, 2 * H // 128), (2 * H, 0), (2 * H, 0), (H, 0), (H, 0), (0,)]
    assert [t.shape for t in found] == shapes


TILES = torch.tensor([[0, 3], [3, M], [0, 0]], dtype=torch.int32)
CALLS: dict[str, Any] = {
    "in high precision": lambda: (swiglu, tuple(inputs()[1:])),
    "backward in high precision": lambda: (swiglu_backward, tuple(inputs())),
    "forward": lambda: (swiglu_quantize, (*inputs()[1:], "int8", False)),
    "forward, weighted": lambda: (swiglu_quantize, (*inputs()[1:], "int8", False, torch.rand(M))),
    "forward, saved": lambda: (swiglu_quantize_and_save, (*inputs()[1:], "int8", False, "e4m3", True, torch.rand(M))),
    "backward, h in blocks": lambda: (
        swiglu_backward_quantize,
        (*inputs(), None, None, None, "int8", False, "e4m3", True, TILES, True),
    ),
    "backward of groups": lambda: (
        swiglu_backward_quantize,
        (*inputs(), None, None, None, "int8", False, "e4m3", True, TILES),
    ),
    "backward": lambda: (swiglu_backward_quantize, (*inputs(), None, None, None, "int8", False, "e4m3", True)),
    "backward of saved": lambda: (
        swiglu_backward_quantize,
        (
            inputs()[0],
            *(q := quantize(torch.randn(2, M, H), 1, 128, "int8", False))[0],
            *q[1],
            torch.rand(M),
            "int8",
            True,
            "e5m2",
            False,
        ),
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
def test_arguments_that_do_not_fit_are_refused(
    gate: Tensor, up: Tensor, fmt: str, error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        swiglu_quantize(gate, up, fmt, False)
    if fmt == "e4m3":
        for call in (lambda: swiglu(gate, up), lambda: swiglu_backward(torch.zeros(2, 2), gate, up)):
            with pytest.raises(error, match=message):
                call()


@pytest.mark.parametrize(
    ("ends", "error", "message"),
    [
        (torch.tensor([1, 2]), TypeError, "ends must be int32, not torch.int64"),
        (torch.zeros(0).int(), ValueError, r"ends must be \[G\], contiguous, with G at least 1, not \(0,\)"),
        (torch.zeros(4).int()[::2], ValueError, r"ends must be \[G\], contiguous"),
        (torch.tensor(2).int(), ValueError, r"ends must be \[G\], contiguous, with G at least 1, not \(\)"),
    ],
)
def test_ends_that_do_not_fit_are_refused(ends: Tensor, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        swiglu_quantize(torch.zeros(2, 2), torch.zeros(2, 2), "e4m3", False, None, ends)


def test_a_gradient_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"dh must be \(20, 256\) as gate, not \(3, 256\)"):
        swiglu_backward(inputs()[0][:3], *inputs()[1:])
    with pytest.raises(TypeError, match=r"dh must be float32, bfloat16 or float16, not torch\.float64"):
        swiglu_backward(inputs()[0].double(), *inputs()[1:])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda a: inputs(h=100) + a[3:], ValueError, "multiple of 128 columns, not 100"),
        (lambda a: [a[0].double(), *a[1:]], TypeError, "dh must be float32, bfloat16 or float16, not torch.float64"),
        (lambda a: [a[0][:3], *a[1:]], ValueError, r"dh must be \(20, 256\) as gate, not \(3, 256\)"),
        (lambda a: [*a[:3], torch.ones(M, 2), *a[4:]], ValueError, "gate_scale must be given if gate and up are"),
        (
            lambda a: [a[0], *(t.to(torch.float8_e4m3fn) for t in a[1:3]), *a[3:]],
            ValueError,
            "gate_scale must be given",
        ),
        (lambda a: [*a[:5], torch.ones(M).double()], TypeError, "weight must be float32, not torch.float64"),
        (lambda a: [*a[:5], torch.ones(3)], ValueError, r"weight must be \(20,\) as gate, not \(3,\)"),
    ],
    ids=["columns", "dh's dtype", "dh", "a scale too many", "no scale", "weight's dtype", "weight"],
)
def test_invalid_arguments_of_backward_are_refused(change: Any, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        swiglu_backward_quantize(*change([*inputs(), None, None, None]), *QUANTIZATIONS)


NUMBERS = 4 * torch.randn(70_000, generator=torch.Generator().manual_seed(0))


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(first=st.integers(0, 40), n=st.one_of(st.integers(1, 100), st.integers(32_000, 69_000)))
def test_the_bits_of_the_silu_depend_on_its_element_alone(first, n):
    assert torch.equal(silu(NUMBERS[first : first + n].clone()), silu(NUMBERS)[first : first + n])


def test_the_silu_is_torchs_but_for_rounding():
    torch.testing.assert_close(silu(NUMBERS), F.silu(NUMBERS), rtol=2**-21, atol=0)


def test_limits_of_the_silu():
    x = torch.tensor([-200.0, 0.0, 200.0, float("inf"), float("-inf"), float("nan")])
    assert torch.equal(silu(x)[:4], torch.tensor([0.0, 0.0, 200.0, float("inf")]))
    assert silu(x)[4:].isnan().all()  # as torch's
