"""Tests of the model that a run's configuration asks for: its recipe, and its tensors on the meta device."""

from dataclasses import replace

import pytest

from octile.nn.linear import Linear
from octile.recipe import Recipe
from octile.train.model import converted_meta_model, run_recipe
from tests.train.conftest import MICRO, micro

WITH_INDEXERS = replace(MICRO, index_n_heads=4, index_head_dim=16, index_topk=8)


def test_a_recipe_without_a_name_is_used_instead_of_the_named_one():
    assert run_recipe(micro(recipe="deepseek_v3"), Recipe.bf16()) == Recipe.bf16()


def test_weights_have_the_scales_that_the_initial_checkpoint_announces():
    announced = replace(MICRO, extra={"quantization_config": {"scale_fmt": "ue8m0"}})
    assert run_recipe(micro(recipe="deepseek_v3", model=announced)).formats.w.scale == "power_of_2"


def test_the_tensors_of_a_meta_model_have_no_values():
    assert all(p.is_meta for p in converted_meta_model(micro(), Recipe.deepseek_v3()).parameters())


def test_the_layers_of_a_meta_model_have_the_recipe():
    model = converted_meta_model(micro(), Recipe.deepseek_v3())
    assert any(isinstance(module, Linear) for module in model.modules())


@pytest.mark.parametrize(("stage", "others_are_trained"), [("warm_up", False), ("sparse", True)])
def test_only_a_warm_up_trains_the_indexers_alone(stage, others_are_trained):
    model = converted_meta_model(micro(model=WITH_INDEXERS, indexer_stage=stage), Recipe.bf16())
    indexers = {p for indexer in model.indexers() for p in indexer.parameters()}
    assert all(p.requires_grad for p in indexers)
    assert {p.requires_grad for p in model.parameters() if p not in indexers} == {others_are_trained}
