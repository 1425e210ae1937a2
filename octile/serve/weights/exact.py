"""Exact mode: log-probabilities that are those of training, bit for bit, and why a folder cannot be served so.

The engine is batch-invariant, and the weights are of a batch-invariant recipe (`Recipe.exact`), whose forward pass is
the engine's. What would give a row other bits is refused: a cache in which latents are rounded otherwise than in
training, and heads that are divided over ranks, whose results are summed in another order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from octile.checkpoint.fp8_layout import is_fp8, is_stored_in_fp8
from octile.checkpoint.recipe_entry import ENTRY
from octile.checkpoint.tensor_file import TensorSpec
from octile.recipe import Recipe
from octile.serve.engine.config import CacheConfig, EngineConfig, ParallelConfig
from octile.serve.runner.kv_cache import CacheFormat

FORMATS: dict[torch.dtype, CacheFormat] = {torch.bfloat16: "bf16", torch.float32: "float32"}  # that round nothing


def check_fp8(specs: Mapping[str, TensorSpec]) -> None:
    """Check that all weights that the recipe quantizes are in FP8. The engine would multiply others unquantized.

    Args:
        specs: name → spec of all tensors of a folder whose recipe is batch-invariant.

    Raises:
        ValueError: one is not; the message names the first.
    """
    for name, spec in specs.items():
        if is_stored_in_fp8(name, spec.shape) and not is_fp8(spec):
            raise ValueError(f"engine.exact needs all linear weights of blocks in FP8, but {name} is {spec.dtype}")


def exact_options(
    engine: EngineConfig, cache: CacheConfig, parallel: ParallelConfig | None, recipe: Recipe | None, dtype: torch.dtype
) -> tuple[EngineConfig, CacheConfig]:
    """Return the options of an engine, with what exact mode implies if they ask for it.

    Args:
        engine, cache, parallel: as configured.
        recipe: that of the weights; None: they are not in FP8.
        dtype: dtype of the activations.

    Raises:
        ValueError: exact mode is asked for, and the recipe or another option has other bits than training.
    """
    if not engine.exact:
        return engine, cache
    if recipe is None or not recipe.batch_invariant:
        found = "the weights are not in FP8" if recipe is None else f"their recipe is {recipe.name!r}"
        raise ValueError(f"engine.exact needs weights of the recipe 'exact', named in config.json as {ENTRY}: {found}")
    if parallel is not None and parallel.tp > 1:
        raise ValueError(
            f"parallel.tp must be 1, not {parallel.tp}, with engine.exact: ranks add heads in another order"
        )
    needed: CacheFormat = "fp8" if recipe.latents == "fp8" else FORMATS[dtype]
    if cache.format not in (None, needed):
        raise ValueError(
            f"cache.format must be {needed}, not {cache.format}, with engine.exact: training rounded latents so"
        )
    return replace(engine, batch_invariant=True), replace(cache, format=needed)
