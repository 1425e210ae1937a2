import itertools
import json
import re
import subprocess
import sys
from copy import deepcopy
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import DeepseekV3Config, GlmMoeDsaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from octile.models.config import PRESETS, ModelConfig, RopeScaling
from octile.models.deepseek_v3 import DeepseekV3, rope_of

PUBLISHED_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
YARN_V2 = {**PUBLISHED_V3["rope_scaling"], "mscale": 0.707, "mscale_all_dim": 0.707}
PUBLISHED_V2_LITE = {
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN_V2,
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}


PUBLISHED_V31 = {
    **PUBLISHED_V3,
    "quantization_config": {**PUBLISHED_V3["quantization_config"], "scale_fmt": "ue8m0"},
}
OF_MOONSHOT = {  # keys of Moonlight-16B-A3B and Kimi-K2
    **{key: value for key, value in PUBLISHED_V3.items() if key not in ("ep_size", "quantization_config")},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 163584,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "num_nextn_predict_layers": 0,
    "pretraining_tp": 1,
    "rope_theta": 50000.0,
    "seq_aux": True,
    "topk_group": 1,
    "vocab_size": 163840,
}
PUBLISHED_MOONLIGHT = {
    **{key: value for key, value in OF_MOONSHOT.items() if key != "rope_scaling"},
    "eos_token_id": 163586,
    "ep_size": 1,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-05,
    "routed_scaling_factor": 2.446,
    "transformers_version": "4.46.3",
}
PUBLISHED_KIMI_K2 = {
    **OF_MOONSHOT,
    "eos_token_id": 163585,
    "max_position_embeddings": 131072,
    "model_type": "kimi_k2",
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "quantization_config": PUBLISHED_V3["quantization_config"],
    "rope_scaling": {**PUBLISHED_V3["rope_scaling"], "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
    "routed_scaling_factor": 2.827,
    "transformers_version": "4.48.3",
}
PUBLISHED_GLM_5 = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "eos_token_id": [154820, 154827, 154829],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 202752,
    "model_type": "glm_moe_dsa",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 154820,
    "pretraining_tp": 1,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "v_head_dim": 256,
    "vocab_size": 154880,
}
INDEXER_TYPES = ["full" if layer < 3 or layer % 4 == 2 else "shared" for layer in range(78)]
PUBLISHED_GLM_52 = {
    **PUBLISHED_GLM_5,
    "head_dim": 192,
    "index_share_for_mtp_iteration": True,
    "index_skip_topk_offset": 3,
    "index_topk_freq": 4,
    "index_topk_pattern": None,
    "indexer_types": INDEXER_TYPES,
    "max_position_embeddings": 1048576,
    "mlp_layer_types": [*3 * ["dense"], *75 * ["sparse"]],
    "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
}
PUBLISHED = {
    "GLM-5": PUBLISHED_GLM_5,
    "GLM-5.2": PUBLISHED_GLM_52,
    "V3": PUBLISHED_V3,
    "V3.1": PUBLISHED_V31,
    "V2-Lite": PUBLISHED_V2_LITE,
    "Moonlight": PUBLISHED_MOONLIGHT,
    "Kimi-K2": PUBLISHED_KIMI_K2,
}


def nested(levels: int) -> dict[str, Any]:
    """An object in an object in an object …"""
    return {} if levels == 1 else {"a": nested(levels - 1)}


def same_shape(config, preset):
    """Check for equality, except where paper and published files differ, and except for passed-through keys."""
    return replace(config, initializer_range=preset.initializer_range, extra={}) == preset


@pytest.mark.parametrize("published", [PUBLISHED_V3, PUBLISHED_V31], ids=["V3", "V3.1"])
def test_the_published_v3_config_equals_the_preset(published):
    assert same_shape(ModelConfig.from_hf(published), PRESETS["v3_671b"]())


def test_the_published_v2_lite_config_equals_the_preset():
    assert same_shape(ModelConfig.from_hf(PUBLISHED_V2_LITE), PRESETS["v2_lite_16b"]())


@pytest.mark.parametrize("published", PUBLISHED.values(), ids=PUBLISHED)
def test_every_key_of_a_published_file_is_written_back(published):
    written = json.loads(json.dumps(ModelConfig.from_hf(published).to_hf()))
    keys = published.keys() - {"rope_parameters"}  # read, and written in the older spelling
    assert {key: written[key] for key in keys} == {key: published[key] for key in keys}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_its_file(name, tmp_path):
    config = PRESETS[name]()
    config.write(tmp_path / "config.json")
    assert replace(ModelConfig.read(tmp_path / "config.json"), extra={}) == config


def test_the_sides_of_the_medium_presets_gemms_are_multiples_of_128():
    with torch.device("meta"):
        layers = [module for module in DeepseekV3(ModelConfig.medium()).modules() if isinstance(module, nn.Linear)]
    sides = {side for layer in layers for side in layer.weight.shape}
    assert {side for side in sides if side % 128} == {576}  # the latent with the rotary key, as in DeepSeek's models


def test_transformers_5_spelling_of_rotary_positions_is_read():
    spelled = {k: v for k, v in PUBLISHED_V2_LITE.items() if k not in ("rope_scaling", "rope_theta")}
    yarn = {k: v for k, v in YARN_V2.items() if k != "type"}
    spelled["rope_parameters"] = {**yarn, "rope_type": "yarn", "rope_theta": 10000}
    assert ModelConfig.from_hf(spelled) == ModelConfig.from_hf(PUBLISHED_V2_LITE)


@pytest.mark.parametrize("published", PUBLISHED.values(), ids=PUBLISHED)
def test_a_published_file_is_read_silently(recwarn, published):
    ModelConfig.from_hf(published)
    assert [str(warning.message) for warning in recwarn] == []


def test_the_rotary_frequencies_of_kimi_k2_are_those_of_transformers():
    theirs = DeepseekV3Config(**deepcopy(PUBLISHED_KIMI_K2))  # it writes to rope_scaling
    frequencies = rope_of(ModelConfig.from_hf(PUBLISHED_KIMI_K2)).frequencies()
    torch.testing.assert_close(frequencies, ROPE_INIT_FUNCTIONS["yarn"](theirs, None)[0])


def with_context(factor: float, original: int, longest: int) -> dict[str, Any]:
    rope = {**PUBLISHED_V3["rope_scaling"], "factor": factor, "original_max_position_embeddings": original}
    return {**PUBLISHED_V3, "rope_scaling": rope, "max_position_embeddings": longest}


@pytest.mark.parametrize(
    ("factor", "original", "longest"),
    [(40, 4096, 163840), (32.0, 4096, 131072), (1.6, 4096, 6554), (40, 4096, 4096)],
    ids=["DeepSeek-V3", "Kimi-K2", "rounded", "not extended"],
)
def test_a_context_of_factor_times_the_original_is_read_silently(recwarn, factor, original, longest):
    ModelConfig.from_hf(with_context(factor, original, longest))
    assert [str(warning.message) for warning in recwarn] == []


def test_another_context_causes_a_warning_and_the_factor_is_used():
    with pytest.warns(UserWarning, match=r"a factor of 40 extends 4,096 tokens to 163,840, but .* is 65,536"):
        config = ModelConfig.from_hf(with_context(40, 4096, 65536))
    assert config.rope_scaling.factor == 40


@pytest.mark.parametrize("rope", [None, {"rope_type": "default"}])
def test_no_yarn_is_read_as_none(rope):
    assert ModelConfig.from_hf({**PUBLISHED_V3, "rope_scaling": rope}).rope_scaling is None


def test_absent_mscales_have_the_defaults_of_transformers():
    rope = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}
    config = ModelConfig.from_hf({**PUBLISHED_V3, "rope_scaling": rope})
    assert config.rope_scaling == RopeScaling(mscale=1.0, mscale_all_dim=0.0)


SHORT = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096}


def with_rope(**keys: Any) -> dict[str, Any]:
    return {**PUBLISHED_V3, "rope_scaling": {**SHORT, **keys}}


@pytest.mark.parametrize("keys", [{"attention_factor": 1.5}, {"truncate": False}, {"attention_factor": None}])
def test_attention_factor_and_truncate_are_read_as_written(keys):
    read = ModelConfig.from_hf(with_rope(**keys)).rope_scaling
    assert {key: getattr(read, key) for key in keys} == keys


def test_truncate_null_is_false_as_in_transformers():
    ours = ModelConfig.from_hf(with_rope(truncate=None))
    theirs = DeepseekV3Config(**with_rope(truncate=None))
    frequencies = rope_of(ours).frequencies()
    assert ours.rope_scaling == RopeScaling(mscale_all_dim=0.0, truncate=False)
    torch.testing.assert_close(frequencies, ROPE_INIT_FUNCTIONS["yarn"](theirs, None)[0])
    assert not torch.equal(frequencies, rope_of(ModelConfig.from_hf(with_rope())).frequencies())


def test_settings_of_yarn_that_are_unset_are_not_written():
    written = ModelConfig.from_hf(with_rope()).to_hf()["rope_scaling"]
    assert written == {**SHORT, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}


def test_settings_of_yarn_are_written_and_read_again():
    config = ModelConfig.from_hf(with_rope(attention_factor=1.5, truncate=False))
    assert ModelConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(
    ("mscales", "message"),
    [
        ({"mscale": 0.707, "mscale_all_dim": 0}, "rope_scaling: mscale is 0.707 and mscale_all_dim 0, .* transformers"),
        ({"mscale": 0, "mscale_all_dim": 1}, "rope_scaling: mscale is 0 and mscale_all_dim 1, .* transformers ignores"),
        ({"mscale": 0, "mscale_all_dim": 0}, "rope_scaling: mscale is 0 and mscale_all_dim 0, .* transformers ignores"),
        ({"mscale": 0.707}, "rope_scaling: mscale is 0.707 and mscale_all_dim 0, .* transformers ignores both"),
        ({"mscale_all_dim": 0.7}, "mscale_all_dim is 0.7 without mscale, which octile takes as 1, .* transformers"),
    ],
)
def test_mscales_that_transformers_ignores_cause_a_warning(mscales, message):
    with pytest.warns(UserWarning, match=message):
        ModelConfig.from_hf(with_rope(**mscales))


@pytest.mark.parametrize(
    "mscales",
    [
        {},
        {"mscale": 1.0},
        {"mscale": 1, "mscale_all_dim": 0},
        {"mscale": 0.7, "mscale_all_dim": 0.5},
        {"mscale": 0.7, "attention_factor": 1.2},
        {"mscale_all_dim": 0.7, "attention_factor": 1.2},
    ],
)
def test_mscales_that_transformers_takes_alike_are_read_silently(recwarn, mscales):
    ModelConfig.from_hf(with_rope(**mscales))
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"model_type": "deepseek_v4"}, "model_type is 'deepseek_v4'"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8 and num_attention_heads 128"),
        ({"num_attention_heads": "x"}, "num_key_value_heads is 128 and num_attention_heads 'x'"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope scaling is 'linear'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "rope_scaling lacks original_max_position"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers must be 0 or 1, not 2"),
        ({"topk_method": "best"}, "topk_method must be noaux_tc or group_limited_greedy or greedy, not 'best'"),
        ({"n_group": 7}, "n_group must divide the 256 n_routed_experts, not be 7"),
        ({"topk_group": 9}, "topk_group must be at most n_group, 8, not 9"),
        ({"num_experts_per_tok": 200}, "num_experts_per_tok is 200, but topk_group allows 128"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok must be at most n_routed_experts, 256, not 257"),
        ({"n_group": 256, "topk_group": 8}, "n_group must be at most 128, .* 256 n_routed_experts .* not 256"),
        ({"scoring_func": "sqrt"}, "scoring_func must be sigmoid or softmax, not 'sqrt'"),
        ({"aux_loss_alpha": -0.1}, "aux_loss_alpha must be at least 0, not -0.1"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim must be even"),
        ({"hidden_size": 0}, "hidden_size must be at least 1, not 0"),
        ({"first_k_dense_replace": 62}, "first_k_dense_replace 62 exceeds the 61 layers"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unsupported_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**PUBLISHED_V3, **changes})


SPARSE = {"model_type": "deepseek_v32", "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048}


def test_an_indexer_survives_its_file(tmp_path):
    config = replace(ModelConfig.tiny(), index_n_heads=4, index_head_dim=32, index_topk=64)
    config.write(tmp_path / "config.json")
    assert replace(ModelConfig.read(tmp_path / "config.json"), extra={}) == config
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["DeepseekV32ForCausalLM"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_topk": None}, "the configuration lacks index_topk"),
        (
            {"model_type": "deepseek_v3"},
            "index_n_heads needs model_type 'deepseek_v32' or 'glm_moe_dsa', not 'deepseek_v3'",
        ),
        ({"index_topk": 0}, "index_topk must be at least 1, not 0"),
        ({"index_head_dim": 96}, "index_head_dim must be a power of two from qk_rope_head_dim, 64, to 128, not 96"),
        ({"index_head_dim": 32}, "index_head_dim must be a power of two from qk_rope_head_dim, 64, to 128, not 32"),
        ({"index_head_dim": 256}, "index_head_dim must be a power of two from qk_rope_head_dim, 64, to 128, not 256"),
        ({"q_lora_rank": None}, "an indexer reads compressed queries, so q_lora_rank must be a number, not None"),
        ({"topk_method": "greedy", "n_group": 1, "topk_group": 1}, "DeepSeek-V3.2's, whose topk_method is 'noaux_tc'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_indexer_that_does_not_fit_is_refused(changes, message):
    ModelConfig.from_hf({**PUBLISHED_V3, **SPARSE})
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**PUBLISHED_V3, **SPARSE, **changes})


def test_a_glm_5_has_an_indexer_with_adjacent_rotary_channels_and_one_group_of_experts():
    given = {key: value for key, value in PUBLISHED_GLM_5.items() if key not in ("n_group", "topk_group")}
    config = ModelConfig.from_hf({key: value for key, value in given.items() if key != "indexer_rope_interleave"})
    assert (config.indexer_rope_interleave, config.n_group, config.topk_group) == (True, 1, 1)
    assert config == ModelConfig.from_hf(PUBLISHED_GLM_5)


def test_a_model_that_is_made_with_adjacent_rotary_channels_is_announced_as_a_glm_5():
    config = replace(
        ModelConfig.tiny(), index_n_heads=4, index_head_dim=32, index_topk=64, indexer_rope_interleave=True
    )
    assert config.to_hf()["model_type"] == "glm_moe_dsa"
    assert replace(ModelConfig.from_hf(config.to_hf()), extra={}) == config


FULL = {"indexer_types": 78 * ["full"], "index_topk_freq": 1, "index_topk_pattern": 78 * "F"}
DENSE = {"mlp_layer_types": [*3 * ["dense"], *75 * ["sparse"]]}


@pytest.mark.parametrize("changes", [FULL, DENSE, {**FULL, "index_topk_freq": 4, "index_topk_pattern": "FS"}])
def test_a_glm_5_may_name_what_its_layers_are(changes):
    assert ModelConfig.from_hf({**PUBLISHED_GLM_5, **changes}).num_hidden_layers == 78


def spelled(**spelling: Any) -> dict[str, Any]:
    """GLM-5.2's configuration with another spelling of its shared layers."""
    others = ("indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
    return {key: value for key, value in PUBLISHED_GLM_52.items() if key not in others} | spelling


PERIOD = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
LETTERS = "".join(kind[0].upper() for kind in INDEXER_TYPES)


@pytest.mark.parametrize(
    "spelling",
    [
        PERIOD,
        {"index_topk_pattern": LETTERS},
        {"index_topk_pattern": INDEXER_TYPES},
        {"indexer_types": INDEXER_TYPES, "index_topk_pattern": "F", "index_topk_freq": 2},
        {"index_topk_pattern": LETTERS, "index_topk_freq": 2},
    ],
)
def test_shared_layers_are_read_in_each_spelling_as_transformers_does(spelling):
    config = ModelConfig.from_hf(spelled(**spelling))
    assert [*config.indexer_types] == INDEXER_TYPES == GlmMoeDsaConfig(**spelled(**spelling)).indexer_types


def test_the_shared_layers_are_those_of_transformers_for_any_period():
    for freq, offset in itertools.product((0, 1, 2, 5), (None, 1, 4)):
        spelling = {"index_topk_freq": freq} | ({} if offset is None else {"index_skip_topk_offset": offset})
        expected = GlmMoeDsaConfig(**spelled(**spelling)).indexer_types
        found = ModelConfig.from_hf(spelled(**spelling)).indexer_types
        assert [*(found or 78 * ["full"])] == expected


@pytest.mark.parametrize("spelling", [{}, {"indexer_types": INDEXER_TYPES, **PERIOD, "index_topk_freq": 2}])
def test_what_is_written_says_the_same_in_the_spelling_that_engines_read(spelling):
    """By a rewritten list, or by one that a file has beside another period."""
    config = replace(ModelConfig.from_hf(spelled(**spelling)), indexer_types=tuple(INDEXER_TYPES))
    written = config.to_hf()
    assert (written["indexer_types"], written["index_topk_pattern"]) == (tuple(INDEXER_TYPES), LETTERS)
    own = replace(config, indexer_types=None).to_hf()
    assert "indexer_types" not in own
    assert own.get("index_topk_pattern") == (None if not spelling else 78 * "F")


def test_the_layers_that_read_the_top_k_keys_of_an_indexer_are_counted():
    config = ModelConfig.from_hf(PUBLISHED_GLM_52)
    own = [layer for layer in range(79) if config.has_own_indexer(layer)]
    assert own == [0, 1, 2, *range(6, 78, 4), 78]
    assert [config.top_k_readers(layer) for layer in own] == [1, 1, *19 * [4], 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexer_types": ["full", "shared"]}, "indexer_types .* must name each of the 78 layers .*, not 2"),
        ({"indexer_types": [*77 * ["full"], "none"]}, "indexer_types must be full or shared, not 'none'"),
        ({"indexer_types": [*77 * ["shared"], "full"]}, "indexer_types must begin with 'full'"),
        ({"index_topk_pattern": "FFSS"}, r"\(or index_topk_pattern\) must name each of the 78 layers .*, not 4"),
        ({"index_topk_pattern": 78 * "X"}, r"index_topk_pattern must consist of F \(full\) and S \(shared\), not 'X'"),
        ({"indexer_rope_interleave": False}, "indexer_rope_interleave must be true in a glm_moe_dsa"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types must be 3 × 'dense' .*, then 'sparse'"),
        ({"indexer_types": 7}, "indexer_types must be null or a list, each text, not 7"),
        (
            {"model_type": "deepseek_v32", "indexer_rope_interleave": False, "index_topk_freq": 4},
            r"indexer_types \(or index_topk_pattern, index_topk_freq\) must be 'full' for each layer .* a glm_moe_dsa",
        ),
        (
            {"model_type": "deepseek_v3", "index_n_heads": None, "index_head_dim": None, "index_topk": None},
            "no indexer",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_glm_5_that_octile_does_not_compute_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**PUBLISHED_GLM_5, **changes})


def test_an_indexer_needs_all_of_its_fields():
    with pytest.raises(
        ValueError, match="needs index_n_heads, index_head_dim, index_topk, of which index_topk must be given"
    ):
        replace(ModelConfig.tiny(), index_n_heads=4, index_head_dim=32)


JSON_SCALARS = st.none() | st.booleans() | st.text(max_size=4) | st.integers() | st.floats()
JSON_VALUES = st.one_of(
    st.sampled_from([10**18, -1, 0, 1, 2, 10**5, 10**6, 1e30, -1e-9, 10**400, "256", [], {}, True, False]),
    st.recursive(JSON_SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3)),
)
ROPE_KEYS = [f"rope_scaling.{key}" for key in PUBLISHED_V3["rope_scaling"]]
CHECKED = [f.name for f in fields(ModelConfig) if f.name != "extra"]


NAMES = "|".join((*PUBLISHED_V3, *CHECKED, "rope_parameters", "rope scaling", "extra"))


@pytest.mark.parametrize("alias", ["num_mtp_layers", "num_local_experts"])
def test_null_under_another_name_is_unset(alias):
    assert ModelConfig.from_hf({alias: None, **PUBLISHED_V3}) == ModelConfig.from_hf({**PUBLISHED_V3, alias: None})


@pytest.mark.one_case
@pytest.mark.filterwarnings("ignore:rope_scaling")  # of another context
@pytest.mark.parametrize("key", sorted({*PUBLISHED_V3, *CHECKED, *ROPE_KEYS, "rope_parameters", "num_mtp_layers"}))
@settings(max_examples=10, deadline=None)  # for each of 58 keys, which are all read by the same functions
@given(value=JSON_VALUES)
def test_any_value_of_a_key_is_read_or_refused_by_name(key, value):
    outer, _, inner = key.partition(".")
    changed = {**PUBLISHED_V3[outer], inner: value} if inner else value
    error = refusal({**PUBLISHED_V3, outer: changed})
    assert error is None or re.fullmatch(rf".*({NAMES}).{{0,200}}", error)  # one line


def refusal(published) -> str | None:
    """The message by which a configuration is refused; None if it is read, and reads what it has written."""
    try:
        config = ModelConfig.from_hf(published)
    except ValueError as error:
        return str(error)
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config
    return None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**5}, "num_hidden_layers must be at most 1,000, not 100000"),
        ({"num_hidden_layers": 61.0}, "num_hidden_layers must be a whole number, not 61.0"),
        ({"vocab_size": True}, "vocab_size must be a whole number, not True"),
        ({"hidden_size": 10**18}, "hidden_size must be at most 1,048,576, not 10{18}"),
        ({"q_lora_rank": 0}, "q_lora_rank must be at least 1, not 0"),
        ({"q_lora_rank": -1}, "q_lora_rank must be at least 1, not -1"),
        ({"kv_lora_rank": None}, "the configuration lacks kv_lora_rank"),
        ({"rope_theta": 0}, "rope_theta must be above 1, not 0"),
        ({"rope_theta": 1}, "rope_theta must be above 1, not 1"),
        ({"rope_theta": -5}, "rope_theta must be above 1, not -5"),
        ({"rope_theta": float("nan")}, "rope_theta must be finite, not nan"),
        ({"rope_theta": float("inf")}, "rope_theta must be finite, not inf"),
        ({"rope_theta": "10000"}, "rope_theta must be a number, not '10000'"),
        ({"initializer_range": float("nan")}, "initializer_range must be finite, not nan"),
        ({"initializer_range": -1}, "initializer_range must be at least 0, not -1"),
        ({"initializer_range": 1e30}, r"initializer_range must be at most 10, not 1e\+30"),
        ({"routed_scaling_factor": -0.5}, "routed_scaling_factor must be at least 0, not -0.5"),
        ({"routed_scaling_factor": float("nan")}, "routed_scaling_factor must be finite, not nan"),
        ({"mtp_loss_weight": -1}, "mtp_loss_weight must be at least 0, not -1"),
        ({"mtp_loss_weight": float("nan")}, "mtp_loss_weight must be finite, not nan"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be finite, not nan"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps must be finite, not inf"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be at least 1e-30, not -1"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be at least 1e-30, not 0"),
        ({"norm_topk_prob": 1}, "norm_topk_prob must be true or false, not 1"),
        ({"moe_layer_freq": True}, "moe_layer_freq is True, but this model computes only 1"),
        ({"tie_word_embeddings": 0}, "tie_word_embeddings is 0, but this model computes only False"),
        ({"model_type": ["deepseek_v3"]}, r"model_type is \['deepseek_v3'\]"),
        ({"topk_method": 1}, "topk_method must be noaux_tc or group_limited_greedy or greedy, not 1"),
        ({"bos_token_id": 129280}, "bos_token_id must be below vocab_size, 129280, not 129280"),
        ({"eos_token_id": [1, -1]}, "eos_token_id must be at least 0, not -1"),
        ({"eos_token_id": [1, 10**6]}, "eos_token_id must be below vocab_size, 129280, not 1000000"),
        ({"rope_scaling": [1]}, r"rope_scaling must be an object or null, not \[1\]"),
        ({"rope_parameters": "yarn"}, "rope_parameters must be an object or null, not 'yarn'"),
        ({"rope_scaling": {**YARN_V2, "type": ["yarn"]}}, r"rope scaling is \['yarn'\]"),
        ({"rope_scaling": {**YARN_V2, "factor": 0}}, "rope_scaling.factor must be at least 1, not 0"),
        ({"rope_scaling": {**YARN_V2, "factor": -1}}, "rope_scaling.factor must be at least 1, not -1"),
        ({"rope_scaling": {**YARN_V2, "factor": float("nan")}}, "rope_scaling.factor must be finite, not nan"),
        ({"rope_scaling": {**YARN_V2, "beta_fast": 0.5}}, "rope_scaling.beta_fast must be at least beta_slow, 1, not"),
        (
            {"rope_scaling": {**YARN_V2, "beta_slow": 1e-320}},
            "rope_scaling.beta_slow must be at least 1e-06",
        ),
        (
            {"rope_scaling": {**YARN_V2, "attention_factor": 0}},
            "rope_scaling.attention_factor must be above 0",
        ),
        ({"rope_scaling": {**YARN_V2, "truncate": "no"}}, "rope_scaling.truncate must be true or false, not 'no'"),
        ({"rope_scaling": {**YARN_V2, "sharp": 1}}, "rope_scaling.sharp is unknown: there are factor, "),
        ({"num_mtp_layers": 0}, "num_mtp_layers is 0, but num_nextn_predict_layers is 1: they are one"),
        ({"architectures": "DeepseekV3ForCausalLM"}, "architectures must be null or a list, each text, not 'Deepseek"),
        ({"architectures": [1]}, "architectures must be text, not 1"),
        ({"torch_dtype": 16}, "torch_dtype must be text or null, not 16"),
        ({"dtype": ["bfloat16"]}, r"dtype must be text or null, not \['bfloat16'\]"),
        ({"quantization_config": "fp8"}, "quantization_config must be an object or null, not 'fp8'"),
        ({"quantization_config": {"fmt": 1}}, "quantization_config.fmt must be text or null, not 1"),
        (
            {"quantization_config": {"activation_scheme": 1}},
            "quantization_config.activation_scheme must be text or null",
        ),
        (
            {"quantization_config": {"modules_to_not_convert": "lm_head"}},
            "quantization_config.modules_to_not_convert must be null or a list, each text, not 'lm_head'",
        ),
        ({"note": nested(65)}, "extra must be nested at most 64 levels deep"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_values_of_another_type_or_outside_their_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf({**PUBLISHED_V3, **changes})


def test_a_field_of_another_type_is_a_type_error_in_python():
    with pytest.raises(TypeError, match="num_hidden_layers must be a whole number, not True"):
        ModelConfig(num_hidden_layers=True)


def test_a_missing_key_is_named():
    with pytest.raises(ValueError, match="the configuration lacks kv_lora_rank"):
        ModelConfig.from_hf({k: v for k, v in PUBLISHED_V3.items() if k != "kv_lora_rank"})


def test_a_number_in_quotation_marks_is_refused():
    with pytest.raises(ValueError, match="hidden_size must be a whole number, not '256'"):
        ModelConfig.from_hf({**PUBLISHED_V3, "hidden_size": "256"})


@pytest.mark.parametrize("text", ["{", "[1, 2]"])
def test_a_file_without_a_json_object_is_refused(text, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        ModelConfig.read(path)


def test_unknown_keys_do_not_change_equality_of_the_written_json():
    config = ModelConfig.from_hf({**PUBLISHED_V3, "pad_token_id": None, "note": {"a": [1]}})
    again = ModelConfig.from_hf(json.loads(json.dumps(config.to_hf())))
    assert again == config
    assert again.extra["note"] == {"a": [1]}
    assert "pad_token_id" in again.extra


def test_the_configuration_needs_no_torch():
    code = "import sys, octile.models.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
