"""Hopper's latent attention of few rows in the emulator: the reference's values, and nothing that is not a position."""

import math

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.few_rows import attention as launcher
from octile.ops import few_rows as operators
from octile.ops.latent_cache import PAGE
from tests.ops import few_rows
from tests.ops.paged_caches import new_cache
from tools import emulator
from tools.emulator import build

emulated = pytest.mark.skipif(build.compiler() is None, reason="the emulator needs a C++ compiler")
SCALE = 0.02


def write(arguments: tuple[Tensor, ...], slots: Tensor, cache: Tensor) -> Tensor:
    q, kv, w_k, norm_weight, cos, sin = arguments
    m, (n_heads, latent, nope) = len(q), w_k.shape
    is_fp8 = cache.dtype == torch.uint8
    constants = launcher.plan_queries(m, latent, nope, kv.shape[1] - latent, is_fp8, norm_weight.dtype)
    out = torch.full((m, n_heads, kv.shape[1]), math.nan, dtype=torch.bfloat16)
    emulator.run(
        "latent_queries",
        constants,
        grid=n_heads * (latent // 128) + m,
        threads=256,
        shared_bytes=constants["shared_bytes"],
        arguments=[
            q, q.stride(0), kv, kv.stride(0), w_k, norm_weight, 1e-6, cos, sin, slots, cache, 64 * len(cache), out,
            n_heads,
        ],
        previous=[q, kv, cos, sin, slots],
    )  # fmt: skip
    return out


@emulated
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=["bf16", "fp8"])
@pytest.mark.parametrize(("m", "n_heads", "nope"), [(1, 2, 128), (3, 1, 64), (8, 2, 32)])
def test_queries_and_the_cache(m: int, n_heads: int, nope: int, dtype: torch.dtype):
    arguments = few_rows.queries(m, n_heads, nope)
    slots = torch.tensor([5, -1, 191, 64, 77, -(2**40), 7, 8][:m])
    cache, expected_cache = (new_cache(3, 512, 64, dtype) for _ in range(2))
    expected = operators._queries(*arguments[:4], 1e-6, *arguments[4:], slots, expected_cache)
    assert few_rows.close(write(arguments, slots, cache), expected)
    assert torch.equal(cache, expected_cache)


@emulated
def test_a_slot_beyond_the_cache_is_not_written():
    cache = new_cache(1, 512, 64, torch.bfloat16)
    write(few_rows.queries(2, 1, 32), torch.tensor([64, 2**40]), cache)
    assert not cache.any()


def newest_rows(cache: Tensor, pages: Tensor, lengths: Tensor) -> list[Tensor]:
    """Return the rows of the last 8 positions, which the kernel before the attention may write."""
    texts = zip(pages.tolist(), lengths.tolist(), strict=True)
    return [cache[of[at // PAGE], at % PAGE] for of, length in texts for at in range(max(length - 8, 0), length)]


def attend(
    q: Tensor, cache: Tensor, pages: Tensor, lengths: Tensor, w_v: Tensor, seed: int = 0, lazy: bool | None = None
) -> Tensor:
    (m, n_heads, _), values = q.shape, w_v.shape[1]
    splits = launcher.splits_of(m)
    partial, lse = torch.full((m, splits, n_heads, 512), math.nan), torch.full((m, splits, n_heads), math.nan)
    of_attention, of_merge = launcher.plan_attention(), launcher.plan_merge(m, values)
    emulator.run(
        "mla_few_rows",
        of_attention,
        grid=m * splits * -(-n_heads // launcher.HEADS),
        threads=256,
        shared_bytes=of_attention["shared_bytes"],
        arguments=[q, cache, pages, pages.stride(0), lengths, 1, partial, lse, SCALE, n_heads, splits],
        previous=[q, *newest_rows(cache, pages, lengths)],
        seed=seed,
        lazy=lazy,
    )
    out = torch.full((m, n_heads * values), math.nan, dtype=torch.bfloat16)
    emulator.run(
        "merge_values",
        of_merge,
        grid=n_heads * launcher.CLUSTER,
        cluster=launcher.CLUSTER,
        threads=256,
        shared_bytes=of_merge["shared_bytes"],
        arguments=[partial, lse, lengths, 1, w_v, out, n_heads, splits],
        previous=[partial, lse],
        seed=seed,
    )
    return out


@emulated
@pytest.mark.parametrize(
    ("lengths", "n_heads", "values"),
    [
        ([1], 16, 128),
        ([2100], 3, 128),
        ([1, 3500, 2, 3, 4], 1, 128),  # 7 chunks of a split, in 4 stages
        ([0, 33, 64], 17, 256),
        ([65, 1, 0, 31, 32, 200, 129, 64], 1, 128),
    ],
)
def test_attention(lengths: list[int], n_heads: int, values: int):
    arguments = few_rows.paged(lengths, n_heads, values)
    found, expected = attend(*arguments), operators._values(*arguments, SCALE)
    assert few_rows.close(found, expected)
    assert not found[torch.tensor(lengths) == 0].any()


@emulated
@pytest.mark.parametrize("lazy", [True, False])
def test_the_last_8_positions_are_read_after_the_kernel_before(lazy: bool):
    arguments = few_rows.paged([40, 33, 8, 199], 2)
    assert few_rows.close(attend(*arguments, lazy=lazy), operators._values(*arguments, SCALE))


@emulated
def test_positions_after_the_length_are_not_read():
    q, cache, pages, lengths, w_v = few_rows.paged([70, 5], 2)
    expected = attend(q, cache, pages, lengths, w_v)
    cache[pages[0, 1].long(), 6:], cache[pages[1, 0].long(), 5:] = math.nan, math.inf
    pages[1, 1] = 2**30
    assert torch.equal(attend(q, cache, pages, lengths, w_v, seed=1), expected)


@emulated
def test_a_nan_reaches_its_row_only():
    q, cache, pages, lengths, w_v = few_rows.paged([70, 70], 2)
    cache[pages[0, 1].long(), 3, 17] = math.nan
    found = attend(q, cache, pages, lengths, w_v)
    assert found[0].isnan().all()
    assert found[1].isfinite().all()


def test_calls_that_the_kernels_do_not_take():
    q, kv, w_k, norm_weight, cos, sin = few_rows.queries(2, 2, 32)
    slots, cache, why = torch.tensor([1, 2]), new_cache(1, 512, 64, torch.bfloat16), launcher.why_no_queries
    assert "9 rows" in why(q.new_zeros(9, 192), kv, w_k, norm_weight, cos, sin, slots, cache)
    assert "float32" in why(q.float(), kv, w_k, norm_weight, cos, sin, slots, cache)
    assert "24 + 64" in why(q, kv, w_k[..., :24].contiguous(), norm_weight, cos, sin, slots, cache)
    assert "norm" in why(q, kv, w_k, norm_weight.half(), cos, sin, slots, cache)
    assert "q or kv" in why(q, kv.mT.contiguous().mT, w_k, norm_weight, cos, sin, slots, cache)
    assert "cosines" in why(q, kv, w_k, norm_weight, cos.mT.contiguous().mT, sin, slots, cache)
    assert "the cache is torch.float32" in why(q, kv, w_k, norm_weight, cos, sin, slots, cache.float())
    q, cache, pages, _, w_v = few_rows.paged([5, 70], 2)
    why_not = launcher.why_no_values
    assert "the cache is torch.uint8" in why_not(q, cache.to(torch.uint8), pages, w_v)
    assert "100 channels" in why_not(q, cache, pages, w_v[:, :100].contiguous())
    assert "no pages" in why_not(q, cache, pages[:, :0], w_v)
