"""Hopper's kernels of a mixture of few rows on a GPU: the reference's values, their bits, and replays of a graph."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.few_rows import mixture
from octile.kernels.cuda.gemm import request
from octile.ops.few_rows_mixture import few_rows_mixture
from tests.ops.few_rows_mixture import arguments

V2_LITE = {"e": 64, "d": 2048, "i": 1408, "s": 2816, "k": 6}


@pytest.fixture(autouse=True)
def hopper() -> None:
    if reason := request.why_not_on(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip(f"the kernels do not run here: {reason}")


def on_gpu(t: int, dtype: torch.dtype = torch.bfloat16, **sizes: int) -> dict[str, Any]:
    return arguments(t, **sizes, dtype=dtype, device="cuda")


def assert_close(a: dict[str, Any]) -> None:
    """Compare x and the experts with those of single operators, and with those of a second call, bit for bit."""
    (found, experts), (again, _), (expected, expected_experts) = (
        _called(a, call) for call in (few_rows_mixture, few_rows_mixture, few_rows_mixture.reference)
    )
    assert torch.equal(experts, expected_experts)
    assert torch.equal(found.view(torch.uint8), again.view(torch.uint8))
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6 * _largest(expected), equal_nan=True)


def _called(a: dict[str, Any], call: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
    x = a["x"].clone()
    return x, call(*(a | {"x": x}).values())


def _largest(x: Tensor) -> float:
    finite = x[x.isfinite()].float()
    return max(finite.abs().max().item(), 1.0) if len(finite) else 1.0


@pytest.mark.parametrize("t", range(1, 9))
def test_numbers_of_rows(t: int):
    assert_close(on_gpu(t, **V2_LITE))


@pytest.mark.each_value  # of rows with one shape of all sizes: see above
@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        ({"e": 8, "d": 256, "i": 128, "s": 0, "k": 8}, {}),
        ({"e": 15, "d": 256, "i": 128, "s": 128, "k": 3}, {}),
        ({"e": 16, "d": 7168, "i": 2048, "s": 2048, "k": 8}, {"n_group": 4, "topk_group": 2, "best": 2}),
        ({"e": 256, "d": 512, "i": 128, "s": 128, "k": 8}, {"scoring_func": "softmax", "norm_topk_prob": False}),
        ({"e": 16, "d": 256, "i": 256, "s": 384, "k": 4}, {}),
        ({"e": 40, "d": 384, "i": 256, "s": 512, "k": 1}, {"power_of_2": True, "bias": torch.linspace(-0.1, 0.1, 40)}),
    ],
    ids=str,
)
@pytest.mark.parametrize("t", [1, 2, 8])
def test_shapes_and_choices(t: int, sizes: dict[str, int], changes: dict[str, Any]):
    of_gpu = {name: value.cuda() if isinstance(value, Tensor) else value for name, value in changes.items()}
    assert_close(on_gpu(t, **sizes) | of_gpu)


@pytest.mark.parametrize(
    ("sizes", "changes"),
    [
        (V2_LITE, {}),
        ({"e": 16, "d": 7168, "i": 2048, "s": 2048, "k": 8}, {"n_group": 4, "topk_group": 2, "best": 2}),
        ({"e": 256, "d": 512, "i": 128, "s": 128, "k": 8}, {"scoring_func": "softmax", "norm_topk_prob": True}),
        ({"e": 40, "d": 384, "i": 256, "s": 0, "k": 1}, {"power_of_2": True}),
    ],
    ids=str,
)
def test_one_row_has_the_bits_of_operators_whose_rows_are_independent(sizes: dict[str, int], changes: dict[str, Any]):
    a = on_gpu(1, **sizes)
    a |= changes | {"gate_weight": a["gate_weight"].bfloat16(), "row_invariant": True}
    for seed in range(20):
        a["x"] = torch.randn(a["x"].shape, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()
        (found, experts), (expected, expected_experts) = (
            _called(a, call) for call in (few_rows_mixture, few_rows_mixture.reference)
        )
        assert torch.equal(experts, expected_experts)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("value", [0.0, 1e-40, 1e36, math.inf, math.nan])
def test_extreme_values_stay_in_their_row(value: float):
    a = on_gpu(3, **V2_LITE)
    a["x"][1, 100:] = value
    assert_close(a)


@pytest.mark.parametrize(("t", "dtype"), [(9, torch.bfloat16), (2, torch.float32)])
def test_calls_that_the_kernels_do_not_support_are_computed_by_other_operators(t: int, dtype: torch.dtype):
    assert_close(on_gpu(t, dtype, **V2_LITE))


@pytest.mark.parametrize(("t", "row_invariant"), [(1, False), (4, False), (1, True)])
def test_a_graph_is_replayed_with_other_values(t: int, row_invariant: bool):
    """Each kernel starts before the previous one has ended, and still reads what that one has written."""
    layers = [on_gpu(t, e=16, d=1024, i=256, s=512, k=4, seed=seed) for seed in range(8)]
    for layer in layers:
        layer["gate_weight"] = layer["gate_weight"].to(torch.bfloat16 if row_invariant else torch.float32)
    x = layers[0]["x"].clone()

    def compute(synchronize: bool) -> Tensor:
        rows = x.clone()
        for layer in layers:
            few_rows_mixture(*(layer | {"x": rows}).values(), row_invariant)
            if synchronize:
                torch.cuda.synchronize()
        return rows

    compute(False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = compute(False)
    for seed in range(20):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, compute(True))


@pytest.mark.parametrize("t", range(1, 9))
def test_the_kernels_are_used_for_the_shape_of_v2_lite(t: int):
    a = on_gpu(t, **V2_LITE)
    numbers = [a[name] for name in list(a)[5:12]]
    weights = [a[name] for name in list(a)[12:20]]
    before = a["x"], a["norm_weight"], a["eps"], a["gate_weight"], a["bias"]
    others = tuple(numbers), tuple(weights[:4]), tuple(weights[4:]), False
    assert mixture.why_unsupported(*before, *others, False) is None
    if t == 1:
        exact = *before[:3], a["gate_weight"].bfloat16(), a["bias"]
        assert mixture.why_unsupported(*exact, *others, True) is None
