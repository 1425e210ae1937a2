"""Tests of sparse attention: softmax over the top-k positions alone, dense attention if they are all, and pages."""

import math

import pytest
import torch
from torch import Tensor

from octile.ops import sparse_attention as module
from octile.ops.latent_cache import read_latents
from octile.ops.sparse_attention import paged_sparse_attention, sparse_attention, sparse_attention_with_lse
from octile.ops.top_keys import top_keys
from tests.ops.operators import assert_fake_is_true, assert_well_formed
from tests.ops.paged_caches import filled_cache
from tests.ops.paged_keys import int32

S, H, C, W, T = 6, 3, 16, 24, 40
SCALE = 0.2
POSITIONS = int32([[3, 7, -1, -1], [39, 0, 1, 2], [-1, -1, -1, -1], [-1, 5, -1, 9], [8, -1, -1, -1], [4, 3, 2, 1]])


def operands(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, latents = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((S, H, W), (T, W)))
    return q, latents


def expected(q: Tensor, latents: Tensor, top_k: Tensor) -> Tensor:
    """Attention of one query in float64 over some positions."""
    keys = latents[top_k.long()].double()
    return (SCALE * q.double() @ keys.mT).softmax(-1) @ keys[:, :C]


@pytest.mark.parametrize(
    ("dtype", "rounding"), [(torch.float32, 2e-6), (torch.bfloat16, 2**-8), (torch.float16, 2**-10)]
)
def test_queries_attend_to_their_positions(dtype: torch.dtype, rounding: float):
    q, latents = operands(dtype)
    found = sparse_attention(q, latents, POSITIONS, C, SCALE)
    assert found.dtype == dtype
    for row, positions in enumerate(POSITIONS):
        exact = expected(q[row], latents, positions[positions >= 0])
        torch.testing.assert_close(found[row].double(), exact, rtol=rounding, atol=1e-5)


def test_with_all_keys_of_the_past_it_is_dense_attention():
    q, latents = operands()
    ends = torch.arange(1, S + 1, dtype=torch.int32)
    positions = top_keys(torch.randn(S, T), ends * 0, ends, T)
    scores = SCALE * torch.einsum("shw,tw->sht", q, latents)
    seen = torch.arange(T) < ends[:, None, None]
    dense = scores.masked_fill(~seen, -math.inf).softmax(-1) @ latents[:, :C]
    torch.testing.assert_close(sparse_attention(q, latents, positions, C, SCALE), dense, rtol=1e-5, atol=1e-6)


def test_positions_outside_the_top_k_are_not_read():
    q, latents = operands()
    before = sparse_attention(q, latents, POSITIONS, C, SCALE)
    others = torch.ones(T, dtype=torch.bool)
    others[POSITIONS[POSITIONS >= 0].long()] = False
    latents[others] = math.nan
    assert torch.equal(sparse_attention(q, latents, POSITIONS, C, SCALE), before)


def test_an_absent_position_does_not_read_the_first():
    q, latents = operands()
    latents[0] = math.nan
    assert not sparse_attention(q, latents, POSITIONS, C, SCALE)[[0, 2, 3, 4]].isnan().any()


def test_rows_do_not_depend_on_the_parts_that_they_are_computed_in(monkeypatch: pytest.MonkeyPatch):
    arguments = *operands(), POSITIONS, C, SCALE
    whole = sparse_attention(*arguments)
    monkeypatch.setattr(module, "MAX_ELEMENTS", 200)
    torch.testing.assert_close(sparse_attention(*arguments), whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("positions", [POSITIONS[:, :0], POSITIONS.clamp(max=-1)])
def test_without_positions_the_result_is_zero(positions: Tensor):
    assert not sparse_attention(*operands(), positions, C, SCALE).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lse_is_that_of_the_scores_of_the_top_k_positions(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MAX_ELEMENTS", 200)
    q, latents = operands(dtype)
    o, lse = sparse_attention_with_lse(q, latents, POSITIONS, C, SCALE)
    assert torch.equal(o, sparse_attention(q, latents, POSITIONS, C, SCALE))
    assert (o.dtype, lse.dtype) == (dtype, torch.float32)
    for row, positions in enumerate(POSITIONS):
        scores = SCALE * q[row].double() @ latents[positions[positions >= 0].long()].double().mT
        torch.testing.assert_close(lse[row].double(), scores.logsumexp(-1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("positions", [POSITIONS[:, :0], POSITIONS.clamp(max=-1)])
def test_without_positions_lse_is_minus_infinity(positions: Tensor):
    o, lse = sparse_attention_with_lse(*operands(), positions, C, SCALE)
    assert not o.any()
    assert torch.equal(lse, torch.full((S, H), -math.inf))


FORMS = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=["fp32", "bf16", "fp8"])
PAGES = int32([[3, 0, 9], [1, 2, 5], [9, 9, 9], [4, 1, 0], [0, 1, 2], [2, 2, 2]])  # 9 is in no cache, and is not read
IN_TEXT = int32([[3, 70, -1], [191, 0, 64], [-1, -1, -1], [-1, 5, 100], [128, 127, 2], [1, -1, -1]])


def paged_operands(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(S, H, W, generator=torch.Generator().manual_seed(1)), filled_cache(6, C, W - C, dtype)


@FORMS
def test_rows_of_a_cache(dtype: torch.dtype):
    q, cache = paged_operands(dtype)
    values = read_latents(cache, torch.arange(6 * 64), C, torch.float32)
    expected = sparse_attention(q, values, POSITIONS, C, SCALE)
    torch.testing.assert_close(sparse_attention(q, cache.flatten(0, 1), POSITIONS, C, SCALE), expected)


@FORMS
def test_positions_in_pages_are_those_of_the_texts(dtype: torch.dtype):
    q, cache = paged_operands(dtype)
    values = read_latents(cache, torch.arange(6 * 64), C, torch.float32)
    slots = [[-1 if p < 0 else int(PAGES[s, p // 64]) * 64 + p % 64 for p in IN_TEXT[s].tolist()] for s in range(S)]
    expected = sparse_attention(q, values, int32(slots), C, SCALE)
    torch.testing.assert_close(paged_sparse_attention(q, cache, PAGES, IN_TEXT, C, SCALE), expected)


def test_without_pages_the_result_is_zero():
    q, cache = paged_operands(torch.float32)
    assert not paged_sparse_attention(q, cache, PAGES[:, :0], IN_TEXT.clamp(max=-1), C, SCALE).any()


def test_the_operator_is_well_formed():
    arguments = *operands(), POSITIONS, C, SCALE
    assert_well_formed(sparse_attention, arguments)
    assert_fake_is_true(sparse_attention, arguments)


def test_the_operator_with_lse_is_well_formed():
    arguments = *operands(torch.bfloat16), POSITIONS, C, SCALE
    assert_well_formed(sparse_attention_with_lse, arguments)
    assert_fake_is_true(sparse_attention_with_lse, arguments)


@pytest.mark.one_case
@FORMS
def test_the_paged_operator_is_well_formed(dtype: torch.dtype):
    q, cache = paged_operands(dtype)
    arguments = q, cache, PAGES, IN_TEXT, C, SCALE
    assert_well_formed(paged_sparse_attention, arguments)
    assert_fake_is_true(paged_sparse_attention, arguments)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": operands()[0].double()}, TypeError, "q must be float32"),
        ({"q": operands()[0][0]}, ValueError, r"q must be \[S, H, W\]"),
        ({"q": operands()[0][..., 1:]}, ValueError, "q must have the 24 channels of latents, not 23"),
        ({"latents": operands()[1][None]}, ValueError, r"latents must be \[T, W\]"),
        ({"latents": torch.zeros(T, 40).byte()}, ValueError, "q must have the 26 channels of latents, not 24"),
        ({"latents": torch.zeros(T, 41).byte()}, ValueError, "rows of 41 bytes cannot hold latents of"),
        ({"latents": operands()[1].int()}, TypeError, "latents must be float32"),
        ({"latents": operands()[1].to("meta")}, ValueError, "q is on cpu but latents on meta"),
        ({"positions": POSITIONS.long()}, TypeError, "positions must be int32"),
        ({"positions": POSITIONS[1:]}, ValueError, r"positions must be \(6, K\)"),
        ({"positions": POSITIONS + 1}, ValueError, "positions must be from -1 to below 40, not from 0 to 40"),
        ({"latent_dim": 25}, ValueError, "latent_dim must be from 1 to the 24 channels, not 25"),
        ({"n_splits": 129}, ValueError, "n_splits must be from 0 to 128, not 129"),
    ],
)
def test_wrong_arguments_are_refused(change: dict, error: type[Exception], message: str):
    q, latents = operands()
    arguments = {"q": q, "latents": latents, "positions": POSITIONS, "latent_dim": C, "scale": SCALE, "n_splits": 0}
    with pytest.raises(error, match=message):
        sparse_attention(*(arguments | change).values())
    if "n_splits" not in change:
        with pytest.raises(error, match=message):
            sparse_attention_with_lse(*list((arguments | change).values())[:-1])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"cache": torch.zeros(6, 64, W).int()}, TypeError, "cache must be float32"),
        ({"cache": torch.zeros(6, 32, W)}, ValueError, r"cache must be \[P, 64"),
        ({"cache": torch.zeros(6, 64, W + 1)}, ValueError, "q must have the 25 channels of the cache, not 24"),
        ({"cache": torch.zeros(6, 64, W, device="meta")}, ValueError, "q is on cpu but cache on meta"),
        ({"pages": PAGES.long()}, TypeError, "pages must be int32"),
        ({"pages": PAGES[1:]}, ValueError, r"pages must be \(6, M\)"),
        ({"pages": PAGES - 1}, ValueError, "pages must be from 0 to below 6, not "),
        ({"positions": IN_TEXT + 1}, ValueError, "positions must be from -1 to below 192, not from 0 to 192"),
        ({"n_splits": -1}, ValueError, "n_splits must be from 0 to 128, not -1"),
    ],
)
def test_wrong_arguments_of_pages_are_refused(change: dict, error: type[Exception], message: str):
    q, cache = paged_operands(torch.float32)
    arguments = {
        "q": q, "cache": cache, "pages": PAGES, "positions": IN_TEXT, "latent_dim": C, "scale": SCALE, "n_splits": 0,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        paged_sparse_attention(*(arguments | change).values())
