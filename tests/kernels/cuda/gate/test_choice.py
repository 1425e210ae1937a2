"""Hopper's choice of experts by logits in the emulator: the experts of the reference, and its weights closely."""

import math

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.gate import choice
from octile.kernels.cuda.gemm import request
from octile.ops.gate import route
from octile.routing import EPS
from tools import emulator
from tools.emulator import build

emulated = pytest.mark.skipif(build.compiler() is None, reason="the emulator needs a C++ compiler")
CHOICES: dict[str, choice.Choice] = {
    "V3": (4, 4, 2, 2, "sigmoid", True, 2.5),
    "V2": (3, 8, 3, 1, "softmax", False, 16.0),
    "V2-Lite": (6, 1, 1, 1, "softmax", False, 1.0),
    "softmax, normalized": (12, 1, 1, 1, "softmax", True, 1.0),
}


def choose(products: Tensor, bias: Tensor | None, how: choice.Choice, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights, experts and logits."""
    t, columns = products.shape
    weights, experts = torch.full((t, how[0]), math.nan), torch.full((t, how[0]), -1)
    logits = products if columns == n_experts else torch.full((t, n_experts), math.nan)
    emulator.run(
        "choose_experts",
        choice.plan(columns, n_experts, how, bias is not None),
        grid=-(-t // choice.WARPS),
        threads=32 * choice.WARPS,
        shared_bytes=0,
        arguments=[products, 0 if bias is None else bias, logits, weights, experts, how[-1], EPS, t],
    )
    return weights, experts, logits


@pytest.mark.one_case
@emulated
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("how", CHOICES.values(), ids=CHOICES)
def test_choice_and_weights(how: choice.Choice, biased: bool, parts: int):
    generator = torch.Generator().manual_seed(parts)
    products = torch.randn(11, parts * 40, generator=generator)
    bias = torch.randn(40, generator=generator) / 4 if biased else None
    weights, experts, logits = choose(products, bias, how, 40)
    first, *others = products.split(40, dim=1)
    for other in others:
        first = first + other
    assert torch.equal(logits, first)
    expected_weights, expected_experts = route(logits, bias, *how)
    assert torch.equal(experts, expected_experts)
    torch.testing.assert_close(weights, expected_weights, rtol=2.0**-18, atol=0)


@emulated
def test_equal_logits_and_nan():
    logits = torch.zeros(2, 40)
    logits[1, 30] = math.nan
    _, experts, _ = choose(logits, None, (3, 1, 1, 1, "sigmoid", False, 1.0), 40)
    assert experts.tolist() == [[0, 1, 2], [30, 0, 1]]


@emulated
def test_an_expert_that_is_switched_off_is_above_those_of_other_groups():
    bias = torch.zeros(40)
    bias[20], bias[21:] = 9.0, -math.inf
    _, experts, _ = choose(torch.zeros(2, 40), bias, (2, 2, 1, 1, "sigmoid", True, 2.5), 40)
    assert experts.tolist() == [[20, 21]] * 2


def test_calls_that_the_kernel_does_not_take(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request, "why_not_on", lambda device: None)
    logits, how = torch.zeros(2, 40), CHOICES["V2-Lite"]
    assert choice.why_unsupported(logits, None, how, 40) is None
    assert "257 experts" in str(choice.why_unsupported(torch.zeros(2, 257), None, how, 257))
    assert "not contiguous" in str(choice.why_unsupported(torch.zeros(40, 2).mT, None, how, 40))
    assert "bias" in str(choice.why_unsupported(logits, torch.zeros(40).bfloat16(), how, 40))
