"""Hopper's gate of few rows in the emulator: logits closely, and the choice and weights of these logits."""

import math

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.gate import few_rows
from octile.kernels.cuda.gemm import request
from octile.kernels.cuda.jit.launch import overlapping_launches
from octile.kernels.row_invariant import CHUNK
from octile.lab.tensor_core import tensor_core_matmul
from octile.ops.gate import route
from octile.routing import EPS
from tests.kernels.cuda.gate.test_choice import CHOICES, choose
from tools import emulator
from tools.emulator import build

emulated = pytest.mark.skipif(build.compiler() is None, reason="the emulator needs a C++ compiler")


def gate(
    x: Tensor, weight: Tensor, bias: Tensor | None, how, seed: int = 0, row_invariant: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, experts and logits of a kernel that begins before the previous one has written x."""
    (t, d), e = x.shape, len(weight)
    found = torch.full((t, how[0]), math.nan), torch.full((t, how[0]), -1), torch.full((t, e), math.nan)
    with overlapping_launches():
        constants = few_rows.plan(t, d, e, weight.dtype, how, bias is not None, row_invariant)
    emulator.run(
        "gate_few_rows",
        constants,
        grid=few_rows.grid(t),
        cluster=few_rows.CLUSTER,
        threads=32 * few_rows.WARPS,
        shared_bytes=constants["shared_bytes"],
        arguments=[x, weight, 0 if bias is None else bias, found[2], *found[:2], how[-1], EPS, x.stride(0), t],
        previous=[x],
        seed=seed,
        arithmetic="hopper" if row_invariant else "float32",
    )
    return found


@pytest.mark.one_case
@emulated
@pytest.mark.parametrize(
    ("name", "t", "d", "e", "dtype"),
    [
        ("V3", 9, 128, 64, torch.float32),
        ("V2", 3, 2056, 16, torch.float32),
        ("V2-Lite", 17, 264, 70, torch.bfloat16),
        ("softmax, normalized", 8, 8, 40, torch.float32),
        ("V3", 70, 40, 160, torch.float32),
        ("V3", 9, 2312, 256, torch.float32),
    ],
)
def test_logits_choice_and_weights(name: str, t: int, d: int, e: int, dtype: torch.dtype):
    how, generator = CHOICES[name], torch.Generator().manual_seed(t)
    x = torch.randn(t, d, generator=generator).bfloat16()
    weight = (torch.randn(e, d, generator=generator) / d**0.5).to(dtype)
    bias = torch.randn(e, generator=generator) / 4 if name == "V3" else None
    weights, experts, logits = gate(x, weight, bias, how, t)
    torch.testing.assert_close(logits, (x.double() @ weight.double().mT).float(), rtol=0, atol=1e-5)
    expected_weights, expected_experts = route(logits, bias, *how)
    assert torch.equal(experts, expected_experts)
    torch.testing.assert_close(weights, expected_weights, rtol=2.0**-18, atol=0)


@pytest.mark.slow
@emulated
def test_a_row_has_the_same_bits_with_few_rows_and_with_many():
    """With many a cluster has two tiles of rows, and a warp loads the columns in more parts."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(70, 2312, generator=generator).bfloat16(), torch.randn(130, 2312, generator=generator)
    many = gate(x, weight, None, CHOICES["V2-Lite"])
    few = gate(x[64:].clone(), weight, None, CHOICES["V2-Lite"])
    assert all(torch.equal(of_many[64:], of_few) for of_many, of_few in zip(many, few, strict=True))


@emulated
def test_a_row_of_nan_stays_a_row():
    x, weight = torch.ones(4, 64).bfloat16(), torch.ones(12, 64)
    x[2] = math.nan
    weights, experts, logits = gate(x, weight, None, CHOICES["softmax, normalized"])
    assert logits.isnan().all(1).tolist() == [False, False, True, False]
    assert experts[2].tolist() == list(range(12))
    assert weights[[0, 1, 3]].isfinite().all()


@pytest.mark.one_case
@emulated
@pytest.mark.parametrize(
    ("name", "t", "d", "e"),
    [
        ("V2-Lite", 2, 1096, 70),  # parts that end in the middle of 16 columns
        ("V3", 9, 520, 64),
        ("V2", 17, 8, 16),  # thread blocks without a unit
        ("softmax, normalized", 70, 1032, 40),
        ("V3", 3, 2312, 256),  # more units than warps
    ],
)
def test_row_invariant_logits_have_the_bits_of_sums_in_parts(name: str, t: int, d: int, e: int):
    x, weight = _of_mixed_magnitudes(t, d), _of_mixed_magnitudes(e, d, seed=1)
    bias = torch.linspace(-0.2, 0.2, e) if name == "V3" else None
    found = gate(x, weight, bias, CHOICES[name], t, row_invariant=True)
    logits = torch.zeros(t, e)
    for part in range(0, d, CHUNK):
        columns = slice(part, part + CHUNK)
        logits += tensor_core_matmul(x[:, columns], weight[:, columns], arch="sm_90_mma")
    assert_same_bits(found, choose(logits, bias, CHOICES[name], e))


@pytest.mark.slow
@emulated
def test_a_row_invariant_row_has_the_same_bits_alone_and_among_any_others():
    x, weight = _of_mixed_magnitudes(70, 1096), _of_mixed_magnitudes(64, 1096, seed=1)
    x[3], x[65] = math.nan, math.inf
    together = gate(x, weight, None, CHOICES["V2-Lite"], row_invariant=True)
    for rows in (slice(65, 66), slice(2, 12)):
        alone = gate(x[rows].clone(), weight, None, CHOICES["V2-Lite"], row_invariant=True)
        assert_same_bits(alone, tuple(of_all[rows] for of_all in together))


def _of_mixed_magnitudes(rows: int, columns: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-12, 3, (rows, columns), generator=generator)
    return (torch.randn(rows, columns, generator=generator) * exponents.float().exp2()).bfloat16()


def assert_same_bits(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for name, ours, theirs in zip(("weights", "experts", "logits"), found, expected, strict=True):
        integer = torch.int32 if ours.dtype == torch.float32 else ours.dtype  # NaN is equal to itself
        assert torch.equal(ours.view(integer), theirs.view(integer)), name


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"x": torch.zeros(257, 64).bfloat16()}, "257 tokens"),
        ({"weight": torch.zeros(300, 64)}, "are too many"),
        ({"weight": torch.zeros(16, 64).half()}, "torch.float16"),
        ({"bias": torch.zeros(16).bfloat16()}, "bias"),
        ({"x": torch.zeros(8, 68).bfloat16()[:, :60], "weight": torch.zeros(16, 60)}, "rows of x"),
        ({"row_invariant": True}, "torch.float32, not bfloat16"),
        (
            {
                "x": torch.zeros(8, 2**16).bfloat16(),
                "weight": torch.zeros(256, 2**16).bfloat16(),
                "row_invariant": True,
            },
            "65536 columns do not fit",
        ),
        ({"weight": torch.zeros(16, 64).bfloat16(), "row_invariant": True}, None),
        ({}, None),
    ],
)
def test_what_is_not_supported_has_a_reason(monkeypatch, change, why):
    monkeypatch.setattr(request, "why_not_on", lambda device: None)
    operands = {"x": torch.zeros(8, 64).bfloat16(), "weight": torch.zeros(16, 64), "bias": None} | change
    row_invariant = operands.pop("row_invariant", False)
    found = few_rows.why_unsupported(*operands.values(), *CHOICES["V3"], row_invariant=row_invariant)
    assert found is None if why is None else why in found
