"""On a GPU the counts of tokens and the order of rows are those of the CPU, bit for bit, and nothing waits."""

import pytest
import torch
from torch import Tensor

from octile.ops.permute import count_tokens, routing_plan, weighted_routing_plan

# tokens, experts per token, experts
SHAPES = [(0, 2, 5), (1, 1, 1), (3, 6, 64), (32768, 6, 64), (32769, 4, 16), (16384, 8, 256), (5000, 3, 4096)]


def experts_of(t: int, k: int, n_experts: int) -> Tensor:
    """Experts of which some have most of the tokens, and some none."""
    share = torch.rand(t, k, generator=torch.Generator().manual_seed(t))
    return (share.pow(3) * n_experts).long()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_plan_is_that_of_the_cpu(shape: tuple[int, int, int], deterministic: bool):
    experts = experts_of(*shape)
    counts = count_tokens(experts, shape[2])
    on_gpu = experts.cuda()
    routing_plan(on_gpu, count_tokens(on_gpu, shape[2])[0])  # compiles the kernels
    torch.use_deterministic_algorithms(deterministic)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found_counts = count_tokens(on_gpu, shape[2])
        found = routing_plan(on_gpu, found_counts[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.use_deterministic_algorithms(False)
    for ours, expected in zip((found_counts, *found), (counts, *routing_plan(experts, counts[0])), strict=True):
        assert ours.dtype == expected.dtype
        assert torch.equal(ours.cpu(), expected)


@pytest.mark.parametrize(("t", "k", "n_experts"), [*SHAPES, (32, 6, 64), (85, 6, 64), (256, 8, 256), (257, 8, 256)])
def test_a_weighted_plan_is_that_of_the_cpu(t: int, k: int, n_experts: int):
    experts, weights = experts_of(t, k, n_experts), torch.rand(t, k)
    found = weighted_routing_plan(experts.cuda(), weights.cuda(), n_experts)
    for ours, expected in zip(found, weighted_routing_plan(experts, weights, n_experts), strict=True):
        assert torch.equal(ours.cpu(), expected)


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_counts_of_sequences_are_those_of_the_cpu(batch: int):
    experts = experts_of(24 * 1001, 6, 64)
    assert torch.equal(count_tokens(experts.cuda(), 64, batch).cpu(), count_tokens(experts, 64, batch))


def test_a_plan_is_captured_in_a_cuda_graph():
    inputs = [experts_of(t, 6, 64)[:1000].cuda() for t in (1000, 2000)]
    expected = [routing_plan(x, count_tokens(x, 64)[0]) for x in inputs]
    experts, graph = inputs[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = routing_plan(experts, count_tokens(experts, 64)[0])
    for x, plan in zip(inputs, expected, strict=True):
        experts.copy_(x)
        graph.replay()
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, plan, strict=True))
