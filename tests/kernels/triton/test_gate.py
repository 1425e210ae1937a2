"""The kernels of the gate equal the reference: the choice and terms bit for bit, weights and gradients closely.

The interpreter's exponential and its order of sums differ from torch's in the last bits.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from octile.kernels.terms import DY_TERMS, TERMS
from octile.kernels.triton import gate as kernel
from octile.kernels.triton import launch_config
from octile.ops.gate import bfloat16_terms, gate, gate_backward, route, route_backward
from tests.kernels.triton.comparison import assert_same, extreme
from tests.kernels.triton.gpus import any_gpu, hopper
from tests.ops.test_gate import E, assert_as_close_as_rounded, canceling, every_setting

pytestmark = pytest.mark.usefixtures("gpu")
T = 90


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes as long for a program of one token as for one of 64."""
    monkeypatch.setattr(launch_config, "GATE_PROGRAMS", 2)


def _logits(t: int = T, ties: bool = False) -> Tensor:
    """Logits whose sigmoids and softmax differ clearly where they differ."""
    drawn = 2 * torch.randn(t, E, generator=torch.Generator().manual_seed(t))
    if ties:
        drawn = drawn.round()
        drawn[::3] *= -0.0
    return drawn


def _assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2.0**-19, atol=2.0**-120, equal_nan=True)


@pytest.mark.each_pair
@any_gpu
@every_setting
@pytest.mark.parametrize("t", [0, 1, T])
@pytest.mark.parametrize("bias_dtype", [None, torch.float32, torch.bfloat16], ids=str)
def test_choice_and_weights(settings: tuple[Any, ...], t: int, bias_dtype: torch.dtype | None):
    logits, bias = _logits(t), None if bias_dtype is None else torch.linspace(-0.3, 0.4, E).to(bias_dtype)
    weights, experts, same = kernel.launch(logits, bias, *settings, E)
    expected_weights, expected_experts = route(logits, bias, *settings)
    assert same is logits
    assert torch.equal(experts, expected_experts)
    _assert_close(weights, expected_weights)


@pytest.mark.one_case
@any_gpu
@every_setting
def test_a_program_chooses_for_one_token(settings: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launch_config, "GATE_PROGRAMS", 9)
    logits = _logits(9)
    weights, experts, _ = kernel.launch(logits, None, *settings, E)
    expected_weights, expected_experts = route(logits, None, *settings)
    assert torch.equal(experts, expected_experts)
    _assert_close(weights, expected_weights)


def test_all_programs_of_row_invariant_choices_have_as_many_tokens(monkeypatch: pytest.MonkeyPatch):
    tokens_of_program = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]):
            return lambda *arguments, ROWS, **constants: tokens_of_program.append(ROWS)

    monkeypatch.setattr(kernel, "choose_experts", Kernel())
    for t in (1, 90, 1000):
        kernel.launch(torch.zeros(t, E), None, 1, 1, 1, 1, "softmax", True, 1.0, E, row_invariant=True)
    assert tokens_of_program == 3 * tokens_of_program[:1]


@pytest.mark.one_case
@any_gpu
@every_setting
def test_parts_of_logits_are_summed_in_their_order(settings: tuple[Any, ...]):
    parts = torch.randn(T, 3 * E, generator=torch.Generator().manual_seed(0))
    logits = parts[:, :E] + parts[:, E : 2 * E] + parts[:, 2 * E :]
    weights, experts, found = kernel.launch(parts, None, *settings, E)
    assert_same([found], [logits])
    assert_same([weights, experts], kernel.launch(logits, None, *settings, E)[:2])


@any_gpu
@every_setting
def test_ties_and_zeros_are_ordered_alike(settings: tuple[Any, ...]):
    logits = _logits(ties=True)
    if settings[4] == "softmax" and settings[2] < settings[1]:
        logits[:, 1:] = logits[:, :1]  # of softmax in another rounding, only equal rows have the same ties
    weights, experts, _ = kernel.launch(logits, None, *settings, E)
    expected_weights, expected_experts = route(logits, None, *settings)
    assert torch.equal(experts, expected_experts)
    _assert_close(weights, expected_weights)


@any_gpu
@every_setting
def test_nan_and_infinities_are_treated_alike(settings: tuple[Any, ...]):
    logits = _logits()
    logits[::4, 5], logits[1::4, 2], logits[2::4, 7] = float("nan"), float("inf"), float("-inf")
    logits[3::8] = float("-inf")
    weights, experts, _ = kernel.launch(logits, None, *settings, E)
    expected_weights, expected_experts = route(logits, None, *settings)
    assert torch.equal(experts, expected_experts)
    _assert_close(weights, expected_weights)


@any_gpu
def test_an_expert_that_is_switched_off_is_above_those_of_other_groups():
    bias = torch.zeros(E)
    bias[E // 2] = 9.0
    bias[E // 2 + 1 :] = float("-inf")
    settings = (2, 2, 1, 1, "sigmoid", True, 2.5)
    _, experts, _ = kernel.launch(_logits(), bias, *settings, E)
    assert experts.tolist() == [[E // 2, E // 2 + 1]] * len(experts)


@any_gpu
@pytest.mark.parametrize("settings", [(8, 8, 4, 2, "sigmoid", True, 2.5), (6, 1, 1, 1, "softmax", True, 1.0)], ids=str)
def test_many_experts(settings: tuple[Any, ...]):
    logits = torch.randn(20, 256, generator=torch.Generator().manual_seed(0)).mul(64).round() / 16
    weights, experts, _ = kernel.launch(logits, None, *settings, 256)
    expected_weights, expected_experts = route(logits, None, *settings)
    assert torch.equal(experts, expected_experts)
    _assert_close(weights, expected_weights)


@any_gpu
def test_strides_of_logits_do_not_matter():
    logits, bias = _logits(E).mT, torch.linspace(-0.3, 0.4, 2 * E)[::2]
    settings = (4, 4, 2, 2, "sigmoid", True, 2.5)
    expected = kernel.launch(logits.contiguous(), bias.contiguous(), *settings, E)
    assert_same(kernel.launch(logits, bias, *settings, E)[:2], expected[:2])


@pytest.mark.one_case
@pytest.mark.each_pair
@any_gpu
@every_setting
@pytest.mark.parametrize("t", [0, 1, T])
@pytest.mark.parametrize("given", ["weights", "logits", "both", "none"])
def test_gradients_of_the_logits(settings: tuple[Any, ...], t: int, given: str):
    logits = _logits(t)
    experts = route(logits, None, *settings)[1]
    generator = torch.Generator().manual_seed(1)
    dweights = torch.randn(experts.shape, generator=generator) if given in ("weights", "both") else None
    dlogits = torch.randn(t, E, generator=generator) if given in ("logits", "both") else None
    found = kernel.launch_backward(dweights, dlogits, logits, experts, *settings[4:])
    expected = route_backward(dweights, dlogits, logits, experts, *settings[4:])
    torch.testing.assert_close(found, expected, rtol=2.0**-17, atol=2.0**-18)

    terms = kernel.launch_backward(dweights, dlogits, logits, experts, *settings[4:], DY_TERMS)
    assert_same([terms], [bfloat16_terms(found.mT, DY_TERMS).mT.contiguous()])


@any_gpu
def test_strides_of_gradients_do_not_matter():
    logits, experts = _logits().mT.contiguous().mT, torch.arange(T)[:, None] % E
    arguments = (torch.randn(1, T).mT, torch.randn(E, T).mT, logits, experts)
    contiguous = (t.contiguous() for t in arguments)
    settings = "sigmoid", False, 1.0
    assert_same([kernel.launch_backward(*arguments, *settings)], [kernel.launch_backward(*contiguous, *settings)])


def _operands(t: int, d: int, weight_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, a weight whose logits differ clearly where they differ, and the terms of the weight."""
    generator = torch.Generator().manual_seed(t)
    x, weight = torch.randn(t, d, generator=generator).bfloat16(), torch.randn(E, d, generator=generator) / d**0.5
    weight = weight.to(weight_dtype)
    return x, weight, weight if weight_dtype == torch.bfloat16 else bfloat16_terms(weight, [*range(TERMS)])


with_gemm = pytest.mark.parametrize(("t", "d"), [(T, 100), (1, 64), (0, 40)])
every_weight = pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.mark.one_case
@pytest.mark.each_pair
@any_gpu
@every_setting
@with_gemm
@every_weight
def test_choice_with_the_gemm(settings: tuple[Any, ...], t: int, d: int, weight_dtype: torch.dtype):
    x, weight, terms = _operands(t, d, weight_dtype)
    bias = torch.linspace(-0.3, 0.4, E)
    weights, experts, logits = kernel.launch_with_gemm(x, terms, bias, *settings, E)
    torch.testing.assert_close(logits, gate(x, weight, bias, *settings)[2], rtol=2.0**-18, atol=2.0**-18)
    expected_weights, expected_experts = route(logits, bias, *settings)
    assert torch.equal(experts, expected_experts)
    _assert_close(weights, expected_weights)


def _check_gradients(settings: tuple[Any, ...], t: int, d: int, weight_dtype: torch.dtype, given: str) -> None:
    x, weight, _ = _operands(t, d, weight_dtype)
    _, experts, logits = gate(x, weight, None, *settings)
    generator = torch.Generator().manual_seed(1)
    dweights = torch.randn(experts.shape, generator=generator) if given in ("weights", "both") else None
    dlogits = torch.randn(t, E, generator=generator) if given in ("logits", "both") else None
    arguments = dweights, dlogits, logits, experts, x
    dx, dweight = kernel.launch_backward_with_gemms(*arguments, weight, *settings[4:])
    expected_dx, expected_dweight = gate_backward(*arguments, weight, *settings[4:])
    torch.testing.assert_close(dx, expected_dx, rtol=2.0**-7, atol=2.0**-10)  # a last bit of BF16
    torch.testing.assert_close(dweight, expected_dweight, rtol=2.0**-15, atol=2.0**-15)


@pytest.mark.one_case
@pytest.mark.each_pair
@hopper
@every_setting
@with_gemm
@every_weight
@pytest.mark.parametrize("given", ["weights", "logits", "both"])
def test_gradients_with_the_gemms(
    settings: tuple[Any, ...], t: int, d: int, weight_dtype: torch.dtype, given: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(launch_config.GATE_BACKWARD_GEMMS, "ROWS", 16)  # several parts of the tokens
    _check_gradients(settings, t, d, weight_dtype, given)


@pytest.mark.one_case
@every_weight
def test_gradients_with_the_gemms_of_several_tiles_of_columns(weight_dtype: torch.dtype):
    _check_gradients((4, 4, 2, 2, "sigmoid", True, 2.5), T, 200, weight_dtype, "both")


@pytest.mark.one_case
@every_weight
def test_dx_is_as_close_as_its_rounding_where_products_cancel(weight_dtype: torch.dtype):
    dweights, logits, experts, weight = canceling(T, 200, 16)
    weight, settings = weight.to(weight_dtype), ("softmax", False, 1.0)
    x = torch.zeros(T, 200, dtype=torch.bfloat16)
    dx, _ = kernel.launch_backward_with_gemms(dweights, None, logits, experts, x, weight, *settings)
    dy = kernel.launch_backward(dweights, None, logits, experts, *settings)  # its exponential is not torch's
    assert_as_close_as_rounded(dx, dy, weight)


def test_strides_of_x_and_of_a_weight_do_not_matter_to_the_gemms():
    settings = 4, 4, 2, 2, "sigmoid", True, 2.5
    x, weight, _ = (t.mT.contiguous().mT for t in _operands(T, 40, torch.bfloat16))
    found = kernel.launch_with_gemm(x, weight, None, *settings, E)
    assert_same(found, kernel.launch_with_gemm(x.contiguous(), weight.contiguous(), None, *settings, E))
    arguments = torch.ones(T, 4), None, found[2], found[1]
    found = kernel.launch_backward_with_gemms(*arguments, x, weight, *settings[4:])
    same = kernel.launch_backward_with_gemms(*arguments, x.contiguous(), weight.contiguous(), *settings[4:])
    assert_same(found, same)


MANY = launch_config.GATE_WITH_GEMM_TOKENS


@any_gpu
@pytest.mark.parametrize(("t", "n_experts", "n_group"), [(MANY, 5, 1), (MANY, 16, 8)])
def test_the_kernels_multiply_many_tokens(t: int, n_experts: int, n_group: int):
    assert kernel.has_gemms(t, n_experts, n_group)


@any_gpu
@pytest.mark.parametrize(("t", "n_experts", "n_group"), [(MANY - 1, 16, 1), (MANY, 17, 1), (MANY, 15, 5)])
def test_torch_multiplies_few_tokens_or_many_experts(t: int, n_experts: int, n_group: int):
    assert not kernel.has_gemms(t, n_experts, n_group)


@any_gpu
@pytest.mark.parametrize("shape", [(3, 5), (17, 300), (0, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0, 1, 0, 0], [0, 0, 0]], ids=str)
def test_terms(shape: tuple[int, int], dtype: torch.dtype, order: list[int]):
    t = extreme(*shape).to(dtype)
    if t.numel():
        t[0, :3] = torch.tensor([float("inf"), float("-inf"), float("nan")])
    assert_same([kernel.launch_terms(t, order)], [bfloat16_terms(t, order)])
    assert_same([kernel.launch_terms(t.mT, order)], [bfloat16_terms(t.mT, order)])
