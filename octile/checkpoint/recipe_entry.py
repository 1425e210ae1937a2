"""The entry of config.json that names the recipe of FP8 weights where `octile serve` can repeat its forward pass.

    "octile_recipe": {"name": "exact", "latents": "activations"}

Other programs do not read it. Folders without it have `Recipe.deepseek_v3`, as published models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from octile.recipe import LATENTS, Recipe

ENTRY = "octile_recipe"


def with_recipe(config: Mapping[str, Any], recipe: Recipe | None) -> dict[str, Any]:
    """Return the content of a config.json with the entry of a batch-invariant recipe, and with none of another one."""
    result = {key: value for key, value in config.items() if key != ENTRY}
    if recipe is not None and recipe.batch_invariant:
        result[ENTRY] = {"name": "exact", "latents": recipe.latents}
    return result


def recipe_of(config: Mapping[str, Any]) -> Recipe:
    """Return the recipe of a folder's FP8 weights, by the content of its config.json.

    Raises:
        ValueError: the entry is not one that octile writes.
    """
    entry = config.get(ENTRY)
    if entry is None:
        return Recipe.deepseek_v3()
    if not isinstance(entry, Mapping) or entry.get("name") != "exact" or entry.get("latents") not in LATENTS:
        known = " or ".join(repr(name) for name in LATENTS)
        raise ValueError(f"{ENTRY} must be {{'name': 'exact', 'latents': …}} with {known}, not {entry!r}")
    return replace(Recipe.exact(), latents=entry["latents"])
