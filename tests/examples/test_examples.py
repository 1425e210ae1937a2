"""Tests that each example runs from its command line at a small size and does what its docstring says."""

import json
import re
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

from octile.checkpoint import convert_checkpoint, load, save
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import apply_recipe
from octile.nn.linear import Linear
from octile.nn.observer import observe_quantization
from octile.recipe import Recipe
from octile.train.data.prepare import prepare
from tests.examples.conftest import FOLDER
from tests.train.conftest import MICRO

TOY = ["--hidden", "64", "--layers", "1"]


@pytest.fixture
def texts(tmp_path):
    """Twenty small texts."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(20):
        (folder / f"{number}.txt").write_text(f"def add_{number}(a, b):\n    return a + b + {number}\n" * 8)
    return folder


@pytest.fixture
def untrained(texts, tmp_path):
    """untrained(name, weights, layers): a folder with a model as it was drawn and a tokenizer of the texts."""

    def make(name, weights="fp8", layers=2):
        store = prepare(texts, MICRO.vocab_size, tmp_path / f"{name}-data", 15, held_out_windows=2)
        config = replace(
            MICRO,
            num_hidden_layers=layers,
            bos_token_id=store.tokenizer.begin,
            eos_token_id=store.tokenizer.end,
        )
        torch.manual_seed(layers)
        files = [store.folder / "tokenizer.json", store.folder / "tokenizer_config.json"]
        save(DeepseekV3(config), tmp_path / name, weights, files)
        return tmp_path / name

    return make


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "qwen"])
def test_a_transformers_model_learns_with_its_trainer(example, tmp_path, model):
    out = tmp_path / "run"
    trainer = example("train_with_trainer").main(
        ["--model", model, "--out", str(out), "--steps", "12", "--length", "32", *TOY]
    )
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.5
    assert any(isinstance(module, Linear) for module in trainer.model.modules())
    assert (out / "model" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "qwen"])
def test_a_transformers_model_learns_in_a_loop(example, model):
    losses = example("train_with_a_loop").main(["--model", model, "--steps", "12", "--length", "32", *TOY])
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["fp8", pytest.param("bf16", marks=pytest.mark.exhaustive)])
def test_a_student_learns_what_a_larger_teacher_wrote(example, untrained, tmp_path, weights):
    teacher, student = untrained("teacher", layers=3), untrained("student", weights)
    prompts, traces, out = tmp_path / "prompts.txt", tmp_path / "traces.jsonl", tmp_path / "distilled"
    prompts.write_text("def add\nreturn\n")
    written = example("write_traces").main(
        [str(teacher), "--prompts", str(prompts), "--out", str(traces), "--samples", "5", "--tokens", "24"]
    )
    lines = [json.loads(line) for line in traces.read_text().splitlines()]
    assert len(lines) == written
    assert {line["prompt"] for line in lines} == {"def add", "return"}

    before, after = example("fine_tune_on_traces").main(
        [str(student), str(traces), "--out", str(out), "--lr", "3e-3", "--epochs", "3"]
    )
    assert after < before
    assert load(out).model.layers[0].mlp.up_proj.recipe == Recipe.deepseek_v3()
    assert (out / "tokenizer.json").read_bytes() == (student / "tokenizer.json").read_bytes()


@pytest.fixture
def qwen(texts, tmp_path):
    """A small Qwen3 in BF16 with a tokenizer of the texts."""
    store = prepare(texts, 320, tmp_path / "qwen-data", 15, held_out_windows=2)
    config = Qwen3Config(
        vocab_size=320,
        hidden_size=160,  # blocks at the edge are smaller
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "qwen")
    store.tokenizer.save(tmp_path / "qwen")
    return tmp_path / "qwen"


def test_masters_of_fp8_weights_are_quantized_to_the_same_numbers(example, qwen, tmp_path):
    convert_checkpoint(qwen, tmp_path / "qwen-fp8", "fp8")
    stored = load_file(tmp_path / "qwen-fp8" / "model.safetensors")
    model = apply_recipe(example("fine_tune_from_fp8").load_in_float32(tmp_path / "qwen-fp8", tmp_path / "start"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    cast = {}
    with observe_quantization(lambda operand, q: cast.setdefault(operand, []).append(q)):
        model(torch.arange(24)[None]).logits.sum().backward()
    layers = [(name, layer) for name, layer in model.named_modules() if isinstance(layer, Linear)]
    assert len(layers) == len(cast["w"]) == 7
    for (name, layer), q in zip(layers, cast["w"], strict=True):
        assert q.shape == layer.weight.shape
        assert q.data.view(torch.uint8).equal(stored[f"{name}.weight"].view(torch.uint8)), name
        assert q.scale.equal(stored[f"{name}.weight_scale_inv"]), name


@pytest.mark.one_case
@pytest.mark.parametrize("weights", ["fp8", "bf16"])
def test_a_transformers_model_is_fine_tuned_from_its_weights_and_left_in_fp8(example, qwen, texts, tmp_path, weights):
    if weights == "fp8":
        convert_checkpoint(qwen, tmp_path / "qwen-fp8", "fp8")
        qwen = tmp_path / "qwen-fp8"
    out = tmp_path / "tuned"
    trainer = example("fine_tune_from_fp8").main(
        [str(qwen), "--text", str(texts / "3.txt"), "--out", str(out), "--steps", "6", "--length", "16", "--lr", "3e-3"]
    )
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.5
    masters, left = load_file(out / "float32" / "model.safetensors"), load_file(out / "fp8" / "model.safetensors")
    assert (out / "fp8" / "tokenizer.json").is_file()  # servers need it
    name = "model.layers.0.mlp.down_proj.weight"
    assert masters[name].dtype == torch.float32
    assert left[name].dtype == torch.float8_e4m3fn
    assert left["model.embed_tokens.weight"].equal(masters["model.embed_tokens.weight"].bfloat16())


def test_only_the_response_of_a_trace_is_predicted(example, untrained, tmp_path):
    from octile.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(untrained("student"))
    traces = tmp_path / "traces.jsonl"
    traces.write_text(json.dumps({"prompt": "def add", "response": "return a"}) + "\n")
    traces.write_text(traces.read_text() * 2)
    (tokens, labels), _ = example("fine_tune_on_traces").read_traces(traces, tokenizer, max_length=64)
    prompt, response = tokenizer.encode("def add"), tokenizer.encode("return a")
    assert tokens[0].tolist() == [tokenizer.begin, *prompt, *response, tokenizer.end]
    assert labels[0].tolist() == [-100] * (1 + len(prompt)) + [*response, tokenizer.end]


def test_the_readme_names_every_example():
    named = set(re.findall(r"\]\((\w+\.py)\)", (FOLDER / "README.md").read_text()))
    assert named == {file.name for file in FOLDER.glob("*.py")}
