"""The mixture of few rows: its reference is what its formula says, and calls that do not fit are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octile.formats import BLOCK, TILE
from octile.kernels.cuda.few_rows import mixture
from octile.ops.few_rows_mixture import few_rows_mixture
from octile.ops.gate import gate
from octile.ops.norm import rms_norm
from octile.ops.quantize import dequantize, quantize
from tests.ops.few_rows_mixture import arguments
from tests.ops.operators import assert_well_formed


def quantized(x: Tensor) -> Tensor:
    return dequantize(*quantize(x, *TILE, "e4m3", False), *TILE, torch.float32)


def expert(x: Tensor, up: Tensor, up_scale: Tensor, down: Tensor, down_scale: Tensor, weight: float = 1.0) -> Tensor:
    """One expert of one row, of dequantized weights."""
    of_gate, of_up = (dequantize(up, up_scale, *BLOCK, torch.float32) @ x).chunk(2)
    h = quantized((F.silu(of_gate) * of_up * weight)[None])[0]
    return dequantize(down, down_scale, *BLOCK, torch.float32) @ h


@given(
    t=st.integers(0, 5), e=st.integers(1, 6), d=st.integers(1, 160), i=st.integers(1, 150),
    s=st.sampled_from([0, 1, 140]), k=st.integers(1, 6), seed=st.integers(0, 100),
)  # fmt: skip
def test_rows_get_the_sum_of_their_experts(t: int, e: int, d: int, i: int, s: int, k: int, seed: int) -> None:
    a = arguments(t, e, d, i, s, min(k, e), seed)
    x = a["x"].clone()
    found = few_rows_mixture(*a.values())
    normed = rms_norm(x, a["norm_weight"], a["eps"])[0]
    weights, experts, _ = gate(normed, a["gate_weight"], None, min(k, e), 1, 1, 1, "sigmoid", True, 2.5)
    assert torch.equal(found, experts)
    for row in range(t):
        y = quantized(normed[row : row + 1])[0]
        expected = x[row].clone()
        for weight, n in zip(weights[row].tolist(), experts[row].tolist(), strict=True):
            expected += expert(y, a["up"][n], a["up_scale"][n], a["down"][n], a["down_scale"][n], weight)
        if s:
            expected += expert(y, a["shared_up"], a["shared_up_scale"], a["shared_down"], a["shared_down_scale"])
        # where h is halfway between two encoded values, the order of sums decides
        torch.testing.assert_close(a["x"][row], expected, rtol=2**-5, atol=2**-4)


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("x", torch.randn(2, 128).half(), TypeError, "x must be bfloat16 or float32, not torch.float16"),
        ("x", torch.randn(128, 2).mT, ValueError, "x must be a contiguous matrix"),
        ("up", torch.zeros(4, 255, 128).to(torch.float8_e4m3fn), ValueError, "up must be"),
        ("up", torch.zeros(4, 256, 128), TypeError, "up must be torch.float8_e4m3fn, not torch.float32"),
        ("down", torch.zeros(4, 128, 100).to(torch.float8_e4m3fn), ValueError, "down must be"),
        ("gate_weight", torch.zeros(5, 128), ValueError, "gate_weight must have the 4 experts of up, not 5"),
        ("up_scale", torch.zeros(4, 2, 2), ValueError, "up's scale must be"),
        ("shared_up", None, ValueError, "must be given together"),
        ("shared_down", torch.zeros(128, 64).to(torch.float8_e4m3fn), ValueError, "shared_down must be"),
        ("n_chosen", 5, ValueError, "n_chosen must be from 1 to 4, not 5"),
        ("n_group", 3, ValueError, "n_group must divide the 4 experts of gate_weight, not be 3"),
        ("scoring_func", "tanh", ValueError, "scoring_func must be sigmoid or softmax, not 'tanh'"),
        ("norm_weight", torch.ones(5), ValueError, r"norm_weight must be \(128,\), not \(5,\)"),
        ("norm_weight", torch.ones(128, device="meta"), ValueError, "x is on cpu but norm_weight on meta"),
        ("gate_weight", torch.zeros(4, 64), ValueError, r"must end in the D = 64 of gate_weight \(4, 64\)"),
        ("gate_weight", torch.zeros(4, 128, dtype=torch.float64), TypeError, "gate_weight must be"),
        ("bias", torch.zeros(3), ValueError, r"bias must be \(4,\), not \(3,\)"),
        ("bias", torch.zeros(4, device="meta"), ValueError, "x is on cpu but bias on meta"),
    ],
)
@pytest.mark.parametrize("call", [few_rows_mixture.reference, few_rows_mixture.kernels["cuda"]], ids=["cpu", "cuda"])
def test_errors_come_before_any_work(
    call: Callable[..., Tensor],
    name: str,
    value: Any,
    error: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mixture, "why_unsupported", lambda *arguments: None)
    monkeypatch.setattr(mixture, "launch", lambda *arguments: pytest.fail("the kernels were launched"))
    a = arguments(2, 4, 128, 128, 128, dtype=torch.bfloat16) | {name: value}
    before = a["x"].clone()
    with pytest.raises(error, match=message):
        call(*a.values())
    assert torch.equal(a["x"], before)


@pytest.mark.slow
def test_the_operator_is_well_formed():
    assert_well_formed(few_rows_mixture, list(arguments(2, 8, 256, 128, 256).values()))
