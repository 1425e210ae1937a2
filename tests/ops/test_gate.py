"""Tests of the gate: torch's autograd, bit for bit, its choice, and the BF16 terms that a GPU multiplies."""

from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octile.kernels.terms import DY_TERMS, TERMS, WEIGHT_TERMS
from octile.ops.gate import (
    bfloat16_terms,
    gate,
    gate_backward,
    route,
    route_backward,
    sigmoid,
    top_experts,
)
from tests.ops.operators import assert_fake_is_true, assert_well_formed

D, E = 40, 12
# choice (K, groups, groups of a token, best), scoring function, whether weights are normalized, factor
SETTINGS: dict[str, tuple[Any, ...]] = {
    "V3": (4, 4, 2, 2, "sigmoid", True, 2.5),
    "V2": (3, 4, 3, 1, "softmax", False, 16.0),
    "V2-Lite": (2, 1, 1, 1, "softmax", False, 1.0),
    "one expert": (1, 1, 1, 1, "sigmoid", True, 1.0),
    "softmax, normalized": (12, 1, 1, 1, "softmax", True, 1.0),
    "sigmoid, not normalized": (5, 3, 2, 2, "sigmoid", False, 2.0),
}
every_setting = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0, 1.0, -3.5, 1e-30, 200.0, -200.0]


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def canceling(t: int, d: int, n_experts: int, spread: float = 1e-3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dweights, logits and experts of a softmax gate, and a weight, of whose products most cancel in dx.

    Over the experts the gradients of a token's logits sum to zero, and the experts' weights differ by `spread` only.
    """
    generator = torch.Generator().manual_seed(0)
    dweights, logits, weight = (
        torch.randn(size, generator=generator) for size in ((t, 4), (t, n_experts), (n_experts, d))
    )
    return dweights, logits, logits.topk(4).indices, 1 + spread * weight


def assert_as_close_as_rounded(dx: Tensor, dy: Tensor, weight: Tensor) -> None:
    """Check that dx is not farther from the exact product than this one rounded to BF16, but for 1%."""
    exact = dy.double() @ weight.double()
    assert (dx.double() - exact).norm() <= 1.01 * (exact.bfloat16().double() - exact).norm()


class Sigmoid(torch.autograd.Function):
    """The operators' sigmoid, with torch's gradient of it."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = sigmoid(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        return torch.ops.aten.sigmoid_backward(dy, *ctx.saved_tensors)


def formula(logits: Tensor, bias: Tensor | None, settings: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Weights and experts, as torch's functions compute them from logits that require a gradient."""
    *choice, scoring_func, norm_topk_prob, factor = settings
    affinity = logits.softmax(-1)
    score = sigmoid(logits.detach()) if scoring_func == "sigmoid" else affinity.detach()
    experts = top_experts(score if bias is None else score + bias, *choice)
    weights = Sigmoid.apply(logits.gather(1, experts)) if scoring_func == "sigmoid" else affinity.gather(1, experts)
    if norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * factor, experts


def assert_equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@dtypes
def test_logits_equal_the_gemm_in_float32(dtype: torch.dtype):
    x, w = tensor(5, D, dtype=dtype), tensor(3, D)
    assert torch.equal(gate(x, w, None, 2, 1, 1, 1, "sigmoid", True, 1.0)[2], x.float() @ w.mT)


@pytest.mark.one_case
@every_setting
@given(st.integers(0, 9), st.booleans(), st.booleans(), st.integers(0, 2**31))
def test_weights_and_their_gradients_equal_autograd(settings, t: int, has_bias: bool, special: bool, seed: int):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(t, E, generator=generator)
    if special:
        where, which = (torch.randint(n, (t, E), generator=generator) for n in (3, len(SPECIAL)))
        logits = torch.where(where == 0, torch.tensor(SPECIAL)[which], logits)
    bias = torch.rand(E, generator=generator) - 0.5 if has_bias else None
    leaf = logits.clone().requires_grad_()
    weights, experts = formula(leaf, bias, settings)
    found_weights, found_experts = route(logits, bias, *settings)
    assert torch.equal(found_experts, experts)
    assert_equal(found_weights, weights.detach())

    dweights, dlogits = torch.randn(weights.shape, generator=generator), torch.randn(t, E, generator=generator)
    (expected,) = torch.autograd.grad((weights, leaf.clone()), leaf, (dweights, dlogits), retain_graph=True)
    assert_equal(route_backward(dweights, dlogits, logits, experts, *settings[4:]), expected)
    (expected,) = torch.autograd.grad(weights, leaf, dweights)
    assert_equal(route_backward(dweights, None, logits, experts, *settings[4:]), expected)
    assert_equal(route_backward(None, dlogits, logits, experts, *settings[4:]), dlogits)


@dtypes
@every_setting
def test_gradients_of_the_input_and_the_weight_equal_autograd(settings, dtype: torch.dtype):
    x, w = tensor(5, D, dtype=dtype).requires_grad_(), (tensor(E, D) / 6).requires_grad_()
    logits = x.float() @ w.mT
    weights, experts = formula(logits, None, settings)
    dweights, dlogits = tensor(*weights.shape), tensor(5, E)
    torch.autograd.backward((weights, logits), (dweights, dlogits))
    with torch.no_grad():
        dx, dw = gate_backward(dweights, dlogits, logits, experts, x, w, *settings[4:])
    assert (dx.dtype, dw.dtype) == (dtype, torch.float32)
    assert_equal(dx, x.grad)
    assert_equal(dw, w.grad)


def test_without_gradients_of_the_results_those_of_the_inputs_are_zero():
    x, w = tensor(5, D), tensor(E, D)
    logits, experts = tensor(5, E), torch.zeros(5, 1, dtype=torch.int64)
    gradients = gate_backward(None, None, logits, experts, x, w, "sigmoid", True, 1.0)
    assert all(not g.any() for g in gradients)


def test_a_bias_in_another_dtype_is_added_in_float32():
    x, w, bias = tensor(5, D), tensor(E, D), tensor(E).bfloat16()
    assert torch.equal(gate(x, w, bias, *SETTINGS["V3"])[1], gate(x, w, bias.float(), *SETTINGS["V3"])[1])


def test_autocast_changes_nothing():
    x, w = tensor(5, D), tensor(E, D)
    expected = x @ w.mT
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(gate(x, w, None, *SETTINGS["V3"])[2], expected)


@every_setting
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", ""])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_the_row_invariant_gate_has_the_same_bits_among_any_others(settings, has_bias: bool, dtype):
    bias, x, w = tensor(E) if has_bias else None, tensor(100, D).to(dtype), tensor(E, D).bfloat16()
    together = gate(x, w, bias, *settings, True)
    for rows in (slice(0, 1), slice(3, 18), slice(1, 100)):
        for found, expected in zip(gate(x[rows], w, bias, *settings, True), together, strict=True):
            assert torch.equal(found, expected[rows])
    for found, expected in zip(gate(x, w.float(), bias, *settings, True), together, strict=True):
        assert torch.equal(found, expected)
    torch.testing.assert_close(together[2], gate(x, w, bias, *settings)[2])


@pytest.mark.one_case
@every_setting
def test_the_operators_are_well_formed(settings):
    x, w, bias = tensor(5, D), tensor(E, D), tensor(E)
    weights, experts, logits = gate(x, w, bias, *settings)
    backward = (torch.ones_like(weights), None, logits, experts, x, w, *settings[4:])
    forward = (x, w, bias, *settings)
    operators = (gate, forward), (gate_backward, backward), (gate, (*forward, True))
    for operator, arguments in operators:
        assert_well_formed(operator, arguments)
        assert_fake_is_true(operator, arguments)


def test_the_operator_of_terms_is_well_formed():
    assert_well_formed(bfloat16_terms, (tensor(4, 5), [0, 2, 0]))
    assert_fake_is_true(bfloat16_terms, (tensor(4, 5), [0, 2, 0]))


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32).filter(lambda v: v == 0 or abs(v) > 2.0**-100), min_size=1))
def test_three_bf16_terms_sum_to_the_value(values):
    t = torch.tensor([values])
    parts = bfloat16_terms(t, [0, 1, 2])
    assert parts.dtype == torch.bfloat16
    assert torch.equal(parts.double().sum(0, keepdim=True), t.double())


def test_terms_come_in_the_given_order():
    t = tensor(4, 5)
    terms = bfloat16_terms(t, [0, 1, 2]).unflatten(0, (3, 4))
    assert torch.equal(bfloat16_terms(t, [2, 0, 0, 1]), torch.cat([terms[i] for i in (2, 0, 0, 1)]))


def test_a_bfloat16_value_has_one_term():
    t = tensor(4, 4, dtype=torch.bfloat16)
    assert torch.equal(bfloat16_terms(t, [0]), t)
    assert not bfloat16_terms(t, [1, 2]).any()


def test_every_product_of_terms_that_counts_is_computed_once():
    products = [(i, j) for i in range(TERMS) for j in range(TERMS) if i + j < TERMS]  # those of 24 bits
    assert sorted(zip(DY_TERMS, WEIGHT_TERMS, strict=True)) == products
    of_one_term = list(zip(DY_TERMS[-TERMS:], WEIGHT_TERMS[-TERMS:], strict=True))  # of a BF16 weight
    assert sorted(of_one_term) == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize(("dtype", "first"), [(torch.float32, 0), (torch.bfloat16, -TERMS)], ids=str)
def test_dx_is_as_close_as_its_rounding_where_products_cancel(dtype: torch.dtype, first: int):
    dweights, logits, experts, weight = canceling(100, 256, 64)
    weight = weight.to(dtype)
    dy = route_backward(dweights, None, logits, experts, "softmax", False, 1.0)
    of_dy, of_weight = bfloat16_terms(dy.mT, DY_TERMS[first:]).mT, bfloat16_terms(weight, WEIGHT_TERMS[first:])
    assert_as_close_as_rounded((of_dy.float() @ of_weight.float()).bfloat16(), dy, weight)


GATE = {"x": tensor(5, 4), "weight": tensor(E, 4), "bias": None, **dict(zip("kgtb", (4, 4, 2, 2), strict=True))}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": tensor(5, 4).double()}, TypeError, "x must be float32"),
        ({"weight": tensor(E, 4).long()}, TypeError, "weight must be float32"),
        ({"x": tensor(5, 4, 2)}, ValueError, "x must be a matrix"),
        ({"weight": tensor(E, 6)}, ValueError, r"x \(5, 4\) must end in the D = 6"),
        ({"weight": tensor(0, 4)}, ValueError, "weight must have from 1 to 4096 experts, not 0"),
        ({"k": 7}, ValueError, "n_chosen must be from 1 to 6, not 7"),
        ({"g": 5}, ValueError, "n_group must divide the 12 experts of weight, not be 5"),
        ({"bias": torch.zeros(E).double()}, TypeError, "bias must be float32"),
        ({"bias": torch.zeros(5)}, ValueError, r"bias must be \(12,\), not \(5,\)"),
        ({"scoring_func": "tanh"}, ValueError, "scoring_func must be sigmoid or softmax, not 'tanh'"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], error, message: str):
    arguments = {**GATE, "scoring_func": "sigmoid", "norm_topk_prob": True, "factor": 1.0} | changes
    with pytest.raises(error, match=message):
        gate(*arguments.values())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dweights": tensor(5, 2).bfloat16()}, TypeError, "dweights must be float32"),
        ({"dweights": tensor(5, 3)}, ValueError, r"dweights must be \(5, 2\), not \(5, 3\)"),
        ({"dlogits": tensor(4, E)}, ValueError, r"dlogits must be \(5, 12\), not \(4, 12\)"),
        ({"logits": tensor(4, E)}, ValueError, r"logits must be \(5, 12\), not \(4, 12\)"),
        ({"experts": tensor(5, 2)}, TypeError, "experts must be int64, not torch.float32"),
        ({"experts": torch.zeros(5, 13).long()}, ValueError, r"experts must be \[5, K\] with K from 1 to 12"),
    ],
    ids=str,
)
def test_gradients_that_do_not_fit_are_refused(changes: dict[str, Any], error, message: str):
    arguments = {"dweights": tensor(5, 2), "dlogits": None, "logits": tensor(5, E), "experts": torch.zeros(5, 2).long()}
    with pytest.raises(error, match=message):
        gate_backward(*(arguments | changes).values(), tensor(5, 4), tensor(E, 4), "sigmoid", True, 1.0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((tensor(4, 5).long(), [0]), TypeError, "t must be float32"),
        ((tensor(4), [0]), ValueError, r"t must be a matrix, not \(4,\)"),
        ((tensor(4, 5), [0, 3]), ValueError, r"order must name terms from 0 to 2, not be \[0, 3\]"),
        ((tensor(4, 5), []), ValueError, r"order must name terms from 0 to 2, not be \[\]"),
    ],
)
def test_terms_that_cannot_be_made_are_refused(arguments, error, message: str):
    with pytest.raises(error, match=message):
        bfloat16_terms(*arguments)


def test_the_highest_scores_are_chosen_in_their_order():
    scores = torch.tensor([[0.1, 0.9, 0.5, 0.7], [4.0, 3.0, 2.0, 1.0]])
    assert top_experts(scores, 3, 1, 1, 1).tolist() == [[1, 3, 2], [0, 1, 2]]


def test_among_equal_scores_the_lower_index_comes_first():
    assert top_experts(torch.tensor([[0.0, 1.0, -0.0, 1.0, 0.0]]), 4, 1, 1, 1).tolist() == [[1, 3, 0, 2]]


def test_experts_come_from_the_groups_with_the_highest_sums():
    scores = torch.tensor([[9.0, 0.0, 6.0, 6.0, 5.0, 5.0]])  # sums of two: 9, 12, 10
    assert top_experts(scores, 2, 3, 1, 2).tolist() == [[2, 3]]
    assert top_experts(scores, 2, 3, 1, 1).tolist() == [[0, 1]]
    assert top_experts(scores, 4, 3, 2, 2).tolist() == [[2, 3, 4, 5]]


def test_negative_scores_of_a_chosen_group_are_above_others():
    assert top_experts(torch.tensor([[-1.0, -2.0, -3.0, -4.0]]), 2, 2, 1, 2).tolist() == [[0, 1]]


def test_infinitely_negative_scores_of_a_chosen_group_are_above_others():
    scores = torch.tensor([[0.1, 0.2, 5.0, -torch.inf], [0.1, 0.2, -torch.inf, 5.0]])
    assert top_experts(scores, 2, 2, 1, 1).tolist() == [[2, 3], [3, 2]]


@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 99))
def test_without_ties_it_is_torchs_top_k(experts: int, tokens: int, seed: int):
    scores = torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))
    k = 1 + seed % experts
    assert torch.equal(top_experts(scores, k, 1, 1, 1), scores.topk(k).indices)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_chosen": 5}, "n_chosen must be from 1 to 4, not 5"),
        ({"n_chosen": 0}, "n_chosen must be from 1 to 4, not 0"),
        ({"n_group": 3}, "n_group must divide the 8 experts of scores, not be 3"),
        ({"topk_group": 5}, "topk_group must be from 1 to n_group, 4, not 5"),
        ({"best": 3}, "best must be 1 or 2 and at most the 2 experts of a group, not 3"),
        ({"n_group": 8, "topk_group": 4}, "best must be 1 or 2 and at most the 1 experts of a group, not 2"),
        ({"scores": torch.zeros(8)}, r"scores must be a matrix \[T, E\] with E from 1 to 4096, not \(8,\)"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(changes, message: str):
    settings = {"scores": torch.zeros(2, 8), "n_chosen": 2, "n_group": 4, "topk_group": 2, "best": 2} | changes
    with pytest.raises(ValueError, match=message):
        top_experts(**settings)


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match=r"scores must be float32, not torch.float16"):
        top_experts(torch.zeros(2, 8, dtype=torch.float16), 2, 1, 1, 1)


NUMBERS = 4 * torch.randn(70_000, generator=torch.Generator().manual_seed(0))


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(first=st.integers(0, 40), n=st.one_of(st.integers(1, 100), st.integers(32_000, 69_000)))
def test_the_bits_of_the_sigmoid_depend_on_its_element_alone(first, n):
    assert torch.equal(sigmoid(NUMBERS[first : first + n].clone()), sigmoid(NUMBERS)[first : first + n])


def test_the_sigmoid_is_torchs_but_for_rounding():
    torch.testing.assert_close(sigmoid(NUMBERS), torch.sigmoid(NUMBERS), rtol=2**-21, atol=0)


def test_limits_of_the_sigmoid():
    x = torch.tensor([float("-inf"), -200.0, 0.0, 200.0, float("inf"), float("nan")])
    assert torch.equal(sigmoid(x)[:-1], torch.tensor([0.0, 0.0, 0.5, 1.0, 1.0]))
    assert sigmoid(x)[-1].isnan()
