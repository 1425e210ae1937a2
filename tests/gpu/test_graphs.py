"""Operators never wait for the GPU, and a captured graph follows offsets that change between its replays."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octile.ops.grouped import grouped_matmul_nt, grouped_wgrad, masked_grouped_matmul_nt
from octile.ops.groups import align_groups
from octile.ops.matmul import matmul_nt
from octile.ops.quantize import dequantize, quantize
from octile.ops.transpose import quantize_rows_and_columns

TILE, COLUMN_TILE, BLOCK = (1, 128), (128, 1), (128, 128)
T, N, K = 500, 200, 384


def _forward(x_TK: Tensor, w_GNK: Tensor, offs: Tensor) -> Tensor:
    a, b = quantize(x_TK, *TILE, "e4m3", True), quantize(w_GNK, *BLOCK, "e4m3", False)
    return grouped_matmul_nt(*a, TILE, *b, BLOCK, offs, torch.float32)


def _masked(x_TK: Tensor, w_GNK: Tensor, offs: Tensor) -> Tensor:
    a, b = quantize(x_TK.expand(4, T, K), *TILE, "e4m3", False), quantize(w_GNK, *BLOCK, "e4m3", False)
    y_GTN = masked_grouped_matmul_nt(*a, TILE, *b, BLOCK, offs, torch.float32)
    unused = torch.arange(T, device=x_TK.device) >= offs[:, None]
    return y_GTN.masked_fill(unused[..., None], 0.0)


def _wgrad(x_TK: Tensor, w_GNK: Tensor, offs: Tensor) -> Tensor:
    q = quantize(x_TK, *COLUMN_TILE, "e4m3", False)
    return grouped_wgrad(*q, COLUMN_TILE, *q, COLUMN_TILE, offs, torch.float32)


def _aligned_wgrad(x_TK: Tensor, w_GNK: Tensor, offs: Tensor) -> Tensor:
    tiles, ends = align_groups(offs, T)
    *_, data_t, scale_t = quantize_rows_and_columns(x_TK, "e4m3", False, tiles)
    q = data_t.mT, scale_t.mT, COLUMN_TILE
    return grouped_wgrad(*q, *q, ends, torch.float32)


def _dense(x_TK: Tensor, w_GNK: Tensor, offs: Tensor) -> Tensor:
    whole = (T, K)
    a, b = quantize(x_TK, *whole, "e4m3", False), quantize(w_GNK[0], *BLOCK, "e4m3", False)
    return matmul_nt(*a, whole, *b, BLOCK, torch.float32) + dequantize(*a, *whole, torch.float32).sum()


OPERATORS = [_forward, _masked, _wgrad, _aligned_wgrad, _dense]


def _inputs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, T + 1, (4,), generator=generator).sort().values.to(torch.int32)
    inputs = torch.randn(T, K, generator=generator), torch.randn(4, N, K, generator=generator), ends
    return tuple(t.cuda() for t in inputs)


@pytest.mark.parametrize("operator", OPERATORS)
def test_a_graph_follows_changed_inputs(operator: Callable[..., Tensor]):
    static = _inputs(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        operator(*static)  # compiles the kernels
    torch.cuda.current_stream().wait_stream(side)

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = operator(*static)
    for seed in (1, 2, 3):
        fresh = _inputs(seed)
        for old, new in zip(static, fresh, strict=True):
            old.copy_(new)
        graph.replay()
        torch.testing.assert_close(out, operator(*fresh), rtol=0, atol=0)


@pytest.mark.parametrize("operator", OPERATORS)
def test_nothing_is_read_back(operator: Callable[..., Tensor]):
    inputs = _inputs(4)
    operator(*inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        operator(*inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
