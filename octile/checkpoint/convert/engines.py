"""Which FP8 checkpoints vLLM and SGLang refuse because of the shapes of their weights, and which they load wrongly.

Both engines merge linear layers that read the same input into one weight, and with tensor parallelism split the rows or
the columns of a weight over GPUs. Each part must then consist of whole blocks of 128×128:

    merged layers     the rows of each layer; in dense layers not those of the last
    fused layers      the rows of each part of a weight that a checkpoint holds as one, such as Phi-3's; the same
    reordered heads   the rows of a head, where q, k and v of each head follow each other: GPT-NeoX's, Bloom's
    split rows        the rows on each GPU: q, k, v, gate, up
    split columns     the columns on each GPU: o, down

and of merged layers, and of the experts of a layer, all must be FP8 or none.  Source: `validate_fp8_block_shape`,
`Fp8MoEMethod` and `is_layer_skipped` of vLLM, which SGLang has, too.  vLLM 0.26 no longer checks the rows of dense
layers that it merges, but has one row of scales for 128 rows of their sum. The last layer's scales then do not fit, so
that loading fails, or replace those of the layer before.

transformers computes in FP8 with any shape. Where it dequantizes, it takes as the size of a block a side of the weight
divided by the number of scales along it, which is 128 for multiples of 128 only.  Source: its `Fp8Dequantize`.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from octile.checkpoint.fp8_layout import BLOCK

MERGED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
)
SPLIT_ROWS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "w1", "w3")
SPLIT_COLUMNS = ("o_proj", "down_proj", "w2")
REORDERED = ("bloom", "gpt_neox")  # models whose query_key_value is sorted by q, k and v when it is loaded
GPUS = (2, 4, 8)
# What the engines' own loaders do with folders of these models, whose shapes they take: `tools.write_architectures`.
ENGINES = "vLLM 0.26 and SGLang 0.5.23"
UNREAD_SCALES = "SGLang 0.5.23 does not read the scales of this model's FP8 weights, and computes with others"
LOADER_WARNINGS = {
    **dict.fromkeys(("gpt_oss", "llama", "llama4_text", "mistral", "mistral3", "phi3", "whisper"), UNREAD_SCALES),
    "jamba": "vLLM 0.26 refuses the FP8 layers of Mamba",
    "phimoe": "vLLM 0.26 makes the gates FP8 for models whose architecture is PhimoeForCausalLM, without scales",
    "stablelm": "SGLang 0.5.23 refuses the FP8 layers of StableLM's attention",
}
Shapes = Mapping[str, tuple[int, ...]]


def engine_warnings(weights: Shapes, fp8: Collection[str], config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what vLLM and SGLang refuse, or load wrongly: sentences.

    Of tensor parallelism it is the first number of GPUs that they refuse.

    Args:
        weights: name → shape of all tensors of a checkpoint.
        fp8: the names of those that are FP8.
        config: the config.json.
    """
    fp8 = set(fp8)
    loader = LOADER_WARNINGS.get(str(config.get("model_type"))) if fp8 else None
    text = config.get("text_config")  # of a model that reads images, too: what is FP8 is the language model's
    language_model = {**config, **text} if isinstance(text, Mapping) else config
    return (*_why_refused(weights, fp8, language_model), *([loader] if loader else []))


def dequantization_warnings(weights: Shapes, fp8: Collection[str]) -> tuple[str, ...]:
    """Return what transformers dequantizes to other values, or refuses to: one sentence, or none.

    Args:
        weights: name → shape of all tensors of a checkpoint.
        fp8: the names of those that are FP8.
    """
    for name in sorted(fp8):
        for what, size, block in zip(("rows", "columns"), weights[name][-2:], BLOCK, strict=True):
            if size > block and size % block:
                return (
                    "transformers 5.24 dequantizes this checkpoint (dequantize=True) to other values, or refuses to: "
                    f"{_pattern(name)} has {size} {what}, no multiple of {block}; octile convert --to bf16 does it",
                )
    return ()


def _why_refused(weights: Shapes, fp8: set[str], config: Mapping[str, Any]) -> tuple[str, ...]:
    refused = dict.fromkeys(reason for name in sorted(fp8) for reason in _why_not_merged(name, weights, fp8, config))
    refused |= dict.fromkeys(_why_not_experts(weights, fp8))
    if refused:
        return tuple(f"{ENGINES} refuse this checkpoint: {reason}" for reason in refused)
    for gpus in GPUS:
        for name in sorted(fp8):
            if reason := _why_not_split(name, weights[name], gpus, config):
                return (f"{ENGINES} refuse to split this checkpoint over {gpus} GPUs: {reason}",)
    return ()


def _why_not_experts(weights: Shapes, fp8: set[str]) -> Iterator[str]:
    experts = {True: set[str](), False: set[str]()}  # modules with a weight that is FP8, and with one that is not
    for name, shape in weights.items():
        if ".experts." in name and name.endswith(".weight") and len(shape) == 2:
            experts[name in fp8].add(name.partition(".experts.")[0])
    for module in sorted(experts[True] & experts[False]):
        experts_of_layer = f"{_pattern(module)}.experts"
        yield f"{experts_of_layer} has weights in FP8 and others that are not, but the experts of a layer are merged"


def _why_not_merged(name: str, weights: Shapes, fp8: set[str], config: Mapping[str, Any]) -> Iterator[str]:
    parent, layer = _parent_and_layer(name)
    rows = weights[name][0]
    fused = _fused_rows(layer, rows, config)
    if any(part % BLOCK[0] for part in fused[:-1]):
        parts = ", ".join(map(str, fused))
        yield f"{_pattern(name)} has parts of {parts} rows, of which all but the last must be multiples of {BLOCK[0]}"
    heads = config.get("num_attention_heads") or config.get("n_head")
    if layer == "query_key_value" and isinstance(heads, int) and heads > 0 and config.get("model_type") in REORDERED:
        head_dim = rows // (3 * heads)
        if head_dim % BLOCK[0]:
            yield f"{_pattern(name)} has heads of {head_dim} rows, no multiple of {BLOCK[0]}, and they are reordered"
    group = next((group for group in MERGED if layer in group), ())
    siblings = {other: f"{parent}.{other}.weight" for other in group if f"{parent}.{other}.weight" in weights}
    if len(siblings) < 2:
        return
    merged = " and ".join(siblings)
    for other, sibling in siblings.items():
        if sibling not in fp8:
            yield f"{_pattern(name)} is FP8 and {other} is not, but {merged} are merged"
    if rows % BLOCK[0] and (_is_expert(name) or layer != list(siblings)[-1]):
        yield f"{_pattern(name)} has {rows} rows, no multiple of {BLOCK[0]}, and {merged} are merged"


def _why_not_split(name: str, shape: tuple[int, ...], gpus: int, config: Mapping[str, Any]) -> str | None:
    _, layer = _parent_and_layer(name)
    heads = config.get("num_key_value_heads")
    gpus_of_kv = min(gpus, heads) if isinstance(heads, int) and heads > 0 else gpus  # more hold copies of a head
    for i, rows in enumerate(_fused_rows(layer, shape[0], config)):
        part = rows // (gpus_of_kv if layer == "qkv_proj" and i else gpus)
        if part % BLOCK[0]:
            return f"{_pattern(name)} has a part of {part} rows on each, no multiple of {BLOCK[0]}"
    dim = 0 if layer in SPLIT_ROWS else 1 if layer in SPLIT_COLUMNS else None
    if (
        dim is None or shape[dim] % gpus
    ):  # other layers are not split; GPUs that do not divide a side are refused anyway
        return None
    part = shape[dim] // (gpus_of_kv if layer in ("k_proj", "v_proj") else gpus)
    if part % BLOCK[dim] == 0:
        return None
    return f"{_pattern(name)} has {part} {('rows', 'columns')[dim]} on each, no multiple of {BLOCK[dim]}"


def _fused_rows(layer: str, rows: int, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the rows of each part of a layer that a checkpoint holds as one: of gate and up, or of q, k and v."""
    if layer == "gate_up_proj":
        return rows // 2, rows // 2
    heads = config.get("num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    if (
        layer != "qkv_proj"
        or not isinstance(heads, int)
        or not isinstance(kv_heads, int)
        or heads <= 0
        or kv_heads <= 0
    ):
        return ()
    head_dim = rows // (heads + 2 * kv_heads)
    return heads * head_dim, kv_heads * head_dim, kv_heads * head_dim


def _parent_and_layer(name: str) -> tuple[str, str]:
    parent, _, layer = name.removesuffix(".weight").rpartition(".")
    return parent, layer


def _is_expert(name: str) -> bool:
    return "experts" in name.split(".")


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name.removesuffix(".weight"))
