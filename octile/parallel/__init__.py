"""Training on many processes: the experts of a model spread over ranks."""

from octile.parallel.experts import ExpertDispatcher, ExpertShare, shard_experts

__all__ = ["ExpertDispatcher", "ExpertShare", "shard_experts"]
