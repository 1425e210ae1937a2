"""Folders of models that octile does not load: every command that loads a model says in a line who serves them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import octile
from octile.checkpoint import convert_checkpoint
from octile.checkpoint.other_models import SERVED_ELSEWHERE, check_model_type
from octile.cli import main
from octile.lab.operators import Recording

SMALL = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
COMMANDS = {
    "serve": ("serve", "FOLDER"),
    "generate": ("generate", "FOLDER"),
    "train --init-from": ("train", "--init-from", "FOLDER", "--data", "TEXT", "--out", "OUT", "--device", "cpu"),
    "rl": ("rl", "FOLDER", "--out", "OUT"),
    "bench serve": ("bench", "serve", "--run", "FOLDER"),
    "lab preflight": ("lab", "preflight", "FOLDER"),
    "lab rollout": ("lab", "rollout", "FOLDER"),
    "lab recompute": ("lab", "recompute", "FOLDER", "RECORDING"),
}


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    """A small Qwen3 that `octile convert` has converted to FP8."""
    folder = tmp_path_factory.mktemp("qwen3")
    config = AutoConfig.for_model("qwen3", **SMALL, **HEADS, head_dim=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "bf16")
    convert_checkpoint(folder / "bf16", folder / "fp8", "fp8")
    return folder / "fp8"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_loads_a_model_says_who_serves_another(name, converted, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("a text\n" * 1000)
    Recording("cpu", "", [], [], {"one": torch.ones(1)}).save(tmp_path / "recording")
    paths = {"TEXT": tmp_path / "text.txt", "RECORDING": tmp_path / "recording", "OUT": tmp_path / "out"}
    names = {"FOLDER": str(converted), **{word: str(path) for word, path in paths.items()}}
    with pytest.raises(SystemExit) as end:
        main([names.get(word, word) for word in COMMANDS[name]])
    line = capsys.readouterr().err.splitlines()[-1]
    types = "deepseek_v3, deepseek_v2, deepseek_v32, kimi_k2, glm_moe_dsa"
    assert end.value.code == 2
    assert line == (
        f"octile: {converted} has a model of type 'qwen3' (Qwen3ForCausalLM), but octile loads only the types {types}; "
        f"vLLM, SGLang and transformers serve it: vllm serve {converted}"
    )


def test_a_model_without_weights_that_octile_reads_is_refused_alike(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    message = r"has a model of type 'llama', but .* serve it, and with octile\.convert transformers trains it in FP8$"
    with pytest.raises(ValueError, match=message):
        octile.load(tmp_path)


def refusal(config: Mapping[str, Any]) -> str:
    with pytest.raises(ValueError, match="has a model of type") as caught:
        check_model_type(Path("a b"), config)
    return str(caught.value)


def test_another_quantization_has_no_command():
    assert refusal({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}).endswith("serve it")


def test_a_command_quotes_the_folder():
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert refusal({"model_type": "llama", "quantization_config": fp8}).endswith("serve it: vllm serve 'a b'")


@pytest.mark.parametrize("kind", ["somebody's", 7])
def test_a_model_that_nobody_may_serve_is_refused(kind):
    assert refusal({"model_type": kind, "architectures": []}).endswith("vLLM, SGLang and transformers may serve it")


def test_transformers_has_the_models_that_are_served_elsewhere():
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) >= SERVED_ELSEWHERE


def test_an_engine_that_does_not_read_the_scales_is_not_named():
    fp8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert refusal({"model_type": "llama", **fp8}).endswith("; vLLM and transformers serve it: vllm serve 'a b'")
