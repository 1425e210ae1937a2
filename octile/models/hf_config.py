"""Parse a Hugging Face `config.json` into the fields of a `ModelConfig`.

transformers has two spellings for rotary positions (`rope_scaling` and `rope_theta`, or one `rope_parameters`). Both
are read; the first, which every inference engine supports, is written.  There are three kinds of keys:

    a field        of `ModelConfig`: its value is used
    COMPUTED       changes what the model computes: must have the one value that this model computes
    any other      stored in `extra` unchanged, such as `quantization_config`, and written back; those that octile or
                   an inference engine reads have the types of `ExtraKeys` and `QuantizationKeys`

DeepSeek-V3.2 (`deepseek_v32`) is V3 with an indexer that chooses `index_topk` tokens for each token's attention, and
GLM-5 (`glm_moe_dsa`) is V3.2 with adjacent pairs of the indexer's rotary channels. The indexer's fields are read for
these model types alone.

In GLM-5.2 most layers have no indexer and reuse the tokens that an earlier one has chosen. Three spellings say which,
and the first of them that a file has decides, as in transformers: `indexer_types`, `index_topk_pattern`, and
`index_topk_freq` with `index_skip_topk_offset`. Engines read only the others: what is written says the same in both.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from octile.validation import check_given, quoted, warn_caller

NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "first_k_dense_replace",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts_per_tok",
)
NULLABLE = ("q_lora_rank", "bos_token_id", "eos_token_id")  # null is a value of these; elsewhere it means unset
ALIASES = {"num_mtp_layers": "num_nextn_predict_layers", "num_local_experts": "n_routed_experts"}
COMPUTED: dict[str, Any] = {  # the one value of each that this model computes
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "moe_layer_freq": 1,
    "rope_interleave": True,
    "seq_aux": True,
}
MODEL_TYPES = ("deepseek_v3", "deepseek_v2", "deepseek_v32", "kimi_k2", "glm_moe_dsa")
GLM = "glm_moe_dsa"
SPARSE = ("deepseek_v32", GLM)  # the model types with sparse attention
INDEXER = ("index_n_heads", "index_head_dim", "index_topk")  # fields that it needs and others do not have
MAX_LAYERS = 1000
PATTERN = {"F": "full", "S": "shared"}  # of the letters of `index_topk_pattern`
V2_DEFAULTS: dict[str, Any] = {
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
GLM_DEFAULTS: dict[str, Any] = {"n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5, "indexer_rope_interleave": True}
DEFAULTS: dict[str, dict[str, Any]] = {"deepseek_v2": V2_DEFAULTS, GLM: GLM_DEFAULTS}
ROPES = ("rope_scaling", "rope_parameters")  # the two spellings
YARN_NEEDED = ("factor", "original_max_position_embeddings")
IGNORED_MSCALE = "transformers ignores both unless both are given and above 0, and computes otherwise"


@dataclass(frozen=True)
class ExtraKeys:
    """The types of keys that no field of `ModelConfig` holds."""

    architectures: tuple[str, ...] | None = None
    dtype: str | None = None
    index_share_for_mtp_iteration: bool | None = None
    index_skip_topk_offset: int | None = None
    index_topk_freq: int | None = None
    index_topk_pattern: str | tuple[str, ...] | None = None
    indexer_types: tuple[str, ...] | None = None
    mlp_layer_types: tuple[str, ...] | None = None
    quantization_config: dict[str, Any] | None = None
    torch_dtype: str | None = None


@dataclass(frozen=True)
class QuantizationKeys:
    """The types of the keys of `quantization_config`."""

    activation_scheme: str | None = None
    fmt: str | None = None
    modules_to_not_convert: tuple[str, ...] | None = None
    quant_method: str | None = None
    scale_fmt: str | None = None
    weight_block_size: tuple[int, ...] | None = None


def check_extra(config: Mapping[str, Any]) -> None:
    """Check the types of the keys that no field of `ModelConfig` holds.

    Raises:
        ValueError: a key has another type.
    """
    check_given(ExtraKeys, config)
    check_given(QuantizationKeys, config.get("quantization_config") or {}, "quantization_config.")


def parse(config: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the fields among `known`, `rope_scaling` as a dict or None, and all other keys under "extra".

    The values of fields are those of the file: `ModelConfig` checks their types and ranges.

    Raises:
        ValueError: a needed key is missing, a key asks for what this model does not compute, or one that is stored in
            `extra` has another type.
    """
    check_extra(config)
    config = canonical_names(config, ALIASES)
    _check_computed(config)
    given = {k: v for k, v in config.items() if k in known and (v is not None or k in NULLABLE)}
    is_sparse = config.get("model_type") in SPARSE
    if not is_sparse and (unfit := [name for name in INDEXER if name in given]):
        kinds = " or ".join(map(repr, SPARSE))
        raise ValueError(f"{unfit[0]} needs model_type {kinds}, not {quoted(config.get('model_type'))}")
    if missing := [name for name in (*NEEDED, *(INDEXER if is_sparse else ())) if name not in given]:
        raise ValueError(f"the configuration lacks {', '.join(missing)}")

    defaults = DEFAULTS.get(str(config.get("model_type")), {})
    found = {"num_nextn_predict_layers": 0, **defaults, **given, **_rope(config)}
    implied = {*known, *COMPUTED, "num_key_value_heads", "rope_parameters"}
    if is_sparse:
        found["indexer_types"] = _indexer_types(config)
    return {**found, "extra": {k: v for k, v in config.items() if k not in implied}}


def canonical_names(config: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Return a configuration with one name for each setting. Where a setting has two names, null is unset.

    Raises:
        ValueError: two names of one setting have different values.
    """
    for alias, name in aliases.items():
        one, other = config.get(alias), config.get(name)
        if one is not None and other is not None and not _same(one, other):
            raise ValueError(f"{alias} is {quoted(one)}, but {name} is {quoted(other)}: they are one")
    named: dict[str, Any] = {}
    for key, value in config.items():
        name = aliases.get(key, key)
        if value is not None or name not in named:
            named[name] = value
    return named


def _check_computed(config: Mapping[str, Any]) -> None:
    if (kind := config.get("model_type", "deepseek_v3")) not in MODEL_TYPES:
        raise ValueError(f"model_type is {quoted(kind)}, but must be one of {', '.join(map(repr, MODEL_TYPES))}")
    for name, computed in COMPUTED.items():
        if config.get(name) is not None and not _same(config[name], computed):
            raise ValueError(f"{name} is {quoted(config[name])}, but this model computes only {computed!r}")
    if kind == GLM:
        _check_layers(config)
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if kv_heads is not None and not _same(kv_heads, heads):
        raise ValueError(
            f"num_key_value_heads is {quoted(kv_heads)} and num_attention_heads {quoted(heads)}, but latent attention "
            "has as many of both"
        )


def _check_layers(config: Mapping[str, Any]) -> None:
    """Check the indexers' rotary channels of a GLM-5, and that it has experts where `first_k_dense_replace` says so."""
    if config.get("indexer_rope_interleave") not in (None, True):
        raise ValueError(f"indexer_rope_interleave must be true in a {GLM}, as transformers computes it")
    layers, n_dense = config.get("mlp_layer_types"), config.get("first_k_dense_replace")
    if layers is None or not isinstance(n_dense, int):
        return
    if list(layers) != ["dense"] * n_dense + ["sparse"] * (len(layers) - n_dense):
        raise ValueError(f"mlp_layer_types must be {n_dense} × 'dense' (first_k_dense_replace), then 'sparse'")


def _indexer_types(config: Mapping[str, Any]) -> list[str] | None:
    """Read `indexer_types` from the spelling that decides; None if each layer has an indexer of its own.

    Raises:
        ValueError: a letter of `index_topk_pattern` is unknown.
    """
    if config.get("indexer_types") is not None:
        return [*config["indexer_types"]]
    types = spelled_types(config)
    return types if "shared" in types else None


def spelled_types(config: Mapping[str, Any]) -> list[str]:
    """Return what a configuration would have as `indexer_types` by its other spellings.

    Raises:
        ValueError: a letter of `index_topk_pattern` is unknown.
    """
    if (pattern := config.get("index_topk_pattern")) is not None:
        if unknown := sorted({*pattern} - {*PATTERN, *PATTERN.values()}):
            raise ValueError(f"index_topk_pattern must consist of F (full) and S (shared), not {quoted(unknown[0])}")
        return [PATTERN.get(each, each) for each in pattern]
    freq, offset = config.get("index_topk_freq"), config.get("index_skip_topk_offset")
    n_layers = config["num_hidden_layers"]
    if not isinstance(n_layers, int) or n_layers > MAX_LAYERS:  # refused later
        return []
    period, start = max(freq or 1, 1), (2 if offset is None else offset) - 1
    return ["shared" if max(layer - start, 0) % period else "full" for layer in range(n_layers)]


def _same(a: object, b: object) -> bool:
    """Whether two values of a JSON file are equal; true is not 1."""
    return a == b and isinstance(a, bool) == isinstance(b, bool)


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read `rope_theta` and `rope_scaling` from either spelling."""
    name = "rope_scaling" if config.get("rope_parameters") is None else "rope_parameters"
    given = {} if config.get(name) is None else config[name]
    if not isinstance(given, Mapping):
        raise ValueError(f"{name} must be an object or null, not {quoted(given)}")
    rope = {key: value for key, value in given.items() if value is not None}
    thetas = (rope.pop("rope_theta", None), config.get("rope_theta"), 10000.0)
    theta = next(theta for theta in thetas if theta is not None)
    kinds = [rope.pop(key) for key in ("rope_type", "type") if key in rope] or ["default"]
    if all(kind == "default" for kind in kinds):
        return {"rope_theta": theta, "rope_scaling": None}
    if wrong := [kind for kind in kinds if kind != "yarn"]:
        raise ValueError(f"rope scaling is {quoted(wrong[0])}, but this model computes only 'yarn'")

    if lacking := [key for key in YARN_NEEDED if key not in rope]:
        raise ValueError(f"{name} lacks {', '.join(lacking)}, which yarn needs")
    if "truncate" in given:
        rope.setdefault("truncate", False)  # null is false in transformers, too
    if rope.get("mscale_all_dim") and "mscale" not in rope and "attention_factor" not in rope:
        warn_caller(
            f"{name}: mscale_all_dim is {quoted(rope['mscale_all_dim'])} without mscale, which octile takes as 1, as "
            f"DeepSeek's code does; {IGNORED_MSCALE}",
        )
    return {"rope_theta": theta, "rope_scaling": {"mscale": 1.0, "mscale_all_dim": 0.0, **rope}}
