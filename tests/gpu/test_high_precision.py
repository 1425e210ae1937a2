"""On a GPU the high-precision recipes sum and store weight gradients in FP32, without waiting for the host."""

import pytest
import torch
from torch import Tensor, nn

from octile.kernels.triton import high_precision as kernel
from octile.nn.functional import grouped_linear, linear
from octile.ops.high_precision import high_precision_grouped_nt, without_reduced_precision_reduction
from octile.recipe import Recipe

T, K, N = 300, 264, 136
ENDS = {"dense": None, "experts": [100, 100, 180, 290], "one expert": [300], "no rows": [0, 0]}

every_case = pytest.mark.parametrize("ends", ENDS.values(), ids=ENDS)


def _run(ends: list[int] | None, compute: str, main_grad: bool, tokens: int = T) -> tuple[Tensor, ...]:
    """x, w, dy, y, dx and dw of one pass on FP32 operands."""
    generator = torch.Generator("cuda").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator)

    recipe, x, dy = Recipe.named(compute), random(tokens, K).requires_grad_(), random(tokens, N)
    w = nn.Parameter(random(*([] if ends is None else [len(ends)]), N, K))
    if main_grad:
        w.main_grad = torch.zeros_like(w)
    if ends is None:
        y = linear(x, w, None, recipe)
    else:
        y = grouped_linear(x, w, torch.tensor(ends, dtype=torch.int32, device="cuda"), recipe)
    y.backward(dy)
    return x, w, dy, y, x.grad, w.main_grad if main_grad else w.grad


@pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("compute", ["bf16", "fp16_loss_scaling"])
@every_case
def test_results_and_gradients_are_those_of_float64(ends: list[int] | None, compute: str, main_grad: bool):
    x, w, dy, y, dx, dw = _run(ends, compute, main_grad)
    dtype = Recipe.named(compute).compute
    x64, w64, dy64 = (t.detach().to(dtype).double() for t in (x, w, dy))
    bounds = [0, T] if ends is None else [0, *ends]
    expected = [torch.zeros(T, n, dtype=torch.float64, device="cuda") for n in (N, K)]
    groups = []
    for first, last, each in zip(bounds[:-1], bounds[1:], w64.view(-1, N, K), strict=True):
        expected[0][first:last], expected[1][first:last] = x64[first:last] @ each.T, dy64[first:last] @ each
        groups.append(dy64[first:last].T @ x64[first:last])
    for found, of_float64 in zip((y, dx, dw), (*expected, torch.stack(groups).view_as(dw)), strict=True):
        assert found.dtype == torch.float32
        assert (found.double() - of_float64).norm() <= 1e-6 * of_float64.norm()


@every_case
def test_no_tokens(ends: list[int] | None):
    _, w, _, y, dx, dw = _run(None if ends is None else [0] * len(ends), "bf16", False, tokens=0)
    assert (y.shape, dx.shape) == ((0, N), (0, K))
    assert torch.equal(dw, torch.zeros_like(w))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 6, 100, 513], ids=lambda rows: f"{rows} rows")
def test_few_rows_of_experts_in_the_dtype_of_the_operands(rows: int, dtype: torch.dtype):
    """Also in a CUDA graph whose groups change."""
    generator = torch.Generator("cuda").manual_seed(0)
    x, w = (torch.randn(shape, device="cuda", generator=generator).to(dtype) for shape in ((rows, K), (16, N, K)))
    offs = torch.zeros(16, dtype=torch.int32, device="cuda")
    high_precision_grouped_nt(x, w, offs, dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = high_precision_grouped_nt(x, w, offs, dtype)
    for seed in range(3):
        ends = torch.randint(rows + 1, (16,), generator=torch.Generator().manual_seed(seed)).sort().values.tolist()
        offs.copy_(torch.tensor(ends))
        graph.replay()
        exact = torch.zeros(rows, N, dtype=torch.float64, device="cuda")
        for first, last, each in zip([0, *ends], ends, w.double(), strict=False):
            exact[first:last] = x[first:last].double() @ each.T
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-4)
        assert not y[ends[-1] :].any()


def test_nan_in_a_row_of_an_expert_stays_in_the_row():
    x, w = (torch.ones(shape, device="cuda", dtype=torch.bfloat16) for shape in ((12, K), (4, N, K)))
    x[5, 3] = float("nan")
    y = high_precision_grouped_nt(x, w, torch.tensor([3, 6, 6, 12], dtype=torch.int32, device="cuda"), x.dtype)
    assert y.isnan().any(1).tolist() == [row == 5 for row in range(12)]


def test_experts_do_not_wait_for_the_host():
    x, dy = (torch.randn(T, n, device="cuda").bfloat16() for n in (K, N))
    offs = torch.tensor([100, 100, 180, 290], dtype=torch.int32, device="cuda")
    kernel.launch_tn(dy, x, offs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernel.launch_tn(dy, x, offs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_split_k_adds_its_partial_sums_in_float32():
    a, b = (torch.rand(n, 2**17, device="cuda").bfloat16() for n in (16, 16))
    exact = a.double() @ b.double().T
    with without_reduced_precision_reduction():
        y = a @ b.T
    assert ((y.double() - exact).abs() <= 2**-8 * exact).all()  # half a spacing, and the FP32 sum


def test_a_compiled_layer_has_the_same_gradients():
    torch.manual_seed(0)
    x, w = torch.randn(T, K, device="cuda"), nn.Parameter(torch.randn(N, K, device="cuda"))
    found = []
    for call in (linear, torch.compile(linear)):
        w.grad = None
        with torch.autocast("cuda", torch.bfloat16):
            call(x, w, None, Recipe.bf16()).float().square().sum().backward()
        found.append(w.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-3)
