"""The kernels of attention within packed texts, and of its gradients, against the reference."""

import pytest
import torch
from torch import Tensor

from octile.kernels.triton import packed_attention as kernels
from octile.ops.packed_attention import packed_attention, packed_attention_backward

pytestmark = pytest.mark.usefixtures("gpu")
LENGTHS = (70, 1, 0, 130, 64)
SCALE = 0.3


def inputs(heads: int, x: int, values: int, dtype: torch.dtype, is_part: bool = False) -> list[Tensor]:
    """q, k, v and the gradient of o; as parts of wider tensors their rows are not contiguous."""
    generator = torch.Generator().manual_seed(0)
    widths = x, x, values, values
    drawn = [torch.randn(sum(LENGTHS), heads, width + 5 * is_part, generator=generator) for width in widths]
    return [t.to(dtype)[..., :width] for t, width in zip(drawn, widths, strict=True)]


def starts() -> Tensor:
    return torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)


@pytest.mark.one_case
@pytest.mark.each_pair
@pytest.mark.parametrize("sizes", [(2, 24, 16), (3, 192, 128), (1, 16, 16), (2, 40, 33), (1, 260, 300)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_part", [False, True], ids=["contiguous", "parts of others"])
def test_results_and_gradients(sizes: tuple[int, int, int], dtype: torch.dtype, is_part: bool):
    q, k, v, do = inputs(*sizes, dtype, is_part)
    texts = starts(), SCALE
    o, lse = packed_attention.reference(*(t.float() for t in (q, k, v)), *texts)
    expected = o, lse, *packed_attention_backward.reference(*(t.float() for t in (do, q, k, v)), o, lse, *texts)
    found_o, found_lse = kernels.forward(q, k, v, *texts)
    found = found_o, found_lse, *kernels.backward(do, q, k, v, found_o, found_lse, *texts)
    for ours, exact in zip(found, expected, strict=True):
        if dtype == torch.float32:
            assert (ours - exact).norm() <= 1e-5 * exact.norm()
        else:  # p, ds and results are rounded to 8 bits
            assert (ours.float() - exact).norm() <= 1e-2 * exact.norm()


@pytest.mark.slow
def test_more_texts_than_a_program_reads_at_once():
    q, k, v, do = (t[:9] for t in inputs(1, 16, 16, torch.float32))
    texts = torch.tensor([*[0] * 256, 4, *[4] * 3, 9], dtype=torch.int32), SCALE
    o, lse = packed_attention.reference(q, k, v, *texts)
    expected = o, lse, *packed_attention_backward.reference(do, q, k, v, o, lse, *texts)
    found_o, found_lse = kernels.forward(q, k, v, *texts)
    found = found_o, found_lse, *kernels.backward(do, q, k, v, found_o, found_lse, *texts)
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, exact)


@pytest.mark.slow
@pytest.mark.parametrize("operand", range(4), ids=["q", "k", "v", "do"])
def test_a_nan_stays_in_its_text(operand: int):
    operands = inputs(2, 24, 16, torch.float32)
    texts = starts(), SCALE

    def compute() -> list[Tensor]:
        q, k, v, do = operands
        o, lse = kernels.forward(q, k, v, *texts)
        return [o, *kernels.backward(do, q, k, v, o, lse, *texts)]

    clean = compute()
    operands[operand][71] = torch.nan  # the first row of the text of 130
    for found, expected in zip(compute(), clean, strict=True):
        assert torch.equal(found[:71], expected[:71])
        assert torch.equal(found[201:], expected[201:])
