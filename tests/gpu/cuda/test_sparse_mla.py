"""Hopper's sparse latent attention on a GPU: values, bits, NaN, absent positions, and replays of a graph."""

import functools

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.gemm import request
from octile.ops.latent_cache import read_latents
from octile.ops.sparse_attention import paged_sparse_attention, sparse_attention
from tests.ops.paged_caches import filled_cache, write_nan

FORMS = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=["bf16", "fp8"])
S, P, M, SCALE = 7, 80, 10, 0.02
T = 64 * P


@pytest.fixture(autouse=True)
def hopper() -> None:
    if reason := request.why_not_on(torch.device("cuda", torch.cuda.current_device())):
        pytest.skip(f"the kernels do not run here: {reason}")


@functools.cache
def rows_on_cpu(dtype: torch.dtype) -> Tensor:
    return filled_cache(P, 512, 64, dtype)


def inputs(n_heads: int, k: int, dtype: torch.dtype, most: int = T, rows: int = S) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, a cache, and lists: of all entries, of none, of few, with absent entries at one end or in between."""
    generator = torch.Generator().manual_seed(n_heads)
    q = torch.randn(rows, n_heads, 576, generator=generator).bfloat16()
    positions = torch.stack([torch.randperm(most, generator=generator)[:k] for _ in range(rows)]).int()
    for row, absent in enumerate((slice(0), slice(None), slice(3, None), slice(0, -3), slice(None, None, 3))):
        if row < rows:
            positions[row, absent] = -1
    return q.cuda(), rows_on_cpu(dtype).cuda(), positions.cuda()


def values_of(cache: Tensor) -> Tensor:
    """The rows as the kernel multiplies them: those in FP8 are rounded to BF16."""
    return read_latents(cache, torch.arange(T, device="cuda"), 512, torch.bfloat16).float()


def assert_as_reference(found: Tensor, q: Tensor, values: Tensor, positions: Tensor) -> None:
    expected = sparse_attention(q.float(), values, positions, 512, SCALE)
    # BF16 rounds a softmax's weights, whose sum is 1, by 2⁻⁹ of themselves
    assert ((found.float() - expected).abs() <= 2**-8 * values.abs().max() + 2**-8 * expected.abs()).all()
    assert (found.float() - expected).norm() <= 2**-7 * expected.norm()


@FORMS
@pytest.mark.parametrize("n_splits", [0, 1, 5])
@pytest.mark.parametrize(("n_heads", "k"), [(1, 70), (16, 2048), (64, 1000), (100, 2048), (128, 2048)])
def test_results_are_the_references(n_heads: int, k: int, n_splits: int, dtype: torch.dtype):
    q, cache, positions = inputs(n_heads, k, dtype)
    found = sparse_attention(q, cache.flatten(0, 1), positions, 512, SCALE, n_splits)
    assert_as_reference(found, q, values_of(cache), positions)
    assert not found[1].any()


@FORMS
@pytest.mark.parametrize("n_heads", [64, 128])
def test_results_of_many_queries_are_the_references(n_heads: int, dtype: torch.dtype):
    q, cache, positions = inputs(n_heads, 2048, dtype, rows=200)
    found = sparse_attention(q, cache.flatten(0, 1), positions, 512, SCALE)
    assert_as_reference(found, q, values_of(cache), positions)


@FORMS
def test_many_queries(dtype: torch.dtype):
    q, cache, positions = inputs(128, 512, dtype, rows=300)
    found = sparse_attention(q, cache.flatten(0, 1), positions, 512, SCALE)
    assert_as_reference(found, q, values_of(cache), positions)


@FORMS
@pytest.mark.parametrize("n_splits", [0, 1])
@pytest.mark.parametrize("n_heads", [16, 128])
def test_positions_in_pages(n_heads: int, n_splits: int, dtype: torch.dtype):
    q, cache, positions = inputs(n_heads, 600, dtype, most=64 * M)
    pages = torch.randint(0, P, (S, M), generator=torch.Generator().manual_seed(0)).int().cuda()
    found = paged_sparse_attention(q, cache, pages, positions, 512, SCALE, n_splits)
    slots = pages.gather(1, positions.clamp(min=0).long() // 64) * 64 + positions % 64
    assert_as_reference(found, q, values_of(cache), slots.where(positions >= 0, -1).int())


@FORMS
@pytest.mark.parametrize("others", [-2, -(2**31), T, 2**31 - 1])
def test_positions_outside_of_the_latents_are_absent(others: int, dtype: torch.dtype):
    q, cache, positions = inputs(16, 500, dtype)
    latents = cache.flatten(0, 1)
    outside = positions.masked_fill(positions < 0, others)
    expected = sparse_attention(q, latents, positions, 512, SCALE)
    assert torch.equal(sparse_attention(q, latents, outside, 512, SCALE), expected)
    in_fp32 = q.float(), values_of(cache)
    expected = sparse_attention(*in_fp32, positions, 512, SCALE)  # by torch
    assert torch.equal(sparse_attention(*in_fp32, outside, 512, SCALE), expected)


@FORMS
def test_pages_outside_of_the_cache_are_absent(dtype: torch.dtype):
    q, cache, positions = inputs(16, 500, dtype, most=64 * M)
    pages = torch.randint(0, P, (S, M), generator=torch.Generator().manual_seed(0)).int().cuda()
    pages[:, 3], pages[:, 5] = P, -1
    absent = (positions // 64 == 3) | (positions // 64 == 5)
    found = paged_sparse_attention(q, cache, pages, positions, 512, SCALE)
    expected = paged_sparse_attention(q, cache, pages, positions.masked_fill(absent, -1), 512, SCALE)
    assert torch.equal(found, expected)


@FORMS
@pytest.mark.parametrize("n_heads", [16, 128])
def test_bits_are_the_same_every_time_and_those_of_the_query_alone(n_heads: int, dtype: torch.dtype):
    q, cache, positions = inputs(n_heads, 2048, dtype)
    latents = cache.flatten(0, 1)
    first = sparse_attention(q, latents, positions, 512, SCALE, 4)
    assert all(torch.equal(sparse_attention(q, latents, positions, 512, SCALE, 4), first) for _ in range(20))
    alone = sparse_attention(q[4:5], latents, positions[4:5], 512, SCALE, 4)
    assert torch.equal(alone[0], first[4])


@FORMS
@pytest.mark.parametrize("n_heads", [16, 128])
@pytest.mark.parametrize("channel", [0, 511, 512])
def test_nan_is_not_hidden_and_stays_in_its_row(n_heads: int, channel: int, dtype: torch.dtype):
    q, cache, positions = inputs(n_heads, 1000, dtype)
    cache = cache.clone()
    latents = cache.flatten(0, 1)
    row = int(positions[5, 999])
    others = [s for s in range(S) if s != 5]
    positions[others] = positions[others].masked_fill(positions[others] == row, -1)
    before = sparse_attention(q, latents, positions, 512, SCALE)
    write_nan(cache, row, channel, 512)
    found = sparse_attention(q, latents, positions, 512, SCALE)
    assert found[5].isnan().all()
    assert torch.equal(found[others], before[others])


@FORMS
@pytest.mark.parametrize("n_heads", [16, 128])
def test_a_graph_attends_to_the_positions_at_its_replay(n_heads: int, dtype: torch.dtype):
    q, cache, positions = inputs(n_heads, 600, dtype)
    latents = cache.flatten(0, 1)
    sparse_attention(q, latents, positions, 512, SCALE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = sparse_attention(q, latents, positions, 512, SCALE)
    for shift in (1, 3):
        positions.copy_(positions.roll(shift, 0))
        graph.replay()
        assert torch.equal(found, sparse_attention(q, latents, positions, 512, SCALE))
