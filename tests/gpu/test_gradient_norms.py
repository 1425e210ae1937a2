"""Norms of gradients and clipping on a GPU: exact arithmetic, equal bits at each call, capture in a CUDA graph."""

import pytest
import torch
from torch import Tensor

from octile.ops.gradient_norms import gradient_norms
from octile.optim import clip_grad_norm_


def gradients(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [1, 4096, 5, 3_000_001, 0, *range(500, 600)]
    return [torch.randn(size, generator=generator).to("cuda", dtype) for size in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_equal_exact_ones_with_the_same_bits_at_each_call(dtype: torch.dtype):
    tensors = gradients(dtype)
    found = gradient_norms(tensors)
    torch.testing.assert_close(found.double(), torch.stack([g.double().norm() for g in tensors]), rtol=2e-6, atol=0)
    assert torch.equal(gradient_norms(tensors), found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_broken_gradient_has_the_norm_nan_and_one_that_overflows_inf(dtype: torch.dtype):
    tensors = gradients(dtype)
    tensors[3][-1], tensors[7][0] = torch.inf, -torch.inf
    tensors[1].fill_(3e38)
    found = gradient_norms(tensors)
    assert found.isnan().nonzero().flatten().tolist() == [3, 7]
    assert found.isinf().nonzero().flatten().tolist() == [1]


def test_clipping_in_a_graph_follows_the_gradients():
    params = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients(torch.float32)]
    for p in params:
        p.grad = torch.zeros_like(p)
    clip_grad_norm_(params, 1.0)  # a capture needs pinned memory that exists
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = clip_grad_norm_(params, 1.0)
    for factor in (3.0, 0.25):
        for p in params:
            p.grad.fill_(factor)
        graph.replay()
        expected = factor * sum(p.numel() for p in params) ** 0.5
        assert norm.item() == pytest.approx(expected, rel=1e-5)
        torch.testing.assert_close(params[3].grad[0].item(), factor / expected, rtol=1e-5, atol=0)
