"""How the experts of a run are distributed over its ranks, and the capacity for their rows."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.delayed_scaling import amax_histories
from octile.parallel import symmetric_memory
from octile.parallel.expert_sharding import ExpertShare, shard_experts
from octile.parallel.experts import Across, groups_of
from octile.parallel.links import AUTO_RANKS
from octile.parallel.ranks import Ranks
from octile.recipe import Recipe
from octile.train.config import TrainConfig

CAPACITY_FACTOR = 2.0  # capacity for rows on symmetric memory, vs. balanced experts; it grows if needed


def check_exchange(config: TrainConfig, hops: dist.ProcessGroup | DeviceMesh, ranks: Ranks) -> None:
    """Refuse kernels on symmetric memory that the configuration asks for, where the ranks cannot use them.

    Raises:
        ValueError: they cannot, in any replica; on all ranks.
    """
    if config.parallel.exchange != "symmetric_memory":
        return
    reasons = ranks.gather(symmetric_memory.why_not_peers(groups_of(hops)), str | None)
    if reason := next(filter(None, reasons), None):
        raise ValueError(f"parallel.exchange symmetric_memory cannot be used, since {reason}: use auto, or all_to_all")


def distribute_experts(
    model: DeepseekV3,
    config: TrainConfig,
    hops: dist.ProcessGroup | DeviceMesh,
    recipe: Recipe,
    too_many_rows: Tensor,
) -> ExpertShare:
    """Distribute the experts over the ranks of a replica, and return the share of this rank.

    The capacity is CAPACITY_FACTOR times the rows of balanced experts if a step can be repeated with more. A recipe
    with a loss scale or delayed scales has capacity for all rows, since a repeated step would begin with other scales.

    Args:
        model: this rank's model.
        config: the configuration of the run.
        hops: the ranks of this rank's replica, see `RankMesh`.
        recipe: the recipe of the model.
        too_many_rows: float32 [], set to 1 by passes whose rows are more than the capacity.
    """
    parallel, tokens = config.parallel, config.micro_batch_size * config.sequence_length
    by_kernels = parallel.exchange == "symmetric_memory" or (parallel.exchange == "auto" and parallel.ep <= AUTO_RANKS)
    max_tokens = tokens if by_kernels else None
    across: Across = "auto" if parallel.pp == 1 else "all_to_all_single"  # stages allocate differently
    if recipe.loss_scale or amax_histories(model):
        return shard_experts(model, hops, max_tokens, across=across)
    max_rows = round(CAPACITY_FACTOR * tokens * config.model.num_experts_per_tok)
    return shard_experts(model, hops, max_tokens, max_rows, too_many_rows=too_many_rows, across=across)
