"""Compare telemetry rows of two machines that sum in different orders."""

import pytest
import torch
from torch import nn

from octile.lab import telemetry
from octile.nn.mlp import MLP
from octile.nn.moe import Experts

D, T = 256, 200
OFFS = [60, 60, 200]
E4M3_HALF_STEP = 2.0**-10  # half the distance of its subnormal numbers
MAX_DIFFERENT = 4  # values that may be flushed on one machine and not on the other


class Block(nn.Module):
    """An MLP and experts; one expert gets no token."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mlp, self.experts = MLP(D, 192), Experts(3, D, 128)

    def forward(self, x):
        return self.experts(x + self.mlp(x), torch.tensor(OFFS, dtype=torch.int32, device=x.device))


def rows_of(model, device):
    """(layer, product, operand) → row, of one step; a token of x is zero."""
    x = torch.randn(T, D, generator=torch.Generator().manual_seed(1))
    x[7] = 0
    x = x.to(device).requires_grad_()
    with telemetry(model.to(device)) as t:
        model(x).square().sum().backward()
        return {(r["layer"], r["product"], r.get("operand")): r for r in t.step()}


def assert_agree(one, other):
    """Check that errors agree within 1 dB, and accumulation errors within 3 dB; single elements may differ.

    A nearly exact quantization, for example of an input that was quantized with power-of-two scales before, has errors
    in a few subnormal values only: 130 dB are two or three of them. Each error is at most half a step times its scale,
    and sums in another order may round some of them differently. Therefore the energy of the error is compared, and
    may differ by that of a few such values.
    """
    if "operand" not in one:
        assert other["quantization_snr_db"] == pytest.approx(one["quantization_snr_db"], abs=1.0)
        assert other["accumulation_snr_db"] == pytest.approx(one["accumulation_snr_db"], abs=3.0)
        return
    octaves = "mean_blockwise_dynamic_range"
    assert other[octaves] == pytest.approx(one[octaves], abs=1.0)
    one_value = (E4M3_HALF_STEP * max(row["scale_inv_max"] for row in (one, other))) ** 2
    energy, other_energy = (row["mse"] * row["values"] for row in (one, other))
    assert other_energy == pytest.approx(energy, rel=10**0.1 - 1, abs=MAX_DIFFERENT * one_value)
