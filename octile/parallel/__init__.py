"""Training on many processes: the experts of a model spread over ranks, and weights that FSDP2 gathers in FP8."""

from octile.parallel.experts import ExpertDispatcher, ExpertShare, shard_experts
from octile.parallel.fsdp import AllGatherSummary, use_fp8_all_gather

__all__ = ["AllGatherSummary", "ExpertDispatcher", "ExpertShare", "shard_experts", "use_fp8_all_gather"]
