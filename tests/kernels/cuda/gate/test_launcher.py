"""Hopper's gate in the emulator: logits closely, and the choice and the weights of these logits as the reference."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.gate import launcher
from octile.kernels.cuda.gate.launcher import Tile
from octile.ops.gate import route
from octile.routing import EPS
from tools import emulator
from tools.emulator import build

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="the emulator needs a C++ compiler")
SETTINGS: dict[
    str, tuple[Any, ...]
] = {  # choice (K, groups, groups of a token, best), scoring function, normalized, factor
    "V3": (4, 4, 2, 2, "sigmoid", True, 2.5),
    "V2": (3, 8, 3, 1, "softmax", False, 16.0),
    "V2-Lite": (2, 1, 1, 1, "softmax", False, 1.0),
    "softmax, normalized": (12, 1, 1, 1, "softmax", True, 1.0),
    "sigmoid, not normalized": (1, 1, 1, 1, "sigmoid", False, 2.0),
}
every_setting = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
TILES = {
    "one warpgroup": Tile(1, 2, 3, 1),
    "two warpgroups": Tile(2, 3, 2, 1),
    "four warpgroups": Tile(4, 2, 1, 1),
}


def _operands(t: int, d: int, e: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(t)
    return torch.randn(t, d, generator=generator).bfloat16(), torch.randn(e, d, generator=generator).to(dtype) / d**0.5


def _emulate(x: Tensor, weight: Tensor, bias: Tensor | None, settings: tuple[Any, ...], seed: int = 0) -> list[Tensor]:
    """Weights, experts and logits."""
    *choice, scoring_func, normalize, factor = settings
    (t, d), e = x.shape, len(weight)
    made = launcher.plan(x, weight, *choice, scoring_func == "softmax", normalize, bias is not None)
    found = torch.full((t, choice[0]), math.nan), torch.full((t, choice[0]), -1), torch.full((t, e), math.nan)
    maps = [described._replace(pointer=m.data_ptr()) for described, m in zip(made.maps, (x, weight), strict=True)]
    emulator.run(
        made.kernel,
        made.constants,
        grid=made.grid,
        threads=made.threads,
        shared_bytes=made.constants["shared_bytes"],
        arguments=[*maps, 0 if bias is None else bias, found[2], *found[:2], factor, EPS, t, d],
        memory=[x, weight],
        headers=made.headers,
        seed=seed,
    )
    return list(found)


def _check(found: list[Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, settings: tuple[Any, ...]) -> None:
    weights, experts, logits = found
    torch.testing.assert_close(logits, x.float() @ weight.float().mT, rtol=2.0**-18, atol=2.0**-18)
    expected_weights, expected_experts = route(logits, bias, *settings)
    assert torch.equal(experts, expected_experts)
    torch.testing.assert_close(weights, expected_weights, rtol=2.0**-18, atol=0)


@pytest.mark.one_case
@pytest.mark.each_value
@every_setting
@pytest.mark.parametrize("biases", [None, (-0.3, 0.4), (-1.4, -0.1), (-3.0, -2.0)], ids=str)
def test_choice_and_weights(settings: tuple[Any, ...], biases: tuple[float, float] | None):
    x, weight = _operands(150, 72, 16)
    bias = None if biases is None else torch.linspace(*biases, 16)
    _check(_emulate(x, weight, bias, settings), x, weight, bias, settings)


@pytest.mark.one_case
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize(("t", "d", "e"), [(300, 200, 24), (1, 8, 8), (256, 64, 64)])
def test_tiles_and_shapes(tile: Tile, t: int, d: int, e: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launcher, "TILES", {launcher.MAX_COLUMNS: tile})
    settings, bias = (4, 1, 1, 1, "sigmoid", True, 2.5), torch.linspace(-0.3, 0.4, e)
    x, weight = _operands(t, d, e)
    _check(_emulate(x, weight, bias, settings, seed=t), x, weight, bias, settings)


def test_a_weight_of_one_term():
    x, weight = _operands(150, 72, 16, torch.bfloat16)
    _check(
        _emulate(x, weight, None, SETTINGS["sigmoid, not normalized"]),
        x,
        weight,
        None,
        SETTINGS["sigmoid, not normalized"],
    )


@pytest.mark.one_case
@every_setting
def test_ties_zeros_and_nan_are_ordered_as_in_the_reference(settings: tuple[Any, ...]):
    weight = torch.eye(16).bfloat16()
    x = torch.randn(150, 16, generator=torch.Generator().manual_seed(0)).mul(2).round().bfloat16()
    x[::3] *= -0.0
    x[5::7] = math.nan  # 0 · NaN: all logits of these tokens
    weights, experts, logits = _emulate(x, weight, None, settings)
    expected_weights, expected_experts = route(logits, None, *settings)
    assert torch.equal(experts, expected_experts)
    torch.testing.assert_close(weights, expected_weights, rtol=2.0**-18, atol=0, equal_nan=True)


@every_setting
def test_experts_are_chosen_whose_scores_lie_far_apart(settings: tuple[Any, ...]):
    x = torch.randn(150, 16, generator=torch.Generator().manual_seed(0)).abs().mul(-15).bfloat16()
    _, experts, logits = _emulate(x, torch.eye(16), None, settings)
    assert torch.equal(experts, route(logits, None, *settings)[1])


def _call(t: int = 2048, d: int = 64, e: int = 16, k: int = 4, groups: int = 1, **others: Any) -> str | None:
    x, weight = others.get("x", torch.empty(t, d)), torch.empty(e, d, dtype=others.get("dtype", torch.float32))
    return launcher.why_unsupported(x, weight, others.get("bias"), k, groups, 1, 1, "sigmoid", True, 1.0)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"e": 12}, "12 experts are not a multiple of 8"),
        ({"e": 72}, "72 experts are more than 64"),
        ({"e": 72, "dtype": torch.bfloat16}, "72 experts are more than 64"),
        ({"e": 192, "dtype": torch.bfloat16}, "192 experts are more than 64"),
        ({"groups": 2}, "2 groups are not a multiple of 4"),
        ({"e": 32, "k": 17}, "17 experts of a token are more than 16"),
        ({"t": 2047}, "2047 tokens are fewer than 2048"),
        ({"x": torch.empty(2048, 68, dtype=torch.bfloat16)}, "do not begin at multiples of 16 bytes"),
        ({"x": torch.empty(2048, 72, dtype=torch.bfloat16)[:, :68]}, "do not begin at multiples of 16 bytes"),
        ({"x": torch.empty(64, 2048, dtype=torch.bfloat16).mT}, "are not contiguous"),
        ({"bias": torch.zeros(16, dtype=torch.bfloat16)}, "the bias is not float32"),
        ({}, "written for Hopper"),
    ],
)
def test_calls_of_other_kernels(call: dict[str, Any], reason: str):
    assert reason in str(_call(**call))
