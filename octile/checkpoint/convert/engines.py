"""Which FP8 checkpoints vLLM and SGLang refuse because of the shapes of their weights.

Both engines merge linear layers that read the same input into one weight, and with tensor parallelism split the rows or
the columns of a weight over GPUs. Each part must then consist of whole blocks of 128×128:

    merged layers     the rows of each layer; in dense layers not those of the last
    split rows        the rows on each GPU: q, k, v, gate, up
    split columns     the columns on each GPU: o, down

and of merged layers all must be FP8 or none.  Source: `validate_fp8_block_shape`, `Fp8MoEMethod` and `is_layer_skipped`
of vLLM, which SGLang has, too.
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
)
SPLIT_ROWS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "w1", "w3")
SPLIT_COLUMNS = ("o_proj", "down_proj", "w2")
GPUS = (2, 4, 8)
Shapes = Mapping[str, tuple[int, ...]]


def engine_warnings(weights: Shapes, fp8: Collection[str], config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what vLLM and SGLang refuse: sentences. Of tensor parallelism the first number of GPUs that they refuse.

    Args:
        weights: name → shape of all tensors of a checkpoint.
        fp8: the names of those that are FP8.
        config: the config.json.
    """
    fp8 = set(fp8)
    refused = dict.fromkeys(reason for name in sorted(fp8) for reason in _why_not_merged(name, weights, fp8))
    if refused:
        return tuple(f"vLLM and SGLang refuse this checkpoint: {reason}" for reason in refused)
    for gpus in GPUS:
        for name in sorted(fp8):
            if reason := _why_not_split(name, weights[name], gpus, config):
                return (f"vLLM and SGLang refuse to split this checkpoint over {gpus} GPUs: {reason}",)
    return ()


def _why_not_merged(name: str, weights: Shapes, fp8: set[str]) -> Iterator[str]:
    parent, layer = _parent_and_layer(name)
    rows = weights[name][0]
    if layer == "gate_up_proj" and rows // 2 % BLOCK[0]:
        yield f"{_pattern(name)} has two parts of {rows // 2} rows, no multiple of {BLOCK[0]}"
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
    dim = 0 if layer in SPLIT_ROWS else 1 if layer in SPLIT_COLUMNS else None
    if (
        dim is None or shape[dim] % gpus
    ):  # other layers are not split; GPUs that do not divide a side are refused anyway
        return None
    part = shape[dim] // gpus
    heads = config.get("num_key_value_heads")
    if layer in ("k_proj", "v_proj") and isinstance(heads, int) and 0 < heads < gpus:
        part = shape[dim] // heads  # a head is not split: it is on several GPUs
    if part % BLOCK[dim] == 0:
        return None
    return f"{_pattern(name)} has {part} {('rows', 'columns')[dim]} on each, no multiple of {BLOCK[dim]}"


def _parent_and_layer(name: str) -> tuple[str, str]:
    parent, _, layer = name.removesuffix(".weight").rpartition(".")
    return parent, layer


def _is_expert(name: str) -> bool:
    return "experts" in name.split(".")


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name.removesuffix(".weight"))
