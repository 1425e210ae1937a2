"""Warnings of what vLLM, SGLang and transformers refuse."""

import pytest
import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from octile.checkpoint.convert.engines import dequantization_warnings, engine_warnings
from octile.checkpoint.fp8_layout import dequantize_weight

REFUSED = "vLLM 0.26 and SGLang 0.5.23 refuse this checkpoint: "
SPLIT = "vLLM 0.26 and SGLang 0.5.23 refuse to split this checkpoint over "


def checkpoint(layer: str = "model.layers.3", d: int = 4096, **sizes: int) -> dict[str, tuple[int, int]]:
    """Weights of a layer: gate, up and down of `intermediate`, and q, k, v and o of `q` and `kv` rows."""
    shapes = {}
    if rows := sizes.get("intermediate"):
        shapes |= {"mlp.gate_proj": (rows, d), "mlp.up_proj": (rows, d), "mlp.down_proj": (d, rows)}
    if rows := sizes.get("expert"):
        for e in range(2):
            names = ("gate_proj", "up_proj", "down_proj")
            sides = ((rows, d), (rows, d), (d, rows))
            shapes |= {f"mlp.experts.{e}.{name}": side for name, side in zip(names, sides, strict=True)}
    if "q" in sizes:
        shapes |= {f"self_attn.{name}_proj": (sizes["q" if name == "q" else "kv"], d) for name in "qkv"}
        shapes |= {"self_attn.o_proj": (d, sizes["q"])}
    return {f"{layer}.{name}.weight": shape for name, shape in shapes.items()}


def warnings(weights: dict[str, tuple[int, ...]], *high_precision: str, **config: object) -> tuple[str, ...]:
    fp8 = [name for name in weights if not any(part in name for part in high_precision)]
    return engine_warnings(weights, fp8, config)


def test_shapes_in_whole_blocks_are_not_warned_of():
    assert warnings(checkpoint(intermediate=14336, q=4096, kv=1024)) == ()


def test_gate_and_up_of_deepseek_v2_lite_are_refused_when_they_are_merged():
    assert warnings(checkpoint(intermediate=10944, d=2048)) == (
        REFUSED
        + "model.layers.*.mlp.gate_proj has 10944 rows, no multiple of 128, and gate_proj and up_proj are merged",
    )


def test_a_layer_of_every_block_is_named_once():
    weights = {**checkpoint("model.layers.0", intermediate=10944), **checkpoint("model.layers.1", intermediate=10944)}
    assert len(warnings(weights)) == 1


def test_the_last_of_merged_layers_may_end_within_a_block():
    weights = {"m.self_attn.q_a_proj.weight": (1536, 7168), "m.self_attn.kv_a_proj_with_mqa.weight": (576, 7168)}
    assert warnings(weights) == ()


def test_experts_must_be_whole_blocks_too():
    said = warnings(checkpoint(expert=192))
    assert [line.removeprefix(REFUSED).split()[0] for line in said] == [
        "model.layers.*.mlp.experts.*.gate_proj",
        "model.layers.*.mlp.experts.*.up_proj",
    ]


def test_gate_and_up_in_one_tensor_are_two_parts():
    assert warnings({"l.mlp.gate_up_proj.weight": (2 * 10944, 512)}) == (
        REFUSED
        + "l.mlp.gate_up_proj has parts of 10944, 10944 rows, of which all but the last must be multiples of 128",
    )
    assert warnings({"l.mlp.gate_up_proj.weight": (2 * 8192, 512)}) == ()


def test_q_k_and_v_in_one_tensor_are_three_parts():
    qkv = {"l.self_attn.qkv_proj.weight": ((36 + 2 * 6) * 80, 2560)}
    assert warnings(qkv, num_attention_heads=36, num_key_value_heads=6) == (
        REFUSED + "l.self_attn.qkv_proj has parts of 2880, 480, 480 rows, of which all but the last must be multiples "
        "of 128",
    )


def test_whole_blocks_of_q_k_and_v_in_one_tensor_are_not_warned_of():
    qkv = {"l.self_attn.qkv_proj.weight": ((32 + 2 * 8) * 128, 4096)}
    assert warnings(qkv, num_attention_heads=32, num_key_value_heads=8) == ()


def test_q_k_and_v_in_one_tensor_are_split_over_gpus_each():
    qkv = {"l.self_attn.qkv_proj.weight": ((32 + 2 * 8) * 96, 3072)}
    assert warnings(qkv, num_attention_heads=32, num_key_value_heads=8) == (
        f"{SPLIT}4 GPUs: l.self_attn.qkv_proj has a part of 192 rows on each, no multiple of 128",
    )


@pytest.mark.parametrize(("kind", "key"), [("gpt_neox", "num_attention_heads"), ("bloom", "n_head")])
def test_heads_that_are_reordered_must_be_whole_blocks(kind, key):
    small, large = ({"l.attention.query_key_value.weight": (3 * 8 * rows, 512)} for rows in (64, 128))
    assert warnings(small, **{"model_type": kind, key: 8}) == (
        REFUSED + "l.attention.query_key_value has heads of 64 rows, no multiple of 128, and they are reordered",
    )
    assert warnings(large, **{"model_type": kind, key: 8}) == ()


def test_a_head_of_keys_in_one_tensor_with_q_is_not_split_over_gpus():
    qkv = {"l.self_attn.qkv_proj.weight": ((32 + 2 * 2) * 128, 4096)}
    assert warnings(qkv, num_attention_heads=32, num_key_value_heads=2) == ()


def test_experts_of_a_layer_of_which_only_some_are_fp8_are_refused():
    said = warnings(checkpoint(expert=256, d=512), "experts.1.")
    assert said == (
        REFUSED + "model.layers.*.mlp.experts has weights in FP8 and others that are not, but the experts of a layer "
        "are merged",
    )


@pytest.mark.parametrize(("expert", "gpus"), [(768, 4), (1536, 8), (128, 2)])
def test_the_first_number_of_gpus_that_is_refused_is_named(expert, gpus):
    (said,) = warnings(checkpoint(expert=expert, q=4096, kv=1024))
    columns = f"down_proj has {expert // gpus} columns on each, no multiple of 128"
    assert said == f"{SPLIT}{gpus} GPUs: model.layers.*.mlp.experts.*.{columns}"


def test_a_head_of_keys_is_not_split_over_gpus():
    weights = checkpoint(q=4096, kv=256)
    assert warnings(weights, text_config={"num_key_value_heads": 2}) == ()
    assert warnings(weights, num_key_value_heads=2) == ()
    assert warnings(weights, num_key_value_heads=4)[0].startswith(
        f"{SPLIT}4 GPUs: model.layers.*.self_attn.k_proj has 64"
    )


def test_merged_layers_of_which_only_some_are_fp8_are_refused():
    assert warnings(checkpoint(intermediate=8192), "up_proj") == (
        REFUSED + "model.layers.*.mlp.gate_proj is FP8 and up_proj is not, but gate_proj and up_proj are merged",
    )


def test_layers_that_are_not_fp8_are_not_checked():
    assert warnings(checkpoint(intermediate=10944), "gate_proj", "up_proj", "down_proj") == ()


# What transformers dequantizes

KV = "model.layers.3.self_attn.kv_a_proj_with_mqa.weight"
SIZES = (64, 128, 192, 200, 256, 576, 640)


def is_dequantized(rows: int, columns: int) -> bool:
    """Whether transformers dequantizes a weight to its values."""
    data = torch.ones(rows, columns).to(torch.float8_e4m3fn)
    scale = torch.arange(1.0, 1 + -(-rows // 128) * -(-columns // 128)).view(-(-rows // 128), -1)
    try:
        found = Fp8Dequantize(None)._dequantize_one(data, scale, torch.float32)
    except ValueError:
        return False
    return torch.equal(found, dequantize_weight(data, scale, torch.float32))


@pytest.mark.parametrize("rows", SIZES)
def test_weights_that_transformers_does_not_dequantize_are_warned_of(rows):
    for columns in SIZES:
        assert (dequantization_warnings({KV: (rows, columns)}, [KV]) == ()) == is_dequantized(rows, columns), columns


def test_one_of_all_such_weights_is_named():
    shapes = {KV.replace("3", str(layer)): (576, 7168) for layer in range(9)}
    (warning,) = dequantization_warnings(shapes, shapes)
    assert "model.layers.*.self_attn.kv_a_proj_with_mqa has 576 rows, no multiple of 128; octile convert" in warning
