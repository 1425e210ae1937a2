"""The Triton tensor core model equals the vectorized torch form bit for bit, in Triton's interpreter."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from triton import knobs

from octile.kernels.triton import tensor_core
from octile.lab.tensor_core.architectures import find_instruction
from octile.lab.tensor_core.operand import decode
from octile.lab.tensor_core.vectorized import Summation, sum_products
from tests.lab.matrices import normal, random_bits, same_bits

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS = [("sm_90", E4M3, E5M2), ("sm_89", E5M2, E5M2), ("sm_100", E4M3, E4M3), ("sm_90", torch.bfloat16, torch.bfloat16)]


def launched(a, b, start, how: Summation):
    out = start.clone()
    row = how.instruction
    scales = None if how.a_scale is None or how.b_scale is None else (how.a_scale, how.b_scale)
    tensor_core.launch(
        out,
        (a.value, a.exponent),
        (b.value, b.exponent),
        scales,
        how.interval,
        how.promote,
        row.terms,
        row.fraction_bits,
        row.output_bits,
        row.floor,
        row.truncation == "down",
    )
    return out


@pytest.fixture
def interpreter():
    """Require the interpreter; one GPU suffices, since the kernel uses no feature that only some have."""
    if not knobs.runtime.interpret:
        pytest.skip("triton was imported for the GPU in this process: run `pytest tests/kernels/triton` alone")
    with np.errstate(all="ignore"):
        yield


@pytest.mark.one_case
@pytest.mark.each_pair
@pytest.mark.parametrize(("arch", "a_dtype", "b_dtype"), ROWS)
@pytest.mark.parametrize("make", [normal, random_bits])
def test_a_chain_equals_the_vectorized_form(interpreter, make, arch, a_dtype, b_dtype):
    row = find_instruction(arch, a_dtype, b_dtype)
    a, b = decode(make(a_dtype, (9, 64), 0), row), decode(make(b_dtype, (65, 64), 1), row)
    start = torch.randn(9, 65)
    start[0, 0], start[1, 1] = 2.0**-149, 2.0**100
    how = Summation(row, 64, promote=False)
    assert same_bits(launched(a, b, start, how), sum_products(a, b, start, how))


def test_terms_can_be_truncated_downward(interpreter):
    row = replace(find_instruction("sm_90", E4M3, E4M3), truncation="down")
    a, b = decode(random_bits(E4M3, (3, 64), 0), row), decode(random_bits(E4M3, (5, 64), 1), row)
    how = Summation(row, 64, promote=False)
    assert same_bits(launched(a, b, torch.zeros(3, 5), how), sum_products(a, b, torch.zeros(3, 5), how))


@pytest.mark.one_case
@pytest.mark.parametrize(("promote", "scaled"), [(True, False), (True, True), (False, True)])
def test_promotion_and_rescaling_equal_the_vectorized_form(interpreter, promote, scaled):
    row = find_instruction("sm_90", E4M3, E4M3)
    a, b = decode(normal(E4M3, (33, 96), 0), row), decode(random_bits(E4M3, (5, 96), 1), row)
    generator = torch.Generator().manual_seed(2)
    a_scale, b_scale = (torch.rand(side, 2, generator=generator) if scaled else None for side in (33, 5))
    start = torch.randn(33, 5, generator=generator)
    how = Summation(row, 64, promote, a_scale, b_scale)
    assert same_bits(launched(a, b, start, how), sum_products(a, b, start, how))
