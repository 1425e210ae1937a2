"""octile as a model converter of torchtitan: its dense layers and its `GroupedExperts` train in FP8.

torchtitan imports this module where its configuration names it, and finds the converter under the name "octile":

    torchrun … -m torchtitan.train --job.config_file FILE \\
        --job.custom_config_module octile.integrations.torchtitan --model.converters octile

The section `octile` of its configuration has the settings of `octile.convert`. A job whose `custom_config_module` is
another module imports this one by `--experimental.custom_import`; it has the defaults then.

torchtitan builds a model without memory, converts it, and then parallelizes, compiles and initializes it. Layers and
experts keep their parameters and their names, so that all of these and its checkpoints do what they do without octile.
Rows of experts are moved by octile's kernels (`octile.integrations.torchtitan_moe`), unless tensor parallelism divides
the tokens of a mixture.

Source: torchtitan 0.2, `torchtitan.protocols.model_converter`.
"""

# without `from __future__ import annotations`: torchtitan reads the types of the fields
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.tools.logging import logger

import octile.integrations.torchtitan_experts  # noqa: F401 (by which `octile.convert` converts experts)
from octile.integrations.torchtitan_moe import fuse_moe
from octile.nn.conversion import apply_recipe
from octile.recipe import OptimizerFormats, Recipe

NAME = "octile"  # of the converter, and of the section of the configuration


@dataclass
class Octile:
    """The section `octile` of torchtitan's configuration."""

    recipe: str = "deepseek_v3"
    """Recipe of the layers that are converted, or a .toml file with one"""

    keep: list[str] = field(default_factory=list)
    """
    Comma-separated patterns of layers that stay in high precision, such as `layers.0.*`. A pattern matches a layer or a
    module that contains it. The output head and the routers always stay.
    """


@dataclass
class JobConfig:
    """What `job.custom_config_module` adds to torchtitan's configuration."""

    octile: Octile = field(default_factory=Octile)


class OctileConverter:
    """Converts the model's linear layers and experts by `octile.convert`, and its mixtures by `fuse_moe`.

    Neither is a part of the other: `fuse_moe` is not for tensor parallelism, of which `octile.convert` does not know.
    Transposed weights are cached where each rank has whole weights.

    Args:
        job_config: torchtitan's configuration.
        parallel_dims: how torchtitan parallelizes the model.

    Raises:
        ValueError: the configuration names an unknown recipe, one that needs another trainer, or a converter of
            torchtitan that quantizes, too.
    """

    def __init__(self, job_config: Any, parallel_dims: Any):
        self.settings: Octile = getattr(job_config, NAME, Octile())
        others = [name for name in job_config.model.converters if name.startswith("quantize.")]
        if others:
            raise ValueError(
                f"model.converters must have octile as the only converter that quantizes, not {others[0]}, too"
            )
        try:
            self.recipe = Recipe.named(self.settings.recipe)
        except ValueError as error:
            raise ValueError(f"octile.recipe: {error}") from None
        if why := _why_unsupported(self.recipe):
            raise ValueError(f"octile.recipe {self.recipe.name!r} {why}")
        has_whole_weights = not (parallel_dims.fsdp_enabled or parallel_dims.tp_enabled or parallel_dims.ep_enabled)
        if has_whole_weights and self.recipe.formats is not None:  # which the weight cache holds for all micro-batches
            self.recipe = replace(self.recipe, transposed_weights=self.recipe.transposed_weights or "cached")
        self.fuses_moe = not parallel_dims.tp_enabled  # which gives each rank a part of the tokens' rows

    def convert(self, model: nn.Module) -> None:
        """Convert the model in place, and log what was converted.

        Raises:
            ValueError: a pattern of `octile.keep` matches no layer, the recipe is for other models, or there is no
                layer to convert.
        """
        try:
            apply_recipe(model, self.recipe, keep=self.settings.keep)
        except ValueError as error:
            is_setting = str(error).startswith(("keep ", "recipe "))
            raise ValueError(f"{NAME}.{error}" if is_setting else str(error)) from None
        if self.fuses_moe:
            fuse_moe(model)
        logger.info(f"octile: {model.conversion_summary}")

    def post_optimizer_hook(self, model: nn.Module | Sequence[nn.Module]) -> None:
        """Do nothing: no recipe that is accepted has a state."""


def _why_unsupported(recipe: Recipe) -> str | None:
    if recipe.optimizer != OptimizerFormats():
        return "sets formats of the optimizer's state, but the optimizer is torchtitan's"
    if recipe.has_delayed_scaling:
        return "has delayed scaling, whose scales of past steps torchtitan does not save"
    if recipe.loss_scale is not None:
        return "needs a loss scale, which torchtitan does not have"
    return None


register_model_converter(OctileConverter, NAME)
