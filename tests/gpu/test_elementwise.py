"""On a GPU the kernels between high-precision GEMMs agree with the CPU's formulas, and wait for nothing."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from octile.nn import MLP
from octile.nn.conversion import apply_recipe
from octile.ops.high_precision import high_precision_grouped_nt
from octile.ops.swiglu import swiglu, swiglu_backward
from octile.recipe import Recipe

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def no_waiting() -> Iterator[Callable[[], None]]:
    """Return a function after whose call everything that makes the host wait raises."""
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_within(found: Tensor, expected: Tensor, size: Tensor, dtype: torch.dtype, spacings: float) -> None:
    """Compare within as many spacings of dtype at the given size; NaN and Inf must be at the same places."""
    found, expected, size = found.cpu().float(), expected.float(), size.float()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())
    finite = expected.isfinite()
    bound = spacings * torch.finfo(dtype).eps * size + 2 * torch.finfo(dtype).smallest_normal
    assert ((found - expected).abs() <= bound)[finite].all()


SWIGLU_SHAPES = [(300, 768), (1, 7), (35, 200), (4097, 384), (0, 128), (3, 0)]


@every_dtype
@pytest.mark.parametrize("shape", SWIGLU_SHAPES, ids=str)
def test_swiglu_agrees_with_the_cpu(shape: tuple[int, int], dtype: torch.dtype):
    m, h = shape
    gate, up = (4 * random(m, 2 * h, dtype=dtype)).chunk(2, 1)  # halves of one tensor
    dh = random(h, m, dtype=dtype, seed=1).mT
    if m > 30:
        gate[0] = up[1] = 0
        gate[2, 0], gate[3, 1], gate[4, 2], up[5, 3], dh[6, 4] = float("nan"), float("inf"), -float("inf"), 3e38, 0
        gate[7, :3] = torch.tensor([-100.0, -88.0, 100.0])
    expected, on_gpu = swiglu(gate, up), [t.cuda() for t in (dh, gate, up)]
    assert_within(swiglu(*on_gpu[1:]), expected, (1 + gate.float().abs()) * expected.float().abs(), dtype, 8)
    found, expected = swiglu_backward(*on_gpu), swiglu_backward(dh, gate, up)
    dh, gate, up = (t.float() for t in (dh, gate, up))
    terms = (dh * up).abs() * gate.sigmoid() * (1 + gate.abs()), expected[:, h:].float().abs()
    assert_within(found, expected, torch.cat(terms, dim=1) * (1 + gate.abs()).repeat(1, 2), dtype, 8)


@pytest.mark.parametrize("ends", [[60, 130, 200], [0, 0, 90], [0, 0, 0], [200, 200, 200]], ids=str)
def test_rows_past_the_last_group_are_zero(ends: list[int], no_waiting: Callable[[], None]):
    x, w = random(200, 64, dtype=torch.bfloat16).cuda(), random(3, 40, 64, dtype=torch.bfloat16).cuda()
    offs = torch.tensor(ends, dtype=torch.int32).cuda()
    high_precision_grouped_nt(x, w, offs, torch.bfloat16)  # compiles the kernel
    torch.full((200, 40), float("nan"), device="cuda", dtype=torch.bfloat16)  # the result's memory, likely
    no_waiting()
    y = high_precision_grouped_nt(x, w, offs, torch.bfloat16)
    torch.cuda.set_sync_debug_mode("default")
    expected = high_precision_grouped_nt(x.cpu(), w.cpu(), offs.cpu(), torch.bfloat16)
    assert not y[ends[-1] :].any()
    torch.testing.assert_close(y.cpu(), expected, rtol=2**-7, atol=2**-7)


def test_a_feed_forward_layer_in_bf16_agrees_with_the_cpu():
    torch.manual_seed(0)
    mlp, x = apply_recipe(MLP(384, 512), Recipe.bf16()), random(2, 150, 384, dtype=torch.bfloat16)
    results = []
    for device in ("cpu", "cuda"):
        mlp.to(device).zero_grad()
        leaf = x.to(device).detach().requires_grad_()
        with torch.autocast(device, torch.bfloat16):
            y = mlp(leaf)
        y.float().square().sum().backward()
        results.append([t.detach().float().cpu() for t in (y, leaf.grad, *(p.grad for p in mlp.parameters()))])
    for on_cpu, on_gpu in zip(*results, strict=True):
        assert (on_gpu - on_cpu).norm() <= 1e-2 * on_cpu.norm()
