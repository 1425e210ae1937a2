"""Check of a run's recipe before any work: whether its ranks and its model can be trained with it."""

from __future__ import annotations

from dataclasses import replace

from octile.formats import E5M6
from octile.models.deepseek_v3 import Block
from octile.models.meta import meta_model
from octile.nn.conversion import apply_recipe
from octile.ops.norm import MAX_COLUMNS
from octile.optim.state import has_scales
from octile.recipe import Recipe
from octile.train.config import TrainConfig
from octile.train.data.examples import is_examples


def check_recipe(config: TrainConfig) -> None:
    """Refuse a recipe that the run's ranks, or a model of its shape, cannot be trained with.

    Raises:
        ValueError: there is no such recipe, or an exception of it matches no layer. It is batch-invariant, and the
            data are examples. There are several ranks, or the optimizer is Muon, and the optimizer's state has one
            scale for a whole tensor; or a size of the model is one that the recipe's functions do not take.
        FileNotFoundError: the recipe's file does not exist.
    """
    recipe = config.load_recipe()
    if config.parallel.ranks > 1 and has_scales(recipe.optimizer):
        raise ValueError(
            f"recipe {config.recipe} needs one rank, not {config.parallel.describe()}: its gradients and moments have "
            "one scale for a whole tensor, of which a rank has a part"
        )
    if config.optim.name == "muon" and has_scales(recipe.optimizer):
        raise ValueError(
            f"optim.name must be adamw with recipe {config.recipe}, not muon: Muon has no moments with a scale"
        )
    if is_examples(config.data) and recipe.batch_invariant:
        raise ValueError(
            f"recipe {config.recipe} does not train on examples (data {config.data!r}): its attention, that of "
            "serving, does not know the borders of texts that share a sequence"
        )
    if recipe.formats is not None:
        _check_sizes(config, recipe)


def _check_sizes(config: TrainConfig, recipe: Recipe) -> None:
    """Refuse sizes that fused layers do not take. Layers that are not fused take any."""
    model, c = meta_model(config.model), config.model
    apply_recipe(model, replace(recipe, name=config.recipe))  # messages name the file
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    attention = next(filter(None, (block.self_attn.fusion() for block in blocks)), None)
    feed_forward = next(filter(None, (block.mlp.fusion() for block in blocks)), None)
    normalized = {
        "hidden_size": attention or feed_forward,
        "q_lora_rank": attention,
        "kv_lora_rank": attention,
    }
    for name, is_fused in normalized.items():
        size = getattr(c, name)
        if is_fused and size is not None and size > MAX_COLUMNS:
            raise ValueError(
                f"model.{name} must be at most {MAX_COLUMNS:,}, the longest row that recipe {config.recipe} normalizes "
                f"and quantizes, not {size:,}"
            )
    saved = attention and attention.recipe.attention_output
    if saved and saved.fmt == E5M6 and c.num_attention_heads * c.v_head_dim % 2:
        raise ValueError(
            f"model.num_attention_heads × model.v_head_dim must be even, not {c.num_attention_heads} × {c.v_head_dim}: "
            f"recipe {config.recipe} saves the output of attention as E5M6, two values in three bytes"
        )
