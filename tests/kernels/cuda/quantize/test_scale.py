"""The CUDA kernels' division rounds to the same encoded value as the FP32 quotient; scales are the reference's."""

import pytest
import torch
from torch import Tensor

from octile.formats import E4M3, E5M2, E5M6, INT8
from octile.kernels.cuda.quantize.launcher import DTYPES
from tools import emulator
from tools.emulator import build
from tools.emulator.examples import SOURCES

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="the emulator needs a C++ compiler")

SIGNIFICANT = 8  # bits of a midpoint between two values of INT8 or E5M6; those of E4M3 and E5M2 have fewer
NEAR = 13  # units in the last place: only scales this close to a value of so few bits could round differently
DTYPE_OF = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2, INT8: torch.int8, E5M6: torch.uint8}


def _run(x: Tensor, scale: Tensor, fmt=E4M3) -> tuple[Tensor, Tensor]:
    """x / scale, and the scales of blocks whose largest magnitudes are x."""
    quotient, scales = torch.empty_like(x), torch.empty_like(x)
    arguments = [x, scale, quotient, scales, x.numel()]
    grid, constants = -(-x.numel() // 1024), {"format": DTYPES[DTYPE_OF[fmt]]}
    emulator.run(
        "scales", constants, grid=grid, threads=1024, shared_bytes=0, arguments=arguments, headers=SOURCES
    )  # fmt: skip
    return quotient, scales


def _steps(x: Tensor, steps: Tensor | int) -> Tensor:
    """The FP32 values that are `steps` units in the last place above positive ones."""
    return (x.view(torch.int32) + steps).view(torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("binade", [1.0, pytest.param(0.5, marks=pytest.mark.exhaustive)])
def test_quotients_nearly_halfway_between_two_values(binade: float):
    halfway = torch.arange(1 << SIGNIFICANT - 1, (1 << SIGNIFICANT) + 1) * 2.0 ** (1 - SIGNIFICANT)
    beside = torch.arange(-NEAR, NEAR + 1, dtype=torch.int32)
    scale = _steps(halfway[:-1, None], beside).flatten()[:, None]
    middle = (halfway * binade).expand(len(scale), -1)
    scale = scale.expand_as(middle).contiguous()
    for steps in range(-2, 3):
        x = _steps((scale.double() * middle).float(), steps)
        quotient, _ = _run(x, scale)
        assert torch.equal((quotient - middle).sign(), (x / scale - middle).sign())


@pytest.mark.one_case
@pytest.mark.parametrize("exponent", [-126, -100, 0, 63, 64, 100, 118])
def test_quotients_of_any_magnitude(exponent: int):
    torch.manual_seed(0)
    scale = (1 + torch.rand(100_000)) * 2.0**exponent
    x = scale * (torch.rand(100_000) * 896 - 448) * torch.exp2(-torch.randint(0, 18, (100_000,)).float())
    assert torch.equal(_run(x, scale)[0], x / scale)


@pytest.mark.parametrize("scale", [2.0**-126, 0.7, 1 - 2.0**-24, 3e38 / 448, float("inf"), float("nan")])
def test_zeros_keep_their_sign_and_inf_and_nan_are_visible(scale: float):
    x = torch.tensor([0.0, -0.0, 2.0**-149, -(2.0**-149), 5.0, -5.0, float("inf"), float("-inf"), float("nan")])
    x = x if not scale < float("inf") else x[:4]  # the other values belong to a block with a larger scale
    found, expected = _run(x, torch.full_like(x, scale))[0], x / scale
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    number = ~expected.isnan()
    assert torch.equal(found.signbit()[number], expected.signbit()[number])


@pytest.mark.one_case
@pytest.mark.parametrize("fmt", list(DTYPE_OF), ids=lambda f: f.name)
def test_scales_are_the_correctly_rounded_quotients_by_the_largest_value(fmt):
    for exponent in (-149, -126, -110, -60, 0, 127):
        amax = (1 + torch.arange(0, 1 << 23, 37)[: 1 << 15] * 2.0**-23) * 2.0**exponent
        assert torch.equal(_run(amax, torch.ones_like(amax), fmt)[1], (amax / fmt.max).clamp(min=2.0**-126))
