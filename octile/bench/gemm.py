"""`octile bench gemm`: the products beside the vendor's BF16 product (on a CPU: FP32, its fastest exact one).

Operands are cast beforehand, x in tiles of 1×128 and w in blocks of 128×128.
"""

from __future__ import annotations

import torch

from octile.bench.rows import Row, beside
from octile.bench.timing import seconds
from octile.scaled import grouped_matmul_nt, matmul_nt, quantize

# M, N, K: of DeepSeek-V3 (attention's and experts' projections) on a GPU; of the tiny preset's size on a CPU
GPU_SHAPES = [
    (4096, 2112, 7168),
    (4096, 576, 7168),
    (4096, 24576, 1536),
    (4096, 32768, 512),
    (4096, 7168, 16384),
    (4096, 4096, 7168),
    (4096, 7168, 2048),
    (128, 4096, 7168),
    (128, 7168, 2048),
]
CPU_SHAPES = [(2048, 512, 256), (2048, 1024, 1024), (2048, 576, 2048)]
GPU_GROUPS, CPU_GROUPS = (8, 4096, 4096, 2048), (8, 256, 512, 256)  # groups, rows of each, N, K


def rows() -> list[Row]:
    """Measures every shape; data are random normal numbers."""
    gpu = torch.cuda.is_available()
    device, peer_dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    torch.manual_seed(0)
    found = [_dense(m, n, k, device, peer_dtype) for m, n, k in (GPU_SHAPES if gpu else CPU_SHAPES)]
    return [*found, _grouped(*(GPU_GROUPS if gpu else CPU_GROUPS), device, peer_dtype)]


def _dense(m: int, n: int, k: int, device: str, peer_dtype: torch.dtype) -> Row:
    x, w = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    q_x, q_w = quantize(x), quantize(w, (128, 128))
    x, w = x.to(peer_dtype), w.to(peer_dtype)
    times = seconds({"fp8": lambda: matmul_nt(q_x, q_w), "peer": lambda: x @ w.mT}, rounds=20)
    return _row(f"{m}×{n}×{k}", "FP8", 2 * m * n * k, times, peer_dtype)


def _grouped(groups: int, rows: int, n: int, k: int, device: str, peer_dtype: torch.dtype) -> Row:
    x, w = torch.randn(groups * rows, k, device=device), torch.randn(groups, n, k, device=device)
    offs = torch.arange(1, groups + 1, dtype=torch.int32, device=device) * rows
    q_x, q_w = quantize(x), quantize(w, (128, 128))
    x, w = x.to(peer_dtype), w.to(peer_dtype)
    times = seconds(
        {
            "fp8": lambda: grouped_matmul_nt(q_x, q_w, offs),
            "peer": lambda: torch.nn.functional.grouped_mm(x, w.mT, offs=offs),
        },
        rounds=20,
    )
    return _row(f"{groups}×{rows}×{n}×{k}", "FP8, grouped", 2 * groups * rows * n * k, times, peer_dtype)


def _row(case: str, what: str, flops: int, times: dict[str, float], peer_dtype: torch.dtype) -> Row:
    peer = "torch BF16" if peer_dtype == torch.bfloat16 else "torch FP32"
    return beside(case, what, flops / times["fp8"] / 1e12, "TFLOP/s", peer, flops / times["peer"] / 1e12)
