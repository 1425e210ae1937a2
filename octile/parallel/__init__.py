"""Training on many processes: expert parallelism, sharded optimizer state, and weights that FSDP2 gathers in FP8."""

from typing import TYPE_CHECKING

from octile.lazy import attach

if TYPE_CHECKING:
    from octile.parallel.balance import balance_gates
    from octile.parallel.expert_sharding import ExpertShare, shard_experts
    from octile.parallel.experts import ExpertDispatcher
    from octile.parallel.fsdp import AllGatherSummary, use_fp8_all_gather
    from octile.parallel.state import ShardedState

__getattr__, __dir__, __all__ = attach(
    __name__,
    {  # `octile.parallel.schedules` needs no torch
        "balance": ("balance_gates",),
        "expert_sharding": ("ExpertShare", "shard_experts"),
        "experts": ("ExpertDispatcher",),
        "fsdp": ("AllGatherSummary", "use_fp8_all_gather"),
        "state": ("ShardedState",),
    },
)
