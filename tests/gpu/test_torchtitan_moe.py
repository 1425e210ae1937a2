"""torchtitan's mixture of experts with rows moved by octile's kernels, on a GPU, vs. torchtitan's own in FP32."""

import copy

import pytest
import torch

pytest.importorskip("torchtitan")

from torchtitan.models.moe import moe

from octile.integrations.torchtitan_moe import fuse_moe

T, D, I = 300, 256, 128


def test_results_and_gradients_are_those_of_torchtitan():
    torch.manual_seed(0)
    arguments = moe.MoEArgs(num_experts=8, top_k=6, use_grouped_mm=False, score_before_experts=False)
    module = moe.MoE(arguments, D, I).cuda()
    with torch.no_grad():
        module.init_weights(0.1, torch.device("cuda"))
    fused = copy.deepcopy(module)
    fuse_moe(fused)
    x, dy = torch.randn(2, 1, T, D, device="cuda")
    results = []
    for m in (fused, module):
        own_x = x.clone().requires_grad_()
        y = m(own_x)
        y.backward(dy)
        results.append([y.detach(), own_x.grad, *(p.grad for p in m.parameters())])
    for found, expected in zip(*results, strict=True):
        assert (found - expected).norm() <= 1e-4 * expected.norm()
