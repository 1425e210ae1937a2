"""Division by a block's reciprocal scale rounds to the same encoded value as the FP32 quotient."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from octile.formats import E4M3, E5M2, INT8
from octile.kernels.triton.fp8_bits import quantize_constants
from octile.kernels.triton.scaling import divide, scale_from_amax
from tests.kernels.triton.gpus import any_gpu

SIGNIFICANT = 8  # bits of a midpoint between two values of INT8 or E5M6; those of E4M3 and E5M2 have fewer

pytestmark = [pytest.mark.usefixtures("gpu"), any_gpu]


@triton.jit
def _divide(x, scale, quotient, N, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < N
    result = divide(tl.load(x + at, mask=inside, other=0.0), tl.load(scale + at, mask=inside, other=1.0), False)
    tl.store(quotient + at, result, mask=inside)


@triton.jit
def _scale(amax, scale, SIZE: tl.constexpr, INVERSE: tl.constexpr, REST: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(scale + at, scale_from_amax(tl.load(amax + at).to(tl.int32, bitcast=True), INVERSE, REST, False))


def _quotient(x: Tensor, scale: Tensor) -> Tensor:
    quotient, size = torch.empty_like(x), 1 << 20
    _divide[(triton.cdiv(x.numel(), size),)](x, scale, quotient, x.numel(), SIZE=size)
    return quotient


def _steps(x: Tensor, steps: Tensor | int) -> Tensor:
    """The FP32 values that are `steps` units in the last place above positive ones."""
    return (x.view(torch.int32) + steps).view(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("binade", [1.0, 0.5])
def test_quotients_nearly_halfway_between_two_values(binade: float):
    halfway = torch.arange(1 << SIGNIFICANT - 1, (1 << SIGNIFICANT) + 1) * 2.0 ** (1 - SIGNIFICANT)
    scale = _steps(halfway[:-1, None], torch.arange(-6, 7, dtype=torch.int32)).flatten()[:, None]
    middle = (halfway * binade).expand(len(scale), -1)
    scale = scale.expand_as(middle).contiguous()
    for steps in range(-2, 3):
        x = _steps((scale.double() * middle).float(), steps)
        assert torch.equal((_quotient(x, scale) - middle).sign(), (x / scale - middle).sign())


@pytest.mark.one_case
@pytest.mark.parametrize("exponent", [-126, -100, 0, 100, 118])
def test_quotients_of_any_magnitude(exponent: int):
    torch.manual_seed(0)
    scale = (1 + torch.rand(100_000)) * 2.0**exponent
    x = scale * (torch.rand(100_000) * 896 - 448) * torch.exp2(-torch.randint(0, 18, (100_000,)).float())
    assert torch.equal(_quotient(x, scale), x / scale)


@pytest.mark.one_case
@pytest.mark.parametrize("scale", [2.0**-126, 0.7, 3e38 / 448, float("inf"), float("nan")])
def test_zeros_keep_their_sign_and_inf_and_nan_are_visible(scale: float):
    x = torch.tensor([0.0, -0.0, 2.0**-149, -(2.0**-149), 5.0, -5.0, float("inf"), float("-inf"), float("nan")])
    x = x if not scale < float("inf") else x[:4]  # the other values belong to a block with a larger scale
    found, expected = _quotient(x, torch.full_like(x, scale)), x / scale
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    number = ~expected.isnan()
    assert torch.equal(found.signbit()[number], expected.signbit()[number])


@pytest.mark.parametrize("fmt", [E4M3, E5M2, INT8], ids=lambda f: f.name)
@pytest.mark.parametrize("exponent", [-126, -110, -60, 0, 127])
def test_scales_are_the_correctly_rounded_quotients_by_the_largest_value(fmt, exponent: int):
    amax = (1 + torch.arange(0, 1 << 23, 37)[: 1 << 17] * 2.0**-23) * 2.0**exponent
    scale = torch.empty_like(amax)
    inverse = {name: value for name, value in quantize_constants(fmt.dtype).items() if name in ("INVERSE", "REST")}
    _scale[(1,)](amax, scale, SIZE=amax.numel(), **inverse)
    assert torch.equal(scale, (amax / fmt.max).clamp(min=2.0**-126))
