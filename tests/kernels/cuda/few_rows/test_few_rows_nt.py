"""Hopper's products of few rows in the emulator: the reference's values for ragged shapes, NaN, Inf and zeros."""

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from octile.formats import BLOCK, TILE
from octile.kernels.cuda.few_rows import launcher
from octile.lab.tensor_core import tensor_core_scaled_matmul
from octile.ops.few_rows import few_rows_nt
from octile.ops.quantize import dequantize, quantize
from tests.ops import few_rows
from tools import emulator
from tools.emulator import build

emulated = pytest.mark.skipif(build.compiler() is None, reason="the emulator needs a C++ compiler")


def multiply(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, scale: Tensor, add: Tensor | None,
    power_of_2: bool = False, seed: int = 0, eps: float = 1e-6, row_invariant: bool = False,
) -> Tensor:  # fmt: skip
    (m, k), n = x.shape, len(weight)
    norm = None if norm_weight is None else norm_weight.dtype
    constants = launcher.plan(m, k, norm, power_of_2, add is not None, row_invariant)
    kernel, headers = launcher.KERNELS[row_invariant]
    y = torch.full((m, n), math.nan, dtype=torch.bfloat16)
    emulator.run(
        kernel,
        constants,
        grid=-(-n // launcher.TILE_ROWS),
        threads=launcher.THREADS,
        shared_bytes=constants["shared_bytes"],
        arguments=[
            x, x.stride(0), 0 if norm_weight is None else norm_weight, eps, weight, scale, 0 if add is None else add,
            0 if add is None else add.stride(0), y, n,
        ],
        previous=[t for t in (x, add) if t is not None and t.is_contiguous()],
        headers=headers,
        seed=seed,
        arithmetic="hopper",
    )  # fmt: skip
    return y


@pytest.mark.one_case
@pytest.mark.each_value
@emulated
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize(
    ("m", "k", "n", "norm", "add"),
    [
        (1, 2048, 32, torch.float32, False),
        (1, 16, 1, None, True),
        (2, 4112, 40, None, False),
        (3, 1408, 130, torch.bfloat16, True),
        (5, 144, 16, torch.float16, False),
        (7, 4224, 8, torch.float32, True),
        (8, 2048, 24, None, True),
    ],
)
def test_values(m: int, k: int, n: int, norm: torch.dtype | None, add: bool, power_of_2: bool):
    x, norm_weight, weight, scale, rows = few_rows.product(m, k, n, norm, add)
    expected = few_rows_nt(x, norm_weight, 1e-6, weight, scale, power_of_2, rows)
    assert few_rows.close(multiply(x, norm_weight, weight, scale, rows, power_of_2), expected)


@pytest.mark.one_case
@emulated
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize(("k", "n", "add"), [(16, 1, True), (1024, 24, False), (1168, 130, True), (5264, 16, False)])
def test_one_row_has_the_bits_of_the_gemm(k: int, n: int, add: bool, power_of_2: bool):
    x, _, weight, scale, rows = few_rows.product(1, k, n, None, add)
    data, x_scale = quantize(x, *TILE, "e4m3", power_of_2)
    expected = tensor_core_scaled_matmul(data, x_scale, TILE, weight, scale, BLOCK, promote_every=128).bfloat16()
    expected = expected if rows is None else expected + rows
    assert torch.equal(multiply(x, None, weight, scale, rows, power_of_2, row_invariant=True), expected)


@pytest.mark.one_case
@emulated
@pytest.mark.parametrize("norm", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("k", [144, 2048, 4224])
def test_one_row_with_a_norm(k: int, norm: torch.dtype):
    x, norm_weight, weight, scale, _ = few_rows.product(1, k, 24, norm, False)
    expected = few_rows_nt(x, norm_weight, 1e-6, weight, scale, False)
    assert few_rows.close(multiply(x, norm_weight, weight, scale, None, row_invariant=True), expected)


@emulated
@settings(deadline=None, max_examples=8)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 1e-40, 1e-20, 1e20, 1e36, math.inf, math.nan]))
def test_extreme_values_of_one_row(seed: int, value: float):
    x, _, weight, scale, _ = few_rows.product(1, 272, 16, None, False, seed)
    chosen = torch.rand(x.shape, generator=few_rows.generator(seed)) < 0.02
    x = x.where(~chosen, torch.tensor(value).bfloat16())
    expected = few_rows_nt(x, None, 1e-6, weight, scale, False)
    assert few_rows.close(multiply(x, None, weight, scale, None, seed=seed, row_invariant=True), expected)


def through_identity(x: Tensor, norm_weight: Tensor | None = None, seed: int = 0) -> Tensor:
    """Return rows as the kernel quantizes them, dequantized: their product with an identity."""
    k = x.shape[1]
    weight = torch.eye(k).to(torch.float8_e4m3fn)
    return multiply(x, norm_weight, weight, torch.ones(-(-k // 128), -(-k // 128)), None, seed=seed, eps=0.0)


def dequantized(x: Tensor) -> Tensor:
    return dequantize(*quantize(x, *TILE, "e4m3", False), *TILE, torch.float32).bfloat16()


@pytest.mark.slow
@emulated
@settings(deadline=None, max_examples=8)
@given(st.integers(0, 2**32), st.integers(1, 8), st.sampled_from([16, 128, 256]))
def test_bits_of_the_quantization(seed: int, m: int, k: int):
    of = few_rows.generator(seed)
    x = (torch.randn(m, k, generator=of) * torch.exp2(20 * torch.randn(m, 1, generator=of))).bfloat16()
    assert torch.equal(through_identity(x, seed=seed), dequantized(x))


@emulated
def test_bits_of_tiles_that_are_divided_carefully():
    """Rows of 1 and −1 have a norm of 1 exactly, so they are the norm's weight after it."""
    norm_weight = few_rows.careful_values(512)
    sign = torch.randint(2, (3, 512), generator=few_rows.generator(1)) * 2 - 1
    assert torch.equal(through_identity(sign.bfloat16(), norm_weight), dequantized(sign * norm_weight))


@emulated
def test_rows_apart():
    x, norm_weight, weight, scale, rows = few_rows.product(3, 256, 48, torch.float32, True)
    wide, added = torch.full((3, 264), math.nan).bfloat16(), torch.full((3, 50), math.nan).bfloat16()
    wide[:, :256], added[:, 1:49] = x, rows
    expected = multiply(x, norm_weight, weight, scale, rows)
    assert torch.equal(multiply(wide[:, :256], norm_weight, weight, scale, added[:, 1:49]), expected)


@pytest.mark.slow
@emulated
@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**32), st.integers(1, 8), st.sampled_from([0.0, 1e-40, 1e-20, 1e20, 1e36, math.inf, math.nan]))
def test_extreme_values(seed: int, m: int, value: float):
    x, norm_weight, weight, scale, _ = few_rows.product(m, 272, 16, torch.float32, False, seed)
    chosen = torch.rand(x.shape, generator=few_rows.generator(seed)) < 0.02
    x = x.where(~chosen, torch.tensor(value).bfloat16())
    for norm in (None, norm_weight):
        expected = few_rows_nt(x, norm, 1e-6, weight, scale, False)
        assert few_rows.close(multiply(x, norm, weight, scale, None, seed=seed), expected)


IDENTITY = torch.eye(128).to(torch.float8_e4m3fn), torch.ones(1, 1)  # gives the quantized rows back


@emulated
@pytest.mark.parametrize("power_of_2", [False, True])
def test_rows_are_quantized_to_the_bits_of_the_reference(power_of_2: bool):
    x = torch.randn(8, 128, generator=few_rows.generator(0)).bfloat16()
    expected = few_rows_nt(x, None, 0.0, *IDENTITY, power_of_2)
    assert torch.equal(multiply(x, None, *IDENTITY, None, power_of_2), expected)


@emulated
@pytest.mark.parametrize("below", [1, 2, 3])
def test_scales_just_below_a_number_of_eight_bits(below: int):
    """There the kernel divides more carefully: `octile/kernels/cuda/quantize/scale.cuh`."""
    scale = torch.tensor(0x3B130000 - below, dtype=torch.int32).view(torch.float32)
    amax = (scale.double() * 448).float()
    assert (amax / 448).view(torch.int32) & 0xFFFF >= 0x10000 - 4
    norm_weight = amax * (torch.rand(128, generator=few_rows.generator(below)) * 2 - 1)
    norm_weight[5] = amax
    x = torch.ones(1, 128, dtype=torch.bfloat16)  # whose norm is the weight
    expected = few_rows_nt(x, norm_weight, 0.0, *IDENTITY, False)
    assert torch.equal(multiply(x, norm_weight, *IDENTITY, None, eps=0.0), expected)


@emulated
def test_a_nan_of_the_weight_reaches_its_column_only():
    x, _, weight, scale, _ = few_rows.product(2, 256, 32, None, False)
    weight.view(torch.uint8)[5, 200] = 0x7F
    found = multiply(x, None, weight, scale, None)
    assert found[:, 5].isnan().all()
    assert found.isnan().sum() == 2


def test_operands_that_the_kernel_does_not_take():
    x, norm_weight, weight, scale, rows = few_rows.product(2, 256, 32, torch.float32, True)
    why = functools.partial(launcher.why_unsupported, row_invariant=False)
    few, long = torch.zeros(8, 16384, dtype=torch.bfloat16), torch.zeros(1, 16384, dtype=torch.float8_e4m3fn)
    assert "shared memory" in why(few, None, long, torch.ones(1, 128), None)
    assert "9 rows" in why(x.new_zeros(9, 256), None, weight, scale, None)
    assert "float32" in why(x.float(), None, weight, scale, None)
    assert "multiple of 16" in why(x[:, :8], None, weight[:, :8].contiguous(), scale, None)
    assert "weight" in why(x, None, weight[:, ::2], scale, None)
    assert "rows of x" in why(x[:, ::2], None, weight[:, :128].contiguous(), scale[:, :1].contiguous(), None)
    assert "norm" in why(x, norm_weight.repeat_interleave(2)[::2], weight, scale, None)
    assert "add" in why(x, norm_weight, weight, scale, rows.mT.contiguous().mT)
    assert "2 rows, not 1" in why(x, None, weight, scale, None, row_invariant=True)
