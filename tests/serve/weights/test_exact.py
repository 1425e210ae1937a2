"""What exact mode implies for an engine, and what it refuses."""

import json
from dataclasses import replace

import pytest
import torch

from octile.checkpoint.convert import convert_checkpoint
from octile.checkpoint.hugging_face import save
from octile.checkpoint.recipe_entry import with_recipe
from octile.recipe import Recipe
from octile.serve.engine.config import CacheConfig, EngineConfig, ParallelConfig
from octile.serve.weights.exact import exact_options
from octile.serve.weights.load import Folder
from octile.validation import read_json
from tests.serve.models import exact_model

ENGINE, CACHE, EXACT = EngineConfig(exact=True), CacheConfig(), Recipe.exact()
FP8_LATENTS = replace(EXACT, latents="fp8")


@pytest.mark.parametrize(
    ("recipe", "dtype", "expected"),
    [(EXACT, torch.float32, "float32"), (EXACT, torch.bfloat16, "bf16"), (FP8_LATENTS, torch.bfloat16, "fp8")],
)
def test_the_engine_is_batch_invariant_and_rounds_latents_as_training_did(recipe, dtype, expected):
    engine, cache = exact_options(ENGINE, CACHE, None, recipe, dtype)
    assert engine.batch_invariant
    assert cache.format == expected
    assert exact_options(engine, cache, ParallelConfig(2), recipe, dtype) == (engine, cache)


def test_other_engines_stay_as_they_are():
    assert exact_options(EngineConfig(), CACHE, None, None, torch.bfloat16) == (EngineConfig(), CACHE)


@pytest.mark.parametrize(
    ("recipe", "cache", "parallel", "error"),
    [
        (Recipe.deepseek_v3(), CACHE, None, "needs weights of the recipe 'exact'.*: their recipe is 'deepseek_v3'"),
        (None, CACHE, None, "needs weights of the recipe 'exact'.*: the weights are not in FP8"),
        (EXACT, CacheConfig("fp8"), None, "cache.format must be bf16, not fp8, with engine.exact"),
        (FP8_LATENTS, CacheConfig("bf16"), None, "cache.format must be fp8, not bf16, with engine.exact"),
        (EXACT, CACHE, ParallelConfig(2, 2), "parallel.tp must be 1, not 2, with engine.exact"),
    ],
)
def test_what_has_other_bits_than_training_is_refused(recipe, cache, parallel, error):
    with pytest.raises(ValueError, match=error):
        exact_options(ENGINE, cache, parallel, recipe, torch.bfloat16)


def test_a_folder_with_a_layer_in_high_precision_is_not_exact(tokenizer, tmp_path):
    save(exact_model(vocab_size=tokenizer.vocab_size), tmp_path / "bf16", weights="bf16")
    convert_checkpoint(tmp_path / "bf16", tmp_path / "fp8", "fp8", keep=["*.1.self_attn.o_proj"])
    config = tmp_path / "fp8" / "config.json"
    config.write_text(json.dumps(with_recipe(read_json(config), EXACT)))
    (tmp_path / "fp8" / "octile.json").unlink()  # which has the checksum of config.json
    tokenizer.save(tmp_path / "fp8")
    folder, device = Folder.open(tmp_path / "fp8"), torch.device("cpu")
    assert folder.exact_options(EngineConfig(), CACHE, None, device) == (EngineConfig(), CACHE)
    for refused in (folder.is_exact, lambda: folder.exact_options(ENGINE, CACHE, None, device)):
        with pytest.raises(ValueError, match=r"but model\.layers\.1\.self_attn\.o_proj\.weight is BF16"):
            refused()


def test_a_folder_is_served_by_the_recipe_that_it_names(tokenizer, tmp_path):
    for name, recipe in (("exact", EXACT), ("usual", Recipe.deepseek_v3())):
        save(exact_model(recipe=recipe, vocab_size=tokenizer.vocab_size), tmp_path / name)
        tokenizer.save(tmp_path / name)
    folder, device = Folder.open(tmp_path / "exact"), torch.device("cpu")
    assert folder.is_exact()
    assert folder.load(device, ENGINE, CacheConfig(gib=0.01))[1].batch_invariant
    usual = Folder.open(tmp_path / "usual")
    assert not usual.is_exact()
    with pytest.raises(ValueError, match="their recipe is 'deepseek_v3'"):
        usual.load(device, ENGINE, CACHE)
