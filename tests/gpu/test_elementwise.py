"""On a GPU the kernels between high-precision GEMMs agree with the CPU's formulas, and wait for nothing."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from octile.nn import MLA, MLP, RMSNorm, pre_norm
from octile.nn.conversion import apply_recipe
from octile.nn.dispatcher import LocalDispatcher
from octile.nn.moe import Experts
from octile.nn.rope import Rope
from octile.ops.high_precision import high_precision_grouped_nt
from octile.ops.norm import rms_norm, rms_norm_backward
from octile.ops.permute import count_tokens, permute, unpermute, unpermute_add_, unpermute_backward
from octile.ops.quantize import quantize
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


NORM_SHAPES = [(3000, 384), (300, 192), (37, 96), (1, 7), (5, 7168), (0, 128)]


@every_dtype
@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
def test_rms_norm_agrees_with_the_cpu(shape: tuple[int, int], dtype: torch.dtype):
    m, k = shape
    wide = random(m, k + 8, dtype=dtype)
    x, weight = wide[:, 8:], random(k, seed=1)  # part of wider rows
    if m > 30:
        x[0] = 0
        x[1, 0], x[2, 1] = float("nan"), float("inf")
    y, rstd = rms_norm(x, weight, 1e-6)
    found, found_rstd = rms_norm(x.cuda(), weight.cuda(), 1e-6)
    torch.testing.assert_close(found_rstd.cpu(), rstd, rtol=2.0**-20, atol=0, equal_nan=True)
    assert_within(found, y, y.abs(), dtype, 8)

    dy, add = random(m, k, dtype=dtype, seed=2), random(m, k, dtype=dtype, seed=3)
    rstd = rstd.nan_to_num(1, 1)
    dy2, dy3 = random(m, k, dtype=dtype, seed=4), random(m, k, dtype=dtype, seed=5)
    for more in ((), (add,), (add, dy2), (add, None, dy3), (None, dy2, dy3)):
        arguments = dy, x, weight, rstd, *more
        found, found_dweight = rms_norm_backward(*(None if t is None else t.cuda() for t in arguments))
        expected, dweight = rms_norm_backward(*arguments)
        largest = (
            expected.float().nan_to_num(0, 0, 0).abs().amax(1, keepdim=True).expand_as(expected) if m else expected
        )
        assert_within(found, expected, largest, dtype, 8)
        torch.testing.assert_close(found_dweight.cpu(), dweight, rtol=1e-3, atol=1e-3, equal_nan=True)


@every_dtype
@pytest.mark.parametrize("shape", [(1000, 4, 384), (7, 3, 200), (1, 8, 9000), (5, 1, 7168), (0, 2, 128)], ids=str)
def test_weighted_sums_agree_with_the_cpu(shape: tuple[int, int, int], dtype: torch.dtype):
    t, k, d = shape
    y, dsum, add = random(t * k, d, dtype=dtype), random(t, d, dtype=dtype, seed=1), random(t, d, dtype=dtype, seed=2)
    weight = random(t, k, seed=3).abs()
    row_ids = torch.randperm(t * k, generator=torch.Generator().manual_seed(4)).view(t, k).to(torch.int32)
    if t > 10:
        y[5, 0], dsum[3, 1] = float("nan"), float("inf")
        weight[4] = 0
    for added in (None, add):
        found = unpermute(y.cuda(), row_ids.cuda(), None if added is None else added.cuda(), weight.cuda())
        torch.testing.assert_close(found.cpu(), unpermute(y, row_ids, added, weight), rtol=0, atol=0, equal_nan=True)
    found_dy, found_dweight = unpermute_backward(dsum.cuda(), y.cuda(), row_ids.cuda(), weight.cuda())
    dy, dweight = unpermute_backward(dsum, y, row_ids, weight)
    torch.testing.assert_close(found_dy.cpu(), dy, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found_dweight.cpu(), dweight, rtol=1e-4, atol=1e-2, equal_nan=True)


@pytest.mark.parametrize("shape", [(1000, 8, 128), (7, 3, 200), (32, 6, 2048)], ids=str)
def test_sums_that_are_added_to_rows_are_those_of_the_cpu(shape: tuple[int, int, int]):
    t, k, d = shape
    row_ids = torch.randperm(t * k, generator=torch.Generator().manual_seed(4)).view(t, k).to(torch.int32)
    x, y, add = (torch.randn(rows, d).bfloat16() for rows in (t, t * k, t))
    found = x.cuda()
    unpermute_add_(found, y.cuda(), row_ids.cuda(), add.cuda())
    unpermute_add_(x, y, row_ids, add)
    assert torch.equal(found.cpu(), x)


@pytest.mark.parametrize("shape", [(1000, 8, 128), (1000, 4, 384), (7, 3, 200), (5, 8, 7168)], ids=str)
def test_permuted_rows_are_those_of_the_cpu(shape: tuple[int, int, int]):
    t, k, d = shape
    tiles = quantize(random(t, d), 1, 128, "e4m3", False)
    row_ids = torch.randperm(t * k, generator=torch.Generator().manual_seed(4)).view(t, k).to(torch.int32)
    places = row_ids, row_ids.flatten().argsort().to(torch.int32)
    found, expected = permute(*(x.cuda() for x in (*tiles, *places))), permute(*tiles, *places)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.cpu().float(), theirs.float())


# Layers of the bf16 recipe


def agree_with_the_cpu(call: Callable[..., Tensor], module: torch.nn.Module, x: Tensor, worst: float = 1e-2) -> None:
    """Compare results and gradients of call(module, x) under autocast on both devices."""
    apply_recipe(module, Recipe.bf16())
    results = []
    for device in ("cpu", "cuda"):
        module.to(device).zero_grad()
        leaf = x.to(device).detach().requires_grad_()
        with torch.autocast(device, torch.bfloat16):
            y = call(module, leaf)
        y.backward(random(*y.shape, dtype=y.dtype, seed=9).to(device))
        results.append([t.detach().float().cpu() for t in (y, leaf.grad, *(p.grad for p in module.parameters()))])
    for on_cpu, on_gpu in zip(*results, strict=True):
        assert (on_gpu - on_cpu).norm() <= worst * on_cpu.norm()


def scaled(module: torch.nn.Module) -> torch.nn.Module:
    """Weights under which activations have a size of about 1."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5) if parameter.dim() > 1 else None
    return module


def test_a_feed_forward_layer_agrees_with_the_cpu():
    agree_with_the_cpu(lambda m, x: m(x), scaled(MLP(384, 512)), random(2, 150, 384, dtype=torch.bfloat16))


def test_half_a_block_agrees_with_the_cpu():
    def half(module: torch.nn.Module, x: Tensor) -> Tensor:
        residual, normed = pre_norm(x, *module)
        return residual + module[1](normed)

    module = scaled(torch.nn.Sequential(RMSNorm(384), MLP(384, 512)))
    agree_with_the_cpu(half, module, random(2, 150, 384, dtype=torch.bfloat16))


@pytest.mark.parametrize("q_lora_rank", [None, 96])
def test_attention_agrees_with_the_cpu(q_lora_rank: int | None):
    sizes = {"kv_lora_rank": 96, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
    mla = scaled(MLA(384, 3, q_lora_rank=q_lora_rank, **sizes))

    def call(module: torch.nn.Module, x: Tensor) -> Tensor:
        return module(x, Rope(32).cos_sin(torch.arange(150, device=x.device)))

    agree_with_the_cpu(call, mla, random(2, 150, 384, dtype=torch.bfloat16), worst=2e-2)


@pytest.mark.parametrize("n_used", [8, 5])
def test_experts_agree_with_the_cpu(n_used: int):
    """With 5 used experts of 8, the last groups are empty."""
    experts_TK = random(300, n_used).argsort(1)[:, :4]
    weights_TK, add = random(300, 4, seed=1).sigmoid(), random(300, 384, dtype=torch.bfloat16, seed=2)

    def call(experts: torch.nn.Module, x: Tensor) -> Tensor:
        dispatcher, chosen = LocalDispatcher(), experts_TK.to(x.device)
        plan = dispatcher.plan(chosen, count_tokens(chosen, 8)[0])
        rows = experts(dispatcher.dispatch(x, plan), plan.offs_E)
        return dispatcher.combine(rows, weights_TK.to(x.device), plan, add.to(x.device))

    agree_with_the_cpu(call, scaled(Experts(8, 384, 256)), random(300, 384, dtype=torch.bfloat16))
