import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from octile.checkpoint import convert_checkpoint, predict_size, save
from octile.checkpoint.shards import Shards
from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3

SPARSE = replace(ModelConfig.tiny(), index_n_heads=4, index_head_dim=64, index_topk=64)


@pytest.mark.slow
def test_deepseek_v3_has_about_700_gb_in_fp8():
    prediction = predict_size(ModelConfig.v3_671b(), "fp8")
    assert prediction.nbytes == pytest.approx(688.6e9, rel=1e-3)  # total_size of the published weights
    assert prediction.share.parameters == pytest.approx(684.5e9, rel=1e-3)  # 671B, the MTP layer, its copies
    assert prediction.share.parameter_share > 0.99


@pytest.mark.one_case
@pytest.mark.parametrize("config", [ModelConfig.tiny(), SPARSE], ids=["dense", "sparse"])
@pytest.mark.parametrize("to", ["fp8", "bf16"])
def test_the_prediction_is_what_save_writes(tmp_path, to, config):
    save(DeepseekV3(config), tmp_path / "model", weights=to)
    assert predict_size(config, to).nbytes == Shards(tmp_path / "model").nbytes


@pytest.mark.parametrize("config", [ModelConfig.tiny(), SPARSE], ids=["dense", "sparse"])
def test_a_bare_configuration_is_enough(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    predictions = {predict_size(path).nbytes for path in (tmp_path, tmp_path / "config.json", config)}
    assert len(predictions) == 1


def test_a_layer_that_a_folder_announces_and_does_not_have_repeats_nothing(tmp_path):
    save(DeepseekV3(ModelConfig.tiny()), tmp_path, weights="bf16")
    assert ModelConfig.tiny().num_nextn_predict_layers == 0
    config = ModelConfig.tiny().to_hf() | {"num_nextn_predict_layers": 1}  # as transformers writes it
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not predict_size(tmp_path).repeats
    assert predict_size(tmp_path / "config.json").repeats


def test_weights_of_any_model_are_measured_by_their_headers(tmp_path, hf_folder, moe_tensors, moe_config):
    folder = hf_folder(tmp_path / "src", moe_config | {"model_type": "other"}, moe_tensors)
    prediction = predict_size(folder, "fp8")
    report = convert_checkpoint(folder, tmp_path / "dst", "fp8")
    assert (prediction.nbytes, prediction.share) == (report.bytes_after, report.share)


OTHER_FORMATS = [
    ({"quantization_config": 5}, "fp8", "quantization_config must be an object or null, not 5"),
    ({"quantization_config": "fp8"}, "fp8", "quantization_config must be an object or null, not 'fp8'"),
    ({"quantization_config": {"quant_method": "mxfp4"}}, "fp8", r"not 'mxfp4' .* Mxfp4Config\(dequantize=True\)"),
    (
        {"quantization_config": {"quant_method": "gptq"}},
        "fp8",
        "not 'gptq' .*: take the weights in BF16 or FP16",
    ),
    ({}, "bf16", "holds no FP8 weights: there is nothing to convert to bf16"),
]


@pytest.mark.parametrize(("changes", "to", "message"), OTHER_FORMATS)
@pytest.mark.parametrize("work", ["predict", "convert"])
def test_no_size_is_predicted_of_what_is_not_converted(
    tmp_path, hf_folder, moe_tensors, moe_config, changes, to, message, work
):
    folder = hf_folder(tmp_path / "src", moe_config | changes, moe_tensors)
    with pytest.raises(ValueError, match=message):
        predict_size(folder, to) if work == "predict" else convert_checkpoint(folder, tmp_path / "dst", to)


def test_the_size_of_what_is_fp8_already_is_that_of_the_folder(tmp_path, hf_folder, moe_tensors, moe_config):
    folder = hf_folder(tmp_path / "src", moe_config, moe_tensors)
    report = convert_checkpoint(folder, tmp_path / "dst", "fp8")
    assert predict_size(tmp_path / "dst", "fp8").nbytes == report.bytes_after


def test_no_size_is_predicted_from_a_configuration_of_another_quantization(tmp_path):
    config = ModelConfig.tiny().to_hf() | {"quantization_config": {"quant_method": "gptq"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"quantization_config must be 'fp8' .* not 'gptq'"):
        predict_size(tmp_path)


def test_a_missing_configuration_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path / 'config.json'} does not exist"):
        predict_size(tmp_path)


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match="to must be 'fp8', 'bf16' or 'float32', not 'int4'"):
        predict_size(ModelConfig.tiny(), "int4")


TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ABSENT = object()
MIXTRAL = {"model_type": "mixtral", "num_local_experts": 4}
MODELS = {
    "llama": LlamaConfig(**TINY, attention_bias=True, mlp_bias=True),
    "llama, tied": LlamaConfig(**TINY, tie_word_embeddings=True),
    "mistral": MistralConfig(**TINY, head_dim=32),
    "qwen2": Qwen2Config(**TINY),
    "qwen3": Qwen3Config(**TINY, head_dim=24),
    "mixtral": MixtralConfig(**TINY, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(
        **TINY, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[1]
    ),
}


@pytest.mark.one_case
@pytest.mark.parametrize("name", MODELS)
def test_a_configuration_of_another_architecture_has_the_size_of_its_weights(tmp_path, name):
    AutoModelForCausalLM.from_config(MODELS[name], dtype=torch.bfloat16).save_pretrained(tmp_path / "whole")
    (tmp_path / "bare").mkdir()
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "bare")
    assert predict_size(tmp_path / "bare", "fp8") == predict_size(tmp_path / "whole", "fp8")
    assert predict_size(tmp_path / "bare", "bf16").nbytes == Shards(tmp_path / "whole").nbytes


HEADS_32 = {**TINY, "num_attention_heads": 32, "num_hidden_layers": 2}
DEFAULTS = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": None}),
    ("mistral", {}),
    ("mistral", {"hidden_size": 100}),
    ("mistral", {"attention_bias": True}),
    ("qwen2", {}),
    ("qwen2", {"num_attention_heads": 16, "num_key_value_heads": None}),
    ("qwen3", {}),
    ("qwen3", {"num_attention_heads": 16, "num_key_value_heads": None}),
    ("qwen3", {"num_key_value_heads": 2}),
    ("qwen3", {"head_dim": 16}),
    ("mixtral", {"num_local_experts": 2}),
    ("mixtral", {"num_local_experts": 2, "hidden_size": 100}),
    ("qwen3_moe", {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 48}),
    ("qwen3_moe", {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 48, "hidden_size": 100}),
]


@pytest.mark.parametrize(("kind", "changes"), DEFAULTS)
def test_absent_numbers_and_widths_of_heads_are_those_of_transformers(tmp_path, kind, changes):
    config = {key: value for key, value in HEADS_32.items() if key != "num_key_value_heads"}
    (tmp_path / "config.json").write_text(json.dumps(config | changes | {"model_type": kind}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    assert predict_size(tmp_path).share.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "gpt2"},
            "model_type is 'gpt2': from a configuration alone the size is known for",
        ),
        ({"hidden_size": "64"}, "hidden_size must be a whole number, not '64'"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers must be at most 1,000, not 1000000"),
        ({"vocab_size": None}, "lacks vocab_size, which llama needs"),
        ({"model_type": "mixtral"}, "lacks num_local_experts, which mixtral needs"),
        ({"model_type": "qwen3_moe"}, "lacks num_experts, moe_intermediate_size, which qwen3_moe needs"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads, 4, not be 3"),
        (
            {"model_type": "mistral", "num_key_value_heads": ABSENT},
            r"num_key_value_heads must divide num_attention_heads, 4, not be 8 \(mistral's default is 8\)",
        ),
        ({"hidden_size": 66}, "hidden_size must be a multiple of num_attention_heads, 4, not 66"),
        (
            {"model_type": "mistral", "hidden_size": 2},
            "hidden_size must be at least num_attention_heads, 4, without head_dim, not 2",
        ),
        ({"text_config": [1]}, r"text_config must be an object or null, not \[1\]"),
        ({**MIXTRAL, "num_experts_per_tok": "2"}, "num_experts_per_tok must be a whole number or null, not '2'"),
        ({"rope_scaling": [1]}, r"rope_scaling must be an object or null, not \[1\]"),
        ({"rope_parameters": "yarn"}, "rope_parameters must be an object or null, not 'yarn'"),
        ({"rope_theta": "1e6"}, "rope_theta must be a number or null, not '1e6'"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be above 0, not 0"),
        ({"hidden_act": 3}, "hidden_act must be text or null, not 3"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be at least 1, not 0"),
        ({"torch_dtype": ["bfloat16"]}, r"torch_dtype must be text or null, not \['bfloat16'\]"),
        ({"eos_token_id": [2, "3"]}, "eos_token_id must be a whole number, not '3'"),
        ({"architectures": "Llama"}, "architectures must be null or a list, each text, not 'Llama'"),
        ({"use_cache": 1}, "use_cache must be true or false or null, not 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_configuration_that_gives_no_size_is_refused(tmp_path, changes, message):
    config = {**TINY, "model_type": "llama", **changes}
    (tmp_path / "config.json").write_text(json.dumps({key: v for key, v in config.items() if v is not ABSENT}))
    with pytest.raises(ValueError, match=message):
        predict_size(tmp_path)


WRONG_KEYS = [
    ("llama", {"hidden_size": "64"}, "hidden_size must be a whole number, not '64'"),
    ("llama", {"rms_norm_eps": 0}, "rms_norm_eps must be above 0, not 0"),
    ("mixtral", {"num_local_experts": 4.5}, "num_local_experts must be a whole number or null, not 4.5"),
    ("mixtral", {"num_local_experts": 5000}, "num_local_experts must be at most 4,096, not 5000"),
    ("qwen3_moe", {"num_local_experts": 5000}, "num_local_experts must be at most 4,096, not 5000"),
    ("qwen3_moe", {"num_experts": 5000}, "num_experts must be at most 4,096, not 5000"),
    ("qwen3_moe", {"rope_scaling": [1]}, r"rope_scaling must be an object or null, not \[1\]"),
    ("llama", {"rope_parameters": {"rope_type": 5}}, "rope_parameters.rope_type must be text or null, not 5"),
    ("llama", {"rope_scaling": {"type": [1]}}, r"rope_scaling.type must be text or null, not \[1\]"),
    (
        "llama",
        {"rope_scaling": {"rope_type": "llama3", "low_freq_factor": "1"}},
        "rope_scaling.low_freq_factor must be a number or null, not '1'",
    ),
    ("qwen3", {"rope_parameters": {"rope_theta": "1e6"}}, "rope_parameters.rope_theta must be a number or null"),
    ("deepseek_v3", {"rope_parameters": {"rope_theta": 0.5}}, "rope_parameters.rope_theta must be above 1, not 0.5"),
    ("deepseek_v3", {"num_key_value_heads": True}, "num_key_value_heads must be a whole number or null, not True"),
    ("deepseek_v3", {"tie_word_embeddings": "abc"}, "tie_word_embeddings must be true or false or null, not 'abc'"),
    ("deepseek_v3", {"attention_bias": 1}, "attention_bias must be true or false or null, not 1"),
    ("deepseek_v3", {"num_experts_per_tok": 5}, "num_experts_per_tok must be at most n_routed_experts, 4, not 5"),
    ("deepseek_v3", {"hidden_size": 1000}, r"hidden_size must be the width of .*, which is \[50, 192\], not 1000"),
    ("llama", {"hidden_size": 1000}, r"hidden_size must be the width of .*, which is \[50, 192\], not 1000"),
    ("qwen2", {"vocab_size": 60}, r"vocab_size must be the number of rows of .*, which is \[50, 192\], not 60"),
    ("deepseek_v3", {"n_routed_experts": 8}, "n_routed_experts is 8, but there are weights of 4 experts"),
    (
        "deepseek_v3",
        {"kv_lora_rank": 128, "qk_rope_head_dim": 64},
        r"kv_lora_rank, qk_rope_head_dim: .*kv_a_proj_with_mqa.weight must have 192 rows, but is \[200, 192\]",
    ),
    (
        "deepseek_v3",
        {"num_attention_heads": 2, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        r"num_attention_heads, .*q_proj.weight must have 384 rows, but is \[256, 192\]",
    ),
    (
        "llama",
        {"num_attention_heads": 4, "head_dim": 128},
        r"num_attention_heads, head_dim: .*q_proj.weight must have 512 rows, but is \[256, 192\]",
    ),
    ("deepseek_v3", {"num_hidden_layers": 3}, "is 3, but there are no weights of model.layers.2$"),
    ("llama", {"num_hidden_layers": 9}, "there are no weights of 7 layers, the first of them model.layers.2$"),
    ("deepseek_v3", {"qk_rope_head_dim": True}, "qk_rope_head_dim must be a whole number, not True"),
    ("deepseek_v3", {"scoring_func": 3}, "scoring_func must be sigmoid or softmax, not 3"),
    (
        "deepseek_v3",
        {"rope_scaling": {"type": "yarn", "factor": "40"}},
        "rope_scaling.factor must be a number, not '40'",
    ),
    ("deepseek_v32", {"index_topk": "2048"}, "index_topk must be a whole number or null, not '2048'"),
    ("deepseek_v2", {"use_cache": 1}, "use_cache must be true or false or null, not 1"),
]


WRONG_KEYS_OF_ANY_MODEL = [
    ({"model_type": [1]}, r"model_type must be text or null, not \[1\]"),
    ({"architectures": 5}, "architectures must be null or a list, each text, not 5"),
    ({"architectures": ["A", 5]}, "architectures must be text, not 5"),
    ({"tie_word_embeddings": "abc"}, "tie_word_embeddings must be true or false or null, not 'abc'"),
    ({"num_experts": "8"}, "num_experts must be a whole number or null, not '8'"),
    ({"num_experts": -1}, "num_experts must be at least 0, not -1"),
    ({"num_experts_per_tok": 10**400}, r"num_experts_per_tok must be at most 16,777,216, not 10\^60 or more"),
    ({"text_config": [1]}, r"text_config must be an object or null, not \[1\]"),
    ({"text_config": {"num_experts": "8"}}, "text_config.num_experts must be a whole number or null, not '8'"),
]
WRONG_KEYS += [("other", changes, message) for changes, message in WRONG_KEYS_OF_ANY_MODEL]


@pytest.mark.one_case
@pytest.mark.parametrize(("kind", "changes", "message"), WRONG_KEYS)
@pytest.mark.parametrize("work", ["predict", "convert"])
def test_a_wrong_key_is_refused_where_there_are_weights(
    tmp_path, hf_folder, moe_tensors, moe_config, kind, changes, message, work
):
    folder = hf_folder(tmp_path / "src", moe_config | {"model_type": kind} | changes, moe_tensors)
    with pytest.raises(ValueError, match=message):
        predict_size(folder) if work == "predict" else convert_checkpoint(folder, tmp_path / "dst", "fp8")
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (ModelConfig.tiny().to_hf(), {"n_group": 3}, "n_group must divide the 16 n_routed_experts, not be 3"),
        (ModelConfig.tiny().to_hf(), {"index_topk": 8}, "index_topk needs model_type 'deepseek_v32'"),
        (ModelConfig.tiny().to_hf(), {"num_local_experts": 8}, "num_local_experts is 8, but n_routed_experts is 16"),
        ({**TINY, "model_type": "llama"}, {"num_key_value_heads": 3}, "num_key_value_heads must divide"),
        ({**TINY, **MIXTRAL}, {"num_experts": 16}, "num_local_experts is .*, but num_experts is 16: they are one"),
    ],
    ids=["n_group", "index_topk", "deepseek experts", "num_key_value_heads", "mixtral experts"],
)
def test_keys_that_do_not_fit_together_are_refused_without_weights(tmp_path, config, changes, message):
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=message):
        predict_size(tmp_path)


@pytest.mark.parametrize(
    ("config", "key", "counts"),
    [
        (replace(ModelConfig.v3_671b(), num_hidden_layers=1000).to_hf(), "n_routed_experts", "998 layers of 256"),
        (replace(ModelConfig.v3_671b(), n_routed_experts=4096).to_hf(), "n_routed_experts", "59 layers of 4,096"),
        (
            {**TINY, **MIXTRAL, "num_hidden_layers": 1000, "num_local_experts": 66},
            "num_local_experts",
            "1,000 layers of 66",
        ),
        (
            {
                **TINY,
                "model_type": "qwen3_moe",
                "num_hidden_layers": 1000,
                "num_experts": 132,
                "moe_intermediate_size": 8,
                "decoder_sparse_step": 2,
            },
            "num_experts",
            "500 layers of 132",
        ),
    ],
    ids=["layers", "experts", "mixtral", "qwen3_moe"],
)
def test_more_experts_than_a_size_is_predicted_for_are_refused(tmp_path, config, key, counts):
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = (
        f"num_hidden_layers, {key}: a size is predicted for at most 65,536 experts in all layers, not for {counts}"
    )
    with pytest.raises(ValueError, match=message):
        predict_size(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "other", "hidden_size": [64, 128], "rope_scaling": [1]},
        {"model_type": "deepseek_v3", "hidden_act": "gelu", "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"model_type": "llama", "head_dim": None, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"model_type": "other", "n_routed_experts": None, "num_experts": 1, "num_experts_per_tok": 2},
        {"model_type": "deepseek_v3", "num_hidden_layers": 2, "first_k_dense_replace": 3},
        {"model_type": "deepseek_v3", "n_group": 3, "topk_group": 1},
        {"model_type": "deepseek_v3", "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048},
        {"model_type": "deepseek_v3", "moe_layer_freq": [0, 1]},
        {"model_type": "llama", "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128},
    ],
    ids=[
        "unknown model",
        "not computed here",
        "other rope",
        "one expert",
        "dense layers only",
        "pruned experts",
        "an indexer",
        "a list of layers",
        "heads of their own size",
    ],
)
def test_weights_are_converted_whatever_octile_does_not_compute(tmp_path, hf_folder, moe_tensors, moe_config, config):
    folder = hf_folder(tmp_path / "src", moe_config | config, moe_tensors)
    assert convert_checkpoint(folder, tmp_path / "dst", "fp8").files == 2


def test_a_model_of_one_expert_may_choose_more(tmp_path, hf_folder, moe_tensors, moe_config):
    tensors = [{n: t for n, t in file.items() if not re.search(r"experts\.[1-3]", n)} for file in moe_tensors]
    config = moe_config | {"model_type": "mixtral", "n_routed_experts": None, "num_local_experts": 1}
    folder = hf_folder(tmp_path / "src", config | {"num_experts_per_tok": 2}, tensors)
    assert convert_checkpoint(folder, tmp_path / "dst", "fp8").files == 2
