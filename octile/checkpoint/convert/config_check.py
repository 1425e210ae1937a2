"""The check of a `config.json` before a size is predicted or anything is written: types, ranges, what weights say.

Of any model the keys are checked that a conversion reads, and of DeepSeek's and the other known architectures all keys.
Keys may be missing, and need not fit together as octile's own model asks, where there are weights: these are converted
whatever computes with them later.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from octile.checkpoint.convert.architectures import ALIASES, DEFAULTS, Architecture, Count, ModelType, TokenId
from octile.checkpoint.convert.share import EXPERT_COUNTS
from octile.checkpoint.tensor_file import TensorSpec
from octile.models import hf_config
from octile.models.config import ModelConfig, RopeScaling
from octile.validation import Range, check_given, quoted

LAYERS = "model.layers."  # of every known architecture
LAYER = re.compile(rf"{re.escape(LAYERS)}(\d+)\.")
EXPERT = re.compile(r"\.experts\.(\d+)\.")
EMBEDDING = "model.embed_tokens.weight"  # of every known architecture: [vocabulary, hidden_size]
Experts = Annotated[int, Range(at_least=0, at_most=2**24)]  # a model without experts may have 0
Positive = Annotated[float, Range(above=0)]


@dataclass(frozen=True)
class KeysOfAnyModel:
    """The keys that a conversion reads, whatever the model."""

    model_type: str | None = None
    n_routed_experts: Experts | None = None
    num_experts: Experts | None = None
    num_experts_per_tok: Experts | None = None
    num_local_experts: Experts | None = None
    text_config: dict[str, Any] | None = None
    tie_word_embeddings: bool | None = None


@dataclass(frozen=True)
class OtherKeys:
    """The keys of known architectures that change no shape; a file with a wrong one is damaged."""

    attention_dropout: Annotated[float, Range(at_least=0, at_most=1)] | None = None
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | tuple[TokenId, ...] | None = None
    hidden_act: str | None = None
    initializer_range: Annotated[float, Range(at_least=0)] | None = None
    layer_types: tuple[str, ...] | None = None
    max_position_embeddings: Annotated[int, Range(at_least=1)] | None = None
    max_window_layers: Annotated[int, Range(at_least=0)] | None = None
    norm_topk_prob: bool | None = None
    num_experts_per_tok: Annotated[int, Range(at_least=1)] | None = None
    output_router_logits: bool | None = None
    pad_token_id: Annotated[int, Range(at_least=-1)] | None = None
    pretraining_tp: Annotated[int, Range(at_least=1)] | None = None
    rms_norm_eps: Positive | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: Positive | None = None
    router_aux_loss_coef: Annotated[float, Range(at_least=0)] | None = None
    router_jitter_noise: Annotated[float, Range(at_least=0)] | None = None
    sliding_window: Annotated[int, Range(at_least=1)] | None = None
    use_cache: bool | None = None
    use_sliding_window: bool | None = None


@dataclass(frozen=True)
class DeepseekKeys:
    """The keys of DeepSeek models that `ModelConfig` has no field for."""

    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    moe_layer_freq: Count | tuple[int, ...] | None = None
    num_key_value_heads: Count | None = None
    rope_interleave: bool | None = None
    seq_aux: bool | None = None


@dataclass(frozen=True)
class RopeKeys:
    """The keys of `rope_scaling` and `rope_parameters` besides YaRN's. Source: transformers' `RopeParameters`."""

    high_freq_factor: Positive | None = None
    long_factor: tuple[float, ...] | None = None
    low_freq_factor: Positive | None = None
    partial_rotary_factor: Annotated[float, Range(above=0, at_most=1)] | None = None
    rope_theta: Positive | None = None
    rope_type: str | None = None
    short_factor: tuple[float, ...] | None = None
    type: str | None = None


def check_config(config: Mapping[str, Any], specs: Mapping[str, TensorSpec] | None = None) -> None:
    """Check a `config.json`.

    Args:
        config: its content.
        specs: name → spec of the tensors that come with it.

    Raises:
        ValueError: a key has another type, is out of range, or does not match the experts or weights that there are.
    """
    hf_config.check_extra(config)
    check_given(KeysOfAnyModel, config)
    text_config = config.get("text_config") or {}  # of multimodal models
    check_given(hf_config.ExtraKeys, text_config, "text_config.")
    check_given(KeysOfAnyModel, text_config, "text_config.")
    kind = config.get("model_type")
    is_deepseek = kind in hf_config.MODEL_TYPES
    if not is_deepseek and kind not in get_args(ModelType):
        return
    check_given(OtherKeys, config)
    for key in hf_config.ROPES:
        for keys in (RopeKeys, RopeScaling):
            check_given(keys, config.get(key) or {}, f"{key}.")
    if is_deepseek:
        _check_deepseek(config)
    else:
        check_given(Architecture, config, aliases=ALIASES)
    _check_chosen_experts(config)
    _check_weights(config, specs or {})
    _check_experts(config, specs or {})
    _check_attention(config, specs or {}, is_deepseek)


def _check_deepseek(config: Mapping[str, Any]) -> None:
    check_given(DeepseekKeys, config)
    fields = {key: value for key, value in config.items() if key not in hf_config.ROPES}
    check_given(ModelConfig, fields, aliases=hf_config.ALIASES)
    for key in hf_config.ROPES:
        check_given(ModelConfig, {"rope_theta": (config.get(key) or {}).get("rope_theta")}, f"{key}.")


def _check_chosen_experts(config: Mapping[str, Any]) -> None:
    chosen = config.get("num_experts_per_tok") or 0
    key = next((key for key in EXPERT_COUNTS if config.get(key)), None)
    if key is not None and chosen > config[key] > 1:  # one expert is a dense MLP, which chooses none
        raise ValueError(f"num_experts_per_tok must be at most {key}, {config[key]}, not {quoted(chosen)}")


def _check_weights(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> None:
    for key, what, sizes in (("vocab_size", "number of rows", slice(1)), ("hidden_size", "width", slice(1, None))):
        given = config.get(key)
        if given is not None and EMBEDDING in specs and specs[EMBEDDING].shape[sizes] != (given,):
            shape = list(specs[EMBEDDING].shape)
            raise ValueError(f"{key} must be the {what} of {EMBEDDING}, which is {shape}, not {given}")
    n_layers = config.get("num_hidden_layers")
    layers = {int(found[1]) for name in specs if (found := LAYER.match(name))}
    missing = sorted(set(range(n_layers or 0)) - layers)  # further ones are DeepSeek's multi-token prediction
    if layers and missing:
        which = f"{len(missing)} layers, the first of them " if missing[1:] else ""
        raise ValueError(f"num_hidden_layers is {n_layers}, but there are no weights of {which}{LAYERS}{missing[0]}")


def _check_experts(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> None:
    experts = {int(found[1]) for name in specs if name.startswith(LAYERS) and (found := EXPERT.search(name))}
    key = next((key for key in EXPERT_COUNTS if config.get(key)), None)
    if experts and key is not None and max(experts) + 1 != config[key]:
        raise ValueError(f"{key} is {config[key]}, but there are weights of {max(experts) + 1} experts")


def _check_attention(config: Mapping[str, Any], specs: Mapping[str, TensorSpec], is_deepseek: bool) -> None:
    """Check heads and ranks by the rows of attention's projections, where the configuration has all that they need."""
    rows = dict(_rows_of_deepseek(config) if is_deepseek else _rows_of_others(config))
    for name, spec in specs.items():
        _, _, layer = name.removesuffix(".weight").rpartition(".self_attn.")
        if name.startswith(LAYERS) and layer in rows and name.endswith(".weight"):
            keys, expected = rows[layer]
            if spec.shape[0] != expected:
                raise ValueError(f"{keys}: {name} must have {expected} rows, but is {list(spec.shape)}")


def _rows_of_deepseek(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield the rows of attention's projections: layer → the keys that give them, and how many."""
    keys = ("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    heads, q_rank, kv_rank, nope, rope, v = (config.get(key) for key in keys)
    if q_rank:
        yield "q_a_proj", ("q_lora_rank", q_rank)
    if kv_rank and rope:
        yield "kv_a_proj_with_mqa", ("kv_lora_rank, qk_rope_head_dim", kv_rank + rope)
    if heads and nope and rope:
        for layer in ("q_proj", "q_b_proj"):
            yield layer, ("num_attention_heads, qk_nope_head_dim, qk_rope_head_dim", heads * (nope + rope))
    if heads and nope and v:
        yield "kv_b_proj", ("num_attention_heads, qk_nope_head_dim, v_head_dim", heads * (nope + v))


def _rows_of_others(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield the same of other known architectures, with the numbers that transformers has where one is absent."""
    given = {**DEFAULTS.get(config["model_type"], {}), **config}
    heads, hidden = given.get("num_attention_heads"), given.get("hidden_size")
    head_dim = given.get("head_dim") or (hidden // heads if heads and hidden else None)
    kv_heads = given.get("num_key_value_heads") or heads
    if heads and head_dim:
        yield "q_proj", ("num_attention_heads, head_dim", heads * head_dim)
    if kv_heads and head_dim:
        for layer in ("k_proj", "v_proj"):
            yield layer, ("num_key_value_heads, head_dim", kv_heads * head_dim)
