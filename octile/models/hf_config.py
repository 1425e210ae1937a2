"""Parse a Hugging Face `config.json` into the fields of a `ModelConfig`.

transformers has two spellings for rotary positions (`rope_scaling` and `rope_theta`, or one `rope_parameters`). Both
are read; the first, which every inference engine supports, is written.  There are three kinds of keys:

    a field        of `ModelConfig`: its value is used
    COMPUTED       changes what the model computes: must have the one value that this model computes
    any other      stored in `extra` unchanged, such as `quantization_config`, and written back
"""

from collections.abc import Collection, Mapping
from typing import Any

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
V2_DEFAULTS: dict[str, Any] = {
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


def parse(config: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the fields among `known`, `rope_scaling` as a dict or None, and all other keys under "extra".

    Raises:
        ValueError: a needed key is missing or not a number, or a key asks for what this model does not compute.
    """
    config = {ALIASES.get(name, name): value for name, value in config.items()}
    _check_computed(config)
    given = {k: v for k, v in config.items() if k in known and (v is not None or k in NULLABLE)}
    missing = [name for name in NEEDED if name not in given]
    if missing:
        raise ValueError(f"the configuration lacks {', '.join(missing)}")
    for name in NEEDED:
        if not isinstance(given[name], int) and not (name in NULLABLE and given[name] is None):
            raise ValueError(f"{name} must be a whole number, not {given[name]!r}")

    defaults = V2_DEFAULTS if config.get("model_type") == "deepseek_v2" else {}
    found = {"num_nextn_predict_layers": 0, **defaults, **given, **_rope(config)}
    if isinstance(found.get("eos_token_id"), list):
        found["eos_token_id"] = tuple(found["eos_token_id"])
    implied = {*known, *COMPUTED, "num_key_value_heads", "rope_parameters"}
    return {**found, "extra": {k: v for k, v in config.items() if k not in implied}}


def _check_computed(config: Mapping[str, Any]) -> None:
    if config.get("model_type", "deepseek_v3") not in ("deepseek_v3", "deepseek_v2"):
        raise ValueError(f"model_type is {config['model_type']!r}, but must be 'deepseek_v3' or 'deepseek_v2'")
    for name, computed in COMPUTED.items():
        if config.get(name, computed) not in (computed, None):
            raise ValueError(f"{name} is {config[name]!r}, but this model computes only {computed!r}")
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        raise ValueError(f"num_key_value_heads is {kv_heads}, but latent attention has as many as heads: {heads}")


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read `rope_theta` and `rope_scaling` from either spelling."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kind = {rope.pop("rope_type", None), rope.pop("type", None)} - {None} or {"default"}
    if kind == {"default"}:
        return {"rope_theta": theta, "rope_scaling": None}
    if kind != {"yarn"}:
        raise ValueError(f"rope scaling is {'/'.join(sorted(kind))!r}, but this model computes only 'yarn'")

    rope = {"mscale": 1.0, "mscale_all_dim": 0.0} | {k: v for k, v in rope.items() if v is not None}
    unknown, lacking = rope.keys() - set(YARN), set(YARN[:2]) - rope.keys()
    if unknown or lacking:
        raise ValueError(f"yarn scaling lacks {sorted(lacking)} and has {sorted(unknown)}, which it does not know")
    return {"rope_theta": theta, "rope_scaling": rope}
