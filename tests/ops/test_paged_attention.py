"""Tests of paged attention: equal to attention over the keys in a row, whatever pages they are in."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octile.kernels import cpu
from octile.ops.latent_cache import read_latents
from octile.ops.paged_attention import paged_attention, paged_attention_with_lse
from tests.ops.operators import assert_fake_is_true, assert_well_formed
from tests.ops.paged_caches import filled_cache

C, R, H = 40, 8, 3
SCALE = 0.1
LENGTHS = [1, 64, 65, 0, 200, 128]  # one position, page boundaries, none, and several pages
PAGES = torch.randperm(len(LENGTHS) * 4, generator=torch.Generator().manual_seed(0)).int().view(-1, 4)


def queries(rows: int = len(LENGTHS), dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, H, C + R, generator=torch.Generator().manual_seed(1)).to(dtype)


def expected(q: Tensor, cache: Tensor, pages: Tensor, lengths: list[int]) -> Tensor:
    """Attention in float64 over the rows that are read from the cache."""
    results = []
    for row, length in enumerate(lengths):
        position = torch.arange(length)
        slots = pages[row].long()[position // 64] * 64 + position % 64
        keys = read_latents(cache, slots, C, torch.float32).double()
        results.append((SCALE * q[row].double() @ keys.mT).softmax(-1) @ keys[:, :C])
    return torch.stack(results)


@pytest.fixture(params=["compiled", "reference"])
def attend(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    """The compiled kernel of a CPU, and the reference."""
    if request.param == "compiled" and cpu.library() is None:
        pytest.skip("no C++ compiler")
    return paged_attention if request.param == "compiled" else paged_attention.reference


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_attend_to_the_first_positions_of_their_pages(
    attend: Callable[..., Tensor], cache_dtype: torch.dtype, dtype: torch.dtype
):
    cache, q = filled_cache(PAGES.numel(), C, R, cache_dtype), queries(dtype=dtype)
    found = attend(q, cache, PAGES, torch.tensor(LENGTHS, dtype=torch.int32), C, SCALE)
    rounding = 2e-6 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(found.double(), expected(q, cache, PAGES, LENGTHS), rtol=rounding, atol=1e-5)
    assert found.dtype == dtype


def test_a_row_does_not_depend_on_other_rows(attend: Callable[..., Tensor]):
    cache, q = filled_cache(PAGES.numel(), C, R, torch.bfloat16), queries()
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    together = attend(q, cache, PAGES, lengths, C, SCALE)
    for row in range(len(q)):
        alone = attend(*(t[row : row + 1] if t is not cache else t for t in (q, cache, PAGES, lengths)), C, SCALE)
        assert torch.equal(alone[0], together[row])


def test_positions_after_the_length_are_not_read():
    cache, q = filled_cache(4, C, R, torch.float32), queries(1)
    pages, length = torch.arange(4, dtype=torch.int32)[None], torch.tensor([70], dtype=torch.int32)
    before = paged_attention(q, cache, pages, length, C, SCALE)
    cache[1, 6:] = float("nan")
    cache[2:] = float("nan")
    pages[0, 2:] = -1
    assert torch.equal(paged_attention(q, cache, pages, length, C, SCALE), before)


@pytest.mark.parametrize("rows_per_text", [1, 3])
def test_rows_of_one_text_see_as_many_positions_as_they_ask_for(rows_per_text: int):
    cache, q = filled_cache(4, C, R, torch.float32), queries(3)
    pages, lengths = torch.arange(4, dtype=torch.int32).expand(3, 4), [66, 67, 68]
    found = paged_attention(q, cache, pages, torch.tensor(lengths, dtype=torch.int32), C, SCALE, 0, rows_per_text)
    torch.testing.assert_close(found.double(), expected(q, cache, pages, lengths), rtol=2e-6, atol=1e-5)


@pytest.mark.one_case
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.uint8])
def test_the_operator_is_well_formed(cache_dtype: torch.dtype):
    arguments = (
        queries(),
        filled_cache(24, C, R, cache_dtype),
        PAGES,
        torch.tensor(LENGTHS, dtype=torch.int32),
        C,
        SCALE,
    )
    for attends, given in ((paged_attention, arguments), (paged_attention_with_lse, (*arguments, 64))):
        assert_well_formed(attends, given)
        assert_fake_is_true(attends, given)


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("form", ["compiled", "reference"])
def test_results_with_denominators_are_those_without_them(cache_dtype: torch.dtype, form: str):
    cache, q, lengths = filled_cache(24, C, R, cache_dtype), queries(), torch.tensor(LENGTHS, dtype=torch.int32)
    both = paged_attention_with_lse if form == "compiled" else paged_attention_with_lse.reference
    alone = paged_attention if form == "compiled" else paged_attention.reference
    o, lse = both(q, cache, PAGES, lengths, C, SCALE, 64)
    assert torch.equal(o, alone(q, cache, PAGES, lengths, C, SCALE))
    for row, length in enumerate(LENGTHS):
        keys = read_latents(cache, _slots(PAGES[row], length), C, torch.float32).double()
        scores = SCALE * q[row].double() @ keys.mT
        torch.testing.assert_close(lse[row].double(), scores.logsumexp(-1), rtol=2e-6, atol=1e-5)


def _slots(pages: torch.Tensor, length: int) -> torch.Tensor:
    return (pages.long()[:, None] * 64 + torch.arange(64)).flatten()[:length]


def test_denominators_need_parts():
    arguments = queries(), filled_cache(24, C, R, torch.float32), PAGES, torch.tensor(LENGTHS, dtype=torch.int32)
    with pytest.raises(ValueError, match="part must be a multiple of 64 from 64 to 1048576, not 0"):
        paged_attention_with_lse(*arguments, C, SCALE, 0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": queries().double()}, TypeError, "q must be float32"),
        ({"q": queries()[:, :, 1:].contiguous()}, ValueError, "q must have the 48 channels"),
        ({"q": queries().transpose(0, 1)}, ValueError, "q must be \\[R, H, W\\], contiguous"),
        ({"pages": PAGES.long()}, TypeError, "pages must be int32"),
        ({"pages": PAGES[1:]}, ValueError, "pages must be \\(6, M\\)"),
        ({"lengths": torch.full((6,), 257, dtype=torch.int32)}, ValueError, "lengths must be from 0 to the 256"),
        ({"pages": PAGES + 20}, ValueError, "pages must be from 0 to below 24"),
        ({"part": 96}, ValueError, "part must be a multiple of 64 from 0 to 1048576, not 96"),
        ({"part": -64}, ValueError, "part must be a multiple of 64 from 0"),
        ({"rows_per_text": 4}, ValueError, "rows_per_text must be at least 1 and divide q's 6 rows, not be 4"),
        ({"rows_per_text": 0}, ValueError, "rows_per_text must be at least 1"),
        ({"rows_per_text": 2}, ValueError, "pages must be the same for each 2 rows of a text"),
    ],
)
def test_wrong_arguments_are_refused(change: dict, error: type[Exception], message: str):
    arguments = {
        "q": queries(), "cache": filled_cache(24, C, R, torch.float32), "pages": PAGES,
        "lengths": torch.tensor(LENGTHS, dtype=torch.int32), "latent_dim": C, "scale": SCALE, "part": 0,
        "rows_per_text": 1,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        paged_attention(*(arguments | change).values())
