"""What is no tensor, no pair or no recipe at all is refused by the name of the argument."""

import pytest
import torch

from octile.compat import deep_gemm
from octile.ops.quantize import quantize

FLAT = torch.zeros(256, dtype=torch.float8_e4m3fn)
BLOCK = (128, 128)
SIZES = torch.tensor([256], dtype=torch.int32)


def pair(rows=256, columns=256, block=(1, 128)):
    return quantize(torch.randn(rows, columns), *block, "e4m3", False)


def d(*shape, dtype=torch.float32):
    return torch.zeros(shape or (256, 256), dtype=dtype)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: deep_gemm.fp8_gemm_nn(pair(), FLAT, d()), TypeError, r"b must be a pair \(data, scale\), not Tensor"),
        (
            lambda: deep_gemm.fp8_gemm_nt((*pair(), 1), pair(), d()),
            TypeError,
            r"a must be a pair \(data, scale\), not a tuple of 3",
        ),
        (
            lambda: deep_gemm.fp8_gemm_tt((FLAT, torch.ones(2)), pair(), d()),
            ValueError,
            r"a's data must have 2 dimensions or more, not the shape \(256,\)",
        ),
        (lambda: deep_gemm.fp8_gemm_nt((pair()[0], None), pair(), d()), TypeError, "a's scale must be a tensor, not"),
        (lambda: deep_gemm.fp8_gemm_nt(pair(), pair(block=BLOCK), None), TypeError, "d must be a tensor, not NoneType"),
        (
            lambda: deep_gemm.fp8_gemm_nt(pair(), pair(), d(), recipe=(1, 128)),
            ValueError,
            r"recipe must be \(gran_m, gran_n, gran_k\), not \(1, 128\)",
        ),
        (lambda: deep_gemm.bf16_gemm_nn(d(), None, d()), TypeError, "b must be a tensor, not NoneType"),
        (lambda: deep_gemm.bf16_gemm_nt(None, d(), d()), TypeError, "a must be a tensor, not NoneType"),
        (
            lambda: deep_gemm.k_grouped_fp8_gemm_tn_contiguous(
                pair(), pair(), d(1, 256, 256), [256], SIZES, recipe=None
            ),
            TypeError,
            r"recipe must be \(1, 1, 128\) or \(1, 1, 32\), not None",
        ),
        (
            lambda: deep_gemm.k_grouped_fp8_gemm_tn_contiguous(pair(), pair(), d(1, 256, 256), [256], None),
            TypeError,
            "grouped_layout must be a tensor, not NoneType",
        ),
        (
            lambda: deep_gemm.k_grouped_bf16_gemm_tn_contiguous(
                d(dtype=torch.bfloat16), d(dtype=torch.bfloat16), d(2, 256, 256), [300, -44], SIZES
            ),
            ValueError,
            r"ks_cpu must be at least 0 each, not \[300, -44\]",
        ),
        (
            lambda: deep_gemm.set_mk_alignment_for_contiguous_layout(1.5),
            TypeError,
            "new_value must be an integer, not 1.5",
        ),
        (
            lambda: deep_gemm.transform_sf_into_required_layout(d(2, 2, dtype=torch.float64), 256, 256, (128, 128)),
            TypeError,
            "sf must be float32, or int32",
        ),
    ],
)
def test_what_is_nothing_of_the_kind_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
