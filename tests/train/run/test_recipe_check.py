"""Tests of the check of a run's recipe: sizes that its fused layers do not take are refused before any work."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from octile.train.compare.compare import compare
from octile.train.loop import train
from octile.train.run.recipe_check import check_recipe
from tests.train.conftest import MICRO, micro, silent_console

TOO_LONG = "must be at most 32,768, the longest row that recipe {} normalizes and quantizes, not 32,769"
ODD = "model.num_attention_heads × model.v_head_dim must be even, not 3 × 5: recipe {} saves the output of attention as"
FUSED = ("deepseek_v3", "hybrid_e5m2", "int8_tiles", "wgrad_x_blocks")
REFUSED = {
    "hidden_size": ({"hidden_size": 32769}, f"model.hidden_size {TOO_LONG}"),
    "q_lora_rank": ({"q_lora_rank": 32769}, f"model.q_lora_rank {TOO_LONG}"),
    "kv_lora_rank": ({"kv_lora_rank": 32769}, f"model.kv_lora_rank {TOO_LONG}"),
    "odd heads": ({"num_attention_heads": 3, "v_head_dim": 5}, ODD),
}
LONG = {"hidden_size": 32769, "q_lora_rank": 32769, "kv_lora_rank": 32769}
LONG_ODD = {**LONG, "num_attention_heads": 3, "v_head_dim": 5}
KEPT_ATTENTION = 'recipe = "deepseek_v3"\n[[keep]]\nlayers = "*.o_proj"\nproducts = ["wgrad"]\n'


def of_model(recipe: str = "deepseek_v3", recipe_text: str | None = None, **sizes):
    return micro(recipe=recipe, recipe_text=recipe_text, model=replace(MICRO, **sizes))


@pytest.mark.parametrize("recipe", FUSED)
@pytest.mark.parametrize(("sizes", "message"), REFUSED.values(), ids=REFUSED)
def test_sizes_that_fused_layers_do_not_take_are_refused(recipe, sizes, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message.format(recipe))}"):
        check_recipe(of_model(recipe, **sizes))


@pytest.mark.parametrize("recipe", ["bf16", "per_tensor", "mxfp8", "fp8_lm"])
def test_layers_that_are_not_fused_take_any_size(recipe):
    check_recipe(of_model(recipe, **LONG_ODD))


def test_attention_that_an_exception_takes_apart_takes_any_size():
    check_recipe(of_model("mine.toml", KEPT_ATTENTION, **LONG_ODD))


def test_fused_feed_forward_layers_alone_limit_the_hidden_size():
    sizes = {"intermediate_size": 128, **LONG_ODD}
    with pytest.raises(ValueError, match=r"^model\.hidden_size must be at most 32,768"):
        check_recipe(of_model("mine.toml", KEPT_ATTENTION, **sizes))


def test_the_longest_rows_are_accepted():
    check_recipe(of_model(hidden_size=32768, q_lora_rank=32768, kv_lora_rank=32768))


def test_queries_without_compression_are_accepted():
    check_recipe(of_model(q_lora_rank=None))


def test_an_exception_that_matches_no_layer_is_refused():
    text = 'recipe = "deepseek_v3"\n[[keep]]\nlayers = "*.qkv"\nproducts = ["wgrad"]\n'
    with pytest.raises(
        ValueError, match=r"^recipe 'mine\.toml' has an exception for '\*\.qkv', which matches no converted layer"
    ):
        check_recipe(of_model("mine.toml", text))


@pytest.mark.parametrize(("sizes", "message"), REFUSED.values(), ids=REFUSED)
def test_a_run_is_refused_before_its_data_are_prepared(text: Path, tmp_path: Path, sizes, message):
    config = replace(of_model(**sizes), data=str(text), out=tmp_path / "run")
    with pytest.raises(ValueError, match=re.escape(message.format("deepseek_v3"))):
        train(config, False, silent_console())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("sizes", "message"), REFUSED.values(), ids=REFUSED)
def test_a_comparison_is_refused_before_its_folder_is_made(text: Path, tmp_path: Path, sizes, message):
    config = replace(of_model("bf16", **sizes), data=str(text))
    with pytest.raises(ValueError, match=re.escape(message.format("int8_tiles"))):
        compare(config, ("int8_tiles",), tmp_path / "comparison", silent_console())
    assert not (tmp_path / "comparison").exists()
