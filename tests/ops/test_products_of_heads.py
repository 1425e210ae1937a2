"""Products of heads: each head's rows times its own weight, into any strides, or quantized in tiles."""

import pytest
import torch

from octile.ops.paged_attention import heads_nt_out, heads_nt_quantize
from octile.ops.quantize import quantize
from tests.ops.operators import assert_well_formed

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def operands(t: int = 5, h: int = 3, k: int = 24, n: int = 40, dtype: torch.dtype = torch.float32):
    """Rows that lie between others, and weights."""
    torch.manual_seed(0)
    return torch.randn(t, h, k + 2).to(dtype)[..., :k], torch.randn(h, n, k).to(dtype)


@DTYPES
@pytest.mark.parametrize("t", [0, 1, 5])
def test_each_head_is_multiplied_by_its_own_weight(t: int, dtype: torch.dtype):
    x, w = operands(t, dtype=dtype)
    wide = torch.ones(t, 3, 43, dtype=dtype)
    heads_nt_out(wide[..., :40], x, w)
    expected = torch.einsum("thk,hnk->thn", x.double(), w.double())
    torch.testing.assert_close(wide[..., :40].double(), expected, rtol=2**-7, atol=0.05)
    assert (wide[..., 40:] == 1).all()


@DTYPES
@pytest.mark.parametrize("n", [40, 128])
@pytest.mark.parametrize("power_of_2", [False, True])
def test_quantized_results_have_the_bits_of_two_operators(power_of_2: bool, n: int, dtype: torch.dtype):
    x, w = operands(n=n, dtype=dtype)
    out = x.new_empty(5, 3, n)
    heads_nt_out(out, x, w)
    expected = quantize(out.flatten(1), 1, 128, "e4m3", power_of_2)
    for found, of_two in zip(heads_nt_quantize(x, w, power_of_2), expected, strict=True):
        assert torch.equal(found.float(), of_two.float())
        assert found.stride() == of_two.stride()


def test_the_operators_are_well_formed():
    x, w = operands()
    assert_well_formed(heads_nt_out, (torch.zeros(5, 3, 40), x, w))
    assert_well_formed(heads_nt_quantize, (x, w, False))


X, W, OUT = torch.ones(5, 3, 24), torch.ones(3, 40, 24), torch.ones(5, 3, 40)


@pytest.mark.parametrize(
    ("out", "x", "w", "error", "message"),
    [
        (OUT, X.int(), W, TypeError, "x must be float32"),
        (OUT, X, W.bfloat16(), TypeError, "w must be torch.float32 as x, not torch.bfloat16"),
        (OUT.half(), X, W, TypeError, "out must be torch.float32 as x, not torch.float16"),
        (OUT, X[0], W, ValueError, "x and w must be \\[T, H, K\\] and \\[H, N, K\\], not \\(3, 24\\)"),
        (OUT, X, W[:2], ValueError, "x and w must be .*, not \\(5, 3, 24\\) and \\(2, 40, 24\\)"),
        (OUT[:4], X, W, ValueError, "out must be \\(5, 3, 40\\), not \\(4, 3, 40\\)"),
        (OUT.to("meta"), X, W, ValueError, "x is on cpu but out on meta|out is on meta but x on cpu"),
    ],
)
def test_errors_name_the_argument(out, x, w, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        heads_nt_out(out, x, w)
    with pytest.raises(error, match=message.split("|")[0]):  # before any work on a GPU, too
        heads_nt_out.kernels["cuda"](out, x, w)


def test_errors_of_quantized_products_name_the_argument():
    for call in (heads_nt_quantize, heads_nt_quantize.kernels["cuda"]):
        with pytest.raises(ValueError, match="x and w must be"):
            call(X, W[:2], False)
