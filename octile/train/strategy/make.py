"""The strategy that a configuration asks for."""

from __future__ import annotations

import torch

from octile.parallel.ranks import Ranks
from octile.recipe import Recipe
from octile.train.config import TrainConfig
from octile.train.pipeline_layout import make_pipeline_schedule
from octile.train.strategy.pipelined import PipelinedStrategy
from octile.train.strategy.rank_mesh import RankMesh
from octile.train.strategy.sharded import ShardedStrategy
from octile.train.strategy.single import Strategy


def make_strategy(config: TrainConfig, device: torch.device, recipe: Recipe, ranks: Ranks) -> Strategy:
    """Make the strategy of a run, and with it this rank's model. All ranks must call this.

    Raises:
        ValueError: a pipeline's schedule does not fit the ranks, the layers or the micro-batches; or the ranks cannot
            exchange rows as the configuration asks.
    """
    if ranks.size == 1:
        return Strategy(config, device, recipe, ranks)
    groups = RankMesh.of(config.parallel, ranks, device.type)
    schedule = make_pipeline_schedule(config)
    if schedule is None:
        return ShardedStrategy(config, device, recipe, ranks, groups)
    return PipelinedStrategy(config, device, recipe, ranks, groups, schedule)
