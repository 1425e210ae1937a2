"""Tests of the GEMMs of serving: weights in FP8 and in high precision, of all rows and of rows sorted by expert."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from octile.formats import BLOCK
from octile.scaled import ScaledTensor, quantize
from octile.serve.model.gemms import Gemms
from octile.serve.weights.block_weights import Weight, join
from tests.serve.model.read_rows import read

GEMMS = Gemms(torch.float32, power_of_2=False, batch_invariant=False)
INVARIANT = Gemms(torch.float32, power_of_2=False, batch_invariant=True)
SIZES, ROWS = st.integers(1, 150), st.integers(0, 150)
FP8 = pytest.mark.parametrize("fp8", [False, True], ids=["float32", "fp8"])
UGLY = math.nan, math.inf, -math.inf, 0.0, 2.0**-149, 3e38


def weight(fp8: bool, *shape: int) -> Weight:
    """Draw a weight [N, K], or those of experts [E, N, K]."""
    w = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    return quantize(w, BLOCK) if fp8 else w


def values(w: Weight) -> Tensor:
    return w.dequantize() if isinstance(w, ScaledTensor) else w


def rows(n: int, k: int) -> Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(2))


@FP8
@given(t=ROWS, n=SIZES, k=SIZES)
def test_a_product_is_that_of_what_is_read(fp8: bool, t: int, n: int, k: int):
    w = weight(fp8, n, k)
    x = GEMMS.rows_for(rows(t, k), w)
    torch.testing.assert_close(GEMMS.nt(x, w), read(x) @ values(w).mT, rtol=1e-4, atol=1e-4)


@FP8
@given(t=ROWS, n=SIZES, k=SIZES)
def test_a_product_in_given_memory_has_the_same_bits(fp8: bool, t: int, n: int, k: int):
    w = weight(fp8, n, k)
    x, out = GEMMS.rows_for(rows(t, k), w), torch.full((t, n), math.nan)
    assert GEMMS.nt(x, w, out=out) is out
    assert torch.equal(out, GEMMS.nt(x, w))


@pytest.mark.one_case
@FP8
@pytest.mark.parametrize("gemms", [GEMMS, INVARIANT], ids=["any", "invariant"])
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=4), n=SIZES, k=SIZES)
def test_rows_sorted_by_expert_are_multiplied_by_their_experts_weights(
    fp8: bool, gemms: Gemms, sizes: list[int], n: int, k: int
):
    w, t = weight(fp8, len(sizes), n, k), sum(sizes)
    x = gemms.rows_for(rows(t, k), w)
    offs_E = torch.tensor(sizes).cumsum(0).int()
    parts = zip(read(x).split(sizes), values(w), strict=True)
    expected = torch.cat([part @ of_expert.mT for part, of_expert in parts])
    torch.testing.assert_close(gemms.nt(x, w, offs_E), expected, rtol=1e-4, atol=1e-4)


@FP8
@given(t=ROWS, n=SIZES, k=SIZES, ugly=st.sampled_from(UGLY))
def test_a_row_has_the_same_bits_whatever_the_others_are(fp8: bool, t: int, n: int, k: int, ugly: float):
    w, x_TK = weight(fp8, n, k), rows(t + 1, k)
    x_TK[1:] *= ugly
    alone, together = (INVARIANT.nt(INVARIANT.rows_for(x, w), w) for x in (x_TK[:1].clone(), x_TK))
    assert torch.equal(together[:1], alone)


@pytest.mark.parametrize("gemms", [GEMMS, INVARIANT], ids=["any", "invariant"])
@given(t=ROWS, heads=st.integers(1, 4), n=SIZES, k=SIZES)
def test_each_head_is_multiplied_by_its_own_weight(gemms: Gemms, t: int, heads: int, n: int, k: int):
    x_THK, w_HNK = rows(t * heads, k).view(t, heads, k), rows(heads * n, k).view(heads, n, k)
    wide = torch.zeros(t, heads, n + 3)  # queries in absorbed form: rotary parts follow
    gemms.heads_nt(x_THK, w_HNK, wide[..., :n])
    torch.testing.assert_close(wide[..., :n], torch.einsum("thk,hnk->thn", x_THK, w_HNK), rtol=1e-4, atol=1e-4)
    assert not wide[..., n:].any()


@pytest.mark.one_case
@FP8
@pytest.mark.parametrize("gemms", [GEMMS, INVARIANT], ids=["any", "invariant"])
@given(t=ROWS, heads=st.integers(1, 4), n=SIZES, k=SIZES)
def test_results_of_heads_are_what_a_weight_reads(fp8: bool, gemms: Gemms, t: int, heads: int, n: int, k: int):
    x_THK, w_HNK = rows(t * heads, k).view(t, heads, k), rows(heads * n, k).view(heads, n, k)
    out_THN, w = torch.zeros(t, heads, n), weight(fp8, 8, heads * n)
    gemms.heads_nt(x_THK, w_HNK, out_THN)
    found, expected = (read(x) for x in (gemms.heads_rows(x_THK, w_HNK, w), gemms.rows_for(out_THN.flatten(1), w)))
    assert torch.equal(found, expected)


@FP8
@given(t=ROWS, k=SIZES)
def test_projections_are_split_whether_they_are_joined_or_not(fp8: bool, t: int, k: int):
    weights = [weight(fp8, 128, k), weight(fp8, 40, k)]
    sizes = [[128], [30, 10]]
    joined, separate = join(weights, sizes), join(weights[::-1], sizes[::-1])
    assert (len(joined.weights), len(separate.weights)) == (1, 2 if fp8 else 1)
    x = GEMMS.rows_for(rows(t, k), weights[0])
    first, second, third = GEMMS.projections(x, joined)
    for found, expected in zip(GEMMS.projections(x, separate), (second, third, first), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
