"""Tests of the properties that all operators share in torch: registration, versions, autograd, compilation."""

import io
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from octile.ops.matmul import matmul_nt, matmul_nt_out
from octile.ops.operator import LIBRARIES, Operator, operator
from octile.ops.permute import unpermute
from octile.ops.quantize import quantize

TILE = (1, 128)


def define_plus() -> Operator:
    """out += x, without a kernel for any device."""

    @operator(writes=("out",))
    def plus(out: Tensor, x: Tensor) -> None:
        """Adds."""
        out.data.add_(x)  # .data hides the writing from torch, as a kernel does

    @plus.register_fake
    def _(out, x):
        return None

    return plus


@pytest.fixture
def plus() -> Iterator[Operator]:
    yield define_plus()
    del LIBRARIES["plus"]


def operands() -> tuple[object, ...]:
    def operand(rows: int) -> tuple[object, ...]:
        x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows))
        return *quantize(x, *TILE, "e4m3", False), TILE

    return *operand(5), *operand(7)


def test_it_keeps_the_name_and_the_docstring_of_its_reference():
    assert quantize.__name__ == "quantize"
    assert quantize.__doc__.startswith("Quantize matrices")


@pytest.mark.oldest_torch
def test_it_is_found_by_name_among_torchs_operators():
    assert torch.ops.octile.quantize.default is quantize.overload


def test_arguments_may_be_named():
    x = torch.randn(5, 256)
    named = quantize(x, block_rows=1, block_cols=128, fmt="int8", power_of_2=False)
    assert torch.equal(named[0], quantize(x, 1, 128, "int8", False)[0])


def test_a_reloaded_module_defines_its_operators_again(plus):
    define_plus()(out := torch.zeros(3), torch.ones(3))
    assert out.tolist() == [1, 1, 1]


def test_a_removed_operator_is_not_registered():
    define_plus()
    del LIBRARIES["plus"]
    assert not hasattr(torch.ops.octile, "plus")


def test_a_kernel_replaces_the_reference_on_its_device(plus):
    seen = []
    plus.register_kernel("cpu")(lambda out, x: seen.append(x))
    plus(torch.zeros(3), x := torch.ones(3))
    assert seen[0] is x


@pytest.fixture
def on_cuda(plus, monkeypatch) -> Operator:
    """An operator with a CUDA kernel, on a machine whose tensors seem to be on a GPU. Torch's dispatcher refuses it."""
    monkeypatch.setattr(Tensor, "is_cuda", True)
    plus.register_kernel("cuda")(plus.reference)
    plus.overload = dispatched
    return plus


class DispatchedError(RuntimeError):
    pass


def dispatched(*_, **__):
    raise DispatchedError


class Subclass(Tensor):
    pass


class Observer(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class FunctionObserver(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("context", [nullcontext, torch.no_grad, torch.inference_mode])
def test_an_eager_call_on_a_gpu_calls_the_kernel_without_the_dispatcher(on_cuda, context):
    with context():
        on_cuda(out := torch.zeros(3), torch.nn.Parameter(torch.ones(3), requires_grad=False))
        assert out.tolist() == [1, 1, 1]


def test_without_the_dispatcher_writing_counts_as_a_new_version(on_cuda):
    on_cuda(out := torch.zeros(3), torch.ones(3))
    assert out._version == 1


def test_without_the_dispatcher_an_argument_that_requires_grad_is_refused(on_cuda):
    with pytest.raises(RuntimeError, match=r"octile::plus has no gradient"):
        on_cuda(torch.zeros(3), torch.ones(3, requires_grad=True))


@pytest.mark.parametrize(
    "context",
    [Observer, FunctionObserver, FakeTensorMode, lambda: torch.device("cpu"), lambda: FlopCounterMode(display=False),
     enable_python_dispatcher, torch.profiler.profile, torch.autograd.profiler.profile],
)  # fmt: skip
def test_modes_and_profilers_see_a_call_in_the_dispatcher(on_cuda, context):
    out, x = torch.zeros(3), torch.ones(3)
    with context(), pytest.raises(DispatchedError):
        on_cuda(out, x)


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.functionalize])
def test_transforms_see_a_call_in_the_dispatcher(on_cuda, transform):
    with pytest.raises(DispatchedError):
        transform(on_cuda)(torch.zeros(2, 3), torch.ones(2, 3))


def test_gradients_of_functions_see_a_call_in_the_dispatcher(on_cuda):
    with pytest.raises(DispatchedError):
        torch.func.grad(lambda x: on_cuda(torch.zeros(3), x))(torch.ones(3))


def test_a_trace_sees_a_call_in_the_dispatcher(on_cuda):
    with pytest.raises(DispatchedError):
        torch.jit.trace(lambda x: on_cuda(torch.zeros(3), x), torch.ones(3))


@pytest.mark.parametrize(
    "x",
    [torch.ones(3).as_subclass(Subclass), [1.0], torch.ones(3, dtype=torch.complex64).conj().imag],
    ids=["subclass", "no tensor", "negated lazily"],
)
def test_arguments_that_are_not_plain_tensors_go_to_the_dispatcher(on_cuda, x):
    with pytest.raises((DispatchedError, TypeError)) as error:
        on_cuda(torch.zeros(3), x)
    assert error.type is (TypeError if isinstance(x, list) else DispatchedError)


def test_named_arguments_go_to_the_dispatcher(on_cuda):
    with pytest.raises(DispatchedError):
        on_cuda(torch.zeros(3), x=torch.ones(3))


@pytest.mark.parametrize("numbers", [(1.0, 1, True), (1, 1, True), (1.0, True, True), (1.0, 1, 1)])
def test_numbers_that_must_be_converted_go_to_the_dispatcher(monkeypatch, numbers):
    @operator()
    def scale(x: Tensor, factor: float, times: int, is_negative: bool) -> Tensor:
        """Multiplies."""
        return x * factor**times * (-1 if is_negative else 1)

    try:
        monkeypatch.setattr(Tensor, "is_cuda", True)
        scale.register_kernel("cuda")(scale.reference)
        scale.overload = dispatched
        is_exact = [type(number) for number in numbers] == [float, int, bool]
        with nullcontext() if is_exact else pytest.raises(DispatchedError):
            scale(torch.ones(3), *numbers)
    finally:
        del LIBRARIES["scale"]


def test_tensors_on_another_device_go_to_the_dispatcher(on_cuda, monkeypatch):
    monkeypatch.setattr(Tensor, "is_cuda", False)
    with pytest.raises(DispatchedError):
        on_cuda(torch.zeros(3), torch.ones(3))


def test_writing_counts_as_a_new_version(plus):
    out = torch.zeros(3)
    plus(out, torch.ones(3))
    assert (out.tolist(), out._version) == ([1, 1, 1], 1)


def test_tensors_saved_for_backward_may_not_be_overwritten(plus):
    factor, kept = torch.ones(3, requires_grad=True), torch.ones(3)
    product = factor * kept
    plus(kept, torch.ones(3))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_inference_tensors_are_written_in_inference_mode(plus):
    with torch.inference_mode():
        plus(out := torch.zeros(3), torch.ones(3))
        assert out.tolist() == [1, 1, 1]


@pytest.mark.oldest_torch
@pytest.mark.parametrize("call", [quantize, torch.compile(quantize, backend="eager")], ids=["eager", "compiled"])
def test_an_argument_that_requires_grad_is_refused_by_name(call):
    with pytest.raises(RuntimeError, match=r"octile::quantize has no gradient: octile\.nn\.Linear"):
        call(torch.randn(5, 256, requires_grad=True), *TILE, "e4m3", False)


def test_an_optional_tensor_that_requires_grad_is_refused_too():
    y, row_ids = torch.ones(2, 4), torch.tensor([[0, 1]], dtype=torch.int32)
    weight = torch.ones(1, 2)
    assert unpermute(y, row_ids, None, weight).tolist() == [[2.0] * 4]
    with pytest.raises(RuntimeError, match=r"octile::unpermute has no gradient"):
        unpermute(y, row_ids, None, weight.requires_grad_())


def test_without_grad_mode_a_parameter_is_an_argument_like_others():
    with torch.no_grad():
        data, _ = quantize(torch.nn.Parameter(torch.randn(5, 256)), *TILE, "e4m3", False)
    assert not data.requires_grad


def test_meta_tensors_give_meta_tensors():
    product = matmul_nt(*(t.to("meta") if isinstance(t, Tensor) else t for t in operands()), torch.bfloat16)
    assert (product.device.type, product.shape, product.dtype) == ("meta", (5, 7), torch.bfloat16)


@pytest.mark.oldest_torch
@pytest.mark.slow
def test_a_compiled_graph_gives_the_strides_of_the_eager_one():
    def scale(x):
        return quantize(x, *TILE, "e4m3", False)[1]

    x = torch.randn(6, 300)
    found, expected = torch.compile(scale, fullgraph=True)(x), scale(x)
    assert torch.equal(found, expected)
    assert found.stride() == expected.stride() == (1, 8)


@pytest.mark.oldest_torch
@pytest.mark.slow
def test_a_compiled_graph_writes_into_its_input():
    def step(out, *operands):
        matmul_nt_out(out, *operands, True)
        return out * 2

    outs = torch.ones(5, 7), torch.ones(5, 7)
    expected = step(outs[0], *operands())
    assert torch.equal(torch.compile(step, fullgraph=True)(outs[1], *operands()), expected)
    assert torch.equal(*outs)
    assert outs[1]._version > 0


@pytest.mark.oldest_torch
@pytest.mark.slow
def test_a_compiled_graph_may_write_into_its_intermediates():
    def step(*operands):
        out = torch.zeros(5, 7)
        matmul_nt_out(out, *operands, True)
        kept = out + 0
        matmul_nt_out(out, *operands, True)
        return kept, out

    for found, expected in zip(torch.compile(step, fullgraph=True)(*operands()), step(*operands()), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.oldest_torch
def test_a_kernel_is_not_traced_where_compilation_gave_up_on_its_caller(plus):
    compiling = []

    @plus.register_kernel("cpu")
    def _(out, x):
        compiling.append(torch.compiler.is_compiling())
        out.data.add_(x.sin())

    @torch.compile(backend="eager")
    def step(out, x):
        for _ in range(2):  # a break inside a loop: the rest of the function runs in Python
            torch._dynamo.graph_break()
            plus.overload(out, x)

    step(torch.zeros(3), torch.ones(3))
    assert compiling == [False, False]


@pytest.mark.oldest_torch
def test_an_exported_program_is_saved_and_loaded():
    class Model(torch.nn.Module):
        def forward(self, x):
            return quantize(x, *TILE, "e4m3", False)[1]

    x, file = torch.randn(5, 256), io.BytesIO()
    torch.export.save(torch.export.export(Model(), (x,)), file)
    file.seek(0)
    assert torch.equal(torch.export.load(file).module()(x), Model()(x))


def test_vmap_is_refused_where_an_argument_is_written():
    factors = operands()

    def write(out):
        matmul_nt_out(out, *factors, False)
        return out

    with pytest.raises(RuntimeError, match="octile::matmul_nt_out"):
        torch.vmap(write)(torch.zeros(3, 5, 7))
