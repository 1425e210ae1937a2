"""The tensor core model equals its Triton form on a GPU, and the hardware itself on Hopper, bit for bit.

On Hopper: single instructions on millions of operands, and whole GEMMs of octile's kernels.
"""

import pytest
import torch

import octile
from octile.kernels.cuda.gemm.request import why_not_on
from octile.lab import tensor_core, tensor_core_matmul, tensor_core_scaled_matmul
from octile.lab.probe import kernels, products
from octile.lab.probe.compare import cases, compare
from octile.lab.tensor_core.architectures import ARCHITECTURES
from octile.nn.observer import observe_quantization
from octile.scaled import ScaledTensor
from tests.lab.matrices import gemms_of_a_layer, normal, random_bits, same_bits

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
ROWS = [
    pytest.param(arch, a.dtype, b.dtype, id=f"{arch}-{a.name}-{b.name}")
    for arch, rows in ARCHITECTURES.items()
    for row in rows
    if not row.scaled
    for a in row.formats
    for b in row.formats
]


@pytest.mark.parametrize(("arch", "a_dtype", "b_dtype"), ROWS)
@pytest.mark.parametrize("make", [normal, random_bits])
def test_the_triton_form_equals_the_cpu_form(make, arch, a_dtype, b_dtype):
    a, b = make(a_dtype, (70, 160), 0), make(b_dtype, (200, 160), 1)
    c = torch.randn(70, 200)
    on_gpu = tensor_core_matmul(a.cuda(), b.cuda(), c.cuda(), arch)
    assert same_bits(on_gpu.cpu(), tensor_core_matmul(a, b, c, arch))


def test_block_scaled_gemms_equal_those_of_the_cpu():
    a, b = (octile.quantize(torch.randn(side, 700), (1, 128)) for side in (90, 150))
    for promote_every in (None, 128):
        parts = [(q.data, q.scale, q.block) for q in (a, b)]
        on_cpu = tensor_core_scaled_matmul(*parts[0], *parts[1], promote_every=promote_every)
        parts = [(q.data.cuda(), q.scale.cuda(), q.block) for q in (a, b)]
        assert same_bits(tensor_core_scaled_matmul(*parts[0], *parts[1], promote_every=promote_every).cpu(), on_cpu)


def test_a_modeled_layer_on_any_gpu_accumulates_as_hopper():
    layer, x = octile.nn.Linear(256, 64, recipe=octile.Recipe.deepseek_v3()), torch.randn(10, 256)
    with torch.no_grad(), tensor_core("sm_90"):
        on_cpu = layer(x)
        torch.testing.assert_close(layer.cuda()(x.cuda()).cpu(), on_cpu, rtol=0, atol=1e-6)


@pytest.mark.parametrize("promote_every", [None, 128])
@pytest.mark.parametrize("recipe", ["deepseek_v3", "per_tensor", "hybrid_e5m2"])
def test_gradients_equal_the_cpu_gemms_of_their_operands(recipe, promote_every):
    torch.manual_seed(0)
    layer = octile.nn.Linear(256, 192, bias=False, recipe=octile.Recipe.named(recipe), device="cuda")
    x = torch.randn(300, 256, device="cuda", requires_grad=True)
    dy = torch.randn(300, 192, device="cuda")
    layer(x).backward(dy)  # runs the real kernels first: the model must not reuse their results
    x.grad = layer.weight.grad = None
    operands: dict[str, ScaledTensor] = {}
    with observe_quantization(operands.__setitem__), tensor_core("sm_90", promote_every):
        y = layer(x)
        y.backward(dy)  # runs in a thread of autograd
    assert x.grad is not None
    found = y.detach(), x.grad, layer.weight.grad
    for actual, expected in zip(found, gemms_of_a_layer(operands, promote_every), strict=True):
        assert same_bits(actual.cpu(), expected)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("case", [*cases()], ids=str)
def test_the_model_equals_the_hardware(case):
    found = compare(case, 2 * 10**6, kernels.run, torch.device("cuda", 0), side=1024)
    assert found.mismatches["as in the table"] == 0, found


@pytest.mark.parametrize("case", products.CASES, ids=str)
def test_whole_gemms_equal_the_model(case):
    if reason := why_not_on(torch.device("cuda", 0)):
        pytest.skip(f"the product kernels do not run here: {reason}")
    found = products.compare(case, products.on_gpu, torch.device("cuda", 0))
    assert (found.outputs > 0, found.differ) == (True, 0), found
