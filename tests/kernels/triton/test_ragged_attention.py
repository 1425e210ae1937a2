"""The kernel of causal attention of texts of any lengths against the reference."""

import pytest
import torch

from octile.kernels.triton import ragged_attention as kernel
from octile.ops.attention import ragged_attention

pytestmark = pytest.mark.usefixtures("gpu")
SCALE = 0.3
TEXTS = ((70, 70), (1, 65), (3, 3), (33, 200), (64, 64))  # rows and keys


@pytest.mark.one_case
@pytest.mark.each_pair
@pytest.mark.parametrize("sizes", [(2, 24, 16), (3, 192, 128), (1, 16, 16), (2, 40, 33), (1, 260, 300)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_part", [False, True], ids=["contiguous", "parts of others"])
def test_texts_of_any_lengths(sizes: tuple[int, int, int], dtype: torch.dtype, is_part: bool):
    heads, x, values = sizes
    generator = torch.Generator().manual_seed(0)
    rows, keys = map(sum, zip(*TEXTS, strict=True))
    q, k, v = (
        torch.randn(n, heads, width + 5 * is_part, generator=generator).to(dtype)[..., :width]
        for n, width in ((rows, x), (keys, x), (keys, values))
    )
    starts = [torch.tensor([0, *of]).cumsum(0).to(torch.int32) for of in zip(*TEXTS, strict=True)]
    found, expected = torch.full((2, rows, heads, values), 7.0).to(dtype)
    kernel.launch(found, q, k, v, *starts, SCALE)
    ragged_attention.reference(expected, q, k, v, *starts, 70, 200, SCALE)
    if dtype == torch.float32:  # scores up to about 2⁴, of 260 terms
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=2**-15)
    else:  # the weights of a softmax sum to 1, and each has an error of 2⁻⁹ of itself
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-8 * float(v.float().abs().max()))


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("operand", "row", "untouched", "broken"),
    [
        pytest.param(1, 40, [*range(40), *range(70, 90)], range(40, 70), id="key"),
        pytest.param(2, 70, range(70), range(70, 90), id="value of the next text"),
    ],
)
def test_a_nan_stays_in_its_text_and_after_its_position(operand: int, row: int, untouched, broken):
    qkv = torch.randn(3, 90, 2, 24)
    starts = torch.tensor([0, 70, 90], dtype=torch.int32)
    clean, found = torch.empty(2, 90, 2, 24)
    kernel.launch(clean, *qkv, starts, starts, SCALE)
    qkv[operand, row] = torch.nan
    kernel.launch(found, *qkv, starts, starts, SCALE)
    assert found[list(broken)].isnan().all()
    assert torch.equal(found[list(untouched)], clean[list(untouched)])
