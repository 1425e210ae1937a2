"""Hopper's sparse latent attention in the emulator: the reference's values, whatever the lists and their division."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.attention import mla_decode, sparse_mla
from octile.kernels.cuda.gemm import request
from octile.ops.latent_cache import read_latents
from octile.ops.sparse_attention import paged_sparse_attention, sparse_attention, sparse_attention_with_lse
from tests.ops.paged_caches import filled_cache, write_nan
from tools import emulator
from tools.emulator import build

emulated = pytest.mark.skipif(build.compiler() is None, reason="the emulator needs a C++ compiler")
FORMS = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=["bf16", "fp8"])
P, T, SCALE, SMS = 5, 320, 0.02, 3  # pages, their rows


def attend(
    q: Tensor,
    latents: Tensor,
    positions: Tensor,
    n_splits: int,
    pages: Tensor | None = None,
    seed: int = 0,
    lse_out: Tensor | int = 0,
) -> Tensor:
    """Run the kernels on an emulated GPU of few SMs; lse_out: where log-sum-exps are written, without splits."""
    (rows, n_heads, _), k = q.shape, positions.shape[1]
    made = sparse_mla.plan(rows, n_heads, k, latents.dtype == torch.uint8, pages is not None, n_splits, SMS)
    o = torch.full((rows, n_heads, 512), math.nan, dtype=torch.bfloat16)
    partial = torch.full((rows * made.n_splits, n_heads, 512), math.nan)
    lse = torch.full((rows * made.n_splits, n_heads), math.nan)
    page_step, n_positions = (0, len(latents)) if pages is None else (pages.stride(0), 64 * pages.shape[1])
    emulator.run(
        made.kernel,
        made.constants,
        grid=made.grid,
        cluster=made.cluster,
        threads=sparse_mla.THREADS,
        shared_bytes=int(made.constants["shared_bytes"]),
        arguments=[
            latents, q, positions, 0 if pages is None else pages, o, partial,
            lse if made.n_splits > 1 else lse_out, SCALE, n_heads, rows, k,
            positions.stride(0), page_step, n_positions, len(latents), made.n_splits, made.ranges,
        ],
        headers=made.headers,
        seed=seed,
    )  # fmt: skip
    if made.n_splits > 1:
        emulator.run(
            "sparse_merge",
            {},
            grid=rows * n_heads,
            threads=sparse_mla.MERGE_THREADS,
            shared_bytes=0,
            arguments=[partial, lse, o, n_heads, made.n_splits],
        )
    return o


def inputs(rows: int, n_heads: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, a cache, and lists of different positions, every third of them absent."""
    generator = torch.Generator().manual_seed(n_heads)
    q = torch.randn(rows, n_heads, 576, generator=generator).bfloat16()
    positions = torch.stack([torch.randperm(T, generator=generator)[:k] for _ in range(rows)]).int()
    positions[:, ::3] = -1
    return q, filled_cache(P, 512, 64, dtype), positions


def values_of(cache: Tensor) -> Tensor:
    """The rows as the kernel multiplies them: those in FP8 are rounded to BF16."""
    return read_latents(cache, torch.arange(T), 512, torch.bfloat16).float()


def assert_close(found: Tensor, expected: Tensor, largest: Tensor) -> None:
    # BF16 rounds a softmax's weights, whose sum is 1, by 2⁻⁹ of themselves
    assert ((found.float() - expected).abs() <= 2**-8 * largest + 2**-8 * expected.abs()).all()
    assert (found.float() - expected).norm() <= 2**-7 * expected.norm()


def assert_as_reference(found: Tensor, q: Tensor, cache: Tensor, positions: Tensor) -> None:
    values = values_of(cache)
    expected = sparse_attention.reference(q.float(), values, positions, 512, SCALE)
    assert_close(found, expected, values.abs().amax())


@pytest.mark.one_case
@pytest.mark.each_value
@emulated
@FORMS
@pytest.mark.parametrize("n_splits", [0, 1, 2, 3], ids=lambda n: f"{n} splits")
@pytest.mark.parametrize(("n_heads", "k"), [(3, 300), (65, 130)])
def test_results_are_the_references(n_heads: int, k: int, n_splits: int, dtype: torch.dtype):
    q, cache, positions = inputs(5, n_heads, k, dtype)
    assert_as_reference(attend(q, cache.flatten(0, 1), positions, n_splits), q, cache, positions)


@pytest.mark.one_case
@emulated
@FORMS
@pytest.mark.parametrize("n_splits", [1, 2], ids=lambda n: f"{n} splits")
def test_lists_of_any_length_with_absent_entries_anywhere(n_splits: int, dtype: torch.dtype):
    q, cache, positions = inputs(6, 2, 300, dtype)
    positions[0] = -1
    positions[1, 1:] = -1
    positions[2, :-1] = -1
    positions[3, :200] = -1
    positions[4, 64:128] = -1
    positions[5, 130:] = -1
    found = attend(q, cache.flatten(0, 1), positions, n_splits)
    assert_as_reference(found, q, cache, positions)
    assert not found[0].any()


@pytest.mark.one_case
@emulated
@FORMS
@pytest.mark.parametrize("k", [1, 64, 65, 128, 129])
def test_lists_of_few_entries(k: int, dtype: torch.dtype):
    q, cache, positions = inputs(2, 2, 130, dtype)
    lists = positions[:, 1 : k + 1]  # of a stride that is not their length
    assert_as_reference(attend(q, cache.flatten(0, 1), lists, 0), q, cache, lists)


@emulated
@FORMS
def test_log_sum_exps_are_natural_and_those_of_no_positions_minus_infinity(dtype: torch.dtype):
    q, cache, positions = inputs(4, 65, 200, dtype)
    positions[1], positions[2, 1:] = -1, -1
    lse = torch.full((4, 65), math.nan)
    attend(q, cache.flatten(0, 1), positions, 1, lse_out=lse)
    _, expected = sparse_attention_with_lse.reference(q.float(), values_of(cache), positions, 512, SCALE)
    torch.testing.assert_close(lse, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.one_case
@emulated
@FORMS
@pytest.mark.parametrize("n_splits", [1, 2], ids=lambda n: f"{n} splits")
def test_positions_in_pages(n_splits: int, dtype: torch.dtype):
    q, cache, positions = inputs(3, 2, 180, dtype)
    pages = torch.tensor([[4, 0, 7], [1, 1, 1], [3, -2, 2]], dtype=torch.int32)[:, :3]  # 7 and −2 are no pages
    positions = positions % 192
    is_page = torch.tensor([[True, True, False], [True, True, True], [True, False, True]])
    top_k = positions.where(is_page.gather(1, (positions // 64).long()), -1)
    expected = paged_sparse_attention.reference(q.float(), values_of(cache).view(P, 64, 576), pages, top_k, 512, SCALE)
    assert_close(attend(q, cache, positions, n_splits, pages), expected, values_of(cache).abs().amax())


@pytest.mark.slow
@emulated
@FORMS
def test_positions_outside_of_the_latents_are_absent(dtype: torch.dtype):
    q, cache, positions = inputs(3, 2, 140, dtype)
    outside = positions.clone()
    outside[0, ::3], outside[1, ::3], outside[2, ::3] = -(2**31), T, 2**31 - 1
    latents = cache.flatten(0, 1)
    assert torch.equal(attend(q, latents, outside, 1), attend(q, latents, positions, 1))


@emulated
@pytest.mark.parametrize("n_splits", [1, 2], ids=lambda n: f"{n} splits")
def test_pages_that_are_not_in_the_cache_are_absent(n_splits: int):
    q, cache, positions = inputs(2, 2, 140, torch.bfloat16)
    pages = torch.tensor([[P] * 5, [-1] * 5], dtype=torch.int32)
    assert not attend(q, cache, positions, n_splits, pages).any()


@pytest.mark.one_case
@pytest.mark.each_value
@emulated
@FORMS
@pytest.mark.parametrize("n_splits", [1, 2], ids=lambda n: f"{n} splits")
@pytest.mark.parametrize("channel", [0, 255, 256, 511, 575])
def test_nan_is_not_hidden_and_stays_in_its_row(channel: int, n_splits: int, dtype: torch.dtype):
    q, cache, positions = inputs(2, 2, 200, dtype)
    row = int(positions[1, 199])
    positions[0] = positions[0].masked_fill(positions[0] == row, -1)
    write_nan(cache, row, channel, 512)
    found = attend(q, cache.flatten(0, 1), positions, n_splits)
    assert found[1].isnan().all()
    assert not found[0].isnan().any()


@emulated
@FORMS
def test_rows_outside_the_top_k_are_not_read(dtype: torch.dtype):
    q, cache, positions = inputs(2, 2, 200, dtype)
    positions[positions == 0] = -1  # the kernel loads row 0 in place of absent FP8 rows, but not its scale
    latents = cache.flatten(0, 1)
    before = attend(q, latents, positions, 1)
    others = torch.ones(T, dtype=torch.bool)
    others[positions[positions >= 0].long()] = False
    latents[others] = 0xFF if dtype == torch.uint8 else math.nan
    assert torch.equal(attend(q, latents, positions, 1), before)


@emulated
@pytest.mark.parametrize("n_splits", [1, 2], ids=lambda n: f"{n} splits")
@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_scores_that_are_all_infinite_are_nan(value: float, n_splits: int):
    q, cache, positions = inputs(1, 2, 200, torch.bfloat16)
    cache[..., :575], cache[..., 575], q[..., 575] = 0.0, 1.0, value
    assert sparse_attention(q, cache.flatten(0, 1), positions, 512, SCALE).isnan().all()
    assert attend(q, cache.flatten(0, 1), positions, n_splits).isnan().all()


@pytest.mark.one_case
@emulated
@FORMS
@pytest.mark.parametrize("scale", [-0.02, 0.0])
def test_scores_may_be_multiplied_by_what_is_not_positive(
    scale: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(globals(), "SCALE", scale)
    q, cache, positions = inputs(2, 2, 200, dtype)
    assert_as_reference(attend(q, cache.flatten(0, 1), positions, 1), q, cache, positions)


@emulated
@FORMS
def test_scales_of_any_size(dtype: torch.dtype):
    q, cache, positions = inputs(2, 2, 130, dtype)
    latents = cache.flatten(0, 1)
    if dtype == torch.uint8:
        latents[:, 512:528].view(torch.float32).mul_(2.0**100)
    else:
        latents[:, :512] *= 2.0**100
    assert_as_reference(attend(q * 2.0**-100, latents, positions, 1), q * 2.0**-100, cache, positions)


@pytest.mark.slow
@emulated
@FORMS
def test_a_query_of_a_fixed_number_of_splits_has_its_own_bits(dtype: torch.dtype):
    q, cache, positions = inputs(4, 3, 300, dtype)
    latents = cache.flatten(0, 1)
    together = attend(q, latents, positions, 2, seed=1)
    assert torch.equal(attend(q[3:], latents, positions[3:], 2, seed=2)[0], together[3])


@pytest.mark.slow
@emulated
def test_queries_of_many_splits_attend_in_parts(monkeypatch: pytest.MonkeyPatch):
    q, cache, positions = inputs(5, 3, 300, torch.bfloat16)
    latents, sizes = cache.flatten(0, 1), []

    def launch_part(
        q: Tensor,
        positions: Tensor,
        pages: Tensor | None,
        o: Tensor,
        latents: Tensor,
        _: float,
        n_splits: int,
        lse: None,
    ) -> None:
        sizes.append(len(q))
        o.copy_(attend(q, latents, positions, n_splits, pages))

    monkeypatch.setattr(sparse_mla, "launch_part", launch_part)
    monkeypatch.setattr(mla_decode, "MAX_PARTIALS", 2 * 3 * 3 + 1)  # of two queries in three splits
    found = sparse_mla.launch(q, latents, positions, None, SCALE, 128)
    assert sizes == [2, 2, 1]
    assert torch.equal(found, attend(q, latents, positions, 128))
    sparse_mla.launch(q, latents, positions, None, SCALE, 0)
    assert sizes[3:] == [5]  # partial results of few queries at any number of queries


@pytest.mark.parametrize(
    ("rows", "n_heads", "splits"), [(4096, 128, 1), (128, 128, 1), (66, 128, 1), (1, 128, 16), (1, 16, 16), (33, 64, 4)]
)
def test_lists_are_divided_where_there_are_few(rows: int, n_heads: int, splits: int):
    made = sparse_mla.plan(rows, n_heads, 2048, False, False, 0, 132)
    assert made.n_splits == splits
    assert made.grid <= 132


@pytest.mark.parametrize(
    ("n_heads", "is_fp8", "cluster"), [(64, True, 1), (65, True, 2), (130, True, 1), (128, False, 1)]
)
def test_two_blocks_of_64_heads_share_converted_rows(n_heads: int, is_fp8: bool, cluster: int):
    made = sparse_mla.plan(4096, n_heads, 2048, is_fp8, False, 0, 132)
    assert made.cluster == made.constants["cluster"] == cluster
    assert made.grid % cluster == 0


@pytest.mark.parametrize(
    ("rows", "n_heads", "is_fp8", "parts"),
    [(1, 128, True, 1), (66, 128, True, 1), (67, 128, True, 2), (256, 64, True, 1), (256, 128, False, 1)],
)
def test_half_of_the_conversion_is_unrolled_where_thread_blocks_have_many_steps(
    rows: int, n_heads: int, is_fp8: bool, parts: int
):
    assert sparse_mla.plan(rows, n_heads, 2048, is_fp8, True, 0, 132).constants["unrolled_parts"] == parts


@pytest.mark.slow
@emulated
@pytest.mark.parametrize("is_paged", [False, True], ids=["rows", "pages"])
def test_thread_blocks_of_many_steps_compute_the_same(is_paged: bool, monkeypatch: pytest.MonkeyPatch):
    q, cache, positions = inputs(5, 65, 300, torch.uint8)
    latents = cache if is_paged else cache.flatten(0, 1)
    pages = torch.arange(P, dtype=torch.int32).expand(5, P).contiguous() if is_paged else None
    few = attend(q, latents, positions, 1, pages)
    assert_as_reference(few, q, cache, positions)
    monkeypatch.setattr(sparse_mla, "FEW_STEPS", 0)
    assert torch.equal(attend(q, latents, positions, 1, pages), few)


def test_a_list_is_not_divided_into_more_parts_than_it_has_steps():
    assert sparse_mla.plan(5, 16, 300, False, False, 128, 132).n_splits == 3


def _reason(**change: Any) -> str | None:
    q, cache, positions = inputs(2, 2, 10, change.pop("cache", torch.bfloat16))
    arguments = {"q": q, "latents": cache.flatten(0, 1), "positions": positions, "latent_dim": 512} | change
    return sparse_mla.why_unsupported(*arguments.values())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"q": torch.zeros(2, 2, 576)}, "q is torch.float32"),
        ({"cache": torch.float16}, "the latents torch.float16"),
        ({"latent_dim": 448}, "rows have 448 \\+ 128 channels, not 512 \\+ 64"),
        ({"positions": torch.zeros(2, 0, dtype=torch.int32)}, "there are no queries, heads, positions or latents"),
        ({"latents": torch.zeros(0, 576, dtype=torch.bfloat16)}, "there are no queries, heads, positions or latents"),
        ({"latents": torch.zeros(5, 640, dtype=torch.bfloat16)[:, :576]}, "the latents are not contiguous"),
        ({"q": torch.zeros(2305).bfloat16()[1:].view(2, 2, 576)}, "do not begin at a multiple of 16 bytes"),
        ({}, "written for Hopper"),
    ],
)
def test_calls_of_torch(change: dict[str, Any], reason: str):
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(_reason(**change))


def test_hopper_supports_both_forms(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request, "why_not_on", lambda _: None)
    assert _reason() is None
    assert _reason(cache=torch.uint8) is None
