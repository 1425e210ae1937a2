"""`octile bench casts`: quantisation beside a copy of the same bytes, the least that a cast must do."""

from __future__ import annotations

import torch

from octile.bench.rows import Row, beside
from octile.bench.timing import seconds
from octile.scaled import dequantize, quantize

GPU_SHAPE, CPU_SHAPE = (4096, 7168), (2048, 1024)
BLOCKS = [(1, 128), (128, 1), (128, 128), (None, None)]


def rows() -> list[Row]:
    """Measures each block; input is BF16 on a GPU, FP32 on a CPU."""
    gpu = torch.cuda.is_available()
    device, dtype, (m, k) = ("cuda", torch.bfloat16, GPU_SHAPE) if gpu else ("cpu", torch.float32, CPU_SHAPE)
    torch.manual_seed(0)
    x = torch.randn(m, k, device=device, dtype=dtype)
    target, found = torch.empty_like(x), []
    copied = 2 * x.nbytes
    for block in BLOCKS:
        q = quantize(x, block)
        moved = x.nbytes + q.nbytes
        name = "×".join("all" if side is None else str(side) for side in block)
        for what, cast in (
            (f"quantize {name}", lambda block=block: quantize(x, block)),
            (f"dequantize {name}", lambda q=q: dequantize(q, dtype)),
        ):
            times = seconds({"cast": cast, "copy": lambda: target.copy_(x)}, rounds=20)
            speed, peer = moved / times["cast"] / 1e9, copied / times["copy"] / 1e9
            found.append(beside(f"{m}×{k}", what, speed, "GB/s", "copy", peer))
    return found
