"""Serving and training compute the same log-probabilities, bit for bit, under the recipe `exact`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octile.lab.rollout import Agreement, Difference, Text, compare, find_difference, prefill, roll_out
from octile.models.deepseek_v3 import DeepseekV3
from octile.ops import gate, latent_cache, norm, row_invariant, swiglu
from octile.recipe import Recipe
from octile.serve.engine.config import EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Sampling
from octile.serve.engine.stats import Stats
from octile.serve.model import attention, feed_forward, forward, gemms
from octile.serve.runner.model_runner import ModelRunner
from octile.tokenizer import Tokenizer
from tests.serve.models import EXACT, exact_model, text

FP8_LATENTS = replace(Recipe.exact(), latents="fp8")
SHARED = text(70, seed=100)  # more than a page
PROMPTS = [text(1), text(3, 1), SHARED + text(20, 2), text(90, 3), SHARED + text(5, 4), text(17, 5), text(64, 6)]


def agreements(
    model: DeepseekV3,
    tokenizer: Tokenizer,
    n_pages: int = 64,
    n_drafts: int = 0,
    cache_format: Any = None,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    batch_invariant: bool = True,
    max_ahead: int = 0,
) -> tuple[list[Agreement], Stats]:
    """How far the engine, with texts of all lengths in a batch, agrees with the model's forward pass."""
    runner = ModelRunner(model, n_pages, cache_format, batch_invariant=batch_invariant, n_drafts=n_drafts)
    runner.max_ahead = max_ahead
    engine = Engine(runner, tokenizer, EngineConfig(max_batch=5, max_step_tokens=40, n_drafts=n_drafts))
    texts = roll_out(engine, prompts, new_tokens=12, seed=0)
    stats = engine.stats()
    prefill(runner, texts)
    return compare(model, texts), stats


def assert_equal(found: list[Agreement]) -> None:
    assert [(each.equal, each.largest) for each in found] == [(each.tokens, 0.0) for each in found]
    assert min(each.tokens for each in found) > 50


@pytest.mark.one_case
@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [{}, {"q_lora_rank": None}, {"intermediate_size": 256}, {"scoring_func": "softmax", "topk_method": "greedy"}],
    ids=["compressed queries", "direct queries", "fused dense layer", "softmax"],
)
def test_log_probabilities_are_those_of_training(tokenizer, dtype, changes):
    changes |= {"n_group": 1, "topk_group": 1} if "scoring_func" in changes else {}
    found, stats = agreements(exact_model(dtype, **changes), tokenizer)
    assert_equal(found)
    assert stats.shared_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents_in_fp8_are_rounded_by_training_too(tokenizer, dtype):
    assert_equal(agreements(exact_model(dtype, FP8_LATENTS), tokenizer, cache_format="fp8")[0])


@pytest.mark.slow
def test_a_cache_that_rounds_otherwise_is_noticed(tokenizer):
    found, _ = agreements(exact_model(), tokenizer, cache_format="fp8")
    assert found[1].equal < found[1].tokens
    assert found[1].kl > 0


@pytest.mark.slow
@pytest.mark.parametrize("n_drafts", [1, 3])
def test_drafts_change_nothing(tokenizer, n_drafts):
    found, stats = agreements(exact_model(), tokenizer, n_drafts=n_drafts)
    assert_equal(found)
    assert stats.drafted_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("max_ahead", [5, 0])
def test_texts_that_were_preempted_have_the_same_bits(tokenizer, max_ahead):
    prompts = [text(60, n) for n in range(5)]
    found, stats = agreements(exact_model(), tokenizer, n_pages=5, prompts=prompts, max_ahead=max_ahead)
    assert_equal(found)
    assert stats.preemptions > 0


@pytest.mark.one_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_that_are_launched_ahead_have_the_same_bits(tokenizer, dtype):
    found, stats = agreements(exact_model(dtype), tokenizer, max_ahead=5)
    assert_equal(found)
    assert stats.steps_ahead > stats.steps // 3


@pytest.mark.one_case
@pytest.mark.parametrize(("n_pages", "n_drafts"), [(64, 0), (64, 2), (5, 0)])
def test_log_probabilities_of_prompts_are_those_of_training(tokenizer, n_pages, n_drafts):
    model, prompts = exact_model(), [text(60, n) for n in range(5)] if n_pages == 5 else PROMPTS[1:]
    runner = ModelRunner(model, n_pages, batch_invariant=True, n_drafts=n_drafts)
    engine = Engine(runner, tokenizer, EngineConfig(max_batch=5, max_step_tokens=40, n_drafts=n_drafts))
    sampling = Sampling(12, ignore_eos=True, prompt_logprobs=1)
    requests, scored = {}, {}
    for prompt in prompts:
        request = engine.add(prompt, sampling)
        requests[request.id] = prompt
    while engine.has_work:
        for output in engine.step():
            scored.setdefault(output.request_id, output.prompt_logprobs)
    for request_id, prompt in requests.items():
        with torch.no_grad():
            expected = model.log_probs(torch.tensor([prompt]))[0].tolist()
        assert [entry.logprob for entry in scored[request_id]] == expected
    stats = engine.stats()
    assert (stats.shared_tokens, stats.preemptions > 0) == (0, n_pages == 5)


def test_a_batch_in_training_has_the_bits_of_each_text():
    model = exact_model()
    tokens_BS = torch.tensor([text(100, n) for n in range(3)])
    with torch.no_grad():
        together, alone = model.log_probs(tokens_BS), torch.cat([model.log_probs(row[None]) for row in tokens_BS])
        beginning = model.log_probs(tokens_BS[:, :33])
    assert torch.equal(together, alone)
    assert torch.equal(together[:, :32], beginning)


@pytest.mark.slow
def test_the_usual_recipe_and_engine_do_not_agree(tokenizer):
    found, _ = agreements(exact_model(recipe=Recipe.deepseek_v3()), tokenizer, batch_invariant=False)
    assert found[1].equal < found[1].tokens // 10


# Mutations: one operator of serving with another order of sums, or with another rounding


def in_float64(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    return torch.bmm(a.double(), b.double().mT).to(out_dtype)


def multiply_heads_in_float64(x_THK: Tensor, w_HNK: Tensor, out_THN: Tensor) -> None:
    out_THN.copy_(in_float64(x_THK.transpose(0, 1), w_HNK, x_THK.dtype).transpose(0, 1))


def attention_in_float64(q_THW, cache, pages, lengths, latent_dim, scale, rows_per_text):
    o_THC = q_THW.new_empty(*q_THW.shape[:2], latent_dim)
    for q_HW, own, n, o_HC in zip(q_THW, pages, lengths.tolist(), o_THC, strict=True):
        keys_TW = cache[own.long()].flatten(0, 1)[:n].double()
        o_HC.copy_((q_HW.double() @ keys_TW.mT * scale).softmax(-1) @ keys_TW[:, :latent_dim])
    return o_THC


def reversed_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rstd = torch.rsqrt(x.float().flip(-1).square().cumsum(-1)[:, -1] / x.shape[-1] + eps)
    return norm.normalized(x, rstd, weight).to(x.dtype), rstd


def norm_rounded_to_bf16_and_quantized(x, weight, eps, fmt, power_of_2, values=False):
    y, rstd = reversed_norm(x.float(), weight, eps)
    return *norm.quantize(y.bfloat16().float(), 1, 128, fmt, power_of_2), rstd, y.to(x.dtype)


def silu_of_torch(gate_MI, up_MI, fmt, power_of_2, weight=None, ends=None):
    h = torch.nn.functional.silu(gate_MI.double()).float() * up_MI.float()
    return swiglu.quantize(h if weight is None else h * weight[:, None], 1, 128, fmt, power_of_2)


def blocks_backwards(a, a_scale, a_block, b, b_scale, b_block, offs, out_dtype, zero_rest=True):
    values = (
        row_invariant.dequantize(a, a_scale, *a_block, torch.float32).flip(-1),
        row_invariant.dequantize(b, b_scale, *b_block, torch.float32).flip(-1),
    )
    return row_invariant.row_invariant_groups_nt(*values, offs, out_dtype)


def weights_in_bf16(*arguments):
    weights, experts, logits = gate.gate(*arguments)
    return weights.bfloat16().float(), experts, logits


def rotated_in_float64(cache, slots, latent, rope, weight, eps, cos, sin, q, absorbed):
    latent_cache.write_and_rotate(cache, slots, latent, rope, weight, eps, cos, sin, q, absorbed)
    r = rope.shape[1]
    even, odd = q[..., -r::2].double(), q[..., 1 - r :: 2].double()
    cos, sin = (t.double()[:, None] for t in (cos, sin))
    absorbed[..., -r::2], absorbed[..., 1 - r :: 2] = even * cos - odd * sin, even * sin + odd * cos


MUTATIONS: dict[str, tuple[str, object, str, Callable[..., Any]]] = {  # name: where it is, and the operator
    "norm of latents": ("block 0", attention, "rms_norm", reversed_norm),
    "last norm": ("norm", forward, "rms_norm", reversed_norm),
    "norms before FP8 layers": ("block 1", gemms, "rms_norm_quantize", norm_rounded_to_bf16_and_quantized),
    "absorbed queries": ("block 1", gemms, "multiply_heads", multiply_heads_in_float64),
    "attention": ("block 0", attention, "attend_to_latents", attention_in_float64),
    "rotary embeddings": ("block 1", attention, "write_and_rotate", rotated_in_float64),
    "FP8 GEMMs": ("block 0", gemms, "row_invariant_scaled_nt", blocks_backwards),
    "SwiGLU": ("block 1", gemms, "swiglu_quantize", silu_of_torch),
    "weights of experts": ("block 1", feed_forward, "gate", weights_in_bf16),
    "head": ("head", forward, "row_invariant_matmul_nt", in_float64),
}
LONG = [Text(text(500, n)) for n in range(24)]  # rounding to 8 bits hides most last bits


def mutate(monkeypatch: pytest.MonkeyPatch, where: str, module: object, operator: str, mutated: Any) -> None:
    """Replace an operator of serving: in one block alone, if `where` is a block."""
    run_block = forward.Forward._block

    def run(self: forward.Forward, x_TD: Tensor, layer: int, *arguments: Any) -> Tensor:
        with monkeypatch.context() as patch:
            if where == f"block {layer}":
                patch.setattr(module, operator, mutated)
            return run_block(self, x_TD, layer, *arguments)

    if where.startswith("block"):
        monkeypatch.setattr(forward.Forward, "_block", run)
    else:
        monkeypatch.setattr(module, operator, mutated)


@pytest.mark.one_case
@pytest.mark.parametrize("name", MUTATIONS)
def test_an_operator_with_another_order_of_sums_is_found_where_it_is(monkeypatch, name):
    model = exact_model(intermediate_size=256)
    mutate(monkeypatch, *MUTATIONS[name])
    found = find_difference(model, ModelRunner(model, 64, batch_invariant=True), LONG)
    assert isinstance(found, Difference)
    assert found.where == MUTATIONS[name][0]


def test_without_a_mutation_nothing_is_found(tokenizer):
    model = exact_model()
    runner = ModelRunner(model, 64, batch_invariant=True)
    texts = roll_out(Engine(runner, tokenizer), PROMPTS[:3], new_tokens=3, seed=0)
    assert find_difference(model, runner, texts) is None


def test_the_configuration_of_these_tests_has_a_dense_layer_that_is_not_fused():
    assert EXACT.intermediate_size % 128
    assert EXACT.first_k_dense_replace
