"""Products of heads on a GPU: near the reference, and quantized with the bits of their own values."""

import pytest
import torch

from octile.kernels.cuda.jit.launch import overlapping_launches
from octile.ops.paged_attention import has_product_kernel, has_quantizing_kernel, heads_nt_out, heads_nt_quantize
from octile.ops.quantize import quantize
from octile.ops.row_invariant import row_invariant_matmul_nt

ROWS = pytest.mark.parametrize("t", [1, 16, 17, 32, 65, 256, 257])


def operands(t: int, h: int, k: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that lie between others, and weights: small integers, whose sums are exact in any order."""
    torch.manual_seed(t)
    x = torch.randint(-2, 3, (t, h, k + 64), device="cuda").bfloat16()[..., :k]
    return x, torch.randint(-1, 2, (h, n, k), device="cuda").bfloat16()


@ROWS
@pytest.mark.parametrize(("h", "k", "n"), [(16, 128, 512), (3, 64, 70), (2, 96, 100)])
def test_rows_are_multiplied(t: int, h: int, k: int, n: int):
    x, w = operands(t, h, k, n)
    out = torch.full((t, h, n + 64), 7.0, dtype=torch.bfloat16, device="cuda")
    heads_nt_out(out[..., :n], x, w)
    assert torch.equal(out[..., :n], torch.einsum("thk,hnk->thn", x.double(), w.double()).bfloat16())
    assert (out[..., n:] == 7).all()


@ROWS
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize(("h", "k", "n"), [(16, 512, 128), (3, 64, 256), (2, 64, 96)])
def test_results_are_quantized(t: int, h: int, k: int, n: int, power_of_2: bool):
    x, w = operands(t, h, k, n)
    products = torch.einsum("thk,hnk->thn", x.double(), w.double()).bfloat16()
    expected = quantize(products.flatten(1), 1, 128, "e4m3", power_of_2)
    for found, of_two in zip(heads_nt_quantize(x, w, power_of_2), expected, strict=True):
        assert torch.equal(found.float(), of_two.float())
        assert found.stride() == of_two.stride()


@pytest.mark.parametrize("t", [8, 200])
def test_overlapping_launches_have_the_same_bits(t: int):
    x, w_k = operands(t, 16, 128, 512)
    w_v = operands(t, 16, 512, 128)[1]

    def compute() -> tuple[torch.Tensor, torch.Tensor]:
        absorbed = torch.zeros(t, 16, 512, dtype=torch.bfloat16, device="cuda")
        heads_nt_out(absorbed, x, w_k)
        return heads_nt_quantize(absorbed, w_v, False)

    expected = compute()
    with overlapping_launches():
        compute()  # compiles, which cannot be captured
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = compute()
    for _ in range(20):
        graph.replay()
        for found, alone in zip(captured, expected, strict=True):
            assert torch.equal(found.float(), alone.float())


@pytest.mark.parametrize("t", [1, 16, 17, 32, 65, 256])
@pytest.mark.parametrize("h", [3, 16])
def test_few_rows_have_the_bits_of_products_whose_rows_do_not_depend_on_each_other(t: int, h: int):
    """Those sum by wgmma over tiles of any rows, these for few rows by mma; exact mode takes both."""
    generator = torch.Generator("cuda").manual_seed(t)
    q, w_k, attended, w_v = (
        (torch.randn(shape, generator=generator, device="cuda") * 4**spread).bfloat16()
        for shape in ((t, h, 128), (h, 512, 128), (t, h, 512), (h, 128, 512))
        for spread in [torch.randn(shape, generator=generator, device="cuda")]
    )
    many = [torch.cat((x, x.new_ones(300, h, x.shape[2]))).transpose(0, 1) for x in (q, attended)]
    absorbed = torch.empty(t, h, 512, dtype=torch.bfloat16, device="cuda")
    if not (has_product_kernel(absorbed, q, w_k) and has_quantizing_kernel(attended, w_v)):
        pytest.skip("another GPU than Hopper, where torch multiplies heads")
    heads_nt_out(absorbed, q, w_k)
    assert torch.equal(absorbed, row_invariant_matmul_nt(many[0], w_k, torch.bfloat16).transpose(0, 1)[:t])
    values = row_invariant_matmul_nt(many[1], w_v, torch.bfloat16).transpose(0, 1)[:t]
    for found, expected in zip(
        heads_nt_quantize(attended, w_v, False), quantize(values.flatten(1), 1, 128, "e4m3", False), strict=True
    ):
        assert torch.equal(found.float(), expected.float())
