"""The recipe of a run. What a .toml file says becomes part of the configuration, so that the run needs it no more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from octile.recipe import Recipe
from octile.train.config import TrainConfig


def recipe_of(config: TrainConfig) -> Recipe:
    """The recipe that a configuration names or holds.

    Raises:
        ValueError: there is none of that name, or the text is none.
        FileNotFoundError: it is in a file that is not there.
    """
    if config.recipe_text is not None:
        return Recipe.parse(config.recipe_text, config.recipe)
    return Recipe.named(config.recipe)


def with_recipe_text(config: TrainConfig) -> TrainConfig:
    """The configuration with what its .toml file says; unchanged if it has a text already or names no file.

    Raises:
        ValueError: the file is no recipe.
        FileNotFoundError: there is no such file.
    """
    if config.recipe_text is not None or not config.recipe.endswith(".toml"):
        return config
    Recipe.named(config.recipe)  # refuses what is none
    return replace(config, recipe_text=Path(config.recipe).read_text(encoding="utf-8"))
