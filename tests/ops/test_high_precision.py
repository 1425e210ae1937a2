"""Grouped GEMMs in high precision as operators; tests/nn tests their results."""

from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from octile.ops.high_precision import (
    REDUCED_PRECISION,
    high_precision_grouped_nt,
    high_precision_grouped_tn,
    without_reduced_precision_reduction,
)

ENDS = torch.tensor([3, 3, 8], dtype=torch.int32)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.one_case
@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [13, 16])
def test_opcheck_passes(channels: int, dtype: torch.dtype):
    x, w, dy = (torch.randn(shape).to(dtype) for shape in ((9, channels), (3, 11, channels), (9, 11)))
    for out_dtype in {dtype, torch.float32}:
        torch.library.opcheck(high_precision_grouped_nt.overload, (x, w, ENDS, out_dtype))
        torch.library.opcheck(high_precision_grouped_nt.overload, (dy, w.mT, ENDS, out_dtype))
        torch.library.opcheck(high_precision_grouped_tn.overload, (dy, x, ENDS, out_dtype))


def test_another_result_dtype_is_refused():
    x, w = torch.randn(9, 16).bfloat16(), torch.randn(3, 16, 16).bfloat16()
    for operator, b in ((high_precision_grouped_nt, w), (high_precision_grouped_tn, x)):
        with pytest.raises(TypeError, match=r"must be float32, or torch\.bfloat16 as a, not torch\.float16"):
            operator(x, b, ENDS, torch.float16)


def reduction_settings() -> list[bool | None]:
    names = [*REDUCED_PRECISION, *(f"{name}_split_k" for name in REDUCED_PRECISION)]
    return [getattr(torch.backends.cuda.matmul, name, None) for name in names]


@pytest.fixture(params=[True, False, (False, False)], ids=str)
def users_setting(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a user may have set before: reduced precision or not, and no split-K at all."""
    settings = torch.backends.cuda.matmul
    if request.param == (False, False) and not hasattr(settings, f"{REDUCED_PRECISION[0]}_split_k"):
        pytest.skip("this torch cannot forbid split-K")
    for name in REDUCED_PRECISION:
        setattr(settings, name, request.param)
    yield
    for name in REDUCED_PRECISION:
        setattr(settings, name, True)


@pytest.mark.usefixtures("users_setting")
def test_partial_sums_are_added_in_float32_inside_and_as_before_after_an_error():
    before, inside = reduction_settings(), []
    with suppress(ZeroDivisionError), without_reduced_precision_reduction():
        inside.append(reduction_settings())
        raise ZeroDivisionError
    assert inside == [[False, False, *before[2:]]]
    assert reduction_settings() == before
