"""SwiGLU's kernels equal their formula bit for bit, and the reference within the stated bound."""

import numpy as np
import pytest
import torch
from torch import Tensor

from octile.kernels.triton import swiglu
from octile.ops.groups import align_groups
from octile.ops.quantize import STORAGE_DTYPES, quantize
from octile.ops.swiglu import swiglu as swiglu_operator
from octile.ops.swiglu import (
    swiglu_backward,
    swiglu_backward_quantize,
    swiglu_quantize,
    swiglu_quantize_and_save,
)
from octile.ops.transpose import quantize_rows_and_columns
from tests.kernels.triton.comparison import assert_close_data, assert_same, finite
from tests.kernels.triton.gpus import any_gpu

E4M3 = torch.float8_e4m3fn

pytestmark = pytest.mark.usefixtures("gpu")
every_shape = pytest.mark.parametrize("shape", [(35, 128), (130, 256), (1, 128), (0, 128)], ids=str)
both_scales = pytest.mark.parametrize("power_of_2", [False, True], ids=["float32", "power_of_2"])


def _inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """dh, and gate and up as the halves of one result."""
    m, h = shape
    gate_up = (finite(m, 2 * h).clamp(-60, 60) * torch.tensor([2.0, 0.5]).repeat_interleave(h)).to(dtype)
    return [torch.randn(shape).to(dtype), *gate_up.chunk(2, 1)]


def _sigmoid(gate: Tensor) -> Tensor:
    """Sigmoid with NumPy's exponential, which the interpreter uses."""
    return 1.0 / (1.0 + torch.from_numpy(np.exp(-gate.numpy())))


@pytest.mark.one_case
@pytest.mark.each_pair
@every_shape
@both_scales
def test_forward(shape: tuple[int, ...], power_of_2: bool):
    _, gate, up = _inputs(shape)
    found = swiglu.launch(gate, up, E4M3, power_of_2)
    assert_same(found, quantize(gate * _sigmoid(gate) * up, 1, 128, "e4m3", power_of_2))
    assert_close_data(found, swiglu_quantize(gate, up, "e4m3", power_of_2))
    for ends in {0, shape[0] // 2, shape[0]}:
        few = swiglu.launch(gate, up, E4M3, power_of_2, None, torch.tensor([0, ends]).int())
        assert_same([part[:ends] for part in few], [part[:ends] for part in found])


@pytest.mark.one_case
@pytest.mark.each_pair
@every_shape
@both_scales
def test_forward_that_saves_its_inputs(shape: tuple[int, ...], power_of_2: bool):
    _, gate, up = _inputs(shape)
    weight = torch.rand(2 * shape[0])[::2]
    *h_quantized, saved, saved_scale = swiglu.launch_and_save(gate, up, E4M3, False, torch.int8, power_of_2, weight)
    assert_same(h_quantized, swiglu.launch(gate, up, E4M3, False, weight))
    assert_same(h_quantized, quantize(gate * _sigmoid(gate) * up * weight[:, None], 1, 128, "e4m3", False))
    assert_same([saved, saved_scale], quantize(torch.stack([gate, up]), 1, 128, "int8", power_of_2))


def _backward(
    dh: Tensor,
    gate: Tensor,
    up: Tensor,
    weight: Tensor | None = None,
    fmt: str = "e4m3",
    h_fmt: str = "e4m3",
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
    power_of_2: bool = False,
    tiles: Tensor | None = None,
    h_in_blocks: bool = False,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return the results of the kernel and of the reference."""
    settings = (STORAGE_DTYPES[fmt], power_of_2, STORAGE_DTYPES[h_fmt], not power_of_2, tiles, h_in_blocks)
    found = swiglu.launch_backward(dh, gate, up, *scales, weight, *settings)
    settings = (fmt, power_of_2, h_fmt, not power_of_2, tiles, h_in_blocks)
    return found, swiglu_backward_quantize(dh, gate, up, *scales, weight, *settings)


def _assert_close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for pair in (slice(0, 2), slice(2, 4), slice(4, 6)):
        assert_close_data(found[pair], expected[pair])
    torch.testing.assert_close(found[6], expected[6], rtol=1e-5, atol=1e-5)


@pytest.mark.one_case
@pytest.mark.each_pair
@every_shape
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
def test_backward(shape: tuple[int, ...], weighted: bool):
    dh, gate, up = _inputs(shape)
    power_of_2 = weighted
    weight = torch.rand(2 * shape[0])[::2] if weighted else None
    found, expected = _backward(dh, gate, up, weight, power_of_2=power_of_2)
    _assert_close(found, expected)
    sigmoid, h = _sigmoid(gate), gate * _sigmoid(gate) * up
    if weight is not None:
        dh, h = dh * weight[:, None], h * weight[:, None]
    both = torch.cat([dh * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), dh * (gate * sigmoid)], dim=1)
    assert_same(found[:4], quantize_rows_and_columns(both, "e4m3", power_of_2))
    assert_same(found[4:6], quantize_rows_and_columns(h, "e4m3", not power_of_2)[2:])


@pytest.mark.one_case
@pytest.mark.parametrize("fmt", ["e5m2", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(fmt: str, dtype: torch.dtype):
    dh, gate, up = _inputs((20, 128), dtype)
    assert_close_data(swiglu.launch(gate, up, STORAGE_DTYPES[fmt], False), swiglu_quantize(gate, up, fmt, False))
    _assert_close(*_backward(dh, gate, up, torch.rand(20), fmt))
    _assert_close(*_backward(dh, gate, up, torch.rand(20), h_fmt=fmt))


@pytest.mark.one_case
@pytest.mark.each_pair
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2", "int8"])
@pytest.mark.parametrize("shape", [(130, 256), (5, 128), (0, 128)], ids=str)
def test_backward_from_saved_inputs(fmt: str, shape: tuple[int, int]):
    dh, gate, up = _inputs(shape)
    *_, saved, saved_scale = swiglu_quantize_and_save(gate, up, "e4m3", True, fmt, False)
    _assert_close(*_backward(dh, *saved, torch.rand(shape[0]), scales=tuple(saved_scale)))


@pytest.mark.one_case
@pytest.mark.parametrize("is_saved", [False, True], ids=["", "saved"])
def test_backward_of_groups(is_saved: bool):
    dh, gate, up = _inputs((300, 128))
    scales: tuple[Tensor | None, Tensor | None] = (None, None)
    if is_saved:
        *_, (gate, up), (gate_scale, up_scale) = swiglu_quantize_and_save(gate, up, "e4m3", True, "e4m3", False)
        scales = gate_scale, up_scale
    tiles, _ = align_groups(torch.tensor([130, 130, 137, 290], dtype=torch.int32), 300)
    weight = torch.rand(300)
    found, expected = _backward(dh, gate, up, weight, scales=scales, tiles=tiles)
    for pair in (slice(0, 2), slice(2, 4), slice(4, 6)):
        assert_close_data(found[pair], expected[pair])
    without_groups, _ = _backward(dh, gate, up, weight, scales=scales)
    assert_same([*found[:2], found[6]], [*without_groups[:2], without_groups[6]])


@pytest.mark.one_case
@pytest.mark.parametrize("is_grouped", [False, True], ids=["", "groups"])
def test_h_in_blocks(is_grouped: bool):
    dh, gate, up = _inputs((140, 256))
    tiles = align_groups(torch.tensor([130, 137], dtype=torch.int32), 140)[0] if is_grouped else None
    found, expected = _backward(dh, gate, up, tiles=tiles, h_in_blocks=True)
    in_tiles, _ = _backward(dh, gate, up, tiles=tiles)
    assert_same(found[:4], in_tiles[:4])
    torch.testing.assert_close(found[5], expected[5], rtol=2.0**-16, atol=0)
    values, wanted = (
        quantized.repeat_interleave(128, 0).repeat_interleave(128, 1) for quantized in (found[5], expected[5])
    )
    p = found[4].shape[1]
    error = (found[4].float() * values[:, :p] - expected[4].float() * wanted[:, :p]).abs()
    assert (error <= 2.0**-3 * (expected[4].float() * wanted[:, :p]).abs()).all()


def test_a_ragged_number_of_columns():
    _, gate, up = _inputs((35, 200))
    assert_close_data(swiglu.launch(gate, up, E4M3, False), swiglu_quantize(gate, up, "e4m3", False))


@pytest.mark.one_case
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_stay_visible(bad: float):
    dh, gate, up = _inputs((5, 128))
    gate[2, 3] = bad
    (_, scale), (_, expected) = swiglu.launch(gate, up, E4M3, False), swiglu_quantize(gate, up, "e4m3", False)
    assert torch.equal(scale.isfinite(), expected.isfinite())
    scales, wanted = ([*t[1::2], t[6]] for t in _backward(dh, gate, up, torch.rand(5)))
    for found, expected in zip(scales, wanted, strict=True):
        assert torch.equal(found.isfinite(), expected.isfinite())


# In high precision


high_precision_shapes = pytest.mark.parametrize("shape", [(35, 128), (130, 200), (1, 7), (0, 128), (3, 0)], ids=str)
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)


@pytest.mark.one_case
@any_gpu
@high_precision_shapes
@every_dtype
def test_high_precision(shape: tuple[int, int], dtype: torch.dtype):
    _, gate, up = _inputs(shape, dtype)
    found = swiglu.launch_high_precision(gate, up)
    exact = gate.float() * _sigmoid(gate.float()) * up.float()
    assert_same([found], [exact.to(dtype)])
    expected = swiglu_operator(gate, up)
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
    spacing = torch.finfo(dtype).eps * exact.abs() + torch.finfo(dtype).smallest_normal
    assert ((found.float() - expected.float()).abs() <= 8 * spacing).all()


@pytest.mark.one_case
@any_gpu
@high_precision_shapes
@every_dtype
def test_high_precision_gradients(shape: tuple[int, int], dtype: torch.dtype):
    dh, gate, up = _inputs(shape, dtype)
    found = swiglu.launch_high_precision_backward(dh.mT.contiguous().mT, gate, up)
    dh32, gate32, up32 = (t.float() for t in (dh, gate, up))
    sigmoid = _sigmoid(gate32)
    halves = [dh32 * up32 * sigmoid * (1.0 + gate32 * (1.0 - sigmoid)), dh32 * (gate32 * sigmoid)]
    assert_same([found], [torch.cat(halves, dim=1).to(dtype)])
    expected = swiglu_backward(dh, gate, up)
    assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())
    # the sum in d(gate) may cancel, so its error is relative to its terms
    size = torch.cat([(dh32 * up32 * sigmoid).abs() * (1 + gate32.abs()), halves[1].abs()], dim=1)
    spacing = torch.finfo(dtype).eps * size + torch.finfo(dtype).smallest_normal
    assert ((found.float() - expected.float()).abs() <= 8 * spacing).all()


@any_gpu
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_stay_where_they_are_in_high_precision(bad: float):
    dh, gate, up = _inputs((5, 130))
    for i, t in enumerate((gate, up, dh)):
        t[i, 3] = bad
    found = swiglu.launch_high_precision(gate, up), swiglu.launch_high_precision_backward(dh, gate, up)
    for ours, theirs in zip(found, (swiglu_operator(gate, up), swiglu_backward(dh, gate, up)), strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.isinf(), theirs.isinf())
