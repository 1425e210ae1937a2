"""Hopper's latent attention of few rows in the emulator: the reference's values, and nothing that is not a position."""

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.attention import mla_catalog
from octile.kernels.cuda.few_rows import attention as launcher
from octile.lab.tensor_core import tensor_core_matmul
from octile.ops import absorbed_attention
from octile.ops import few_rows as operators
from octile.ops.latent_cache import PAGE
from tests.kernels.cuda.attention.emulated_decode import decode
from tests.ops import few_rows
from tests.ops.paged_caches import new_cache
from tools import emulator
from tools.emulator import build

emulated = pytest.mark.skipif(build.compiler() is None, reason="the emulator needs a C++ compiler")
SCALE = 0.02


def write(
    arguments: tuple[Tensor, ...], slots: Tensor, cache: Tensor, arithmetic: Literal["float32", "hopper"] = "float32"
) -> Tensor:
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
        arithmetic=arithmetic,
    )  # fmt: skip
    return out


@pytest.mark.one_case
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


@emulated
@pytest.mark.parametrize("nope", [128, 48])
def test_queries_are_summed_in_the_order_of_channels(nope: int):
    q, kv, w_k, *others = few_rows.queries(3, 2, nope)
    heads = q.unflatten(-1, (2, -1))[..., :nope]
    few_rows.cancel(heads, w_k)
    found = write((q, kv, w_k, *others), torch.full((3,), -1), new_cache(1, 512, 64, torch.bfloat16), "hopper")
    for head in range(2):
        expected = tensor_core_matmul(heads[:, head], w_k[head])
        assert torch.equal(found[:, head, :512], expected.bfloat16())
        assert not torch.equal(expected.bfloat16(), (heads[:, head].double() @ w_k[head].double().mT).bfloat16())


@emulated
def test_squares_of_a_latent_are_summed_in_the_order_of_the_norm():
    """The order of rms_norm.cu: a lane's two vectors of eight, by fused multiply-adds, then the lanes of a warp."""
    q, drawn_kv, w_k, drawn_weight, cos, sin = few_rows.queries(24, 1, 16)
    cache, slots = new_cache(1, 512, 64, torch.bfloat16), torch.tensor([3])
    for row in range(24):
        one = slice(row, row + 1)
        kv, norm_weight = drawn_kv[one], few_rows.near_ties(drawn_kv[one, :512], drawn_weight, 1e-6)
        write((q[one], kv, w_k, norm_weight, cos[one], sin[one]), slots, cache)
        latent = kv[0, :512].float()
        sums = torch.zeros(32)
        for column in latent.view(2, 32, 8).transpose(1, 2).reshape(16, 32):
            sums = (sums.double() + column.double().square()).float()  # exact before it is rounded once
        for distance in (16, 8, 4, 2, 1):
            sums = sums + sums[torch.arange(32) ^ distance]
        mean = sums[:1] / 512
        root = (mean + 1e-6).double().sqrt().float()  # rounded as in IEEE 754, which torch's float32 is not
        rstd = (1 / root.double()).float()
        assert torch.equal(cache[0, 3, :512], (latent * rstd * norm_weight).bfloat16())
        for other in (0.0, 1.0):  # the weights show the last bit
            neighbor = rstd.nextafter(torch.tensor(other))
            assert not torch.equal(cache[0, 3, :512], (latent * neighbor * norm_weight).bfloat16())


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


@pytest.mark.one_case
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


@pytest.mark.slow
@emulated
@pytest.mark.parametrize("lazy", [True, False])
def test_the_last_8_positions_are_read_after_the_kernel_before(lazy: bool):
    arguments = few_rows.paged([40, 33, 8, 199], 2)
    assert few_rows.close(attend(*arguments, lazy=lazy), operators._values(*arguments, SCALE))


@pytest.mark.slow
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


def attend_from_one(
    q: Tensor, cache: Tensor, pages: Tensor, lengths: Tensor, w_v: Tensor, clusters: int | None = None, seed: int = 0,
    lazy: bool | None = None, scale: float = SCALE,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the result of the kernels of one row, its partial results [parts, H, 512] and their lse [parts, H]."""
    (_, n_heads, _), values, parts = q.shape, w_v.shape[1], -(-pages.shape[1] // launcher.PART_PAGES)
    partial, lse = torch.full((parts, n_heads, 512), math.nan), torch.full((parts, n_heads), math.nan)
    of_attention, of_values = launcher.plan_one_row(), launcher.plan_values(values)
    emulator.run(
        "mla_one_row",
        of_attention,
        grid=(clusters or launcher.clusters_of(n_heads, parts)) * launcher.CLUSTER,
        cluster=launcher.CLUSTER,
        threads=256,
        shared_bytes=of_attention["shared_bytes"],
        arguments=[q, cache, pages, lengths, partial, lse, scale, n_heads],
        previous=[q, *newest_rows(cache, pages, lengths)],
        seed=seed,
        lazy=lazy,
        arithmetic="hopper",
    )
    out = torch.full((1, n_heads * values), math.nan, dtype=torch.bfloat16)
    emulator.run(
        "values_one_row",
        of_values,
        grid=n_heads * values // launcher.TILE_ROWS,
        threads=launcher.MERGE_THREADS,
        shared_bytes=of_values["shared_bytes"],
        arguments=[partial, lse, lengths, w_v, out, n_heads],
        previous=[partial, lse],
        seed=seed,
        arithmetic="hopper",
    )
    return out, partial, lse


def assert_bits_of_batch_invariant_mode(
    found: tuple[Tensor, Tensor, Tensor],
    q: Tensor,
    cache: Tensor,
    pages: Tensor,
    lengths: Tensor,
    w_v: Tensor,
    scale: float = SCALE,
) -> None:
    """Compare with mla_decode_64, mla_merge and a product in the order of K: partial results, too, if there are any."""
    o, partial, lse, _ = decode(q, cache, pages, lengths, mla_catalog.PART, scale, arithmetic="hopper")
    heads = [tensor_core_matmul(o[:, head], w_v[head]).bfloat16() for head in range(q.shape[1])]
    expected = torch.cat(heads, dim=1)
    parts = -(-int(lengths[0]) // mla_catalog.PART)
    if parts > 1:
        assert torch.equal(found[1][:parts].view(torch.int32), partial[:parts].view(torch.int32))
        assert torch.equal(found[2][:parts].view(torch.int32), lse[:parts].view(torch.int32))
    elif parts:
        assert torch.equal(found[1][0].bfloat16().view(torch.int16), o[0].view(torch.int16))
    assert torch.equal(found[0].view(torch.int16), expected.view(torch.int16))


@pytest.mark.one_case
@emulated
@pytest.mark.parametrize(
    "length",
    [0, 63, 64, 65, 512, 513, 2100, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (1, 128, 449, 1056))],
)
def test_one_row_has_the_bits_of_batch_invariant_mode(length: int):
    arguments = few_rows.paged([length], 3, 32)
    assert_bits_of_batch_invariant_mode(attend_from_one(*arguments), *arguments)


@pytest.mark.slow
@emulated
@pytest.mark.parametrize("length", [100, pytest.param(500, marks=pytest.mark.exhaustive), 1000])
def test_sums_that_almost_cancel_have_the_bits_of_batch_invariant_mode(length: int):
    drawn = few_rows.attention_of_last_bits(length, 2, 32, 32)
    q = few_rows.paged([length], 2)[0]
    q[..., :512] *= 2**-8  # as keys in pairs have almost the same weights, their values almost cancel
    arguments = q, *(drawn[name] for name in ("cache", "pages", "lengths", "w_v"))
    assert_bits_of_batch_invariant_mode(attend_from_one(*arguments), *arguments)


@pytest.mark.exhaustive
@emulated
@pytest.mark.parametrize(("length", "n_heads"), [(1056, 16), (577, 20), (4500, 9)])
def test_one_row_of_many_heads_has_the_bits_of_batch_invariant_mode(length: int, n_heads: int):
    arguments = few_rows.paged([length], n_heads, 16)
    assert_bits_of_batch_invariant_mode(attend_from_one(*arguments), *arguments)


@pytest.mark.one_case
@emulated
@pytest.mark.parametrize("scale", [-0.02, 0.0, 0.5])
def test_scores_of_one_row_may_be_multiplied_by_any_scale(scale: float):
    q, cache, pages, lengths, w_v = few_rows.paged([600], 2, 16)
    q[:, 0] = q[:, 0].abs()  # with keys that are growing: a head whose maximum changes at each of them
    q[:, 1] = -q[:, 0]
    cache[pages[0].long()] = (cache.abs() * torch.linspace(0.01, 1, 640).view(-1, 64, 1)).bfloat16()
    arguments = q, cache, pages, lengths, w_v
    assert_bits_of_batch_invariant_mode(attend_from_one(*arguments, scale=scale), *arguments, scale=scale)


@pytest.mark.one_case
@emulated
@pytest.mark.parametrize("lazy", [True, False])
@pytest.mark.parametrize("length", [5, 67, pytest.param(2600, marks=pytest.mark.exhaustive)])
def test_a_cluster_takes_parts_one_after_the_other(length: int, lazy: bool):
    arguments = few_rows.paged([length], 2, 16)
    expected = attend_from_one(*arguments)
    found = attend_from_one(*arguments, clusters=1, seed=1, lazy=lazy)
    assert all(torch.equal(a, b) or (a.isnan() == b.isnan()).all() for a, b in zip(found, expected, strict=True))
    assert torch.equal(found[0], expected[0])


@pytest.mark.slow
@emulated
def test_positions_after_the_length_of_one_row_are_not_read():
    q, cache, pages, lengths, w_v = few_rows.paged([700], 2, 16)
    expected, *_ = attend_from_one(q, cache, pages, lengths, w_v)
    cache[pages[0, 10].long(), 700 % 64 :] = math.nan
    more = torch.cat((pages, torch.full((1, 8), 2**30, dtype=torch.int32)), dim=1)
    assert torch.equal(attend_from_one(q, cache, more, lengths, w_v, seed=1)[0], expected)


@emulated
def test_a_nan_reaches_one_row():
    q, cache, pages, lengths, w_v = few_rows.paged([600], 2, 16)
    cache[pages[0, 1].long(), 3, 17] = math.nan
    assert attend_from_one(q, cache, pages, lengths, w_v)[0].isnan().all()


def test_parts_of_one_row_are_those_of_batch_invariant_mode():
    assert launcher.PART_PAGES * PAGE == absorbed_attention.PART == mla_catalog.PART


@pytest.mark.parametrize(
    ("n_heads", "parts", "clusters"), [(16, 1, 2), (16, 3, 6), (16, 64, 16), (1, 64, 16), (20, 9, 15), (128, 64, 16)]
)
def test_clusters_share_heads_and_parts(n_heads: int, parts: int, clusters: int):
    assert launcher.clusters_of(n_heads, parts) == clusters


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
    assert "2 rows" in why_not(q, cache, pages, w_v, True)
    assert "24 channels, not a multiple of 16" in why_not(q[:1], cache, pages, w_v[:, :24].contiguous(), True)
    of_bits = launcher.why_no_row_invariant_queries
    norm = torch.ones(513)
    assert "1024 channels" in of_bits(w_k.new_zeros(2, 512, 1024), norm[:512])
    assert "multiple of 16 bytes" in of_bits(w_k, norm[1:])
    assert of_bits(w_k, norm[:512]) is None
