import json
from dataclasses import replace

import pytest
import torch

from octile.checkpoint.convert import convert_checkpoint
from octile.checkpoint.hugging_face import load, save
from octile.checkpoint.recipe_entry import ENTRY, recipe_of, with_recipe
from octile.nn.conversion import apply_recipe
from octile.nn.linear import recipe_of as recipe_of_model
from octile.recipe import Recipe
from octile.validation import read_json
from tests.serve.models import exact_model

FP8_LATENTS = replace(Recipe.exact(), latents="fp8")


@pytest.mark.one_case
@pytest.mark.parametrize("recipe", [Recipe.exact(), FP8_LATENTS, Recipe.deepseek_v3()])
def test_a_saved_model_is_read_with_its_recipe(tmp_path, recipe):
    model, tokens = exact_model(recipe=recipe), torch.arange(60)[None]
    save(model, tmp_path)
    read = load(tmp_path)
    assert recipe_of_model(read) == recipe
    save(read, tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "again").log_probs(tokens), read.log_probs(tokens))


def test_the_entry_is_that_of_the_recipe_it_is_saved_with(tmp_path):
    save(exact_model(), tmp_path)
    model = apply_recipe(load(tmp_path), Recipe.deepseek_v3())
    save(model, tmp_path / "usual")
    assert ENTRY not in read_json(tmp_path / "usual" / "config.json")
    assert type(model.lm_head) is torch.nn.Linear


def test_weights_in_bf16_have_no_recipe(tmp_path):
    save(exact_model(), tmp_path, weights="bf16")
    assert ENTRY not in read_json(tmp_path / "config.json")


@pytest.mark.parametrize("to", ["bf16", "float32"])
def test_a_conversion_to_high_precision_drops_the_recipe(tmp_path, to):
    save(exact_model(), tmp_path / "exact")
    convert_checkpoint(tmp_path / "exact", tmp_path / to, to)
    assert ENTRY not in read_json(tmp_path / to / "config.json")


def test_a_conversion_that_leaves_layers_in_high_precision_drops_the_recipe(tmp_path):
    save(exact_model(), tmp_path / "bf16", weights="bf16")
    config = tmp_path / "bf16" / "config.json"
    config.write_text(json.dumps(with_recipe(read_json(config), Recipe.exact())))
    convert_checkpoint(tmp_path / "bf16", tmp_path / "fp8", "fp8", keep=["*.o_proj"])
    assert ENTRY not in read_json(tmp_path / "fp8" / "config.json")


def test_other_entries_stay():
    assert with_recipe({"a": 1}, FP8_LATENTS) == {"a": 1, ENTRY: {"name": "exact", "latents": "fp8"}}
    assert with_recipe({"a": 1, ENTRY: {}}, None) == {"a": 1}


@pytest.mark.parametrize("entry", [[], "exact", {"name": "exact"}, {"name": "bf16", "latents": "fp8"}, {"latents": 1}])
def test_an_unknown_entry_is_refused(entry):
    with pytest.raises(ValueError, match=f"{ENTRY} must be .*'activations' or 'fp8', not"):
        recipe_of({ENTRY: entry})
