"""What lies between GEMMs in high precision: formulas in FP32, rounded once, with right second derivatives."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

from octile.nn import MLP, RMSNorm, pre_norm
from octile.nn.conversion import apply_recipe
from octile.nn.fused.elementwise import rms_norm, swiglu
from octile.nn.moe import Experts
from octile.recipe import Recipe

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def torchs_swiglu(*projections: Tensor) -> Tensor:
    gate, up = projections if len(projections) == 2 else projections[0].chunk(2, -1)
    return F.silu(gate) * up


def gradients(function: Callable[..., Tensor], inputs: list[Tensor], dy: Tensor | None = None) -> list[Tensor]:
    """The result, and the gradients of the inputs."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = function(*leaves)
    y.backward(torch.ones_like(y) if dy is None else dy)
    return [y.detach(), *(t.grad for t in leaves)]


def second_derivatives(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    first = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
    return list(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))


SHAPES = {"one tensor": [(3, 5, 14)], "two": [(3, 5, 7), (3, 5, 7)], "vectors": [(7,), (7,)], "no rows": [(0, 8)]}
every_shape = pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)


@every_shape
def test_swiglu_in_float32_is_torchs_but_for_its_exponential(shapes: list[tuple[int, ...]]):
    inputs = [torch.randn(shape) for shape in shapes]
    for found, expected in zip(gradients(swiglu, inputs), gradients(torchs_swiglu, inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=2**-21, atol=0)


@every_dtype
@every_shape
def test_swiglu_rounds_each_result_once(shapes: list[tuple[int, ...]], dtype: torch.dtype):
    inputs = [(3 * torch.randn(shape)).to(dtype) for shape in shapes]
    dy = torch.randn(torchs_swiglu(*inputs).shape).to(dtype)
    found, exact = gradients(swiglu, inputs, dy), gradients(torchs_swiglu, [t.float() for t in inputs], dy.float())
    for ours, theirs in zip(found, exact, strict=True):
        if dtype == torch.float32:  # torch's exponential has other last bits
            torch.testing.assert_close(ours, theirs, rtol=2**-21, atol=0)
        else:
            assert torch.equal(ours, theirs.to(dtype))


@pytest.mark.parametrize("layer", ["MLP", "Experts"])
def test_feed_forward_layers_round_swiglu_once(layer: str, monkeypatch: pytest.MonkeyPatch):
    """h, which the down-projection reads, is FP32's rounded to BF16."""
    x, seen = torch.randn(6, 32).bfloat16(), []
    if layer == "MLP":
        m = apply_recipe(MLP(32, 48), Recipe.bf16())
        gate, up = m.gate_proj(x), m.up_proj(x)
        m.down_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        m(x)
    else:
        from octile.nn import moe

        m, offs, linear = Experts(2, 32, 48), torch.tensor([4, 6], dtype=torch.int32), moe.grouped_linear
        m.use_recipe(Recipe.bf16())
        gate, up = linear(x, m.gate_up, offs, m.recipe).chunk(2, -1)
        monkeypatch.setattr(moe, "grouped_linear", lambda h, *args: seen.append(h) or linear(h, *args))
        m(x, offs)
    assert torch.equal(seen[-1], (F.silu(gate.float()) * up.float()).bfloat16())


@pytest.mark.parametrize(
    "function",
    [lambda x: swiglu(x), lambda x: swiglu(x, 2 * x), lambda x: swiglu(y := 3 * x, y)],
    ids=["one tensor", "two", "the same twice"],
)
def test_second_derivatives_of_swiglu_are_right(function: Callable[[Tensor], Tensor], monkeypatch):
    x = [torch.randn(5, 14)]
    found = second_derivatives(function, x)
    monkeypatch.setitem(function.__globals__, "swiglu", torchs_swiglu)
    for ours, theirs in zip(found, second_derivatives(function, x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_an_input_computed_from_the_other_is_differentiated_once():
    def chained(f: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda gate: f(gate, gate.sin())

    x = [torch.randn(5, 7)]
    for ours, theirs in zip(
        second_derivatives(chained(swiglu), x), second_derivatives(chained(torchs_swiglu), x), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_only_the_inputs_that_require_a_gradient_get_one():
    gate, up = torch.randn(5, 7), torch.randn(5, 7, requires_grad=True)
    for create_graph in (False, True):
        (found,) = torch.autograd.grad(swiglu(gate, up).sum(), up, create_graph=create_graph)
        torch.testing.assert_close(found, F.silu(gate))


# RMSNorm


def torchs_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.float(), weight.shape, weight.float(), 1e-6).to(x.dtype)


def norm_and_residual(x: Tensor, weight: Tensor) -> Tensor:
    y, residual = rms_norm(x, weight, 1e-6)
    return residual + y.sin()


@every_dtype
@pytest.mark.parametrize("shape", [(3, 5, 20), (20,), (0, 8)], ids=str)
def test_a_norm_is_torchs_in_float32_and_rounded_once(shape: tuple[int, ...], dtype: torch.dtype):
    x, weight, dy = torch.randn(shape).to(dtype), torch.rand(shape[-1]) + 0.5, torch.randn(shape).to(dtype)
    y, dx, dweight = gradients(lambda *t: rms_norm(*t, 1e-6)[0], [x, weight], dy)
    exact, exact_dx, exact_dweight = gradients(torchs_norm, [x.float(), weight], dy.float())
    assert torch.equal(y, exact.to(dtype))
    assert (dx.dtype, dweight.dtype) == (dtype, torch.float32)
    spacing = torch.finfo(dtype).eps * exact_dx.abs() + 1e-5
    assert ((dx.float() - exact_dx).abs() <= spacing).all()
    torch.testing.assert_close(dweight, exact_dweight, rtol=1e-5, atol=1e-5)


def test_the_residuals_gradient_is_added_before_rounding():
    """FP8's fused norm does the same, so BF16 must not round more often."""
    x, weight, dy, dresidual = torch.randn(4, 50, 64).unbind(0)
    x, weight, dy, dresidual = x.bfloat16().requires_grad_(), weight[0], dy.bfloat16(), dresidual.bfloat16()
    (found,) = torch.autograd.grad(rms_norm(x, weight, 1e-6), x, (dy, dresidual))
    wide = x.detach().float().requires_grad_()
    (alone,) = torch.autograd.grad(torchs_norm(wide, weight), wide, dy.float())
    assert (found == (alone + dresidual.float()).bfloat16()).float().mean() > 0.99  # up to the order of FP32 sums
    assert (found == alone.bfloat16() + dresidual).float().mean() < 0.95


@pytest.mark.parametrize("read", ["norm", "residual", "both"])
def test_either_result_of_a_norm_may_be_unused(read: str):
    x, weight = torch.randn(5, 20, requires_grad=True), torch.rand(20, requires_grad=True)
    y, residual = rms_norm(x, weight, 1e-6)
    (0 * y.sum() + residual.sum() if read == "both" else (y if read == "norm" else residual).sum()).backward()
    expected = torch.autograd.grad(torchs_norm(x, weight).sum(), x)[0] if read == "norm" else torch.ones(5, 20)
    torch.testing.assert_close(x.grad, expected)
    assert (weight.grad is None) == (read == "residual")


def test_second_derivatives_of_a_norm_are_right():
    x, weight = torch.randn(5, 20), torch.rand(20) + 0.5
    expected = second_derivatives(lambda x, weight: x + torchs_norm(x, weight).sin(), [x, weight])
    for ours, theirs in zip(second_derivatives(norm_and_residual, [x, weight]), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_norm_before_a_layer_that_is_not_fused_returns_both_uses_of_x():
    x, norm, layer = torch.randn(2, 5, 20, requires_grad=True), RMSNorm(20), MLP(20, 24)
    residual, y = pre_norm(x, norm, layer)
    assert torch.equal(residual, x)
    assert torch.equal(y, norm(x))
    assert y.grad_fn is residual.grad_fn


def test_a_norm_with_hooks_is_called():
    norm, calls = RMSNorm(20), []
    norm.register_forward_hook(lambda *_: calls.append(1))
    pre_norm(torch.randn(2, 5, 20), norm, MLP(20, 24))
    assert calls == [1]


# Where torch's functions compute it


def test_other_dtypes_are_torchs():
    gate, up = torch.randn(2, 5, 7).double()
    assert torch.equal(swiglu(gate, up), F.silu(gate) * up)
    assert swiglu(gate.float(), up).dtype == torch.float64
    assert swiglu(gate.half(), up.bfloat16()).dtype == torch.float32


def test_a_norm_of_other_dtypes_is_in_float32():
    x, weight = torch.randn(5, 20).double(), torch.rand(20).double()
    y, residual = rms_norm(x, weight, 1e-6)
    assert residual is x
    assert torch.equal(y, torchs_norm(x, weight))


def test_shapes_are_broadcast_as_torch_does():
    gate, up = torch.randn(5, 7), torch.randn(7)
    assert torch.equal(swiglu(gate, up), F.silu(gate) * up)


def test_fake_and_meta_tensors_have_the_results_shape_and_dtype():
    x = torch.randn(3, 8, device="meta", dtype=torch.bfloat16)
    with FakeTensorMode():
        fake = swiglu(torch.randn(3, 8).bfloat16())
    for y in (swiglu(x), fake):
        assert (y.shape, y.dtype) == ((3, 4), torch.bfloat16)


def test_transforms_of_torch_func_work():
    gate, up = torch.randn(2, 5, 7)
    found = torch.func.grad(lambda t: swiglu(t, up).sum())(gate)
    torch.testing.assert_close(found, torch.autograd.grad(swiglu(g := gate.requires_grad_(), up).sum(), g)[0])
    each = torch.func.vmap(lambda row: swiglu(row))(torch.randn(5, 6))
    assert each.shape == (5, 3)


@pytest.mark.oldest_torch
@pytest.mark.slow
def test_a_compiled_layer_is_one_graph_with_the_same_results():
    layer, x = torch.nn.Sequential(RMSNorm(16), MLP(16, 24)), torch.randn(5, 16, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for inputs in (x, x.bfloat16()):
        layer.to(inputs.dtype)
        found, expected = (torch.autograd.grad(f(inputs).sum(), [x, *layer.parameters()]) for f in (compiled, layer))
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.oldest_torch
def test_swiglu_of_two_tensors_is_one_graph_without_gradients():
    gate, up = torch.randn(5, 16), torch.randn(5, 16)
    with torch.no_grad():
        found = torch.compile(swiglu, fullgraph=True, backend="aot_eager")(gate, up)
    assert torch.equal(found, swiglu(gate, up))
