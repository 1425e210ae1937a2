"""SwiGLU's kernels: bit for bit their formula, and within the stated bound of the reference."""

import numpy as np
import pytest
import torch
from torch import Tensor

from octile.kernels.triton import swiglu
from octile.ops.quantize import DATA_DTYPES, quantize
from octile.ops.swiglu import swiglu_backward_quantize, swiglu_quantize
from octile.ops.transpose import quantize_rows_and_columns
from tests.kernels.triton.comparison import assert_close_codes, assert_same, finite

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
    """With NumPy's exponential, which is the interpreter's."""
    return 1.0 / (1.0 + torch.from_numpy(np.exp(-gate.numpy())))


@every_shape
@both_scales
def test_forward(shape: tuple[int, ...], power_of_2: bool):
    _, gate, up = _inputs(shape)
    found = swiglu.launch(gate, up, E4M3, power_of_2)
    assert_same(found, quantize(gate * _sigmoid(gate) * up, 1, 128, "e4m3", power_of_2))
    assert_close_codes(found, swiglu_quantize(gate, up, "e4m3", power_of_2))


@every_shape
@both_scales
def test_backward(shape: tuple[int, ...], power_of_2: bool):
    dh, gate, up = _inputs(shape)
    found = swiglu.launch_backward(dh, gate, up, E4M3, power_of_2)
    sigmoid = _sigmoid(gate)
    both = torch.cat([dh * up * sigmoid * (1.0 + gate * (1.0 - sigmoid)), dh * (gate * sigmoid)], dim=1)
    assert_same(found, quantize_rows_and_columns(both, "e4m3", power_of_2))
    expected = swiglu_backward_quantize(dh, gate, up, "e4m3", power_of_2)
    assert_close_codes(found[:2], expected[:2])
    assert_close_codes(found[2:], expected[2:])


@pytest.mark.parametrize("fmt", ["e5m2", "int8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_dtypes(fmt: str, dtype: torch.dtype):
    dh, gate, up = _inputs((20, 128), dtype)
    assert_close_codes(swiglu.launch(gate, up, DATA_DTYPES[fmt], False), swiglu_quantize(gate, up, fmt, False))
    found = swiglu.launch_backward(dh, gate, up, DATA_DTYPES[fmt], False)
    expected = swiglu_backward_quantize(dh, gate, up, fmt, False)
    assert_close_codes(found[:2], expected[:2])
    assert_close_codes(found[2:], expected[2:])


def test_a_ragged_number_of_columns():
    _, gate, up = _inputs((35, 200))
    assert_close_codes(swiglu.launch(gate, up, E4M3, False), swiglu_quantize(gate, up, "e4m3", False))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_inf_stay_visible(bad: float):
    dh, gate, up = _inputs((5, 128))
    gate[2, 3] = bad
    (_, scale), (_, expected) = swiglu.launch(gate, up, E4M3, False), swiglu_quantize(gate, up, "e4m3", False)
    assert torch.equal(scale.isfinite(), expected.isfinite())
    scales = swiglu.launch_backward(dh, gate, up, E4M3, False)[1::2]
    for found, wanted in zip(scales, swiglu_backward_quantize(dh, gate, up, "e4m3", False)[1::2], strict=True):
        assert torch.equal(found.isfinite(), wanted.isfinite())
