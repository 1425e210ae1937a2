"""Kernels that start before the previous one of the stream has ended compute the bits of those that do not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octile.formats import BLOCK, TILE
from octile.kernels.cuda.jit.launch import only_activations_are_new, overlapping_launches
from octile.ops.grouped import grouped_matmul_nt
from octile.ops.latent_cache import write_and_rotate
from octile.ops.matmul import matmul_nt, matmul_nt_out
from octile.ops.norm import rms_norm_quantize
from octile.ops.paged_attention import heads_nt_out, heads_nt_quantize, paged_attention
from octile.ops.permute import permute, unpermute_add_, weighted_routing_plan
from octile.ops.quantize import quantize
from octile.ops.swiglu import swiglu_quantize

D, I, E, K = 2048, 1408, 64, 6
Quantized = tuple[Tensor, Tensor]


def weight(*shape: int) -> Quantized:
    return quantize(torch.randn(shape, device="cuda").bfloat16() / shape[-1] ** 0.5, *BLOCK, "e4m3", False)


def multiply(x: Quantized, w: Quantized, offs: Tensor | None = None) -> Tensor:
    operands = *x, TILE, *w, BLOCK
    if offs is None:
        return matmul_nt(*operands, torch.bfloat16)
    return grouped_matmul_nt(*operands, offs, torch.bfloat16)


def captured(compute: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Capture a computation whose kernels may start early."""
    graph = torch.cuda.CUDAGraph()
    with overlapping_launches():
        compute()  # compiles the kernels
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            compute()
    return graph


class Layer:
    """A projection, shared experts on a stream of their own, and experts, as a decode step launches them."""

    def __init__(self) -> None:
        self.norm = torch.rand(D, device="cuda").bfloat16() + 0.5
        self.projection, self.shared = weight(D, D), (weight(4 * I, D), weight(D, 2 * I))
        self.experts = weight(E, 2 * I, D), weight(E, D, I)
        self.side = torch.cuda.Stream()

    def add(self, x: Tensor, chosen: Tensor, shares: Tensor) -> None:
        _, _, _, y = rms_norm_quantize(x, self.norm, 1e-6, "e4m3", False, True)
        matmul_nt_out(x, *quantize(y, *TILE, "e4m3", False), TILE, *self.projection, BLOCK, True)
        data, scale, _, _ = rms_norm_quantize(x, self.norm, 1e-6, "e4m3", False)
        current = torch.cuda.current_stream()
        self.side.wait_stream(current)
        with torch.cuda.stream(self.side):
            gate, up = multiply((data, scale), self.shared[0]).chunk(2, dim=-1)
            shared = multiply(swiglu_quantize(gate, up, "e4m3", False), self.shared[1])
        row_ids, order, offs, weight_R = weighted_routing_plan(chosen, shares, E)
        with only_activations_are_new():
            gate, up = multiply(permute(data, scale, row_ids, order), self.experts[0], offs).chunk(2, dim=-1)
            rows = multiply(swiglu_quantize(gate, up, "e4m3", False, weight_R, offs), self.experts[1], offs)
            current.wait_stream(self.side)
            unpermute_add_(x, rows, row_ids, shared)


@pytest.mark.parametrize("rows", [9, 32, 100, 256])
def test_layers_in_a_graph_have_the_bits_of_those_that_are_launched_one_by_one(rows: int):
    layers = [Layer() for _ in range(4)]
    x, chosen = torch.zeros(rows, D, device="cuda").bfloat16(), torch.zeros(rows, K, dtype=torch.int64, device="cuda")
    shares = torch.zeros(rows, K, device="cuda")

    def compute() -> None:
        for layer in layers:
            layer.add(x, chosen, shares)

    graph = captured(compute)
    for _ in range(20):
        first, experts = torch.randn(rows, D).bfloat16(), torch.rand(rows, E).topk(K).indices
        weights = torch.rand(rows, K)
        for to, value in ((x, first), (chosen, experts), (shares, weights)):
            to.copy_(value)
        graph.replay()
        found = x.clone()
        x.copy_(first)
        compute()
        assert torch.equal(found, x)


HEADS, KEY, ROTARY, LATENT, PAGES = 16, 128, 64, 512, 9


class Attention:
    """The attention of a layer, as a decode step launches it; its pages were filled before, but for the last rows."""

    def __init__(self, rows: int) -> None:
        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device="cuda").bfloat16() / shape[-1] ** 0.5

        self.projection, self.out = weight(HEADS * (KEY + ROTARY) + LATENT + ROTARY, D), weight(D, HEADS * KEY)
        self.w_k, self.w_v = random(HEADS, LATENT, KEY), random(HEADS, KEY, LATENT)
        self.norm = torch.ones(LATENT, device="cuda").bfloat16()
        self.cache = random(rows * PAGES, 64, LATENT + ROTARY)
        self.pages = torch.randperm(rows * PAGES, device="cuda").int().view(rows, PAGES)

    def add(self, x: Tensor, positions: Tensor, cos_sin: tuple[Tensor, Tensor]) -> None:
        slots = self.pages.gather(1, positions[:, None] // 64)[:, 0] * 64 + positions % 64
        lengths = (positions + 1).int()  # before the kernel that precedes attention
        projected = multiply(quantize(x, *TILE, "e4m3", False), self.projection)
        q, latent, rope = projected.split([HEADS * (KEY + ROTARY), LATENT, ROTARY], -1)
        q_THX = q.unflatten(-1, (HEADS, -1))
        absorbed = q.new_empty(len(x), HEADS, LATENT + ROTARY)
        write_and_rotate(self.cache, slots, latent, rope, self.norm, 1e-6, *cos_sin, q_THX, absorbed)
        heads_nt_out(absorbed[..., :LATENT], q_THX[..., :KEY], self.w_k)
        with only_activations_are_new():
            o_THC = paged_attention(absorbed, self.cache, self.pages, lengths, LATENT, 0.05)
        matmul_nt_out(x, *heads_nt_quantize(o_THC, self.w_v, False), TILE, *self.out, BLOCK, True)


@pytest.mark.parametrize("rows", [9, 32, 256])
def test_attention_in_a_graph_reads_pages_as_one_that_waits_does(rows: int):
    layers = [Attention(rows) for _ in range(4)]
    x = torch.zeros(rows, D, device="cuda").bfloat16()
    positions = torch.zeros(rows, dtype=torch.int64, device="cuda")
    cos_sin = torch.ones(rows, ROTARY // 2, device="cuda"), torch.zeros(rows, ROTARY // 2, device="cuda")

    def compute() -> None:
        for layer in layers:
            layer.add(x, positions, cos_sin)

    graph = captured(compute)
    for _ in range(20):
        first = torch.randn(rows, D, device="cuda").bfloat16()
        x.copy_(first)
        positions.copy_(torch.randint(64 * PAGES, (rows,), device="cuda"))
        graph.replay()
        found = x.clone()
        x.copy_(first)
        compute()
        assert torch.equal(found, x)
