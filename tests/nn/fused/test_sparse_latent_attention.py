"""Tests of absorbed attention to top-k keys: that of keys and values of heads in float64, in gradients, too.

Shapes: B batch, S sequence, H heads, N and R channels of a key, V of a value, C of a latent, K top-k keys.
"""

import itertools
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrizations

from octile.formats import BLOCK
from octile.kernels.cuda.gemm import request
from octile.nn import Linear
from octile.nn.deferred_wgrad import defer_wgrads
from octile.nn.fused import sparse_latent_attention as module
from octile.nn.fused.sparse_latent_attention import sparse_latent_attention, why_not_absorbed
from octile.nn.fused.top_k_attention import top_k_mask
from octile.nn.gathered_weight import GatheredWeight
from octile.nn.observer import observe_quantization
from octile.ops import sparse_attention as operators
from octile.recipe import Recipe
from octile.scaled import quantize
from tests.nn.fused.largest_tensor import LargestTensor

B, S, H, N, R, V, C, K = 2, 11, 3, 8, 4, 6, 16, 4
SCALE = 0.3
QUANTIZED = ["deepseek_v3", "hybrid_e5m2", "per_tensor", "delayed"]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def top_k_keys(b: int = B, s: int = S, k: int = K, seed: int = 0) -> Tensor:
    order = torch.rand(b, s, s, generator=torch.Generator().manual_seed(seed))
    values, top_k = order.masked_fill(torch.ones(s, s).triu(1).bool(), -1.0).topk(k)
    return top_k.masked_fill(values < 0, -1).int()


def inputs(b: int = B, s: int = S, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Queries and rows, which require gradients, and top-k keys."""
    q, rows = random(b, s, H, N + R, dtype=dtype), random(b, s, C + R, seed=1, dtype=dtype)
    return [q.requires_grad_(), rows.requires_grad_(), top_k_keys(b, s)]


def layer(recipe: str | None = None, dtype: torch.dtype = torch.float32) -> nn.Linear:
    kind = nn.Linear(C, H * (N + V), bias=False, dtype=dtype)
    made = kind if recipe is None else Linear.from_linear(kind, Recipe.named(recipe))
    with torch.no_grad():
        made.weight.copy_(random(H * (N + V), C, seed=2) * C**-0.5)
    return made


def attend(q: Tensor, rows: Tensor, top_k: Tensor, w: nn.Linear) -> Tensor:
    return sparse_latent_attention(q, rows, w, top_k, N, SCALE)[0]


def gradient_of_o(q: Tensor) -> Tensor:
    return random(*q.shape[:3], V, seed=3, dtype=q.dtype)


def gradients(q: Tensor, rows: Tensor, top_k: Tensor, w: nn.Linear) -> list[Tensor]:
    """The result, and the gradients of the queries, the rows and the weight."""
    o = attend(q, rows, top_k, w)
    return [o.detach(), *torch.autograd.grad(o, (q, rows, w.weight), gradient_of_o(q))]


def naive(q: Tensor, rows: Tensor, top_k: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The result and attention's weights [B, S, K] by keys and values of each head, of all keys and masked."""
    latent, k_rope = rows.split([C, R], dim=-1)
    kv = (latent @ weight.mT).unflatten(-1, (H, -1))
    k = torch.cat((kv[..., :N], k_rope[:, :, None].expand(-1, -1, H, -1)), dim=-1)
    scores = SCALE * torch.einsum("bshx,bthx->bhst", q, k)
    p = scores.masked_fill(~top_k_mask(top_k, rows.shape[1])[:, None], -torch.inf).softmax(-1)
    weights = p.mean(1).gather(-1, top_k.clamp(min=0).long()).masked_fill(top_k < 0, 0.0)
    return torch.einsum("bhst,bthv->bshv", p, kv[..., N:]), weights


def exact(q: Tensor, rows: Tensor, top_k: Tensor, weight: Tensor) -> list[Tensor]:
    """What `gradients` returns, in float64."""
    wide = [t.detach().double().requires_grad_() for t in (q, rows, weight)]
    o, _ = naive(wide[0], wide[1], top_k, wide[2])
    return [o.detach(), *torch.autograd.grad(o, wide, gradient_of_o(q).double())]


def relative_errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    pairs = zip(found, expected, strict=True)
    return [float((a.double() - b.double()).norm() / b.double().norm()) for a, b in pairs]


@given(b=st.integers(1, 3), s=st.integers(K, 13), max_elements=st.sampled_from([1, 700, 2**26]))
def test_fp32_results_and_gradients_are_those_of_masked_attention(b: int, s: int, max_elements: int):
    arguments = *inputs(b, s), layer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operators, "MAX_ELEMENTS", max_elements)
        found = gradients(*arguments)
    for ours, theirs in zip(found, exact(*arguments[:3], arguments[3].weight), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", [None, "bf16"])
def test_bf16_results_and_gradients_are_rounded_ones(recipe: str | None):
    arguments = *inputs(dtype=torch.bfloat16), layer(recipe)
    found, expected = gradients(*arguments), exact(*arguments[:3], arguments[3].weight)
    assert [t.dtype for t in found] == [*3 * [torch.bfloat16], torch.float32]
    assert max(relative_errors(found, expected)) < 2**-7


def test_under_autocast_products_are_in_its_dtype():
    q, rows, top_k = inputs(dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients(q, rows, top_k, layer())
    assert all(torch.equal(*pair) for pair in zip(found, gradients(q, rows, top_k, layer()), strict=True))


def test_sequences_of_a_batch_do_not_see_each_other():
    q, rows, top_k = inputs(3)
    together = attend(q, rows, top_k, layer())
    for i in range(3):
        assert torch.equal(attend(q[i : i + 1], rows[i : i + 1], top_k[i : i + 1], layer())[0], together[i])


def test_weights_are_attentions_and_have_no_gradient():
    q, rows, top_k = inputs()
    o, weights = sparse_latent_attention(q, rows, layer(), top_k, N, SCALE, with_weights=True)
    expected = naive(q.double(), rows.double(), top_k, layer().weight.double())[1]
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-6)
    assert (weights.dtype, weights.requires_grad, o.requires_grad) == (torch.float32, False, True)
    assert sparse_latent_attention(q, rows, layer(), top_k, N, SCALE)[1] is None


@pytest.mark.parametrize("needed", [*itertools.product([False, True], repeat=3)][1:], ids=str)
@pytest.mark.parametrize("recipe", [None, "deepseek_v3"])
def test_gradients_that_are_not_needed_are_left_out(needed: tuple[bool, ...], recipe: str | None):
    q, rows, top_k = inputs()
    every = gradients(q, rows, top_k, layer(recipe))[1:]
    w = layer(recipe)
    tensors = q, rows, w.weight
    for t, is_needed in zip(tensors, needed, strict=True):
        t.requires_grad_(is_needed)
    attend(q, rows, top_k, w).backward(gradient_of_o(q))
    for t, is_needed, expected in zip(tensors, needed, every, strict=True):
        assert t.grad is None if not is_needed else torch.equal(t.grad, expected)


def test_without_gradients_nothing_is_saved():
    with torch.no_grad(), saved_tensors_hooks(lambda _: pytest.fail("a tensor was saved"), lambda t: t):
        assert not attend(*inputs(), layer("deepseek_v3")).requires_grad


# the weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_adds_micro_batches_in_fp32(dtype: torch.dtype):
    w = layer("bf16", dtype)
    expected = exact(*inputs(dtype=torch.bfloat16), w.weight)[3]
    w.weight.main_grad = torch.zeros(w.weight.shape)
    for _ in range(2):
        q, rows, top_k = inputs(dtype=torch.bfloat16)
        attend(q, rows, top_k, w).backward(gradient_of_o(q))
    assert w.weight.grad is None
    assert relative_errors([w.weight.main_grad], [2 * expected])[0] < 2**-7
    assert not torch.equal(w.weight.main_grad, w.weight.main_grad.bfloat16().float())


@pytest.mark.parametrize("deferred", [False, True])
def test_a_main_grad_that_the_weight_gets_after_the_forward_pass_is_added_to(deferred: bool):
    expected, (q, rows, top_k), w = gradients(*inputs(), layer("bf16"))[3], inputs(), layer("bf16")
    o = attend(q, rows, top_k, w)
    w.weight.main_grad = torch.zeros(w.weight.shape)
    with defer_wgrads() if deferred else nullcontext() as wgrads:
        o.backward(gradient_of_o(q))
    if wgrads is not None:
        wgrads.compute()
    assert w.weight.grad is None
    assert torch.equal(w.weight.main_grad, expected)


def test_main_grad_of_torchs_linear_layer_is_ignored():
    w = layer()
    w.weight.main_grad = torch.zeros(w.weight.shape)
    gradients(*inputs(), w)
    assert not w.weight.main_grad.any()


@pytest.mark.parametrize("recipe", [None, "bf16", "deepseek_v3"])
def test_the_weights_gradient_can_be_deferred(recipe: str | None):
    expected, (q, rows, top_k), w = gradients(*inputs(), layer(recipe))[3], inputs(), layer(recipe)
    with defer_wgrads() as deferred:
        attend(q, rows, top_k, w).backward(gradient_of_o(q))
        assert (w.weight.grad, len(deferred)) == (None, 1)
    deferred.compute()
    assert torch.equal(w.weight.grad, expected)


@pytest.mark.parametrize("recipe", QUANTIZED)
def test_a_quantized_weight_is_multiplied_dequantized_and_its_gradient_passes_through(recipe: str):
    seen: list[Tensor] = []
    w = layer(recipe)
    with observe_quantization(lambda operand, q: seen.append((operand, q.dequantize()))):
        found = gradients(*inputs(), w)
    assert [operand for operand, _ in seen] == ["w"]
    plain = layer()
    with torch.no_grad():
        assert not torch.equal(plain.weight, seen[0][1])
        plain.weight.copy_(seen[0][1])
    assert all(torch.equal(*pair) for pair in zip(found, gradients(*inputs(), plain), strict=True))


def test_the_weight_of_fp8_is_that_of_serving():
    w, plain = layer("deepseek_v3"), layer()
    with torch.no_grad():
        plain.weight.copy_(quantize(w.weight, BLOCK).dequantize())
    assert torch.equal(attend(*inputs(), w), attend(*inputs(), plain))


def test_a_cached_weight_follows_the_optimizer():
    w = layer("deepseek_v3")
    optimizer = torch.optim.SGD(w.parameters(), lr=0.1)
    for _ in range(3):
        fresh = layer("deepseek_v3")
        with torch.no_grad():
            fresh.weight.copy_(w.weight)
        found = [gradients(*inputs(), w) for _ in range(2)]  # the second time it is cached
        for each in found:
            assert all(torch.equal(*pair) for pair in zip(each, gradients(*inputs(), fresh), strict=True))
        w.weight.grad = found[0][3]
        optimizer.step()


def test_a_gathered_weight_is_the_quantized_one():
    w, of_gathered = layer("deepseek_v3"), layer("deepseek_v3")
    q = quantize(w.weight.detach(), BLOCK)
    of_gathered.weight = nn.Parameter(GatheredWeight(q.data, q.scale, torch.float32))
    assert why_not_absorbed(of_gathered, random(1), N) is None
    found = gradients(*inputs(), of_gathered)
    assert all(torch.equal(*pair) for pair in zip(found, gradients(*inputs(), w), strict=True))


def test_a_product_in_high_precision_reads_the_weight_itself():
    recipe = Recipe.deepseek_v3().without("fprop")
    w = layer()
    of_recipe = Linear.from_linear(layer(), recipe)
    rounded = layer()
    with torch.no_grad():
        rounded.weight.copy_(w.weight.bfloat16())
    arguments = inputs(dtype=torch.bfloat16)
    assert torch.equal(attend(*arguments, of_recipe), attend(*arguments, rounded))


# memory


@pytest.mark.parametrize("recipe", [None, "deepseek_v3"])
def test_what_is_saved_grows_with_the_sequence(recipe: str | None):
    def saved(s: int) -> int:
        sizes: dict[int, int] = {}

        def pack(t: Tensor) -> Tensor:
            sizes[t.untyped_storage().data_ptr()] = t.nbytes
            return t

        w = layer(recipe)
        with saved_tensors_hooks(pack, lambda t: t):
            kept = attend(*inputs(1, s), w)
        assert kept.requires_grad
        return sum(sizes.values()) - sum(size for size in [w.weight.nbytes] if recipe is None)

    of_weight = 0 if recipe is None else H * (N + V) * C + 4
    assert saved(80) - of_weight == 2 * (saved(40) - of_weight)


@pytest.mark.parametrize("s", [40, 80])
def test_no_tensor_grows_with_the_square(s: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(operators, "MAX_ELEMENTS", 1)
    q, rows, top_k = inputs(1, s)
    with LargestTensor() as largest:
        o, _ = sparse_latent_attention(q, rows, layer(), top_k, N, SCALE, with_weights=True)
        o.backward(gradient_of_o(q))
    assert largest.numel == s * H * (C + R)


# when the layer is called instead


class Adapted(nn.Linear):
    """A layer that computes something else."""


def hooked(register: str) -> Callable[[nn.Linear], nn.Module]:
    def hook(w: nn.Linear) -> nn.Module:
        getattr(w, register)(lambda *_: None)
        return w

    return hook


def with_forward(w: nn.Linear) -> nn.Module:
    w.forward = lambda x: x
    return w


@pytest.mark.parametrize("recipe", [None, "deepseek_v3"])
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (hooked("register_forward_hook"), "it has hooks"),
        (hooked("register_forward_pre_hook"), "it has hooks"),
        (hooked("register_full_backward_hook"), "it has hooks"),
        (with_forward, "it has hooks"),
        (parametrizations.weight_norm, "it is a Parametrized"),
        (lambda w: Adapted(C, V), "it is a Adapted"),
        (lambda w: nn.Sequential(w), "it is a Sequential"),
        (lambda w: w.double(), "queries and weight are torch.float32 and torch.float64"),
        (lambda w: w, None),
    ],
)
def test_a_layer_that_may_compute_something_else_is_called(recipe: str | None, change: Callable, why: str | None):
    found = why_not_absorbed(change(layer(recipe)), random(1), N)
    assert found is None if why is None else found.startswith(why)


def test_a_layer_with_a_bias_or_another_kind_of_weight_is_called():
    assert why_not_absorbed(nn.Linear(C, V), random(1), N) == "it has a bias"

    class Sharded(Tensor):
        pass

    w = layer()
    w.weight = nn.Parameter(w.weight.detach().as_subclass(Sharded))
    assert why_not_absorbed(w, random(1), N) == "its weight is a Sharded"


@pytest.mark.parametrize(
    ("dtype", "latent_dim", "why"),
    [
        (torch.bfloat16, 512, None),
        (torch.float32, 512, "no kernel reads latents of 512 + 64 channels in torch.float32"),
        (torch.bfloat16, 256, "no kernel reads latents of 256 + 64 channels in torch.bfloat16"),
    ],
)
def test_a_gpu_absorbs_what_its_kernels_read(
    dtype: torch.dtype, latent_dim: int, why: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(request, "why_not_on", lambda _: None)
    with FakeTensorMode():
        q = torch.empty(1, 2, 3, 192, dtype=dtype, device="cuda")
    assert why_not_absorbed(nn.Linear(latent_dim, 6, bias=False), q, 128) == why


def test_a_gpu_on_which_the_kernels_do_not_run_calls_the_layer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request, "why_not_on", lambda device: f"it is {device.type}")
    with FakeTensorMode():
        q = torch.empty(1, 2, 3, 192, dtype=torch.bfloat16, device="cuda")
    found = why_not_absorbed(nn.Linear(512, 6, bias=False), q, 128)
    assert found == "the kernels do not run on this GPU: it is cuda"


def test_a_main_grad_in_bf16_is_refused():
    w = layer("bf16")
    w.weight.main_grad = torch.zeros_like(w.weight, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"main_grad must be float32, not torch\.bfloat16"):
        attend(*inputs(), w)


def test_the_weights_of_attention_have_no_gradient_that_backward_reads(monkeypatch: pytest.MonkeyPatch):
    seen = []
    backward = module._SparseLatentAttention.backward

    def record(ctx, do, dweights):
        seen.append(dweights)
        return backward(ctx, do, dweights)

    monkeypatch.setattr(module._SparseLatentAttention, "backward", staticmethod(record))
    q, rows, top_k = inputs()
    o, weights = sparse_latent_attention(q.requires_grad_(), rows, layer(), top_k, N, SCALE, with_weights=True)
    o.sum().backward()
    assert weights is not None
    assert seen == [None]


@pytest.mark.oldest_torch
@pytest.mark.parametrize("why", [None, "it is old"])
def test_whether_kernels_run_does_not_break_a_compiled_graph(why: str | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request, "why_not_on", lambda _: why)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: x + 1 if module._why_no_kernels(x.device) else x, backend="eager", fullgraph=True
    )
    assert compiled(torch.zeros(())) == (why is not None)
