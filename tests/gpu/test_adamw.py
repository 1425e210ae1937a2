"""AdamW on a GPU equals its reference and the optimizer on the CPU, bit for bit."""

import copy
import math
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from octile.ops.adamw import adamw
from octile.optim import AdamW
from octile.recipe import OptimizerFormats

SETTINGS = (0.9, 0.95, 1e-8)


def tensors(shape: tuple[int, ...], moments: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    w, g, m = (torch.randn(shape, generator=generator) * size for size in (1.0, 1e-2, 1e-2))
    return [w, g, m.to(moments), (torch.rand(shape, generator=generator) * 1e-4).to(moments)]


@pytest.mark.parametrize("shape", [(1,), (333, 777), (2048, 4096)], ids=str)
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("t", [1, 1000])
def test_the_kernel_equals_its_reference(shape: tuple[int, ...], moments: torch.dtype, t: int):
    corrections = torch.tensor([[3e-3 / (1 - 0.9**t), math.sqrt(1 - 0.95**t), 0.9997]])
    expected, found = tensors(shape, moments), [x.cuda() for x in tensors(shape, moments)]
    adamw(*([x] for x in expected), [], corrections, *SETTINGS)
    adamw(*([x] for x in found), [], corrections.cuda(), *SETTINGS)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_many_tensors_in_one_call_equal_the_reference():
    """Aligned and unaligned addresses, BF16 copies, a scale of the gradient."""
    sizes = [1, 1024, 5, 4096 * 3 + 7, 0, *range(500, 700)]
    corrections = torch.tensor([[3e-3 / (1 + i), 0.5, 0.9997] for i in range(len(sizes))])
    found: list[list[Tensor]] = []
    for device in ("cpu", "cuda"):
        each = [
            [t.to(device)[i % 3 :] for t in tensors((size + i % 3,), torch.bfloat16)] for i, size in enumerate(sizes)
        ]
        w, g, m, v = ([t.clone() if i % 2 else t for i, t in enumerate(ts)] for ts in zip(*each, strict=True))
        copies = [torch.zeros_like(t, dtype=torch.bfloat16) for t in w]
        others = None, torch.tensor(0.7, device=device)
        adamw(w, g, m, v, copies, corrections.to(device), *SETTINGS, *others)
        found.append([t.cpu() for t in (*w, *m, *v, *copies)])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="the CPU has no fused multiply-add"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("formats", [OptimizerFormats(), OptimizerFormats(exp_avg="float32", exp_avg_sq="float32")])
def test_the_optimizer_equals_that_on_the_cpu(dtype: torch.dtype, formats: OptimizerFormats):
    generator = torch.Generator().manual_seed(0)
    ours = [nn.Parameter(torch.randn(64, n, generator=generator).to(dtype)) for n in (16, 768)]
    theirs = [nn.Parameter(copy.deepcopy(p.detach()).cuda()) for p in ours]
    optimizers = [AdamW(params, lr=3e-3, formats=formats) for params in (ours, theirs)]
    for _ in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            q.grad = p.grad.cuda()
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q.cpu())
        for kind, state in optimizers[0].state[p].items():
            assert torch.equal(state, optimizers[1].state[q][kind].cpu()), kind


def test_a_captured_step_follows_gradients_and_the_learning_rate():
    generator = torch.Generator().manual_seed(0)
    captured = [nn.Parameter(torch.randn(64, n, generator=generator).cuda()) for n in (16, 768)]
    eager = copy.deepcopy(captured)
    rate = torch.tensor(1.0, dtype=torch.float64, device="cuda")
    ours, theirs = AdamW(captured, rate), AdamW(eager, 1.0)
    for p, q in zip(captured, eager, strict=True):
        p.grad, q.grad = torch.randn_like(p), torch.empty_like(q)
        q.grad.copy_(p.grad)
    for optimizer in (ours, theirs):  # the first step allocates the moments
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    for t in (2, 3):
        theirs.param_groups[0]["lr"] = 1e-2 / t
        rate.fill_(1e-2 / t)
        for p, q in zip(captured, eager, strict=True):
            q.grad.copy_(p.grad.normal_())
        graph.replay()
        theirs.step()
        assert all(torch.equal(p, q) for p, q in zip(captured, eager, strict=True)), f"step {t}"


@pytest.mark.parametrize("exp_avg_sq", ["bfloat16", "float16"])
def test_a_captured_step_reads_the_flag_that_skips_it(exp_avg_sq: Literal["bfloat16", "float16"]):
    formats = OptimizerFormats(exp_avg_sq=exp_avg_sq)
    params = [nn.Parameter(torch.randn(64, n, device="cuda")) for n in (16, 768)]
    optimizer, skip = AdamW(params, 1e-2, formats=formats), torch.zeros((), dtype=torch.bool, device="cuda")
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step(skip=skip)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step(skip=skip)
    for skips in (True, False):
        before, states = copy.deepcopy((params, list(optimizer.state.values())))
        skip.fill_(skips)
        graph.replay()
        kept = [torch.equal(p, old) for p, old in zip(params, before, strict=True)]
        for state, old in zip(optimizer.state.values(), states, strict=True):
            kept += [torch.equal(state[key].float(), old[key].float()) for key in ("step", "exp_avg", "exp_avg_sq")]
        assert kept == [skips] * len(kept)
