"""Tests of the emulator's conversions, which equal a GPU's: those of torch, saturating."""

import pytest
import torch

from tools import emulator
from tools.emulator import build
from tools.emulator.examples import SOURCES

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="the emulator needs a C++ compiler")

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0, torch.float16: float("inf")}


def test_conversions_equal_those_of_torch():
    # every pattern of the upper 16 bits of FP32, and the values next to it
    upper = torch.arange(1 << 16, dtype=torch.int32) << 16
    x = torch.cat([upper, upper + 1, upper - 1]).view(torch.float32)
    encoded, back = torch.empty(x.numel(), 4, dtype=torch.int32), torch.empty(x.numel(), 4)
    arguments = [x, encoded, back]
    emulator.run(
        "conversions", {}, grid=x.numel() // 256, threads=256, shared_bytes=0, arguments=arguments, headers=SOURCES
    )  # fmt: skip
    for i, (dtype, largest) in enumerate(LARGEST.items()):
        rounded = x.clamp(-128.0 if dtype == torch.int8 else -largest, largest)
        expected = rounded.round().nan_to_num(0.0).to(dtype) if dtype == torch.int8 else rounded.to(dtype)
        torch.testing.assert_close(back[:, i], expected.float(), rtol=0, atol=0, equal_nan=True)
        number = ~expected.float().isnan()
        bits = expected.view(torch.int16 if dtype == torch.float16 else torch.uint8).int() & (
            0xFFFF if i == 3 else 0xFF
        )
        assert torch.equal(encoded[:, i][number], bits[number]), "the bits, a zero's sign too"
