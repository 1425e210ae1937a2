"""RMSNorm's cast is torch's norm in FP32, then the cast."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octile.ops.norm import rms_norm_quantize
from octile.ops.quantize import quantize


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(20, 300).to(dtype), (torch.rand(300) + 0.5).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_norm_rounded_only_to_the_codes(dtype: torch.dtype):
    x, weight = inputs(dtype)
    data, scale, rstd = rms_norm_quantize(x, weight, 1e-6, "e4m3", True)
    expected = quantize(F.rms_norm(x.float(), weight.shape, weight.float(), 1e-6), 1, 128, "e4m3", True)
    assert torch.equal(data.float(), expected[0].float())
    assert torch.equal(scale, expected[1])
    torch.testing.assert_close(rstd, x.float().square().mean(-1).add(1e-6).rsqrt(), rtol=0, atol=0)


def test_no_rows_give_no_rows():
    data, scale, rstd = rms_norm_quantize(torch.empty(0, 128), torch.ones(128), 1e-6, "e4m3", False)
    assert (data.shape, scale.shape, rstd.shape) == ((0, 128), (0, 1), (0,))


def test_it_is_a_well_formed_operator():
    torch.library.opcheck(rms_norm_quantize.overload, (*inputs(), 1e-6, "int8", False))


def test_meta_tensors_have_the_shapes_and_strides_of_real_ones():
    x, weight = inputs()
    meta = rms_norm_quantize(x.to("meta"), weight.to("meta"), 1e-6, "e4m3", False)
    for m, real in zip(meta, rms_norm_quantize(x, weight, 1e-6, "e4m3", False), strict=True):
        assert (m.shape, m.dtype, m.stride()) == (real.shape, real.dtype, real.stride())


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
def test_what_does_not_fit_is_refused(x: Tensor, weight: Tensor, fmt: str, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        rms_norm_quantize(x, weight, 1e-6, fmt, False)
