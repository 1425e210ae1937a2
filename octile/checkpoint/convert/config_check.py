"""The check of a `config.json` before a size is predicted or anything is written: types, ranges, what weights say.

Of any model the keys are checked that a conversion reads, and of DeepSeek's and the other known architectures all keys.
Heads and experts are also checked of the models whose attention projects queries, keys and values as Llama's does.
Of all these, the weights of a layer are compared with those of the others.

Keys may be missing, and need not fit together as octile's own model asks, where there are weights: these are converted
whatever computes with them later.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args

from octile.checkpoint.convert.architectures import ALIASES, DEFAULTS, Architecture, Count, ModelType, Size, TokenId
from octile.checkpoint.convert.share import EXPERT_COUNTS
from octile.checkpoint.files import CONFIG
from octile.checkpoint.tensor_file import TensorSpec
from octile.models import hf_config
from octile.models.config import ModelConfig, RopeScaling
from octile.validation import Range, check_given, quoted

LAYERS = "model.layers."  # of every known architecture
LAYER = re.compile(rf"{re.escape(LAYERS)}(\d+)\.")
DECODER = r"^(?:(?:model|transformer|language_model)\.)*layers\.\d+\."  # no encoder, no tower of images or sounds
NUMBERED = re.compile(DECODER.replace(r"\d+", r"(\d+)"))
ATTENTION = re.compile(DECODER + r"self_attn\.(\w+)\.weight$")
EXPERT = re.compile(DECODER + r"\w+\.experts\.(\d+)\.")
STACKED_EXPERTS = re.compile(
    DECODER + r"\w+\.(?:experts\.(?:gate_up_proj|down_proj)(?:_blocks)?|(?:input|output)_linear\.weight)$"
)
MLP = re.compile(
    DECODER
    + r"(?:mlp|block_sparse_moe)\.(?P<expert>experts\.\d+\.)?(?P<layer>gate_proj|up_proj|down_proj|w[123])\.weight$"
)
EMBEDDING = "model.embed_tokens.weight"  # of every known architecture: [vocabulary, hidden_size]
NORM, HEAD = "model.norm.weight", "lm_head.weight"  # of every known architecture
DRAFTING = ".eh_proj.weight"  # only a multi-token prediction layer has it
Experts = Annotated[int, Range(at_least=0, at_most=2**24)]  # a model without experts may have 0
Positive = Annotated[float, Range(above=0)]

# Models whose q_proj, k_proj and v_proj have a row for each channel of each head, besides those of `ModelType`. Of the
# first, a head has hidden_size / num_attention_heads channels without head_dim; of the second, a number of their own.
# Source: the modeling files of transformers 5.
HEADS_DIVIDE_HIDDEN_SIZE = (
    *("cohere", "cohere2", "ernie4_5_moe", "exaone4", "glm4_moe", "granite", "granitemoe", "jamba"),
    *("mllama_text_model", "nemotron", "olmo2", "olmoe", "phi", "phi3", "phimoe", "qwen2_5_vl", "qwen2_5_vl_text"),
    *("qwen2_moe", "qwen2_vl", "qwen2_vl_text", "qwen3_vl_moe_text", "smollm3", "stablelm", "starcoder2"),
)
GATED_QUERIES = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")  # q_proj also has the rows of the output's gate
OWN_HEAD_DIM = (
    *("gemma", "gemma2", "gemma3_text", "glm4", "gpt_oss", "llama4_text", "minimax_m2", "qwen3_vl_text", "seed_oss"),
    *GATED_QUERIES,
)
EXPERTS_BY_OTHER_NAMES = ("moe_num_experts",)  # as ERNIE calls them


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
class HeadKeys:
    """The keys that give heads and experts of other models, where their weights decide them."""

    attn_output_gate: bool | None = None
    head_dim: Size | None = None
    hidden_size: Size | None = None
    moe_num_experts: Experts | None = None
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None


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
        ValueError: a key has another type, is out of range, or does not match the experts or weights that there are. A
            weight is missing, or has another shape than the same weight of other layers.
    """
    hf_config.check_extra(config)
    check_given(KeysOfAnyModel, config)
    text_config = config.get("text_config") or {}  # of multimodal models
    check_given(hf_config.ExtraKeys, text_config, "text_config.")
    check_given(KeysOfAnyModel, text_config, "text_config.")
    kind = config.get("model_type")
    is_deepseek = kind in hf_config.MODEL_TYPES
    if is_deepseek or kind in get_args(ModelType):
        _check_known(config, specs or {}, is_deepseek)
    text, prefix = (text_config, "text_config.") if text_config else (config, "")
    _check_heads_and_experts({"model_type": kind, **text}, prefix, specs or {})


def _check_known(config: Mapping[str, Any], specs: Mapping[str, TensorSpec], is_deepseek: bool) -> None:
    check_given(OtherKeys, config)
    for key in hf_config.ROPES:
        for keys in (RopeKeys, RopeScaling):
            check_given(keys, config.get(key) or {}, f"{key}.")
    if is_deepseek:
        _check_deepseek(config)
    else:
        check_given(Architecture, config, aliases=ALIASES)
    _check_chosen_experts(config)
    _check_weights(config, specs)


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
            raise ValueError(f"{CONFIG}: {key} must be the {what} of {EMBEDDING}, which is {shape}, not {given}")
    n_layers = config.get("num_hidden_layers")
    layers = {int(found[1]) for name in specs if (found := LAYER.match(name))}
    if n_layers is None or not layers:
        return
    if missing := sorted(set(range(n_layers)) - layers):
        which = f"{len(missing)} layers, the first of them " if missing[1:] else ""
        raise ValueError(
            f"{CONFIG}: num_hidden_layers is {n_layers}, but there are no weights of {which}{LAYERS}{missing[0]}"
        )
    drafting = {int(found[1]) for name in specs if name.endswith(DRAFTING) and (found := LAYER.match(name))}
    if more := sorted(layer for layer in layers - drafting if layer >= n_layers):
        raise ValueError(f"{CONFIG}: num_hidden_layers is {n_layers}, but there are weights of {LAYERS}{more[0]}")
    _check_intermediate_sizes(config, specs)
    if not any(layer < n_layers for layer in drafting):  # a draft model alone has neither
        _check_outside_of_layers(config, specs)


def _check_intermediate_sizes(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> None:
    for name, spec in specs.items():
        if (found := MLP.match(name)) is None:
            continue
        is_expert = found["expert"] and config["model_type"] != "mixtral"  # whose experts alone have intermediate_size
        key = "moe_intermediate_size" if is_expert else "intermediate_size"
        what, sizes = ("columns", slice(1, 2)) if found["layer"] in ("down_proj", "w2") else ("rows", slice(1))
        given = config.get(key)
        if given is not None and spec.shape[sizes] != (given,):
            raise ValueError(f"{CONFIG}: {key}: {name} must have {given} {what}, but is {list(spec.shape)}")


def _check_outside_of_layers(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> None:
    """Refuse a model without its embedding, its last norm or its output head."""
    for name, other in ((EMBEDDING, NORM), (NORM, EMBEDDING)):
        if name not in specs and other in specs:
            raise ValueError(f"{name} is missing among the weights, which hold {other}")
    generates = any(name.endswith("ForCausalLM") for name in config.get("architectures") or ())
    if generates and config.get("tie_word_embeddings") is False and HEAD not in specs:
        raise ValueError(f"{CONFIG}: tie_word_embeddings is false, but {HEAD} is missing among the weights")


def _check_layers_alike(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> None:
    """Refuse a weight that is missing in a layer, or has another shape there than in others.

    Modules of one name are compared, so that dense layers and mixtures, or several kinds of attention, may alternate.
    A module that a layer lacks as a whole, such as an indexer, is not missed.
    """
    modules: dict[str, dict[str, dict[str, TensorSpec]]] = defaultdict(lambda: defaultdict(dict))
    for name, spec in specs.items():
        layer, _, kind = name.rpartition(".")
        found = NUMBERED.match(name)
        if found is None or kind != "weight" or int(found[1]) >= (config.get("num_hidden_layers") or 0):
            continue  # multi-token prediction layers have further weights
        module, _, last = layer.rpartition(".")
        modules[re.sub(r"\d+", "*", module)][module][last] = spec
    for group in modules.values():
        _check_same_weights(group)
        _check_same_shapes(group)


def _check_same_weights(modules: Mapping[str, Mapping[str, TensorSpec]]) -> None:
    first_with: dict[frozenset[str], str] = {}
    for module, weights in modules.items():
        first_with.setdefault(frozenset(weights), module)
    for names, module in first_with.items():
        for more, other in first_with.items():
            if names < more:
                missing = f"{min(more - names)}.weight"
                raise ValueError(f"{module}.{missing} is missing among the weights, which hold {other}.{missing}")


def _check_same_shapes(modules: Mapping[str, Mapping[str, TensorSpec]]) -> None:
    shapes: dict[str, Counter[tuple[int, ...]]] = defaultdict(Counter)
    for weights in modules.values():
        for last, spec in weights.items():
            shapes[last][spec.shape] += 1
    for last, counts in shapes.items():
        (most_common, _), *rest = counts.most_common()
        if rest:
            module_with = {weights[last].shape: module for module, weights in modules.items() if last in weights}
            wrong, right = (f"{module_with[s]}.{last}.weight is {list(s)}" for s in (rest[0][0], most_common))
            raise ValueError(f"{wrong}, but {right}: both must have one shape")


def _check_heads_and_experts(config: Mapping[str, Any], prefix: str, specs: Mapping[str, TensorSpec]) -> None:
    """Check heads, ranks and experts of a text model by the weights' shapes; `prefix` names where its keys are."""
    kind = config["model_type"]
    if kind in hf_config.MODEL_TYPES and not prefix:
        rows = dict(_rows_of_deepseek(config))
    elif kind in (*get_args(ModelType), *HEADS_DIVIDE_HIDDEN_SIZE, *OWN_HEAD_DIM):
        check_given(HeadKeys, config, prefix)
        rows = dict(_rows_of_others(config))
    else:
        return
    _check_experts(config, prefix, specs)
    _check_attention(rows, prefix, specs)
    _check_layers_alike(config, specs)


def _check_experts(config: Mapping[str, Any], prefix: str, specs: Mapping[str, TensorSpec]) -> None:
    key = next((key for key in (*EXPERT_COUNTS, *EXPERTS_BY_OTHER_NAMES) if config.get(key)), None)
    if key is None:
        return
    experts = {int(found[1]) for name in specs if (found := EXPERT.match(name))}
    if experts and max(experts) + 1 != config[key]:
        raise ValueError(
            f"{CONFIG}: {prefix}{key} is {config[key]}, but there are weights of {max(experts) + 1} experts"
        )
    for name, spec in specs.items():
        if STACKED_EXPERTS.match(name) and len(spec.shape) > 2 and spec.shape[0] != config[key]:
            raise ValueError(
                f"{CONFIG}: {prefix}{key} is {config[key]}, but {name}, which is {list(spec.shape)}, has "
                f"{spec.shape[0]} experts"
            )


def _check_attention(rows: Mapping[str, tuple[str, int]], prefix: str, specs: Mapping[str, TensorSpec]) -> None:
    """Check heads and ranks by the rows of attention's projections, where the configuration has all that they need."""
    for name, spec in specs.items():
        found = ATTENTION.match(name)
        if found and found[1] in rows:
            keys, expected = rows[found[1]]
            if spec.shape[0] != expected:
                named = ", ".join(prefix + key for key in keys.split(", "))
                raise ValueError(f"{CONFIG}: {named}: {name} must have {expected} rows, but is {list(spec.shape)}")


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
    """Yield the same of other models, with the numbers that transformers has where a known architecture's is absent."""
    kind = config["model_type"]
    given = {**DEFAULTS.get(kind, {}), **config}
    heads, hidden, head_dim = (given.get(key) for key in ("num_attention_heads", "hidden_size", "head_dim"))
    if head_dim is None and heads and hidden and kind not in OWN_HEAD_DIM:
        if heads > hidden:
            raise ValueError(
                f"hidden_size must be at least num_attention_heads, {heads}, without head_dim, not {hidden}"
            )
        head_dim = hidden // heads
    kv_heads = given.get("num_key_value_heads")
    if kv_heads is None and (kind == "llama" or "num_key_value_heads" in given):  # null: as many as heads
        kv_heads = heads
    gates = kind in GATED_QUERIES and given.get("attn_output_gate") is not False
    if heads and head_dim:
        yield "q_proj", ("num_attention_heads, head_dim", (2 if gates else 1) * heads * head_dim)
    if kv_heads and head_dim:
        for layer in ("k_proj", "v_proj"):
            yield layer, ("num_key_value_heads, head_dim", kv_heads * head_dim)
    if heads and kv_heads and head_dim:  # Phi-3's
        yield "qkv_proj", ("num_attention_heads, num_key_value_heads, head_dim", (heads + 2 * kv_heads) * head_dim)
