"""Tests of the weights that serving reads: of a model, and of a checkpoint in FP8, which is used as it is stored."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from octile.checkpoint.hugging_face import load, save
from octile.formats import BLOCK
from octile.scaled import ScaledTensor, quantize
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.weights.weights import ServedWeights
from tests.serve.models import CONFIG, Texts, new_model, text


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8")
    save(new_model(fp8=True), folder, weights="fp8")
    return folder


def test_a_checkpoints_fp8_weights_are_used_as_they_are_stored(checkpoint: Path):
    from safetensors.torch import load_file

    stored = load_file(checkpoint / "model.safetensors")
    read = ServedWeights.read(checkpoint, torch.float32)
    name = "model.layers.0.self_attn.o_proj.weight"
    o = read.blocks[0].attention.o
    assert isinstance(o, ScaledTensor)
    assert torch.equal(o.data.view(torch.uint8), stored[name].view(torch.uint8))
    assert torch.equal(o.scale, stored[f"{name}_scale_inv"])


def test_scales_larger_than_needed_are_those_of_the_checkpoint(checkpoint: Path, tmp_path: Path):
    from safetensors.torch import load_file, save_file

    stored = load_file(checkpoint / "model.safetensors")
    for name in [name for name in stored if f"{name}_scale_inv" in stored]:
        stored[name] = (stored[name].float() / 4).to(stored[name].dtype)
    save_file(stored, tmp_path / "model.safetensors")
    shutil.copy(checkpoint / "config.json", tmp_path)
    name = "model.layers.0.self_attn.o_proj.weight"
    for weights in (ServedWeights.read(tmp_path, torch.float32), ServedWeights.of_model(load(tmp_path))):
        o = weights.blocks[0].attention.o
        assert isinstance(o, ScaledTensor)
        assert torch.equal(o.data.view(torch.uint8), stored[name].view(torch.uint8))
        assert torch.equal(o.scale, stored[f"{name}_scale_inv"])


@pytest.mark.one_case
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_checkpoint_and_the_model_that_is_loaded_of_it_have_the_same_bits(checkpoint: Path, batch_invariant: bool):
    logits = [
        Texts(ModelRunner(source, 4, batch_invariant=batch_invariant), [text(70)]).run(66).run(1).run(3).logits[0]
        for source in (ServedWeights.read(checkpoint, torch.float32), load(checkpoint))
    ]
    assert torch.equal(*logits)


def test_a_checkpoint_without_fp8_is_read_in_the_activations_dtype(tmp_path: Path):
    model = new_model(fp8=False, dtype=torch.bfloat16)
    save(model, tmp_path, weights="bf16")
    logits = [
        Texts(ModelRunner(source, 4), [text(70)]).run(70).logits[0] for source in (ServedWeights.read(tmp_path), model)
    ]
    assert torch.equal(*logits)


def test_weights_for_decoding_are_the_dequantized_keys_and_values():
    model = new_model(fp8=True)
    attention = ServedWeights.of_model(model).blocks[1].attention
    w_HXC = quantize(model.model.layers[1].self_attn.kv_b_proj.weight, BLOCK).dequantize().unflatten(0, (4, -1))
    assert torch.equal(attention.w_k, w_HXC[:, : CONFIG.qk_nope_head_dim].mT)
    assert torch.equal(attention.w_v, w_HXC[:, CONFIG.qk_nope_head_dim :])


def test_wrong_models_are_refused(tmp_path: Path):
    with pytest.raises(TypeError, match="model must be a DeepseekV3, not Linear"):
        ServedWeights.of_model(torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"activations must be bfloat16 or float32, not torch\.float16"):
        ServedWeights.of_model(new_model(fp8=False, dtype=torch.float16))
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        ServedWeights.read(tmp_path)


def test_a_missing_tensor_and_one_of_another_shape_are_named(tmp_path: Path):
    save(new_model(fp8=False, config=replace(CONFIG, num_nextn_predict_layers=0)), tmp_path, weights="bf16")
    from octile.models.config import ModelConfig

    config = ModelConfig.read(tmp_path / "config.json")
    (tmp_path / "octile.json").unlink()  # as of another program's folder
    replace(config, num_hidden_layers=3).write(tmp_path / "config.json")
    with pytest.raises(ValueError, match=r"lacks model\.layers\.2\.input_layernorm\.weight"):
        ServedWeights.read(tmp_path)
    replace(config, vocab_size=100).write(tmp_path / "config.json")
    with pytest.raises(ValueError, match=r"is \[200, 128\], but \[100, 128\] by its config\.json"):
        ServedWeights.read(tmp_path)
