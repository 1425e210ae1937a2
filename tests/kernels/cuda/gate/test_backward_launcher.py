"""The GEMMs of the gate's gradients on Hopper, in the emulator."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.gate import backward_launcher as launcher
from octile.kernels.terms import TERMS
from octile.ops.gate import bfloat16_terms
from tools import emulator
from tools.emulator import build

needs_emulator = pytest.mark.skipif(build.compiler() is None, reason="the emulator needs a C++ compiler")


def _emulate(dy: Tensor, x: Tensor, weight: Tensor, num_sms: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """dx, and the parts of the gradient of the weight."""
    (t, d), e = x.shape, len(weight)
    dys = bfloat16_terms(dy, [*range(TERMS)]).unflatten(0, (TERMS, t)).transpose(0, 1).reshape(t, -1).contiguous()
    plan = launcher.plan(dys, x, weight, num_sms)
    made = plan.launch
    dx = torch.full((t, d), math.nan, dtype=torch.bfloat16)
    partials = torch.full((plan.ranges, e, d), math.nan)
    maps = [described._replace(pointer=m.data_ptr()) for described, m in zip(made.maps, (x, dys), strict=True)]
    emulator.run(
        made.kernel,
        made.constants,
        grid=made.grid,
        threads=made.threads,
        shared_bytes=made.constants["shared_bytes"],
        arguments=[*maps, weight, dx, partials, weight.stride(0), t, d, plan.steps],
        memory=[x, dys],
        headers=made.headers,
        seed=seed,
    )
    return dx, partials


@pytest.mark.one_case
@needs_emulator
@pytest.mark.parametrize(
    ("t", "d", "e", "num_sms", "dtype"),
    [
        (150, 72, 64, 1, torch.float32),
        (600, 264, 24, 6, torch.float32),
        (700, 40, 8, 2, torch.float32),
        (1, 8, 8, 4, torch.float32),
        (300, 256, 64, 2, torch.bfloat16),
    ],
)
def test_dx_and_the_gradient_of_the_weight(t: int, d: int, e: int, num_sms: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(t)
    x, dy = torch.randn(t, d, generator=generator).bfloat16(), torch.randn(t, e, generator=generator)
    weight = torch.randn(e, d, generator=generator).to(dtype)
    dx, partials = _emulate(dy, x, weight, num_sms, seed=t)
    true_dx, true_dweight = dy.double() @ weight.double(), dy.double().mT @ x.double()
    assert (dx.double() - true_dx).norm() <= 1.0001 * (true_dx.bfloat16().double() - true_dx).norm()
    assert (partials.sum(0).double() - true_dweight).norm() <= 1e-6 * true_dweight.norm()


def _call(t: int = 2048, d: int = 64, e: int = 64, **others: Any) -> str | None:
    x = others.get("x", torch.empty(t, d, dtype=torch.bfloat16))
    weight = others.get("weight", torch.empty(e, d))
    logits, experts = torch.empty(t, e), torch.empty(t, 4, dtype=torch.int64)
    return launcher.why_unsupported(None, logits, logits, experts, x, weight, "sigmoid", True, 1.0)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"e": 72}, "72 experts are more than 64"),
        ({"e": 16}, "16 experts are fewer than 24"),
        ({"e": 28}, "28 experts are not a multiple of 8"),
        ({"t": 2047}, "2047 tokens are fewer than 2048"),
        ({"weight": torch.empty(64, 64, dtype=torch.float16)}, "the weight torch.float16"),
        ({"weight": torch.empty(64, 64).mT}, "the rows of the weight are not contiguous"),
        ({"x": torch.empty(2048, 72, dtype=torch.bfloat16)[:, :68]}, "do not begin at multiples of 16 bytes"),
        ({}, "written for Hopper"),
    ],
)
def test_calls_of_other_kernels(call: dict[str, Any], reason: str):
    assert reason in str(_call(**call))
