"""The kernels of a mixture of few rows in the emulator, compared with the operator's reference."""

import ctypes
import functools
import itertools
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from octile.formats import BLOCK, TILE
from octile.kernels.cuda.few_rows import mixture
from octile.kernels.cuda.few_rows.launcher import HEADERS
from octile.kernels.cuda.gate import choice as gate_choice
from octile.kernels.cuda.gemm import num_sms, request
from octile.kernels.hopper import SHARED_BYTES
from octile.kernels.memory_layout import new_scale
from octile.lab.tensor_core import tensor_core_scaled_matmul
from octile.models.config import PRESETS
from octile.ops.accumulator import summed_by
from octile.ops.few_rows_mixture import few_rows_mixture
from octile.ops.permute import unpermute
from octile.ops.quantize import dequantize, quantize
from tests.ops import few_rows
from tools import emulator
from tools.emulator import build

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="the emulator needs a C++ compiler")


def bytes_at(address: int, count: int) -> Tensor:
    return torch.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype=torch.uint8)


def written_before(plan: mixture.Plan, values: tuple[Any, ...]) -> list[Tensor]:
    """Return what the kernel before one of a mixture writes: x, quantized rows and routes, or activations."""
    c = plan.constants
    if plan.kernel == "mixture_gate":
        return [bytes_at(values[0], 2 * c["rows"] * c["columns"])]
    rows, max_count = values[-2:]
    if plan.kernel == "mixture_up":
        of_scale = c["columns"] // TILE[1] * 4 * (-(-rows // 4) * 4)
        sizes = rows * c["columns"], of_scale, mixture.ROUTES_BYTES + mixture.ROUTE_BYTES * max_count
        return list(map(bytes_at, values[:3], sizes))
    return [bytes_at(values[1], 4 * rows * (c["chosen"] * c["intermediate"] + c["shared_intermediate"]))]


def run_plan(
    plan: mixture.Plan, arguments: Sequence[emulator.Argument], previous: Sequence[Tensor], seed: int = 0
) -> None:
    kernel, constants, grid, cluster, threads = plan
    emulator.run(
        kernel,
        constants,
        grid=grid,
        cluster=cluster,
        threads=threads,
        shared_bytes=constants["shared_bytes"],
        arguments=arguments,
        previous=previous,
        headers=HEADERS,
        seed=seed,
        arithmetic="hopper",
    )


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch the kernels in the emulator, on a GPU of three SMs; each launch interleaves its threads differently."""
    seeds = itertools.count()

    class Emulated:
        def __init__(self, plan: mixture.Plan, _: torch.device) -> None:
            self.plan = plan

        def launch_at(self, values: tuple[Any, ...]) -> Callable[[], None]:
            return lambda: run_plan(self.plan, values, written_before(self.plan, values), seed=next(seeds))

    monkeypatch.setattr(mixture, "load", Emulated)
    monkeypatch.setattr(mixture, "_prepared", mixture.BoundedCache(mixture.MAX_KEYS))
    monkeypatch.setattr(num_sms, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(request, "why_not_on", lambda device: None)


class Mixture:
    """Arguments of the operator: random weights of E experts of D columns, with I columns between their projections."""

    def __init__(
        self, e: int = 16, d: int = 256, i: int = 128, s: int = 256, gate: torch.dtype = torch.float32, seed: int = 0
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.norm_weight = 1 + 0.1 * self.random(d)
        self.gate = (self.random(e, d) * 2 / math.sqrt(d)).to(gate)
        self.experts = (*self.fp8(e, 2 * i, d), *self.fp8(e, d, i))
        self.shared: mixture.SharedWeights = (None,) * 4
        if s:
            self.shared = (*self.fp8(2 * s, d), *self.fp8(d, s))
        self.bias: Tensor | None = None
        self.choice: mixture.Choice = (3, 1, 1, 1, "softmax", False, 1.0)
        self.power_of_2 = False

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def fp8(self, *shape: int) -> tuple[Tensor, Tensor]:
        return quantize(self.random(*shape) / math.sqrt(shape[-1]), *BLOCK, "e4m3", False)

    def rows(self, t: int) -> Tensor:
        return self.random(t, self.gate.shape[1]).bfloat16()

    def launched(self, x: Tensor, row_invariant: bool = False) -> tuple[Tensor, Tensor]:
        """Return what the kernels compute: x with the mixture added, and the experts."""
        x = x.clone()
        arguments = x, self.norm_weight, 1e-6, self.gate, self.bias, self.choice, self.experts, self.shared
        how = self.power_of_2, row_invariant
        assert mixture.why_unsupported(*arguments, *how) is None
        return x, mixture.launch(*arguments, *how)

    def expected(self, x: Tensor, row_invariant: bool = False) -> tuple[Tensor, Tensor]:
        """Return what the reference computes, if row_invariant with the sums of Hopper's tensor cores."""
        x = x.clone()
        weights = *self.experts, *self.shared
        arguments = x, self.norm_weight, 1e-6, self.gate, self.bias, *self.choice, *weights, self.power_of_2
        if not row_invariant:
            return x, few_rows_mixture.reference(*arguments)
        with summed_by(functools.partial(tensor_core_scaled_matmul, promote_every=128)):
            return x, few_rows_mixture.reference(*arguments, True)


def assert_close(of: Mixture, x: Tensor, row_invariant: bool = False) -> None:
    (found, experts), (expected, expected_experts) = of.launched(x, row_invariant), of.expected(x, row_invariant)
    assert torch.equal(experts, expected_experts)
    # a value halfway between two encoded ones may round to the other one, 2⁻⁴ away, and so may the result
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-6, atol=2**-6, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("t", [1, 5, *(pytest.param(t, marks=pytest.mark.exhaustive) for t in (2, 8))])
def test_any_number_of_rows(t: int) -> None:
    of = Mixture(seed=t)
    assert_close(of, of.rows(t))


@pytest.mark.slow
@pytest.mark.parametrize(("e", "t"), [(15, 1), (9, 3)])
def test_an_odd_number_of_experts(e: int, t: int) -> None:
    of = Mixture(e=e)
    assert_close(of, of.rows(t))


@pytest.mark.one_case
@pytest.mark.each_value
@pytest.mark.parametrize("t", [1, 2])
@pytest.mark.parametrize(("i", "s"), [(128, 0), (128, 128), (128, 384), (256, 128)])
def test_shared_experts(i: int, s: int, t: int) -> None:
    of = Mixture(i=i, s=s)
    assert_close(of, of.rows(t))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("t", "warps"), [(1, 8), (2, 16), *(pytest.param(*of, marks=pytest.mark.exhaustive) for of in ((5, 12), (8, 8)))]
)
def test_warps_whose_k_blocks_are_of_several_experts(t: int, warps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each warp of `down` multiplies more k-blocks than its pipeline has stages, and not all of them equally many."""
    monkeypatch.setattr(mixture, "DOWN_WARPS_OF_MORE", (warps,))
    monkeypatch.setattr(mixture, "plan", mixture.plan.__wrapped__)
    of = Mixture(e=24, d=128, i=640, s=896)
    of.choice = (max(24 // t, 8), 1, 1, 1, "softmax", False, 4.0)
    assert_close(of, of.rows(t))


@pytest.mark.slow
@pytest.mark.parametrize("t", [1, pytest.param(8, marks=pytest.mark.exhaustive)])
def test_bits_do_not_depend_on_the_interleaving_of_threads(t: int) -> None:
    of = Mixture(d=128, i=384, s=640)
    x = of.rows(t)
    first, *others = (of.launched(x)[0] for _ in range(4))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.one_case
@pytest.mark.parametrize(
    "choice",
    [
        (2, 1, 1, 1, "sigmoid", False, 2.5),
        (1, 4, 1, 1, "softmax", False, 16.0),
        (5, 4, 2, 2, "sigmoid", True, 2.5),
        (32, 1, 1, 1, "softmax", True, 1.0),
    ],
    ids=str,
)
def test_ways_to_choose(choice: mixture.Choice) -> None:
    of = Mixture(e=40, s=0)
    of.choice, of.bias, of.power_of_2 = choice, of.random(40) / 8, choice[4] == "sigmoid"
    assert_close(of, of.rows(2))


@pytest.mark.slow
@pytest.mark.parametrize("gate", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_of_the_gate(gate: torch.dtype) -> None:
    of = Mixture(gate=gate, d=384, i=256, s=256)
    of.norm_weight = of.norm_weight.bfloat16()
    assert_close(of, of.rows(2))


def test_equal_logits_choose_the_first_experts() -> None:
    of = Mixture()
    of.gate.zero_()
    assert of.launched(of.rows(1))[1].tolist() == [[0, 1, 2]]


@pytest.mark.one_case
@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, 3e38, 1e-38])
def test_extreme_values_stay_in_their_row(value: float) -> None:
    of = Mixture()
    x = of.rows(3)
    x[1, 7:] = value
    assert_close(of, x)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("e", "d", "i", "s", "choice"),
    [
        (16, 384, 128, 256, (3, 1, 1, 1, "softmax", False, 1.0)),
        (24, 640, 384, 0, (5, 4, 2, 2, "sigmoid", True, 2.5)),
        (40, 1152, 128, 640, (12, 1, 1, 1, "softmax", True, 1.0)),
    ],
    ids=str,
)
def test_one_row_whose_bits_depend_on_no_other(e: int, d: int, i: int, s: int, choice: mixture.Choice) -> None:
    of = Mixture(e=e, d=d, i=i, s=s, gate=torch.bfloat16, seed=e)
    of.choice, of.bias, of.power_of_2 = choice, of.random(e) / 8, choice[4] == "sigmoid"
    assert_close(of, of.rows(1), row_invariant=True)


def test_bits_of_one_rows_down_projections() -> None:
    """Each expert's result has the bits of a GEMM and is rounded, and they are added in the order of the choices."""
    of = Mixture(e=8, d=128, i=384, s=640, seed=3)
    x, h = of.rows(1), of.random(1, 3 * 384 + 640)
    experts = [6, 0, 3]  # by choice
    route = struct.pack("<4i", 3, 0, 0, 0)
    for e in sorted(experts):
        route += struct.pack("<i8Bi8f", e, experts.index(e), *[255] * 7, 0, *[1.0] * 8)
    _, _, down, down_scale = of.experts
    _, _, shared_down, shared_scale = of.shared
    found = x.clone()
    run_alone(
        mixture.plan_down_row(128, 384, 640, 3, False), h,
        found, h, torch.frombuffer(bytearray(route), dtype=torch.uint8), down, down_scale, shared_down, shared_scale,
        1, 3,
    )  # fmt: skip

    def product(rows: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        operands = *quantize(rows, *TILE, "e4m3", False), TILE, weight, scale, BLOCK
        return tensor_core_scaled_matmul(*operands, promote_every=128).bfloat16()

    of_choices = (product(h[:, 384 * k : 384 * (k + 1)], down[e], down_scale[e]) for k, e in enumerate(experts))
    ids = torch.arange(3, dtype=torch.int32)[None]
    shared = product(h[:, 3 * 384 :], shared_down, shared_scale)
    assert torch.equal(found, x + unpermute(torch.cat([*of_choices]), ids, shared))


def run_alone(plan: mixture.Plan, previous: Tensor, *arguments: emulator.Argument) -> None:
    run_plan(plan, arguments, [previous])


def test_bits_of_the_quantized_rows() -> None:
    """Rows of 1 and −1 have a norm of 1 exactly, so they are the norm's weight after it."""
    of, norm_weight = Mixture(), few_rows.careful_values(256)
    x = of.rows(3).sign()
    data, scale = x.to(torch.float8_e4m3fn), new_scale(x, 1, 128)
    experts, routes = torch.zeros(3, 3, dtype=torch.int64), torch.zeros(mixture.routes_bytes(3, 3, 16)).byte()
    choice = gate_choice.constants(16, *of.choice[:-1], False)
    run_alone(
        mixture.plan_gate(3, 256, torch.float32, torch.float32, choice, False), x,
        x, norm_weight, of.gate, 0, data, scale, routes, experts, 0.0, 1 / 256, 1.0, 0.0,
    )  # fmt: skip
    expected, expected_scale = quantize(x * norm_weight, *TILE, "e4m3", False)
    assert torch.equal(data.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scale, expected_scale)


@pytest.mark.parametrize("t", [1, 2, 8])
def test_bits_of_the_quantized_activations(t: int) -> None:
    """Rows with one expert each, whose down projection is an identity, get the dequantized activations."""
    h, x = few_rows.careful_values(t, 128), torch.zeros(t, 128).bfloat16()
    route = struct.pack("<4i i8Bi 8f", 1, 0, 0, 0, 0, *[0] * t, *[255] * (8 - t), 0, *[1.0] * 8)
    weight, scale = torch.eye(128).to(torch.float8_e4m3fn), torch.ones(1)
    run_alone(
        mixture.plan_down(t, 128, 128, 0, 1, 1, False), h,
        x, h, torch.frombuffer(bytearray(route), dtype=torch.uint8), weight, scale, 0, 0, t, 1,
    )  # fmt: skip
    expected = dequantize(*quantize(h, *TILE, "e4m3", False), *TILE, torch.float32)
    assert torch.equal(x, expected.bfloat16())


@pytest.mark.slow
def test_an_expert_that_no_row_has_chosen_is_not_added() -> None:
    of = Mixture()
    x = of.rows(2)
    chosen = of.expected(x)[1]
    for other in set(range(16)) - set(chosen.flatten().tolist()):
        of.experts[1][other], of.experts[3][other] = math.nan, math.nan
    only = [e for e in chosen[1].tolist() if e not in chosen[0].tolist()]
    of.experts[3][only] = math.nan
    found, _ = of.launched(x)
    assert found[0].isfinite().all()
    assert found[1].isnan().all() == bool(only)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"t": 9}, "9 rows, not 1 to 8"),
        ({"t": 0}, "0 rows, not 1 to 8"),
        ({"dtype": torch.float32}, "x is torch.float32"),
        ({"i": 64}, "256, 64 or 0 columns are no multiple of 128"),
        ({"s": 64}, "256, 128 or 64 columns are no multiple of 128"),
        ({"e": 257}, "257 experts"),
    ],
    ids=str,
)
def test_calls_that_are_not_supported(changes: dict[str, Any], reason: str) -> None:
    sizes = {"e": 16, "i": 128, "s": 0} | {k: v for k, v in changes.items() if k in "eis"}
    of = Mixture(**sizes)
    x = of.rows(changes.get("t", 1)).to(changes.get("dtype", torch.bfloat16))
    arguments = x, of.norm_weight, 1e-6, of.gate, None, of.choice, of.experts, of.shared, False, False
    assert reason in str(mixture.why_unsupported(*arguments))


def plans_of(preset: str, t: int) -> tuple[mixture.Plan, ...]:
    c = PRESETS[preset]()
    sizes = t, c.hidden_size, c.moe_intermediate_size, c.n_shared_experts * c.moe_intermediate_size, c.n_routed_experts
    choice = c.num_experts_per_tok, 1, 1, 1, c.scoring_func, c.norm_topk_prob, c.routed_scaling_factor
    return mixture.plan(*sizes, torch.float32, torch.bfloat16, choice, False, False, 132)


@pytest.mark.parametrize("preset", PRESETS)
def test_shared_memory_suffices_for_all_models(preset: str) -> None:
    plans = [plan for t in range(1, 9) for plan in plans_of(preset, t)]
    assert [plan for plan in plans if plan.constants["shared_bytes"] > SHARED_BYTES] == []


@pytest.mark.parametrize(
    ("preset", "t", "warps", "depth", "cluster"),
    [
        ("v2_lite_16b", 1, 8, 6, 1),
        ("v2_lite_16b", 2, 16, 5, 2),
        ("v2_lite_16b", 8, 16, 3, 2),
        ("v3_671b", 7, 16, 2, 2),
        ("v3_671b", 8, 12, 2, 2),
    ],
)
def test_warps_of_down(preset: str, t: int, warps: int, depth: int, cluster: int) -> None:
    plan = plans_of(preset, t)[2]
    assert [plan.constants[name] for name in ("warps", "depth", "cluster")] == [warps, depth, cluster]
    assert (plan.cluster, plan.threads) == (cluster, 32 * warps)


def test_rows_that_do_not_fit_into_shared_memory() -> None:
    of, down = Mixture(e=32, d=128, s=0), torch.empty(32, 128, 2048, dtype=torch.float8_e4m3fn, device="meta")
    of.choice = (32, 1, 1, 1, "softmax", False, 1.0)
    of.experts = (*of.experts[:2], down, of.experts[3])
    arguments = 1e-6, of.gate, None, of.choice, of.experts, of.shared, False, False
    assert mixture.why_unsupported(of.rows(2), of.norm_weight, *arguments) is None
    reason = "8 rows of 128 and 32 times 2048 columns do not fit into shared memory"
    assert mixture.why_unsupported(of.rows(8), of.norm_weight, *arguments) == reason
