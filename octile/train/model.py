"""The model that a run asks for: its recipe, and the model on the meta device, by which its tensors are counted."""

from __future__ import annotations

from octile.checkpoint.fp8_layout import with_scales_as_announced
from octile.models.deepseek_v3 import DeepseekV3
from octile.models.meta import meta_model
from octile.nn.conversion import apply_recipe
from octile.recipe import Recipe
from octile.train.config import TrainConfig


def run_recipe(config: TrainConfig, recipe: Recipe | None = None) -> Recipe:
    """The recipe of a run's model, whose weights have scales as those of the checkpoint that the run began with.

    Args:
        config: the configuration of the run.
        recipe: a recipe without a name; the one that config names if not given.
    """
    return with_scales_as_announced(recipe or config.load_recipe(), config.model.extra)


def converted_meta_model(config: TrainConfig, recipe: Recipe) -> DeepseekV3:
    """The model of a run with all layers and experts on the meta device, as its first step finds it.

    Args:
        config: the configuration of the run.
        recipe: the recipe that is applied.
    """
    model = meta_model(config.model)
    apply_recipe(model, recipe)
    if config.indexer_stage == "warm_up":
        model.warm_up_indexers(True)
    return model
