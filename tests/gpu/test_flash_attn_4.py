"""flash-attn-4, where it is installed, computes attention of training as FP64 does, with cuDNN's bounds, and in graphs.

Shapes: B batch, S sequence, H heads, X channels of a query and a key, V of a value.
"""

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from octile.kernels import attention as kernels
from octile.kernels import flash_attn_4
from octile.kernels.attention import CUDNN, FLASH_ATTN_4
from octile.kernels.flash_attn_4 import CHANNELS, CHANNELS_OF_PROMPTS, MIN_TOKENS
from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import Block
from octile.nn import MHA
from octile.nn.conversion import apply_recipe
from octile.nn.rope import Rope
from octile.ops.attention import attention, attention_backward, ragged_attention
from octile.ops.packed_attention import packed_attention, packed_attention_backward
from octile.recipe import Recipe
from tests.ops.operators import assert_well_formed

B, H, SCALE = 2, 3, 0.1
WORST = 0.02  # of the norm of a tensor's 128 tokens
# On a CPU, attention's BF16 roundings alone change the error of an FP8 or BF16 block's matrices by 2%, of norms by 19%.
MAX_ERROR_RATIO, MAX_ERROR_RATIO_OF_NORMS = 1.05, 1.25
each_width = pytest.mark.parametrize("widths", CHANNELS, ids=str)


@pytest.fixture(autouse=True)
def flash_attn_4_is_used() -> None:
    if reason := flash_attn_4.why_not_on(torch.device("cuda")):
        pytest.skip(f"flash-attn-4 is not used: {reason}")


def operands(widths: tuple[int, int], s: int, shared: bool = False, seed: int = 0) -> list[Tensor]:
    """q, k, v and the gradient of o; k and v are views: of wider rows or, if shared, of those of one head."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def drawn(heads: int, width: int) -> Tensor:
        return torch.randn(B, s, heads, width, generator=generator, device="cuda").bfloat16()

    x, v = widths
    k, v = drawn(1 if shared else H, x + v).expand(-1, -1, H, -1).split([x, v], dim=-1)
    return [drawn(H, x), k, v, drawn(H, widths[1])]


def computed(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> list[Tensor]:
    o, lse = attention(q, k, v, SCALE)
    return [o, lse, *attention_backward(do, q, k, v, o, lse, SCALE)]


def reference(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> list[Tensor]:
    """The results in FP64, one sequence and one head after the other."""
    o, lse = (q.new_empty(shape, dtype=torch.float64) for shape in (v.shape, (B, H, q.shape[1])))
    gradients = [t.new_empty(t.shape, dtype=torch.float64) for t in (q, k, v)]
    is_future_SS = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device="cuda").triu(1)
    for b in range(B):
        for h in range(H):
            q_SX, k_SX, v_SV = inputs = [t[b, :, h].double().requires_grad_() for t in (q, k, v)]
            s_SS = (SCALE * q_SX @ k_SX.T).masked_fill(is_future_SS, -math.inf)
            o_SV = s_SS.softmax(-1) @ v_SV
            o[b, :, h], lse[b, h] = o_SV.detach(), s_SS.detach().logsumexp(-1)
            for gradient, d in zip(gradients, torch.autograd.grad(o_SV, inputs, do[b, :, h].double()), strict=True):
                gradient[b, :, h] = d
    return [o, lse, *gradients]


def assert_close(found: list[Tensor], expected: list[Tensor], worst: float = WORST) -> None:
    """Compare each 128 tokens alone: in dk and dv the last ones are a small part of the norm."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        dim = 1 if ours.dim() == 4 else 2  # of the tokens: lse is [B, H, S]
        for a, b in zip(*(t.double().split(128, dim) for t in (ours, theirs)), strict=True):
            assert (a - b).norm() <= worst * b.norm()


@each_width
@pytest.mark.parametrize("shared", [False, True], ids=["heads of their own", "one head of keys and values"])
@pytest.mark.parametrize("s", [MIN_TOKENS, MIN_TOKENS + 1, MIN_TOKENS + 333, 4096])
def test_results_and_gradients_are_those_of_fp64(widths: tuple[int, int], s: int, shared: bool):
    qkv_do = operands(widths, s, shared)
    assert kernels.choose_for_training(*qkv_do[:3], SCALE) == (FLASH_ATTN_4, 0)
    found = computed(*qkv_do)
    assert [t.dtype for t in found] == [torch.bfloat16, torch.float32, *[torch.bfloat16] * 3]
    assert all(t.is_contiguous() for t in found)
    assert_close(found, reference(*qkv_do))


@each_width
def test_its_results_can_be_used_by_cudnns_backward_pass_and_the_other_way_round(widths: tuple[int, int]):
    *qkv, do = operands(widths, MIN_TOKENS)
    expected = reference(*qkv, do)[2:]
    for first, second in ((FLASH_ATTN_4, CUDNN), (CUDNN, FLASH_ATTN_4)):
        o, lse = kernels.forward(*qkv, SCALE, (first, 0))
        assert_close(list(kernels.backward(do, *qkv, o, lse, SCALE, (second, 0))), expected)


@each_width
def test_large_scores_are_as_close_as_cudnns(widths: tuple[int, int]):
    q, k, v, do = operands(widths, MIN_TOKENS)
    q = 30 * q
    expected = reference(q, k, v, do)
    errors = []
    for kernel in (FLASH_ATTN_4, CUDNN):
        o, lse = kernels.forward(q, k, v, SCALE, (kernel, 0))
        found = [o, lse, *kernels.backward(do, q, k, v, o, lse, SCALE, (kernel, 0))]
        errors.append([float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)])
    assert all(ours <= max(2 * theirs, 1e-6) for ours, theirs in zip(*errors, strict=True)), errors


@each_width
def test_operators_are_well_formed(widths: tuple[int, int]):
    q, k, v, do = operands(widths, MIN_TOKENS)
    checks = ["test_schema", "test_faketensor"]  # the others see no kernel
    assert_well_formed(attention, (q, k, v, SCALE), checks)
    assert_well_formed(attention_backward, (do, q, k, v, *attention(q, k, v, SCALE), SCALE), checks)


@each_width
def test_it_is_captured_in_a_cuda_graph(widths: tuple[int, int]):
    static = operands(widths, MIN_TOKENS)
    computed(*static)  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = computed(*static)
    others = operands(widths, MIN_TOKENS, seed=1)
    for ours, theirs in zip(static, others, strict=True):
        ours.copy_(theirs)
    graph.replay()
    assert_close(found, computed(*others), 1e-3)


@each_width
def test_other_kernels_are_used_where_torch_excludes_cudnn(widths: tuple[int, int]):
    q, k, v, _ = operands(widths, MIN_TOKENS)
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        assert kernels.choose_for_training(q, k, v, SCALE)[0] != FLASH_ATTN_4
    torch.use_deterministic_algorithms(True)
    try:
        assert kernels.choose_for_training(q, k, v, SCALE)[0] not in (FLASH_ATTN_4, CUDNN)
    finally:
        torch.use_deterministic_algorithms(False)


PROMPTS = {  # rows and keys of each text
    "whole": [(1000, 1000), (1, 1), (700, 700), (129, 129)],
    "continued": [(512, 4000), (1, 700), (600, 601)],
    "one length": [(1024, 1024)] * 2,
}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that have been called."""
    names: list[str] = []
    for name in ("forward_prompts", "forward", "backward"):
        function = getattr(flash_attn_4, name)
        monkeypatch.setattr(
            flash_attn_4, name, lambda *given, name=name, function=function: names.append(name) or function(*given)
        )
    return names


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_agree_with_the_reference(name: str, used: list[str]):
    widths = CHANNELS_OF_PROMPTS[0]
    rows, keys = zip(*PROMPTS[name], strict=True)
    torch.manual_seed(0)
    q, kv = (torch.randn(sum(n), H, sum(widths), device="cuda").bfloat16() for n in (rows, keys))
    q, (k, v) = q[..., : widths[0]].contiguous(), kv.split(widths, dim=-1)
    starts = [torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device="cuda") for n in (rows, keys)]
    out = torch.full((sum(rows) + 2, H, widths[1]), 7.0, device="cuda").bfloat16()
    ragged_attention(out[1:-1], q, k, v, *starts, max(rows), max(keys), SCALE)
    assert used == ["forward_prompts"]
    assert (out[[0, -1]] == 7).all()
    on_cpu = [t.cpu() for t in (out[1:-1], q, k, v, *starts)]
    expected = torch.empty_like(on_cpu[0], dtype=torch.float32)
    ragged_attention.reference(expected, *(t.float() for t in on_cpu[1:4]), *on_cpu[4:], max(rows), max(keys), SCALE)
    for found, of_text in zip(on_cpu[0].split(rows), expected.split(rows), strict=True):
        assert_close([found[None]], [of_text[None]])
    again = torch.empty_like(out[1:-1])
    ragged_attention(again, q, k, v, *starts, max(rows), max(keys), SCALE)
    assert torch.equal(again, out[1:-1])


def test_a_prompt_has_the_same_bits_beside_others(used: list[str]):
    widths = CHANNELS_OF_PROMPTS[0]
    torch.manual_seed(0)
    q, k, v = (torch.randn(3000, H, width, device="cuda").bfloat16() for width in (widths[0], *widths))
    together, alone = (torch.empty_like(v[:n]) for n in (3000, 1500))
    starts = torch.tensor([0, 700, 2200, 3000], dtype=torch.int32, device="cuda")
    ragged_attention(together, q, k, v, starts, starts, 1500, 1500, SCALE)
    starts = torch.tensor([0, 1500], dtype=torch.int32, device="cuda")
    ragged_attention(alone, *(t[700:2200] for t in (q, k, v)), starts, starts, 1500, 1500, SCALE)
    assert torch.equal(together[700:2200], alone)
    assert used == 2 * ["forward_prompts"]


def test_short_prompts_of_a_warm_up_compile_the_kernel_of_all(monkeypatch: pytest.MonkeyPatch):
    """A server's first steps have texts of 32 rows; no prompt of a request may wait for a further compilation."""
    widths = CHANNELS_OF_PROMPTS[0]
    q, k, v = (torch.zeros(4096, H, width, device="cuda").bfloat16() for width in (widths[0], *widths))
    out = torch.empty_like(v)

    def run(lengths: list[int]) -> None:
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
        n = sum(lengths)
        ragged_attention(out[:n], q[:n], k[:n], v[:n], starts, starts, max(lengths), max(lengths), SCALE)

    run([32] * 128)

    def fail(*given: object, **named: object) -> None:
        raise AssertionError("a kernel is compiled")

    monkeypatch.setattr("cutlass.cute.compile", fail)
    for lengths in ([4096], [2000, 1000, 100, 1], [16] * 256, [1024]):
        run(lengths)


@each_width
@pytest.mark.parametrize(("empty", "mean"), [(1, None), (60, 378)], ids=["few empty ones", "most are empty"])
def test_packed_texts_agree_with_the_reference_in_a_graph_too(
    widths: tuple[int, int], empty: int, mean: int | None, used: list[str], monkeypatch: pytest.MonkeyPatch
):
    lengths = [300, 1, 811, *empty * [0], 400]
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(sum(lengths), H, n, device="cuda").bfloat16() for n in (*widths[:1], *widths, widths[1]))
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")

    def run(*tensors: Tensor) -> list[Tensor]:
        o, lse = packed_attention(*tensors[:3], starts, SCALE, mean)
        return [o, lse, *packed_attention_backward(tensors[3], *tensors[:3], o, lse, starts, SCALE, mean)]

    expected = run(q.float(), k.float(), v.float(), do.float())
    assert not used
    found = run(q, k, v, do)
    assert used == ["forward", "backward"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(q, k, v, do)
    graph.replay()
    for results in (found, captured):
        for ours, theirs in zip(results, expected, strict=True):
            dim = 1 if ours.dim() == 2 else 0  # of the rows: lse is [H, T]
            least = theirs.double().norm() / sum(lengths) ** 0.5  # of a row: a text of one token has no dq and dk
            for a, b in zip(*(t.double().split(lengths, dim) for t in (ours, theirs)), strict=True):
                assert (a - b).norm() <= WORST * max(b.norm(), least)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    used.clear()
    run(q, k, v, do)
    assert not used


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_layers_that_are_not_fused_use_it(compiled: bool, used: list[str]):
    torch.manual_seed(0)
    layer = MHA(H * 128, H).cuda().bfloat16()
    x, dy = torch.randn(2, B, MIN_TOKENS, H * 128, device="cuda").bfloat16()
    cos_sin = Rope(128).cos_sin(torch.arange(MIN_TOKENS, device="cuda"))

    def run(call: Callable[..., Tensor]) -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        y = call(leaf, cos_sin)
        y.backward(dy)
        return [t.unflatten(-1, (H, -1)) for t in (y.detach(), leaf.grad)]

    found = run(torch.compile(layer, fullgraph=True) if compiled else layer)
    assert used == ["forward", "backward"]
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        of_cudnn = run(layer)
    assert used == ["forward", "backward"]
    assert_close(found, of_cudnn)


BLOCK_RECIPES = {
    "recomputed": Recipe.deepseek_v3(),
    "kept": replace(Recipe.deepseek_v3(), latent_attention_inputs="kept"),
    "not fused": Recipe.bf16(),
}


@pytest.mark.parametrize("recipe", BLOCK_RECIPES.values(), ids=BLOCK_RECIPES)
def test_a_block_has_the_error_that_it_has_with_cudnn(recipe: Recipe, monkeypatch: pytest.MonkeyPatch):
    heads = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "kv_lora_rank": 128}
    config = replace(ModelConfig.tiny(), hidden_size=384, **heads)
    torch.manual_seed(0)
    block = Block(config, 0).cuda()
    for parameter in block.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    x, dy = torch.randn(2, 1, MIN_TOKENS, config.hidden_size, device="cuda").bfloat16()
    cos_sin = Rope(config.qk_rope_head_dim).cos_sin(torch.arange(MIN_TOKENS, device="cuda"))

    def run(block: Block, x: Tensor, dy: Tensor) -> list[Tensor]:
        block.zero_grad()
        leaf = x.detach().requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=x.dtype == torch.bfloat16):
            y = block(leaf, cos_sin)
        y.backward(dy)
        return [y.detach(), leaf.grad, *(p.grad.clone() for p in block.parameters())]

    expected = run(copy.deepcopy(block), x.float(), dy.float())
    block = apply_recipe(block, recipe)
    chosen = []
    choose_for_training = kernels.choose_for_training
    monkeypatch.setattr(
        kernels, "choose_for_training", lambda *given: chosen.append(choose_for_training(*given)) or chosen[-1]
    )
    found = run(block, x, dy)
    assert chosen == [(FLASH_ATTN_4, 0)] * 2
    monkeypatch.setattr(kernels, "choose_for_training", kernels.choose)
    of_cudnn = run(block, x, dy)
    names = ["y", "dx", *(name for name, _ in block.named_parameters())]
    for name, ours, theirs, exact in zip(names, found, of_cudnn, expected, strict=True):
        ratio = (ours - exact).norm() / (theirs - exact).norm()
        assert ratio <= (MAX_ERROR_RATIO if exact.dim() > 1 else MAX_ERROR_RATIO_OF_NORMS), name
