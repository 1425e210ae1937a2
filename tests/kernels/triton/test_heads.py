"""The kernels of products of heads against the reference, bit for bit where they quantize."""

import pytest
import torch

from octile.kernels.triton import heads as kernel
from octile.ops.paged_attention import heads_nt_out, heads_nt_quantize
from octile.ops.quantize import quantize
from tests.kernels.triton.comparison import assert_same
from tests.kernels.triton.gpus import hopper

pytestmark = [pytest.mark.usefixtures("gpu"), hopper]


def operands(t: int, h: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that lie between others, and weights: small integers, whose sums are exact in any order."""
    torch.manual_seed(t)
    x = torch.randint(-3, 4, (t, h, k + 64)).half()[..., :k]
    return x, torch.randint(-3, 4, (h, n, k)).half()


@pytest.mark.parametrize(("t", "k", "n"), [(1, 16, 5), (33, 128, 70), (65, 64, 128)])
def test_rows_are_multiplied(t: int, k: int, n: int):
    x, w = operands(t, 2, k, n)
    found, expected = (torch.ones(t, 2, n + 3, dtype=torch.float16) for _ in range(2))
    assert kernel.why_no_product(found[..., :n], x, w) is None
    kernel.launch_out(found[..., :n], x, w)
    heads_nt_out.reference(expected[..., :n], x, w)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize(("t", "h", "k", "n"), [(1, 3, 32, 128), (17, 1, 64, 256), (65, 2, 32, 128)])
def test_results_are_quantized(t: int, h: int, k: int, n: int, power_of_2: bool):
    x, w = operands(t, h, k, n)
    assert kernel.why_not_quantized(x, w) is None
    assert_same(kernel.launch_quantized(x, w, power_of_2), heads_nt_quantize.reference(x, w, power_of_2))


@pytest.mark.parametrize("ugly", [float("nan"), float("inf"), 0.0, 2.0**-24])
def test_ugly_rows_are_quantized_as_alone(ugly: float):
    x, w = operands(3, 1, 32, 128)
    x[1] = 0
    x[1, 0, 0] = ugly
    products = torch.einsum("thk,hnk->thn", x.float(), w.float()).half()
    assert_same(kernel.launch_quantized(x, w, False), quantize(products.flatten(1), 1, 128, "e4m3", False))


@pytest.mark.parametrize(
    ("x", "w", "reason"),
    [
        (torch.ones(2, 1, 16), torch.ones(1, 128, 16), "torch.float32, not bfloat16 or float16"),
        (torch.ones(2, 1, 48).half(), torch.ones(1, 128, 48).half(), "K is 48, not a power of two from 32 to 512"),
        (torch.ones(2, 1, 16).half(), torch.ones(1, 128, 16).half(), "K is 16, not a power of two from 32 to 512"),
        (torch.ones(2, 1, 16).half(), torch.ones(1, 96, 16).half(), "heads have 96 columns, so tiles of 128"),
        (torch.ones(0, 1, 32).half(), torch.ones(1, 128, 32).half(), "a tensor is empty"),
        (torch.ones(2, 1, 64).half()[..., ::2], torch.ones(1, 128, 32).half(), "its rows are not contiguous"),
    ],
)
def test_what_is_not_supported_has_a_reason(x: torch.Tensor, w: torch.Tensor, reason: str):
    assert reason in kernel.why_not_quantized(x, w)
