"""Training on many processes: expert parallelism, sharded optimizer state, and weights that FSDP2 gathers in FP8."""

from octile.parallel.balance import balance_gates
from octile.parallel.expert_sharding import ExpertShare, shard_experts
from octile.parallel.experts import ExpertDispatcher
from octile.parallel.fsdp import AllGatherSummary, use_fp8_all_gather
from octile.parallel.state import ShardedState

__all__ = [
    "AllGatherSummary", "ExpertDispatcher", "ExpertShare", "ShardedState", "balance_gates", "shard_experts",
    "use_fp8_all_gather",
]  # fmt: skip
