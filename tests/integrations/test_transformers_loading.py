"""Tests that `load_state_dict` of a converted mixture refuses experts that it would not load."""

import copy
import pickle

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from octile.nn.conversion import apply_recipe
from tests.models_of_transformers import small_model

MIXTURES = pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])  # Mixtral's checkpoint has another name for `mlp`


def saved(name: str, folder) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    small_model(name).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def converted(name: str) -> nn.Module:
    torch.manual_seed(0)
    return apply_recipe(small_model(name))


@MIXTURES
def test_experts_of_a_checkpoint_that_would_be_lost_are_refused(name, tmp_path):
    state = saved(name, tmp_path)
    model = converted(name)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        ValueError, match=r"state_dict has model\.layers\.0\..*experts\.0\..*: make the model with from_pre"
    ):
        model.load_state_dict(state, strict=False)
    assert all(torch.equal(p, before[key]) for key, p in model.state_dict().items())


@MIXTURES
def test_a_model_that_has_the_checkpoints_experts_already_loads_it(name, tmp_path):
    state = saved(name, tmp_path)
    model = apply_recipe(AutoModelForCausalLM.from_pretrained(tmp_path))
    nn.init.zeros_(model.model.norm.weight)
    model.load_state_dict(state, strict=False)
    assert torch.equal(model.model.norm.weight, state["model.norm.weight"])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_and_a_model_within_another_refuse_them_too(copied, tmp_path):
    state = {f"0.{key}": values for key, values in saved("qwen3_moe", tmp_path).items()}
    with pytest.raises(ValueError, match=r"state_dict has 0\.model\.layers\.0\.mlp\.experts\.0\."):
        nn.Sequential(copied(converted("qwen3_moe"))).load_state_dict(state, strict=False)


def test_experts_on_the_meta_device_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"state_dict has model\.layers\.0\..*load the best checkpoint's folder with"):
        converted("qwen3_moe").to("meta").load_state_dict(saved("qwen3_moe", tmp_path), strict=False, assign=True)


def test_experts_that_are_sharded_are_refused(tmp_path, process_group):
    state = saved("qwen3_moe", tmp_path)
    model = apply_recipe(AutoModelForCausalLM.from_pretrained(tmp_path))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match=r"state_dict has model\.layers\.0\..*experts\.0\..*"):
        model.load_state_dict(state, strict=False)


def test_states_with_stacked_experts_or_none_are_loaded():
    model = converted("qwen3_moe")
    model.load_state_dict(small_model("qwen3_moe").state_dict())
    model.load_state_dict({"model.norm.weight": torch.zeros(64)}, strict=False)
    assert not model.model.norm.weight.any()


def test_a_model_that_is_converted_again_checks_once():
    assert len(apply_recipe(converted("qwen3_moe"))._load_state_dict_pre_hooks) == 1


def test_a_dense_model_is_left_alone():
    assert not converted("qwen3")._load_state_dict_pre_hooks
