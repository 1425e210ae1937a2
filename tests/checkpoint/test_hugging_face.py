import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, FineGrainedFP8Config

from octile.checkpoint import hugging_face as hugging_face_module
from octile.checkpoint import load, load_weights, save
from octile.checkpoint.fp8_layout import QUANTIZATION_CONFIG, dequantize_weight, is_stored_in_fp8
from octile.checkpoint.hugging_face import read_model_config
from octile.checkpoint.recipe_entry import with_recipe
from octile.checkpoint.shards import plan_shards
from octile.layer_roles import is_kept
from octile.models.config import ModelConfig
from octile.models.deepseek_v3 import DeepseekV3
from octile.models.names import to_hf
from octile.nn.conversion import convert
from octile.nn.linear import Linear
from octile.nn.moe import Experts, share_of_experts
from octile.recipe import Recipe
from octile.scaled import quantize
from tests.checkpoint.micro_model import MICRO, micro_model

ANNOUNCED = {**QUANTIZATION_CONFIG, "modules_to_not_convert": ["lm_head", "model.layers.2.shared_head.head"]}
GATE_PROJ = "model.layers.1.mlp.experts.3.gate_proj.weight"


@pytest.fixture
def model():
    return micro_model()


@pytest.fixture
def tokens():
    return torch.randint(0, MICRO.vocab_size, (2, 20), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def folder(tmp_path, model):
    save(model, tmp_path / "model", weights="float32")
    return tmp_path / "model"


def change(folder, edit):
    """Applies edit to the tensors of a folder, as another program would write it."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "octile.json").unlink()


def test_float32_comes_back_bit_for_bit(folder, model, same):
    found = load(folder).state_dict()
    assert found.keys() == model.state_dict().keys()
    assert all(same(found[name], tensor) for name, tensor in model.state_dict().items())


def test_a_model_is_not_saved_into_a_file(tmp_path, model):
    (tmp_path / "model").touch()
    with pytest.raises(NotADirectoryError, match=r"folder must be a folder, but '.*/model' is a file"):
        save(model, tmp_path / "model")


def test_a_model_is_not_saved_over_a_run(tmp_path, model):
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(FileExistsError, match=r"holds a run, whose config\.json would be replaced"):
        save(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_bf16_comes_back_rounded(tmp_path, model):
    save(model, tmp_path, weights="bf16")
    found = load(tmp_path)
    assert found.lm_head.weight.equal(model.lm_head.weight.bfloat16().float())
    assert found.model.layers[1].mlp.experts.down.equal(model.model.layers[1].mlp.experts.down.bfloat16().float())


def test_the_gates_bias_is_always_float32(tmp_path, model):
    save(model, tmp_path, weights="fp8")
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    assert load(tmp_path, dtype=torch.bfloat16).model.layers[1].mlp.gate.e_score_correction_bias.equal(bias)


def test_fp8_folders_have_the_published_layout(tmp_path, model, same):
    save(model, tmp_path, weights="fp8")
    found, own = load_file(tmp_path / "model.safetensors"), to_hf(model.state_dict(), MICRO)
    projections = {name for name, tensor in own.items() if is_stored_in_fp8(name, tensor.shape)}
    assert found.keys() == own.keys() | {f"{name}_scale_inv" for name in projections}
    q = quantize(own[GATE_PROJ], (128, 128))
    assert same(found[GATE_PROJ], q.data)
    assert same(found[GATE_PROJ + "_scale_inv"], q.scale)
    assert {str(found[name].dtype) for name in own.keys() - projections} == {"torch.bfloat16", "torch.float32"}
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"] == ANNOUNCED


def test_fp8_folders_load_as_a_model_that_computes_in_fp8(tmp_path, model):
    save(model, tmp_path, weights="fp8")
    found = load(tmp_path)
    assert isinstance(found.model.layers[0].mlp.gate_proj, Linear)
    assert found.model.layers[1].mlp.experts.recipe.name == "deepseek_v3"
    assert type(found.lm_head) is torch.nn.Linear


def test_fp8_folders_load_the_dequantized_weights(tmp_path, model):
    save(model, tmp_path, weights="fp8")
    found, own = to_hf(load(tmp_path).state_dict(), MICRO), to_hf(model.state_dict(), MICRO)
    expected = quantize(own[GATE_PROJ], (128, 128)).dequantize()
    assert found[GATE_PROJ].equal(expected)


def dequantize_stored(folder, *patterns):
    """Stores the FP8 weights of the layers that patterns match in BF16, as `octile convert --keep` does."""

    def edit(tensors):
        for name in [name for name in tensors if f"{name}_scale_inv" in tensors]:
            if is_kept(name.removesuffix(".weight"), patterns):
                scale = tensors.pop(f"{name}_scale_inv")
                tensors[name] = dequantize_weight(tensors[name], scale, torch.bfloat16)

    change(folder, edit)


def in_fp8(model):
    """The names of the layers, and of modules of experts, that compute in FP8."""
    return {name for name, module in model.named_modules() if getattr(module, "recipe", None) is not None}


def test_layers_that_a_folder_has_in_bf16_compute_in_high_precision(tmp_path, model, tokens):
    save(model, tmp_path, weights="fp8")
    layers = in_fp8(load(tmp_path))
    left_out = {"model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.experts"}
    dequantize_stored(tmp_path, *left_out)
    found = load(tmp_path)
    assert in_fp8(found) == layers - left_out
    assert {type(found.get_submodule(name)) for name in left_out} == {torch.nn.Linear, Experts}
    needed = micro_model()
    load_weights(needed, tmp_path)
    assert found(tokens).equal(convert(needed, keep=list(left_out))(tokens))


NO_LAYER_ALONE = "*.self_attn", "*.mlp.[dgsu]*", "*.experts.[1-7]"  # but weights of an expert


@pytest.mark.parametrize(
    "patterns",
    [
        pytest.param(("model.layers.0.self_attn.o_proj", "model.layers.1.mlp.experts"), id="modules"),
        pytest.param(("model.layers.1.mlp.experts.3.down_proj",), id="a weight of an expert"),
        pytest.param(NO_LAYER_ALONE, id="all layers"),
    ],
)
def test_weights_that_a_folder_has_in_bf16_are_saved_in_bf16_and_others_in_fp8(tmp_path, model, same, patterns):
    save(model, tmp_path / "once", weights="fp8")
    dequantize_stored(tmp_path / "once", *patterns)
    save(load(tmp_path / "once"), tmp_path / "twice", weights="fp8")
    once, twice = (load_file(tmp_path / name / "model.safetensors") for name in ("once", "twice"))
    assert once.keys() == twice.keys()
    assert [name for name in once if not same(once[name], twice[name])] == []


def test_layers_that_are_saved_in_bf16_are_announced(tmp_path, model):
    save(model, tmp_path / "once", weights="fp8")
    dequantize_stored(tmp_path / "once", "model.layers.0.self_attn.o_proj", "model.layers.1.mlp.experts")
    save(load(tmp_path / "once"), tmp_path / "twice", weights="fp8")
    announced = json.loads((tmp_path / "twice" / "config.json").read_text())["quantization_config"]
    assert {"model.layers.0.self_attn.o_proj", "model.layers.1.mlp.experts"} <= {*announced["modules_to_not_convert"]}


def test_layers_that_are_left_out_of_a_conversion_are_saved_in_bf16(tmp_path, model):
    save(convert(model, keep=["*.o_proj"]), tmp_path, weights="fp8")
    found = load_file(tmp_path / "model.safetensors")
    assert found["model.layers.0.self_attn.o_proj.weight"].dtype == torch.bfloat16
    assert found[GATE_PROJ].dtype == torch.float8_e4m3fn


def test_experts_some_of_which_a_folder_has_in_bf16_compute_in_high_precision(tmp_path, model):
    save(model, tmp_path, weights="fp8")
    dequantize_stored(tmp_path, "model.layers.1.mlp.experts.3.down_proj")
    found = load(tmp_path)
    assert found.model.layers[1].mlp.experts.recipe is None
    assert found.model.layers[2].mlp.experts.recipe.name == "deepseek_v3"


def test_a_model_with_no_layer_in_fp8_alone_computes_in_high_precision(tmp_path, model):
    save(model, tmp_path, weights="fp8")
    dequantize_stored(tmp_path, *NO_LAYER_ALONE)
    assert in_fp8(load(tmp_path)) == set()


def test_a_weight_in_bf16_is_refused_under_the_recipe_exact(tmp_path, model):
    save(model, tmp_path, weights="fp8")
    dequantize_stored(tmp_path, "model.layers.0.self_attn.o_proj")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(with_recipe(config, Recipe.exact())))
    message = r"config\.json names the recipe 'exact', which needs .* in FP8, but model\.layers\.0\.self_attn.* is BF16"
    with pytest.raises(ValueError, match=message):
        load(tmp_path)


def store_with_powers_of_2(folder):
    """Stores random weights as UE8M0 checkpoints have them, some with larger scales than needed."""
    generator = torch.Generator().manual_seed(2)

    def edit(tensors):
        for name in [name for name in tensors if f"{name}_scale_inv" in tensors]:
            q = quantize(torch.randn(tensors[name].shape, generator=generator), (128, 128), scale="power_of_2")
            too_large = 2.0 ** int(torch.randint(0, 3, (), generator=generator))
            tensors[name] = (q.data.float() / too_large).to(q.data.dtype)
            tensors[f"{name}_scale_inv"] = q.scale

    change(folder, edit)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["scale_fmt"] = "ue8m0"
    (folder / "config.json").write_text(json.dumps(config))


@pytest.fixture
def ue8m0(tmp_path):
    """A folder with power-of-two scales, of a model with more than a block in some weights."""
    torch.manual_seed(0)
    save(DeepseekV3(replace(MICRO, hidden_size=160, moe_intermediate_size=128)), tmp_path / "ue8m0")
    store_with_powers_of_2(tmp_path / "ue8m0")
    return tmp_path / "ue8m0"


@pytest.mark.one_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ue8m0_encoded_values_and_scales_are_saved_as_they_were_loaded(tmp_path, ue8m0, same, dtype):
    save(load(ue8m0, dtype=dtype), tmp_path / "again")
    before, after = (load_file(folder / "model.safetensors") for folder in (ue8m0, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert [name for name in before if not same(before[name], after[name])] == []
    announced = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert announced == {**ANNOUNCED, "scale_fmt": "ue8m0"}


def test_ue8m0_weights_are_computed_with_as_they_are_stored(ue8m0):
    found = load(ue8m0)
    layer = found.model.layers[0].mlp.gate_proj
    w = layer.recipe.formats.w
    assert w.scale == "power_of_2"
    assert quantize(layer.weight, w.block, w.fmt, w.scale).dequantize().equal(layer.weight)


def test_a_changed_block_of_ue8m0_weights_gets_a_new_power_of_two_and_the_others_keep_theirs(tmp_path, ue8m0):
    found = load(ue8m0)
    name = "model.layers.0.mlp.gate_proj.weight"
    with torch.no_grad():
        found.get_parameter(name)[0, 0] = 3000.0
    save(found, tmp_path / "again")
    before, after = (load_file(folder / "model.safetensors") for folder in (ue8m0, tmp_path / "again"))
    old, new = before[f"{name}_scale_inv"], after[f"{name}_scale_inv"]
    assert new[0, 0] == 8.0  # 3000 / 448 rounded up
    assert new.flatten()[1:].equal(old.flatten()[1:])
    assert before[name][128:].view(torch.uint8).equal(after[name][128:].view(torch.uint8))


def test_an_unknown_scale_format_is_refused(ue8m0):
    config = json.loads((ue8m0 / "config.json").read_text())
    config["quantization_config"]["scale_fmt"] = "ue5m3"
    (ue8m0 / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json: .*scale_fmt must be 'ue8m0' or absent, not 'ue5m3'"):
        load(ue8m0)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("read", [load, read_model_config])
def test_a_file_without_tensors_that_has_another_digit_is_refused(tmp_path, model, read, file):
    (tmp_path / "tokenizer.json").write_text('{"ids": 128}')
    save(model, tmp_path / "model", files=[tmp_path / "tokenizer.json"])
    damaged = tmp_path / "model" / file
    text = damaged.read_text()
    damaged.write_text(text.replace("128", "138", 1))
    assert damaged.read_text() != text
    advice = f"if it was changed on purpose, remove its entry from {tmp_path / 'model' / 'octile.json'}"
    with pytest.raises(ValueError, match=rf"{re.escape(str(damaged))} is damaged: .*; {re.escape(advice)}$"):
        read(tmp_path / "model")


@pytest.mark.parametrize("read", [load, read_model_config])
def test_an_error_in_a_key_of_the_config_names_the_file(folder, read):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": True}))
    (folder / "octile.json").unlink()
    with pytest.raises(ValueError, match=rf"{re.escape(str(folder))}/config\.json: vocab_size must be"):
        read(folder)


def test_fp8_survives_a_second_save_bit_for_bit(tmp_path, model):
    save(model, tmp_path / "once", weights="fp8")
    save(load(tmp_path / "once"), tmp_path / "twice", weights="fp8")
    once, twice = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("once", "twice"))
    assert once == twice


def test_a_quantized_parameter_takes_at_most_1_05_bytes(tmp_path):
    save(DeepseekV3(ModelConfig.tiny()), tmp_path, weights="fp8")
    tensors = load_file(tmp_path / "model.safetensors")
    fp8 = [name for name in tensors if name + "_scale_inv" in tensors]
    nbytes = sum(tensors[name].nbytes + tensors[name + "_scale_inv"].nbytes for name in fp8)
    assert nbytes <= 1.05 * sum(tensors[name].numel() for name in fp8)


def test_a_run_folder_is_loaded_by_its_model(tmp_path, model):
    save(model, tmp_path / "model", weights="float32")
    (tmp_path / "config.json").write_text('{"steps": 1}')
    assert load(tmp_path).lm_head.weight.equal(model.lm_head.weight)


def test_parameters_take_the_asked_dtype(folder):
    assert {p.dtype for p in load(folder, dtype=torch.bfloat16).parameters()} == {torch.bfloat16}


def test_a_loaded_model_can_go_on_training(folder, tokens):
    model = load(folder).train()
    model(tokens, tokens).backward()
    assert all(p.grad is not None for p in model.parameters())


def test_large_models_are_written_in_shards(tmp_path, model, monkeypatch):
    monkeypatch.setattr(hugging_face_module, "plan_shards", lambda sizes: plan_shards(sizes, 40_000))
    save(model, tmp_path, weights="fp8")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert load(tmp_path).lm_head.weight.equal(model.lm_head.weight.bfloat16().float())


def test_files_are_passed_through(tmp_path, model):
    (tmp_path / "tokenizer.json").write_text("{}")
    save(model, tmp_path / "model", files=[tmp_path / "tokenizer.json"])
    assert (tmp_path / "model" / "tokenizer.json").read_text() == "{}"


def test_a_missing_file_is_named_before_anything_is_written(tmp_path, model):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json, which does not exist"):
        save(model, tmp_path / "model", files=[tmp_path / "tokenizer.json"])
    assert not (tmp_path / "model").exists()


def test_another_class_is_refused(tmp_path):
    with pytest.raises(TypeError, match="model must be a DeepseekV3, not Linear"):
        save(torch.nn.Linear(2, 2), tmp_path)


def test_unknown_weights_are_refused(tmp_path, model):
    with pytest.raises(ValueError, match="weights must be 'fp8', 'bf16', 'float32', not 'int4'"):
        save(model, tmp_path, weights="int4")


def test_a_full_disk_leaves_the_model_that_was_there(folder, model, full_disk, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    full_disk(50_000)
    with pytest.raises(OSError, match=r"No space left on device: .*model\.safetensors"):
        save(model, folder, weights="bf16")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_folder_that_was_read_in_fp8_can_be_written_in_bf16(tmp_path, model):
    save(model, tmp_path, weights="fp8")
    save(load(tmp_path), tmp_path, weights="bf16")
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


def test_transformers_computes_the_same_from_our_bf16(tmp_path, model, tokens):
    save(model, tmp_path, weights="bf16")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected, found = theirs(tokens).logits, load(tmp_path)(tokens)
    assert (found - expected).abs().amax() <= 1e-5 * expected.abs().amax()


def test_transformers_reads_our_fp8(tmp_path, model):
    save(model, tmp_path, weights="fp8")
    dequantize = FineGrainedFP8Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=dequantize)
    ours = load(tmp_path).state_dict()
    for name, weight in theirs.state_dict().items():
        stacked = name.replace("experts.gate_up_proj", "experts.gate_up")
        stacked = re.sub(r"mlp\.experts\.down_proj$", "mlp.experts.down", stacked)
        assert weight.equal(ours[stacked]), name


def test_we_compute_the_same_from_what_transformers_writes(tmp_path, tokens):
    torch.manual_seed(0)
    without_mtp = replace(MICRO, num_nextn_predict_layers=0).to_hf()
    theirs = DeepseekV3ForCausalLM(DeepseekV3Config(**without_mtp)).eval()
    theirs.save_pretrained(tmp_path)
    with torch.no_grad():
        expected, found = theirs(tokens).logits, load(tmp_path)(tokens)
    assert (found - expected).abs().amax() <= 1e-5 * expected.abs().amax()


def test_a_prediction_layer_that_is_not_there_is_reported(folder):
    def drop_mtp(tensors):
        for name in [name for name in tensors if name.startswith("model.layers.2.")]:
            del tensors[name]

    change(folder, drop_mtp)
    with pytest.warns(UserWarning, match="has no multi-token prediction layer") as warned:
        assert load(folder).config.num_nextn_predict_layers == 0
    assert {warning.filename for warning in warned} == {__file__}  # the line that loads, and none of octile


def test_a_missing_tensor_is_named(folder):
    change(folder, lambda tensors: tensors.pop(GATE_PROJ))
    with pytest.raises(ValueError, match=rf"lacks {GATE_PROJ}, \[48, 96\] by its config\.json"):
        load(folder)


def test_another_shape_is_named_with_both_shapes(folder):
    change(folder, lambda tensors: tensors.update({GATE_PROJ: torch.ones(47, 96)}))
    with pytest.raises(ValueError, match=rf"{GATE_PROJ} in .* is \[47, 96\], but \[48, 96\] by its config\.json"):
        load(folder)


def test_an_unknown_tensor_is_named(folder):
    change(folder, lambda tensors: tensors.update({"who.knows": torch.ones(1)}))
    with pytest.raises(ValueError, match=r"holds who\.knows, which the model of its config\.json does not have"):
        load(folder)


def test_a_missing_scale_is_named(tmp_path, model):
    save(model, tmp_path, weights="fp8")
    change(tmp_path, lambda tensors: tensors.pop(GATE_PROJ + "_scale_inv"))
    with pytest.raises(ValueError, match=f"{GATE_PROJ} is FP8, but the checkpoint has no {GATE_PROJ}_scale_inv"):
        load(tmp_path)


def test_a_flipped_bit_is_found(folder, flip_byte):
    flip_byte(folder / "model.safetensors", -1)
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged: its SHA-256"):
        load(folder)


@pytest.mark.parametrize("weights", ["float32", "fp8"])
def test_the_configuration_is_read_once(tmp_path, model, monkeypatch, weights):
    save(model, tmp_path, weights=weights)
    read, opened = hugging_face_module.read_json, []
    monkeypatch.setattr(hugging_face_module, "read_json", lambda path: opened.append(path.name) or read(path))
    load(tmp_path)
    assert opened == ["config.json"]


@pytest.mark.parametrize("weights", ["float32", "fp8"])
def test_a_rank_reads_its_own_experts(tmp_path, model, weights):
    save(model, tmp_path, weights=weights)
    whole = load(tmp_path)
    for rank in range(2):
        with share_of_experts(rank, 2):
            own = DeepseekV3(MICRO)
        load_weights(own, tmp_path)
        for (name, weight), (_, expected) in zip(own.named_parameters(), whole.named_parameters(), strict=True):
            cut = expected if weight.shape == expected.shape else expected.chunk(2)[rank]
            assert torch.equal(weight, cut), name
        for name, scale in own.stored_scales.items():
            assert torch.equal(scale, whole.stored_scales[name])


def test_no_checkpoint_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no checkpoint at {tmp_path}"):
        load(tmp_path)


def test_a_folder_that_does_not_exist_is_named_with_the_checkpoints_there_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"^no checkpoint at a: there is no such folder$"):
        load("a")
    for folder in ("runs/a/model", "published", "runs/unfinished", "without_weights"):
        Path(folder).mkdir(parents=True)
        Path(folder, "config.json").touch()
    for file in ("runs/a/model/model.safetensors", "published/model.safetensors.index.json"):
        Path(file).touch()
    Path("runs/unfinished/metrics.jsonl").touch()
    os.utime("published/config.json", (0, 0))
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at a: .* folder; checkpoints here: runs/a, published$"):
        load("a")


def test_a_file_is_no_checkpoint(tmp_path):
    (tmp_path / "weights").touch()
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*/weights: it is a file, not a folder$"):
        load(tmp_path / "weights")


@pytest.mark.parametrize("others", [(), ("config.json",)], ids=["alone", "with config.json"])
def test_an_adapter_is_refused_with_the_remedy(tmp_path, others):
    for name in ("adapter_config.json", "adapter_model.safetensors", *others):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=r"is a LoRA adapter \(adapter_config.json\): merge it into its model first"):
        load(tmp_path)


def test_a_merged_model_beside_its_adapter_is_loaded(folder):
    (folder / "adapter_config.json").write_text("{}")
    load(folder)


def test_a_run_without_a_model_is_told_how_to_finish(tmp_path):
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(FileNotFoundError, match="has no model yet: octile train --resume --out"):
        load(tmp_path)


def test_a_finished_run_without_its_model_is_damaged(tmp_path):
    for name in ("config.json", "metrics.jsonl", "summary.json"):
        (tmp_path / name).write_text("{}")
    message = f"the run at {tmp_path} is damaged: {tmp_path}/model/config.json is missing; octile train --resume --out"
    with pytest.raises(FileNotFoundError, match=re.escape(message)):
        load(tmp_path)


def test_the_command_that_finishes_a_run_takes_no_folder_for_an_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("-dash").mkdir()
    for name in ("config.json", "metrics.jsonl"):
        Path("-dash", name).write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"octile train --resume --out \./-dash finishes it"):
        load("./-dash")


def test_a_run_of_two_ranks_without_a_model_is_told_the_command_of_two(tmp_path):
    (tmp_path / "config.json").write_text('{"parallel": {"dp": 2}}')
    (tmp_path / "metrics.jsonl").write_text("{}")
    with pytest.raises(FileNotFoundError, match="no model yet: torchrun --nproc-per-node 2 -m octile train --resume"):
        load(tmp_path)


def test_an_unsafe_file_is_not_even_looked_at(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"holds neither model\.safetensors nor"):
        load(folder)
