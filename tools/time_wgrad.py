"""Time the BF16 grouped wgrad with FP32 results, with other tiles and with TMA, on a Hopper GPU.

    python -m tools.time_wgrad [--rounds 20] [--shapes 30m,80m,v3]

The ratio is to torch's grouped GEMM, which rounds its result to BF16: above 1 is faster. `octile` is the kernel as
training launches it, the next lines are the same kernel with other tiles, and `TMA` loads operands through TMA
descriptors and masks only the last k-block of a group. Each candidate is compared with FP32 before it is timed.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from octile.bench.kernel_time import work_seconds
from octile.bench.rows import align_columns
from octile.kernels.triton import high_precision
from octile.kernels.triton.grouped import clamp_offset
from octile.kernels.triton.k_loop import raster_tile, store_tile


class Shape(NamedTuple):
    """dy [rows, n] and x [rows, k] of all groups together, in groups of unequal size."""

    name: str
    rows: int
    groups: int
    n: int
    k: int


SHAPES = (
    Shape("30m gate_up", 65536 * 4, 32, 1536, 384),
    Shape("30m down", 65536 * 4, 32, 384, 768),
    Shape("80m gate_up", 65536 * 4, 32, 1280, 768),
    Shape("80m down", 65536 * 4, 32, 768, 640),
    Shape("v3 gate_up", 32768, 8, 4096, 7168),
    Shape("v3 down", 32768, 8, 7168, 2048),
)
TILES = [  # TILE_M, TILE_N, BLOCK_K, warps, stages
    *((128, 256, 64, 8, stages) for stages in (3, 4)),
    *((128, 128, 64, warps, stages) for warps in (4, 8) for stages in (3, 4, 6)),
    *((128, 128, 128, 8, stages) for stages in (2, 3)),
    *((64, 256, 64, warps, 4) for warps in (4, 8)),
]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each candidate and shape, the fastest first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="measurements of each candidate")
    parser.add_argument("--shapes", default="30m,80m,v3", help="beginnings of names, with commas")
    options = parser.parse_args(arguments)
    wanted = tuple(options.shapes.split(","))
    lines = [("shape", "candidate", "ms", "TFLOP/s", "ratio to torch")]
    for shape in SHAPES:
        if shape.name.startswith(wanted):
            lines += measured(shape, options.rounds)
    print(align_columns(lines, {"ms", "TFLOP/s", "ratio to torch"}))


def measured(shape: Shape, rounds: int) -> Iterator[tuple[str, ...]]:
    """Measure all candidates that run and are right; yield a line for each, and for each that failed."""
    dy, x, offs = operands(shape)
    exact = exact_product(dy, x, offs)
    calls: dict[str, Callable[[], Tensor]] = {"torch": lambda: F.grouped_mm(dy.mT, x, offs=offs)}
    for name, call in candidates(dy, x, offs):
        try:
            error = (call() - exact).norm() / exact.norm()
            torch.cuda.synchronize()
        except Exception as problem:  # a tile that does not fit, for example
            yield shape.name, name, "", "", type(problem).__name__
            continue
        if error > 1e-5:
            yield shape.name, name, "", "", f"wrong: {error:.1e}"
        else:
            calls[name] = call
    times = work_seconds(calls, rounds)
    flops = 2 * shape.rows * shape.n * shape.k
    for name in sorted(times, key=times.__getitem__):
        ratio = times["torch"] / times[name]
        yield shape.name, name, f"{times[name] * 1e3:.3f}", f"{flops / times[name] / 1e12:.0f}", f"{ratio:.3f}"


def operands(shape: Shape, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    """Return dy, x and the ends of groups of 0.5 to 1.5 times the mean size; one group is empty."""
    generator = torch.Generator().manual_seed(0)
    share = 0.5 + torch.rand(shape.groups, generator=generator)
    share[1] = 0
    offs = (share.cumsum(0) / share.sum() * shape.rows).to(torch.int32).to(device)
    dy, x = (torch.randn(shape.rows, width, device=device, dtype=torch.bfloat16) for width in (shape.n, shape.k))
    return dy, x, offs


def exact_product(dy: Tensor, x: Tensor, offs: Tensor) -> Tensor:
    """Multiply group by group in FP32."""
    bounds = [0, *offs.tolist()]
    parts = [slice(first, end) for first, end in itertools.pairwise(bounds)]
    return torch.stack([dy[rows].float().mT @ x[rows].float() for rows in parts])


def candidates(dy: Tensor, x: Tensor, offs: Tensor) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """Yield the launch of training, then both kernels with each tile."""
    yield "octile", lambda: high_precision.launch_tn(dy, x, offs)
    for tile_m, tile_n, block_k, warps, stages in TILES:
        name = f"{tile_m}×{tile_n}×{block_k}, {warps} warps, {stages} stages"
        tile = {"TILE_M": tile_m, "TILE_N": tile_n, "BLOCK_K": block_k, "num_warps": warps, "num_stages": stages}
        yield name, lambda tile=tile: launch(dy, x, offs, tile, tma=False)
        yield f"TMA {name}", lambda tile=tile: launch(dy, x, offs, tile, tma=True)


def launch(dy: Tensor, x: Tensor, offs: Tensor, tile: dict[str, Any], tma: bool) -> Tensor:
    """Compute the weights' gradients [groups, n, k] with a given tile."""
    (t, n), k, groups = dy.shape, x.shape[1], len(offs)
    out = dy.new_empty(groups, n, k, dtype=torch.float32)
    grid = (groups * triton.cdiv(n, tile["TILE_M"]) * triton.cdiv(k, tile["TILE_N"]),)
    if tma:
        a, b = (
            TensorDescriptor.from_tensor(operand, [tile["BLOCK_K"], tile[side]])
            for operand, side in ((dy, "TILE_M"), (x, "TILE_N"))
        )
        tma_tn[grid](out, offs, a, b, t, n, k, **tile)
    else:
        high_precision.high_precision_tn[grid](out, offs, dy, x, t, n, k, *dy.stride(), *x.stride(), **tile)
    return out


@triton.jit(do_not_specialize=["T"])
def tma_tn(
    out, offs, a, b, T, M, N, TILE_M: tl.constexpr, TILE_N: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """As `high_precision_tn`, with operands in TMA descriptors of BLOCK_K rows, which read zeros outside."""
    m_tiles, n_tiles = tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N)
    group = (tl.program_id(0) // (m_tiles * n_tiles)).to(tl.int64)
    m_tile, n_tile = raster_tile(tl.program_id(0) % (m_tiles * n_tiles), m_tiles, n_tiles)
    start = clamp_offset(tl.load(offs + group - 1, mask=group > 0, other=0), T)
    end = clamp_offset(tl.load(offs + group), T)
    whole = start + (end - start) // BLOCK_K * BLOCK_K
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for first in range(start, whole, BLOCK_K):
        dy = a.load([first, m_tile * TILE_M])
        x = b.load([first, n_tile * TILE_N])
        total = tl.dot(tl.trans(dy), x, total)
    if whole < end:  # the rows of the next group may hold NaN
        inside = (tl.arange(0, BLOCK_K) < end - whole)[:, None]
        dy = tl.where(inside, a.load([whole, m_tile * TILE_M]), 0.0).to(tl.bfloat16)
        x = tl.where(inside, b.load([whole, n_tile * TILE_N]), 0.0).to(tl.bfloat16)
        total = tl.dot(tl.trans(dy), x, total)
    store_tile(out + group * M * N, N, 1, total, m_tile * TILE_M, M, n_tile * TILE_N, N, False)


if __name__ == "__main__":
    main()
