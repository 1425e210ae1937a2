"""On a GPU the gate's GEMMs are as accurate as in FP32, and choice, weights and gradients are those of the CPU."""

from typing import Any

import pytest
import torch

from octile.kernels.cuda.gate import choice, few_rows
from octile.kernels.terms import DY_TERMS, TERMS
from octile.ops.gate import (
    bfloat16_terms,
    gate,
    gate_backward,
    route,
    route_backward,
    top_experts,
)
from tests.nn.gates import V2, V2_LITE, V3
from tests.nn.gates import gate as gate_module
from tests.ops.test_gate import assert_as_close_as_rounded, canceling

T, E, D = 300, 64, 7168
MANY = 2100  # tokens, of which the gate's own kernels multiply, on Hopper for up to 64 experts
SETTINGS: dict[str, tuple[Any, ...]] = {
    "V3": (8, 8, 4, 2, "sigmoid", True, 2.5),
    "V2": (6, 8, 3, 1, "softmax", False, 16.0),
    "medium": (6, 1, 1, 1, "sigmoid", True, 2.5),
    "softmax, normalized": (4, 1, 1, 1, "softmax", True, 1.0),
}
every_setting = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
by_either = pytest.mark.parametrize(
    ("t", "n_experts"), [(T, E), (MANY, 16), (MANY, E)], ids=["torch's GEMM", "own GEMM", "Hopper's GEMM"]
)


def operands(
    weight: torch.dtype = torch.float32, x: torch.dtype = torch.bfloat16, t: int = T, n_experts: int = E
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(size, generator=generator) for size in ((t, D), (n_experts, D), (t, 6), (t, n_experts))]
    return drawn[0].to(x).cuda(), (drawn[1] / 64).to(weight).cuda(), *(t.cuda() for t in drawn[2:])


@pytest.mark.parametrize(("t", "n_experts"), [(T, 16), (T, E), (MANY, 12), (MANY, 16), (MANY, 24), (MANY, E)])
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16], ids=str)
def test_the_gemms_are_as_accurate_as_in_float32(weight: torch.dtype, n_experts: int, t: int):
    x, w, _, dy = operands(weight, t=t, n_experts=n_experts)
    _, experts, logits = gate(x, w, None, *SETTINGS["medium"])
    dx, dw = gate_backward(None, dy, logits, experts, x, w, "sigmoid", True, 2.5)
    assert (logits.dtype, dx.dtype, dw.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    exact = x.double() @ w.double().mT, dy.double().mT @ x.double()
    for found, true in zip((logits, dw), exact, strict=True):
        # Tensor cores truncate where FP32 rounds: D / 16 times by up to 2⁻²³ of the accumulator.
        assert (found.double() - true).norm() <= 1e-5 * true.norm()
    true = dy.double() @ w.double()
    assert (dx.double() - true).norm() <= 1.01 * (true.bfloat16().double() - true).norm()


@by_either
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dx_is_as_close_as_its_rounding_where_products_cancel(weight_dtype: torch.dtype, t: int, n_experts: int):
    from octile.kernels.triton import gate as kernel

    # Of 1e-3 the sums of tensor cores, which truncate, would be farther; three products are, by 4%, of 1e-2, too.
    dweights, logits, experts, weight = (tensor.cuda() for tensor in canceling(t, D, n_experts, spread=1e-2))
    weight, settings = weight.to(weight_dtype), ("softmax", False, 1.0)
    x = torch.zeros(t, D, dtype=torch.bfloat16, device="cuda")
    dx, _ = gate_backward(dweights, None, logits, experts, x, weight, *settings)
    dy = kernel.launch_backward(dweights, None, logits, experts, *settings)
    assert_as_close_as_rounded(dx, dy, weight)


@by_either
@pytest.mark.parametrize("x", [torch.bfloat16, torch.float32], ids=str)
@every_setting
def test_the_choice_and_the_weights_are_those_of_the_cpu(
    settings: tuple[Any, ...], x: torch.dtype, t: int, n_experts: int
):
    values, w, *_ = operands(x=x, t=t, n_experts=n_experts)
    bias = torch.linspace(-0.2, 0.2, n_experts) if settings[4] == "sigmoid" else None
    arguments = values, w, None if bias is None else bias.cuda(), *settings
    gate(*arguments)  # compiles the kernels
    torch.cuda.set_sync_debug_mode("error")
    weights, experts, logits = gate(*arguments)
    torch.cuda.set_sync_debug_mode("default")
    expected_weights, expected_experts = route(logits.cpu(), bias, *settings)
    assert torch.equal(experts.cpu(), expected_experts)
    torch.testing.assert_close(weights.cpu(), expected_weights, rtol=2.0**-18, atol=0)


@every_setting
def test_experts_are_chosen_by_logits_in_parts(settings: tuple[Any, ...]):
    from octile.kernels.triton import gate as kernel

    parts, bias = torch.randn(T, 3 * E, generator=torch.Generator().manual_seed(0)), torch.linspace(-0.2, 0.2, E)
    logits = parts[:, :E] + parts[:, E : 2 * E] + parts[:, 2 * E :]
    weights, experts, found = kernel.launch(parts.cuda(), bias.cuda(), *settings, E)
    expected_weights, expected_experts = route(logits, bias, *settings)
    assert torch.equal(found.cpu(), logits)
    assert torch.equal(experts.cpu(), expected_experts)
    torch.testing.assert_close(weights.cpu(), expected_weights, rtol=2.0**-18, atol=0)


@every_setting
@pytest.mark.parametrize(("dtype", "d"), [(torch.bfloat16, 1096), (torch.bfloat16, 1100), (torch.float32, 1100)])
def test_a_row_of_the_row_invariant_gate_has_the_same_bits_among_any_others(settings: tuple[Any, ...], dtype, d: int):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1000, d, generator=generator).to(dtype).cuda()
    w = torch.randn(E, d, generator=generator).bfloat16().cuda()
    together = gate(x, w, None, *settings, True)
    torch.testing.assert_close(together[2], x.float() @ w.float().mT, rtol=1e-4, atol=1e-3)
    for first, end in ((0, 1), (3, 5), (7, 200), (999, 1000)):
        for weight in (w, w.float()):
            found = gate(x[first:end], weight, None, *settings, True)
            for rows, of_all in zip(found, together, strict=True):
                assert torch.equal(rows, of_all[first:end])


@pytest.mark.parametrize("setting", ["V3", "softmax, normalized"])
@pytest.mark.parametrize("d", [1096, 2048, 5120, 7168])
@pytest.mark.parametrize("n_experts", [64, 160, 256])
@pytest.mark.parametrize("t", [2, 8, 9, 33, 64, 65, 200, 256])
def test_few_rows_of_the_row_invariant_gate_have_the_bits_of_separate_kernels(
    t: int, n_experts: int, d: int, setting: str
):
    x, w = of_mixed_magnitudes(t, d), of_mixed_magnitudes(n_experts, d)
    bias = torch.linspace(-0.2, 0.2, n_experts).cuda() if setting == "V3" else None
    assert_bits_of_separate_kernels(x, w, bias, SETTINGS[setting])


@every_setting
def test_nan_and_infinity_in_few_rows_of_the_row_invariant_gate_are_those_of_separate_kernels(settings):
    x, w = of_mixed_magnitudes(33, 2048), of_mixed_magnitudes(E, 2048)
    x[0, 5], x[9], x[17, 2045] = float("nan"), float("inf"), float("-inf")
    assert_bits_of_separate_kernels(x, w, None, settings)


def of_mixed_magnitudes(rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    exponents = torch.randint(-20, 8, (rows, columns), generator=generator)
    return (torch.randn(rows, columns, generator=generator) * exponents.float().exp2()).bfloat16().cuda()


def assert_bits_of_separate_kernels(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, settings: tuple[Any, ...]
) -> None:
    """Compare one launch of Hopper's gate with Triton's products in parts and Hopper's choice by them; NaN is equal."""
    from octile.kernels.triton import gate as kernel

    if (why := few_rows.why_unsupported(x, w, bias, *settings, row_invariant=True)) is not None:
        pytest.skip(why)
    found = few_rows.launch(x, w, bias, *settings, row_invariant=True)
    expected = choice.launch(kernel.row_invariant_products(x, w), bias, settings, len(w))
    different = []
    for ours, theirs in zip(found, expected, strict=True):
        bits = [t if t.dtype == torch.int64 else t.view(torch.int32) for t in (ours, theirs)]
        different.append(((bits[0] != bits[1]) & ~(ours.isnan() & theirs.isnan())).any(1).nonzero().flatten().tolist())
    of_weights, of_experts, of_logits = different
    assert not of_logits, f"logits of the rows {of_logits} differ"
    assert not of_experts, f"the logits are equal, but not the experts of the rows {of_experts}"
    assert not of_weights, f"logits and experts are equal, but not the weights of the rows {of_weights}"


@every_setting
def test_ties_zeros_and_nan_are_ordered_as_on_the_cpu(settings: tuple[Any, ...]):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(T, E, generator=generator).abs().mul(4).round() / 2  # equal sums only of equal affinities
    logits[::3] *= -0.0
    logits[1::7, 5], logits[2::7, 9] = float("nan"), float("-inf")
    if settings[4] == "softmax" and settings[2] < settings[1]:
        logits[:, 1:] = logits[:, :1]  # of softmax in another rounding, only equal rows have the same ties
    identity = torch.eye(E)
    found = gate(logits.nan_to_num(0, 0, 0).cuda(), identity.cuda(), None, *settings)
    assert torch.equal(found[1].cpu(), route(found[2].cpu(), None, *settings)[1])

    from octile.kernels.triton import gate as kernel

    _, experts, _ = kernel.launch(logits.cuda(), None, *settings, E)
    assert torch.equal(experts.cpu(), route(logits, None, *settings)[1])


@every_setting
@pytest.mark.parametrize("n_experts", [16, E])
def test_the_gate_with_its_own_gemm_orders_ties_zeros_and_nan_as_the_cpu(settings: tuple[Any, ...], n_experts: int):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(MANY, n_experts, generator=generator).abs().mul(4).round().bfloat16() / 2  # as in the test above
    x[::3] *= -0.0
    x[1::7] = float("nan")  # 0 · NaN: all logits of these tokens
    if settings[4] == "softmax" and settings[2] < settings[1]:
        x[:, 1:] = x[:, :1]
    _, experts, logits = gate(x.cuda(), torch.eye(n_experts).cuda(), None, *settings)
    assert torch.equal(experts.cpu(), route(logits.cpu(), None, *settings)[1])


@every_setting
@pytest.mark.parametrize("balanced", [False, True])
def test_the_gradient_of_the_logits_is_that_of_the_cpu(settings: tuple[Any, ...], balanced: bool):
    from octile.kernels.triton import gate as kernel

    generator = torch.Generator().manual_seed(0)
    logits, dlogits = torch.randn(2, T, E, generator=generator)
    experts = route(logits, None, *settings)[1]
    dweights = torch.randn(experts.shape, generator=generator)
    arguments = dweights, dlogits if balanced else None, logits, experts
    on_gpu = [None if t is None else t.cuda() for t in arguments]
    found = kernel.launch_backward(*on_gpu, *settings[4:])
    torch.testing.assert_close(found.cpu(), route_backward(*arguments, *settings[4:]), rtol=2.0**-16, atol=2.0**-17)
    terms = kernel.launch_backward(*on_gpu, *settings[4:], DY_TERMS).unflatten(1, (len(DY_TERMS), -1)).float()
    total = sum(terms[:, DY_TERMS.index(term)] for term in range(TERMS))  # another kernel: sums of softmax in its order
    torch.testing.assert_close(total, found, rtol=2.0**-16, atol=2.0**-17)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0, 1, 0, 0]], ids=str)
def test_terms_are_those_of_the_cpu(order: list[int]):
    t = torch.randn(64, 2048) * torch.exp2(torch.randint(-140, 120, (64, 2048)).float())
    t[0, :4] = torch.tensor([float("inf"), float("nan"), 0.0, -0.0])
    found, expected = bfloat16_terms(t.cuda(), order).cpu(), bfloat16_terms(t, order)
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("settings", [V3, V2, V2_LITE], ids=["V3", "V2", "V2-Lite"])
def test_a_captured_gate_computes_the_same_bits_in_forward_and_backward(settings: dict[str, Any]):
    module = gate_module(**settings).cuda()
    x = torch.randn(200, 32, device="cuda").bfloat16().requires_grad_()

    def step() -> list[torch.Tensor]:
        routing = module(x)
        loss = (routing.weights_TK * torch.linspace(1, 2, 4, device="cuda")).sum() + module.sequence_balance(routing, 2)
        gradients = torch.autograd.grad(loss, [x, module.weight])
        return [t.detach() for t in (*routing, *gradients)]  # a graph that lives on has nodes of another stream

    expected = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@by_either
@every_setting
def test_gradients_are_those_of_the_cpu(settings: tuple[Any, ...], t: int, n_experts: int):
    x, w, dweights, dlogits = operands(t=t, n_experts=n_experts)
    _, experts, logits = gate(x, w, None, *settings)
    arguments = dweights[:, :1].expand(experts.shape), dlogits, logits, experts, x, w
    found = gate_backward(*arguments, *settings[4:])
    expected = gate_backward(*(t.cpu() for t in arguments), *settings[4:])
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.cpu().double() - theirs.double()).norm() <= 2.0**-9 * theirs.double().norm()


@pytest.mark.parametrize("n_experts", [16, 64, 160, 256])
def test_the_experts_with_the_highest_logits_are_chosen(n_experts: int):
    logits = torch.randn(1000, n_experts, device="cuda").mul(64).round() / 64
    _, experts, _ = gate(logits, torch.eye(n_experts, device="cuda"), None, 4, 1, 1, 1, "sigmoid", True, 1.0)
    assert torch.equal(experts, top_experts(logits, 4, 1, 1, 1))
