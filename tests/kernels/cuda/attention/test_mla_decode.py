"""Hopper's MLA decode attention in the emulator: the reference's values, whatever the lengths and the division."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.attention import mla_catalog, mla_decode
from octile.kernels.cuda.gemm import request
from octile.ops import absorbed_attention
from octile.ops.latent_cache import read_latents
from octile.ops.paged_attention import paged_attention, paged_attention_with_lse
from tests.kernels.cuda.attention.emulated_decode import decode
from tests.ops.paged_caches import filled_cache
from tools.emulator import build

emulated = pytest.mark.skipif(build.compiler() is None, reason="the emulator needs a C++ compiler")
FORMS = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=["bf16", "fp8"])
LENGTHS = [70, 1, 0, 190, 64]
M, SCALE, SMS = 3, 0.02, 3


def inputs(n_heads: int, dtype: torch.dtype, lengths: list[int] = LENGTHS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, a cache whose rows after each length are NaN, pages and lengths."""
    generator = torch.Generator().manual_seed(n_heads)
    q = torch.randn(len(lengths), n_heads, 576, generator=generator).bfloat16()
    pages = torch.randperm(len(lengths) * M, generator=generator).int().view(-1, M)
    return q, filled_cache(pages.numel(), 512, 64, dtype), pages, torch.tensor(lengths, dtype=torch.int32)


def attend(
    q: Tensor, cache: Tensor, pages: Tensor, lengths: Tensor, part: int, seed: int = 0, n_sms: int = SMS
) -> Tensor:
    """Run both kernels on an emulated GPU of few SMs."""
    return attend_with_partials(q, cache, pages, lengths, part, seed, n_sms)[0]


def attend_with_partials(
    q: Tensor, cache: Tensor, pages: Tensor, lengths: Tensor, part: int, seed: int = 0, n_sms: int = SMS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run both kernels, and return also partial results [slots, H, 512], lse [slots, H] and lse of rows [rows, H]."""
    return decode(q, cache, pages, lengths, part, SCALE, seed, n_sms)


def poison_rest(cache: Tensor, pages: Tensor, lengths: Tensor) -> None:
    """Set the rows of the last pages after each length to NaN: E4M3, scales and BF16."""
    for row, length in enumerate(lengths.tolist()):
        cache[pages[row, length // 64 :].long(), length % 64 :] = 0xFF if cache.dtype == torch.uint8 else math.nan


def assert_as_reference(
    found: Tensor, q: Tensor, cache: Tensor, pages: Tensor, lengths: Tensor, rounds_latents: bool = False
) -> None:
    values = read_latents(cache, torch.arange(len(cache) * 64), 512, torch.float32).view(-1, 64, 576)
    expected = paged_attention.reference(q.float(), values, pages, lengths, 512, SCALE)
    assert (found.float() - expected).norm() <= 2**-7 * expected.norm()
    if rounds_latents or q.shape[1] > 32:  # for so many heads latents of FP8 rows are rounded, too, and with parts
        expected = paged_attention.reference(q.float(), values.bfloat16().float(), pages, lengths, 512, SCALE)
    largest = values.abs().amax()  # BF16 rounds a softmax's weights, whose sum is 1, by 2⁻⁹ of themselves
    assert ((found.float() - expected).abs() <= 2**-8 * largest + 2**-8 * expected.abs()).all()


@pytest.mark.one_case
@pytest.mark.each_value
@emulated
@FORMS
@pytest.mark.parametrize("part", [0, 64, 128, 192], ids=lambda n: f"parts of {n}")
@pytest.mark.parametrize("n_heads", [3, 20, 65])
def test_results_are_the_references(n_heads: int, part: int, dtype: torch.dtype):
    q, cache, pages, lengths = inputs(n_heads, dtype)
    values = cache.clone()
    poison_rest(cache, pages, lengths)
    found = attend(q, cache, pages, lengths, part)
    assert_as_reference(found, q, values, pages, lengths, part > 0)
    assert not found[lengths == 0].any()


@pytest.mark.one_case
@emulated
@pytest.mark.parametrize(("n_heads", "part"), [(3, 0), (20, 0), (65, 0), (65, 64)])
@FORMS
def test_kernels_that_begin_early_read_nothing_before_the_previous_one_has_ended(n_heads: int, part: int, dtype):
    q, cache, pages, lengths = inputs(n_heads, dtype)
    found = decode(q, cache, pages, lengths, part, SCALE, n_sms=SMS, early=True)[0]
    assert_as_reference(found, q, cache, pages, lengths, part > 0)


@pytest.mark.one_case
@emulated
@pytest.mark.parametrize("n_pages", [(1, 0, 3), (9, 2, 1)], ids=["fewer pages than stages", "more"])
@FORMS
def test_a_kernel_that_loads_an_older_cache_early_waits_before_it_reads_queries(dtype, n_pages: tuple[int, ...]):
    q = torch.randn(3, 16, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    pages = torch.randperm(3 * 9, generator=torch.Generator().manual_seed(1)).int().view(3, 9)
    cache, lengths = filled_cache(27, 512, 64, dtype), torch.tensor([64 * n for n in n_pages], dtype=torch.int32)
    found = decode(q, cache, pages, lengths, 0, SCALE, n_sms=2, early=True, older_cache=True)[0]
    assert_as_reference(found, q, cache, pages, lengths)


@pytest.mark.one_case
@pytest.mark.each_value
@emulated
@pytest.mark.parametrize("n_pages", [1, 2, 3, 4])
@pytest.mark.parametrize("rows", [2, 3, 5])
def test_rows_of_equal_lengths(rows: int, n_pages: int):
    generator = torch.Generator().manual_seed(rows)
    q = torch.randn(rows, 2, 576, generator=generator).bfloat16()
    pages = torch.randperm(rows * n_pages, generator=generator).int().view(rows, n_pages)
    cache = filled_cache(pages.numel(), 512, 64, torch.bfloat16)
    lengths = torch.full((rows,), 64 * n_pages - 5, dtype=torch.int32)
    assert_as_reference(attend(q, cache, pages, lengths, 0), q, cache, pages, lengths)


@pytest.mark.one_case
@pytest.mark.each_value
@emulated
@pytest.mark.parametrize(
    ("n_heads", "dtype"), [(2, torch.bfloat16), (40, torch.bfloat16), (40, torch.uint8), (70, torch.uint8)]
)
@pytest.mark.parametrize("n_pages", [(1, 9, 0, 2, 7, 1), (20,), (1, 1, 1, 1, 16), (13, 1, 1, 1), (0, 3, 3, 5, 2, 4, 3)])
@pytest.mark.parametrize("part", [0, 256], ids=lambda n: f"parts of {n}")
def test_rows_of_several_ranges(part: int, n_pages: tuple[int, ...], n_heads: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(n_heads)
    q = torch.randn(len(n_pages), n_heads, 576, generator=generator).bfloat16()
    pages = torch.randperm(len(n_pages) * 20, generator=generator).int().view(-1, 20)
    cache = filled_cache(pages.numel(), 512, 64, dtype)
    lengths = torch.tensor([max(64 * n - 7, 0) for n in n_pages], dtype=torch.int32)
    assert_as_reference(attend(q, cache, pages, lengths, part, n_sms=5), q, cache, pages, lengths, part > 0)


def test_slots_of_many_rows_are_those_of_shared_ones():
    made = mla_decode.plan(2048, 128, False, 0, 1, 132)
    assert made.slots == 2 * made.ranges == 132  # the first and last row of each range


@emulated
def test_rows_of_many_parts_attend_in_several_launches(monkeypatch: pytest.MonkeyPatch):
    q, cache, pages, lengths = inputs(4, torch.bfloat16)
    every_second = torch.stack((lengths, lengths), dim=1)[:, 0]
    sizes = []

    def launch_rows(
        q: Tensor, pages: Tensor, lengths: Tensor, o: Tensor, lse: None, cache: Tensor, _: float, part: int
    ):
        sizes.append(len(q))
        o.copy_(attend(q, cache, pages, lengths, part))

    monkeypatch.setattr(mla_decode, "launch_rows", launch_rows)
    monkeypatch.setattr(mla_decode, "MAX_PARTIALS", 2 * 2 * 4 + 1)  # of two rows in two parts
    found = mla_decode.launch(q, cache, pages, every_second, 512, SCALE, 128, 1)
    assert sizes == [2, 2, 1]
    assert torch.equal(found, attend(q, cache, pages, lengths, 128))
    mla_decode.launch(q, cache, pages, every_second, 512, SCALE, 0, 1)
    assert sizes[3:] == [5]  # partial results of few rows at any number of rows


@pytest.mark.parametrize(
    ("n_heads", "parts", "rows"),
    [(16, 16, 2048), (16, 80, 1024), (128, 16, 683), (128, 128, 94), (2**20, 2, 1), (2**21, 1, 2048)],
)
def test_rows_at_once(n_heads: int, parts: int, rows: int):
    assert mla_decode.rows_at_once(2048, n_heads, parts) == rows
    assert mla_decode.rows_at_once(2048, n_heads, 0) == 2048


def test_the_parts_that_are_compiled_ahead_are_those_of_exact_mode():
    assert mla_catalog.PART == absorbed_attention.PART


@pytest.mark.parametrize(("max_pages", "part", "parts"), [(8, 512, 1), (9, 512, 2), (1, 128, 1), (5, 0, 0)])
def test_parts_of_the_longest_text(max_pages: int, part: int, parts: int):
    assert mla_decode.parts_of(max_pages, part) == parts


@pytest.mark.one_case
@pytest.mark.each_value
@emulated
@FORMS
@pytest.mark.parametrize("part", [64, 128, 192], ids=lambda n: f"parts of {n}")
@pytest.mark.parametrize("n_heads", [4, 70])
def test_a_row_of_parts_has_its_own_bits(n_heads: int, part: int, dtype: torch.dtype):
    q, cache, pages, lengths = inputs(n_heads, dtype)
    together = attend(q, cache, pages, lengths, part, seed=1)
    for row, n_pages in ((0, 2), (3, 3), (4, 3)):  # a page table that is no wider than the text has fewer slots
        one = slice(row, row + 1)
        alone = attend(q[one], cache, pages[one, :n_pages].contiguous(), lengths[one], part, seed=2, n_sms=2)
        assert torch.equal(alone[0], together[row])


ENDS = [  # around ends of pages and of parts, so that some rows see nothing of a part, or nothing at all
    [190, 191, 192, 193], [62, 63, 64, 65], [0, 0, 0, 0], [1, 2, 0, 0], [320, 129, 0, 64], [1, 320, 257, 2],
    [126, 127, 128, 129], [255, 256, 257, 258],
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.each_value
@emulated
@FORMS
@pytest.mark.parametrize(("n_heads", "queries"), [(16, 4), (3, 4), (20, 3), (32, 2)], ids=lambda n: str(n))
@pytest.mark.parametrize("part", [64, 128, 192, 320], ids=lambda n: f"parts of {n}")
def test_rows_that_share_a_thread_block_have_the_bits_that_they_have_alone(
    part: int, n_heads: int, queries: int, dtype: torch.dtype
):
    lengths = torch.tensor(ENDS)[:, :queries].flatten().int()
    generator = torch.Generator().manual_seed(queries)
    q = torch.randn(len(lengths), n_heads, 576, generator=generator).bfloat16()
    q[:, 0] = q[:, 0].abs()  # with keys that are growing: a head whose maximum changes at each of them
    q[:, 1] = -q[:, 0]
    pages = torch.randperm(len(ENDS) * 5, generator=generator).int().view(len(ENDS), 5)
    cache = filled_cache(pages.numel(), 512, 64, dtype)
    text_queries, own_pages = q.view(len(ENDS), -1, 576), pages.repeat_interleave(queries, 0)
    together, *of_texts = attend_with_partials(text_queries, cache, pages, lengths, part, seed=1)
    together = together.view(len(q), n_heads, 512)
    alone, *of_rows = attend_with_partials(q, cache, own_pages, lengths, part, seed=2)
    assert torch.equal(together.view(torch.int16), alone.view(torch.int16))
    for text_parts, expected in zip(of_texts, of_rows, strict=True):  # in FP32, of which BF16 hides most last bits
        in_rows = text_parts.unflatten(0, (len(ENDS), -1)).unflatten(2, (queries, -1)).transpose(1, 2)
        assert torch.equal(in_rows.reshape(expected.shape).view(torch.int32), expected.view(torch.int32))
    assert_as_reference(together, q, cache, own_pages, lengths, True)
    assert not together[lengths == 0].any()


@pytest.mark.one_case
@pytest.mark.each_value
@emulated
@FORMS
@pytest.mark.parametrize(("n_heads", "queries"), [(3, 4), (16, 2), (20, 3), (64, 2)], ids=lambda n: str(n))
@pytest.mark.parametrize("n_sms", [1, 5])
def test_rows_of_one_text_read_its_pages_once(n_heads: int, queries: int, n_sms: int, dtype: torch.dtype):
    """Lengths end around pages' ends, so that some queries see nothing of a thread block's pages, or nothing at all."""
    ends = torch.tensor([[190, 191, 192, 193], [62, 63, 64, 65], [0, 0, 0, 0], [1, 2, 0, 0], [320, 129, 0, 64]])
    lengths = ends[:, :queries].flatten().int()
    generator = torch.Generator().manual_seed(queries)
    q = torch.randn(len(lengths), n_heads, 576, generator=generator).bfloat16()
    pages = torch.randperm(len(ends) * 5, generator=generator).int().view(len(ends), 5)
    cache = filled_cache(pages.numel(), 512, 64, dtype)
    found = attend(q.view(len(ends), -1, 576), cache, pages, lengths, 0, n_sms=n_sms).view(len(q), n_heads, 512)
    rounded = queries * n_heads > 32
    assert_as_reference(found, q, cache, pages.repeat_interleave(queries, 0), lengths, rounded)
    assert not found[lengths == 0].any()


@pytest.mark.one_case
@emulated
@FORMS
@pytest.mark.parametrize("part", [64, 128])
def test_the_denominators_of_rows_are_the_references(part: int, dtype: torch.dtype):
    q, cache, pages, lengths = inputs(3, dtype)
    *_, lse = attend_with_partials(q, cache, pages, lengths, part)
    values = read_latents(cache, torch.arange(len(cache) * 64), 512, torch.bfloat16).view(-1, 64, 576)
    _, expected = paged_attention_with_lse.reference(q, values, pages, lengths, 512, SCALE, part)
    torch.testing.assert_close(lse, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.one_case
@emulated
@FORMS
@pytest.mark.parametrize("scale", [-0.02, 0.0])
def test_scores_may_be_multiplied_by_what_is_not_positive(
    scale: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(globals(), "SCALE", scale)
    q, cache, pages, lengths = inputs(40, dtype)
    for part in (0, 64):
        assert_as_reference(attend(q, cache, pages, lengths, part), q, cache, pages, lengths)


def test_rows_of_one_text_are_one_row(monkeypatch: pytest.MonkeyPatch):
    q, cache, pages, lengths = inputs(2, torch.bfloat16, [3, 4, 5, 6, 7, 8])
    shapes = []
    monkeypatch.setattr(mla_decode, "launch_rows", lambda q, pages, *_: shapes.append((tuple(q.shape), len(pages))))
    for part in (0, 128):
        assert mla_decode.launch(q, cache, pages, lengths, 512, SCALE, part, 3).shape == (6, 2, 512)
    for heads in (64, 128):  # 384 of a text fill many thread blocks
        mla_decode.launch(q.repeat(1, heads // 2, 1), cache, pages, lengths, 512, SCALE, 0, 3)
    assert shapes == [((2, 6, 576), 2), ((2, 6, 576), 2), ((2, 192, 576), 2), ((6, 128, 576), 6)]


@pytest.mark.parametrize(
    ("n_heads", "rows_per_text", "together"),
    [(16, 1024, 4), (16, 6, 3), (16, 7, 1), (4, 1024, 16), (20, 9, 3), (128, 4, 1)],
)
def test_rows_of_a_text_that_fill_a_thread_block_share_parts(n_heads: int, rows_per_text: int, together: int):
    assert mla_decode.rows_together(n_heads, True, 512, rows_per_text) == together


@pytest.mark.one_case
@pytest.mark.each_value
@emulated
@FORMS
@pytest.mark.parametrize("n_heads", [2, 40, 70])
@pytest.mark.parametrize("channel", [0, 511, 575])
def test_nan_is_not_hidden(n_heads: int, channel: int, dtype: torch.dtype):
    q, cache, pages, lengths = inputs(n_heads, dtype, [100, 150])
    if dtype == torch.uint8:
        bytes_of_channel = slice(channel, channel + 1) if channel < 512 else slice(528 + 2 * (channel - 512), None)
        cache[pages[1, 2], 10, bytes_of_channel] = 0xFF
    else:
        cache[pages[1, 2], 10, channel] = math.nan
    for part in (0, 128):
        found = attend(q, cache, pages, lengths, part)
        assert found[1].isnan().all()
        assert not found[0].isnan().any()


@emulated
def test_queries_of_any_size_are_held_in_fp16():
    q, cache, pages, lengths = inputs(4, torch.uint8)
    q[:, 1] *= 2.0**100
    q[:, 2] *= 2.0**-100
    assert_as_reference(attend(q, cache, pages, lengths, 0), q, cache, pages, lengths)


def _reason(**change: Any) -> str | None:
    q, cache, pages, lengths = inputs(2, change.pop("cache", torch.bfloat16))
    arguments = {"q": q, "cache": cache, "pages": pages, "lengths": lengths, "latent_dim": 512} | change
    return mla_decode.why_unsupported(*arguments.values(), SCALE, 0, 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"q": torch.zeros(5, 2, 576)}, "q is torch.float32"),
        ({"cache": torch.float16}, "the cache torch.float16"),
        ({"latent_dim": 448}, "rows have 448 \\+ 128 channels, not 512 \\+ 64"),
        ({"pages": torch.zeros(5, 0, dtype=torch.int32)}, "there are no rows, heads or pages"),
        ({"q": torch.zeros(5, 2, 576, dtype=torch.bfloat16)[:0]}, "there are no rows, heads or pages"),
        (
            {"q": torch.zeros(5761).bfloat16()[1:].view(5, 2, 576)},
            "does not begin at a multiple of 16 bytes",
        ),
        ({}, "written for Hopper"),
    ],
)
def test_calls_of_other_kernels(change: dict[str, Any], reason: str):
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(_reason(**change))


def test_hopper_supports_both_forms(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request, "why_not_on", lambda _: None)
    assert _reason() is None
    assert _reason(cache=torch.uint8) is None


@pytest.mark.parametrize(("n_heads", "is_fp8", "name", "heads"), [
    (1, False, "mla_decode", 16), (16, True, "mla_decode", 16), (17, False, "mla_decode", 32),
    (32, True, "mla_decode", 32), (33, False, "mla_decode_64", None), (128, True, "mla_decode_64", None),
])  # fmt: skip
def test_heads_of_a_thread_block(n_heads: int, is_fp8: bool, name: str, heads: int | None):
    made = mla_decode.plan(128, n_heads, is_fp8, 0, 1, 132)
    assert (made.kernel, made.constants.get("heads")) == (name, heads)
    assert mla_decode.plan(128, n_heads, is_fp8, 512, 1, 132).kernel == "mla_decode_64"  # of a row alone, too


def test_a_thread_block_merges_several_heads_if_there_are_many():
    assert mla_decode.plan(1024, 16, False, 512, 1, 132).merge_grid == 1024 * 16
    assert mla_decode.plan(2048, 20, False, 512, 1, 132).merge_grid == 2048 * 3


@pytest.mark.parametrize(
    ("n_heads", "is_fp8", "cluster"),
    [(128, True, 2), (128, False, 1), (64, True, 1), (65, True, 2), (192, True, 1), (256, True, 2)],
)
def test_two_thread_blocks_convert_pages_for_each_other(n_heads: int, is_fp8: bool, cluster: int):
    made = mla_decode.plan(128, n_heads, is_fp8, 0, 1, 132)
    assert (made.cluster, made.grid % made.cluster) == (cluster, 0)
