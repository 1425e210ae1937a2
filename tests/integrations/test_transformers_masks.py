"""Tests of masks of transformers' models that are compiled as a whole: none where attention is causal, else its own."""

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    masking_utils,
)

from octile.integrations import transformers_masks
from octile.integrations.transformers_masks import skip_causal_masks
from octile.nn.conversion import apply_recipe

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
TOKENS = torch.arange(48).view(2, 24) % 64


@pytest.fixture(autouse=True)
def registered_masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore transformers' functions, and have torch say what it says before 2.14: that a model is being exported."""
    mapping = masking_utils.AttentionMaskInterface._global_mapping
    before = dict(mapping)
    mapping["sdpa"] = masking_utils.sdpa_mask  # whatever other tests have converted
    find = inspect.unwrap(masking_utils.find_packed_sequence_indices)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", find)
    monkeypatch.setattr(masking_utils, "is_torchdynamo_exporting", torch.compiler.is_compiling)
    yield
    mapping.clear()
    mapping.update(before)
    torch._dynamo.reset()


def llama(**sizes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(SIZES | sizes))).eval()


def attention_of(model: PreTrainedModel, **inputs: Any) -> tuple[dict[str, Any], Tensor]:
    """Compile a model as a whole; return the arguments of its attention and its logits."""
    found = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        found.extend(n.kwargs for n in graph.graph.nodes if "scaled_dot_product_attention" in str(n.target))
        return graph

    with torch.no_grad():
        logits = torch.compile(model, backend=backend, fullgraph=True)(**inputs).logits
    (arguments,) = found
    return arguments, logits


@pytest.mark.oldest_torch
@pytest.mark.slow
@pytest.mark.parametrize("use_cache", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_a_converted_model_is_causal_without_a_mask(use_cache: bool):
    model = llama()
    arguments, _ = attention_of(model, input_ids=TOKENS, use_cache=use_cache)
    assert arguments["attn_mask"] is not None  # what it is about
    torch._dynamo.reset()
    apply_recipe(model)
    with torch.no_grad():
        expected = model(input_ids=TOKENS).logits
    arguments, logits = attention_of(model, input_ids=TOKENS, use_cache=use_cache)
    assert (arguments["attn_mask"], arguments["is_causal"]) == (None, True)
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.oldest_torch
@pytest.mark.slow
def test_padded_tokens_are_masked():
    model = apply_recipe(llama())
    mask = torch.ones_like(TOKENS)
    mask[1, :5] = 0
    with torch.no_grad():
        expected = model(input_ids=TOKENS, attention_mask=mask).logits
    arguments, logits = attention_of(model, input_ids=TOKENS, attention_mask=mask)
    assert arguments["attn_mask"] is not None
    torch.testing.assert_close(logits[mask == 1], expected[mask == 1], rtol=1e-3, atol=1e-3)


@pytest.mark.oldest_torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "is_masked"), [pytest.param(8, True, marks=pytest.mark.exhaustive), (24, True), (25, False)]
)
def test_a_window_that_is_shorter_than_the_text_is_a_mask(window: int, is_masked: bool):
    model = apply_recipe(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window)).eval())
    arguments, _ = attention_of(model, input_ids=TOKENS)
    assert (arguments["attn_mask"] is not None) == is_masked


@pytest.mark.oldest_torch
@pytest.mark.slow
def test_packed_texts_are_masked():
    model = apply_recipe(llama())
    positions = torch.cat((torch.arange(10), torch.arange(14))).expand(2, -1)
    with torch.no_grad():
        expected = model(input_ids=TOKENS, position_ids=positions, use_cache=False).logits
    attention_of(model, input_ids=TOKENS, use_cache=False)  # which leaves nothing behind
    arguments, logits = attention_of(model, input_ids=TOKENS, position_ids=positions, use_cache=False)
    assert arguments["attn_mask"] is not None
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.oldest_torch
@pytest.mark.exhaustive
def test_packed_texts_of_another_model_are_masked_during_a_graph_break():
    model, other = apply_recipe(llama()), llama()
    positions = torch.cat((torch.arange(10), torch.arange(14))).expand(2, -1)
    inputs = {"input_ids": TOKENS, "position_ids": positions, "use_cache": False}
    with torch.no_grad():
        expected = other(**inputs).logits
    found = []

    @torch.compiler.disable
    def call_other(*_: Any) -> None:
        found.append(torch.compile(other, backend="eager")(**inputs).logits)

    model.model.layers[0].register_forward_pre_hook(call_other)
    model.model.compile(backend="eager")
    with torch.no_grad():
        model(input_ids=TOKENS, use_cache=False)
    torch.testing.assert_close(found[0], expected, rtol=1e-3, atol=1e-3)
    assert transformers_masks._counted_in == ""


@pytest.mark.oldest_torch
@pytest.mark.slow
def test_a_forward_pass_that_fails_leaves_nothing_behind():
    model = apply_recipe(llama())

    @torch.compiler.disable
    def fail(*_: Any) -> None:
        raise ArithmeticError

    model.model.layers[0].register_forward_pre_hook(fail)
    model.model.compile(backend="eager")
    with pytest.raises(ArithmeticError):
        model(input_ids=TOKENS, use_cache=False)
    assert transformers_masks._counted_in == ""


def test_only_models_that_count_positions_from_0_on_have_hooks():
    opt = OPTForCausalLM(OPTConfig(hidden_size=64, ffn_dim=96, num_hidden_layers=1, num_attention_heads=4))
    for model in (llama(), opt):
        apply_recipe(apply_recipe(model))
        hooks = [
            name
            for name, module in model.named_modules()
            if transformers_masks._begin in module._forward_pre_hooks.values()
        ]
        assert hooks == (["model"] if model is not opt else [])


@pytest.mark.oldest_torch
@pytest.mark.exhaustive
def test_with_checkpointing_a_model_is_one_graph_without_a_mask():
    model = apply_recipe(llama()).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    masks = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs = [m for m in graph.modules() if isinstance(m, torch.fx.GraphModule)]
        calls = [n for g in graphs for n in g.graph.nodes if "scaled_dot_product_attention" in str(n.target)]
        masks.extend(n.kwargs["attn_mask"] for n in calls)
        return graph

    call = torch.compile(model, backend=backend, fullgraph=True)
    call(input_ids=TOKENS, labels=TOKENS, use_cache=False).loss.backward()
    assert masks == [None]


@pytest.mark.oldest_torch
@pytest.mark.slow
def test_an_exported_model_keeps_its_mask(monkeypatch: pytest.MonkeyPatch):
    model = apply_recipe(llama())
    monkeypatch.setattr(transformers_masks, "_is_exporting", lambda: True)
    arguments, _ = attention_of(model, input_ids=TOKENS)
    assert arguments["attn_mask"] is not None


def test_a_model_that_is_not_compiled_is_asked_as_before():
    skip_causal_masks(llama())
    sdpa_mask = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    assert sdpa_mask is not masking_utils.sdpa_mask
    sizes = {"batch_size": 2, "q_length": 3, "kv_length": 5, "q_offset": 2}
    assert torch.equal(sdpa_mask(**sizes), masking_utils.sdpa_mask(**sizes))
    assert sdpa_mask(batch_size=2, q_length=5, kv_length=5) is None


def test_somebody_elses_masks_stay():
    def masks(**_: Any) -> None:
        return None

    masking_utils.AttentionMaskInterface.register("sdpa", masks)
    apply_recipe(llama())
    assert masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is masks


def test_without_a_registry_models_are_converted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "transformers.masking_utils", None)
    assert apply_recipe(llama()).conversion_summary.startswith("converted 7 of 8")


@pytest.mark.parametrize(
    ("given", "is_causal"),
    [
        ({"q_length": 5, "kv_length": 5}, True),
        ({"cache_position": torch.arange(5), "kv_length": 5}, True),  # as transformers 5.0
        ({"q_length": 5, "kv_length": 6}, False),
        ({"cache_position": torch.arange(1, 6), "kv_length": 6}, False),
        ({"q_length": 5, "kv_length": 5, "allow_is_causal_skip": False}, False),
        ({"q_length": 5, "kv_length": 5, "attention_mask": torch.ones(2, 5)}, False),
        ({"q_length": 5, "kv_length": 5, "local_size": 5}, False),
        ({"kv_length": 5}, False),
    ],
)
def test_what_is_causal(given: dict[str, Any], is_causal: bool):
    assert transformers_masks._is_causal(**given) == is_causal
