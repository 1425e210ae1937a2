"""Hopper's kernel for the indexer's logits in the emulator: close to the reference in every mode, on any shape."""

import math

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.attention import mqa_logits
from octile.kernels.cuda.attention.mqa_logits import KEYS, TILE, Tile
from octile.kernels.cuda.jit.mapped import MappedLaunch
from octile.ops.mqa_logits import paged_mqa_schedule
from tests.ops.paged_keys import filled_pages, in_order, int32, scored
from tools import emulator
from tools.emulator import build

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="the emulator needs a C++ compiler")
TILES = {
    "as few stages as warpgroups": Tile(256, 2, 2),
    "three warpgroups": Tile(128, 3, 6),
    "four warpgroups": Tile(64, 4, 4),
}


def _operands(s: int, t: int, h: int, d: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(s)
    q, k = (torch.randn(*shape, generator=generator).to(torch.float8_e4m3fn) for shape in ((s, h, d), (t, d)))
    return q, k, torch.rand(t, generator=generator) + 0.5, torch.randn(s, h, generator=generator)


def _ranges(s: int, t: int) -> tuple[Tensor, Tensor]:
    """First keys and ends, some beyond the last key, and some ranges empty."""
    generator = torch.Generator().manual_seed(t)
    start = torch.randint(-3, t // 2 + 1, (s,), generator=generator, dtype=torch.int32)
    return start, start + torch.randint(-5, t + 1, (s,), generator=generator, dtype=torch.int32)


def _run(made: MappedLaunch, mapped: list[Tensor], arguments: list[Tensor | int], out: Tensor, seed: int) -> None:
    emulator.run(
        "mqa_logits",
        made.constants,
        grid=made.grid,
        threads=made.threads,
        shared_bytes=made.constants["shared_bytes"],
        arguments=[
            *(described._replace(pointer=t.data_ptr()) for described, t in zip(made.maps, mapped, strict=True)),
            *arguments,
            out,
            out.stride(0),
            *made.sizes,
        ],
        memory=mapped,
        headers=made.headers,
        seed=seed,
    )


def _check(
    s: int, t: int, h: int, d: int, tile: Tile = TILE, width: int = 0, dtype: torch.dtype = torch.float32, seed: int = 0
) -> None:
    """Compare logits of contiguous keys with the reference: cleaned if width is 0, otherwise compressed."""
    q, k, scale, weights = _operands(s, t, h, d)
    starts, ends = _ranges(s, t)
    clean, out = not width, torch.full((s, width or t), math.nan, dtype=dtype)
    made = mqa_logits.plan(q, k, weights, out.shape[1], width > 0, clean, dtype == torch.bfloat16, 2, tile)
    _run(made, [q, weights, k, scale], [starts, ends, 0, 0], out, seed)
    exact = scored(q, k, scale, weights)
    rounding = 1e-5 if dtype == torch.float32 else 2**-8
    for row, (start, end) in enumerate(zip(starts.clamp(min=0).tolist(), ends.clamp(max=t).tolist(), strict=True)):
        count = max(min(end - start, width or t), 0)
        first = 0 if width else start
        found = out[row, first : first + count]
        torch.testing.assert_close(found.double(), exact[row, start : start + count], rtol=rounding, atol=1e-3)
        others = torch.cat((out[row, :first], out[row, first + count :]))
        assert (others == -math.inf if clean else others.isnan()).all()


@pytest.mark.each_value
@pytest.mark.parametrize("d", mqa_logits.HEAD_DIMS)
@pytest.mark.parametrize("h", mqa_logits.HEADS)
def test_shapes(h: int, d: int):
    _check(11, 300, h, d)


@pytest.mark.each_value
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize("seed", range(3))
def test_tiles(tile: Tile, seed: int):
    _check(11, 300, 64, 32, tile, seed=seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compressed(dtype: torch.dtype):
    _check(7, 300, 32, 32, width=200, dtype=dtype)


@pytest.mark.one_case
@pytest.mark.parametrize(("h", "next_n"), [(64, 1), (32, 1), (64, 2), (32, 3), (64, 5)])
def test_pages(h: int, next_n: int):
    b, p, d, width = 4, 9, 32, 700
    q, k, scale, weights = _operands(b * next_n, p * KEYS, h, d)
    cache, generator = filled_pages(k, scale), torch.Generator().manual_seed(next_n)
    lengths = torch.randint(0, width, (b, next_n), generator=generator, dtype=torch.int32)
    lengths[2] = 0
    pages = torch.randint(0, p, (b, 11), generator=generator, dtype=torch.int32)
    schedule, out = paged_mqa_schedule(lengths, 3), torch.full((b * next_n, width), math.nan)
    made = mqa_logits.plan_paged(q.view(b, next_n, h, d), cache, weights, pages.stride(0), width, False, 3)
    _run(made, [q, weights, cache, cache[:, KEYS * d :]], [0, lengths, pages, schedule], out, next_n)
    for i in range(b):
        rows = slice(i * next_n, (i + 1) * next_n)
        exact = scored(q[rows], *in_order(cache, pages[i], d), weights[rows])
        for found, expected, length in zip(out[rows], exact, lengths[i].tolist(), strict=True):
            torch.testing.assert_close(found[:length].double(), expected[:length], rtol=1e-5, atol=1e-3)
            assert found[length:].isnan().all()


def test_items_divide_the_work_evenly():
    q, k = torch.empty(2048, 64, 128, device="meta"), torch.empty(65536, 128, device="meta", dtype=torch.float8_e4m3fn)
    made = mqa_logits.plan(q.to(k.dtype), k, int32([[0] * 64]).float(), 65536, False, True, False, 132)
    _, keys, _, q_tiles, items, chunk, *_ = made.sizes
    assert items == q_tiles * -(-keys // chunk)
    assert items / 132 / -(-items // 132) > 0.95
