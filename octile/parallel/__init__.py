"""Training on many processes: expert parallelism, sharded optimizer state, and weights that FSDP2 gathers in FP8."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octile.parallel.balance import balance_gates
    from octile.parallel.expert_sharding import ExpertShare, shard_experts
    from octile.parallel.experts import ExpertDispatcher
    from octile.parallel.fsdp import AllGatherSummary, use_fp8_all_gather
    from octile.parallel.state import ShardedState

_MODULES = {  # the public names of each module, late: `octile.parallel.schedules` needs no torch
    "balance": ("balance_gates",),
    "expert_sharding": ("ExpertShare", "shard_experts"),
    "experts": ("ExpertDispatcher",),
    "fsdp": ("AllGatherSummary", "use_fp8_all_gather"),
    "state": ("ShardedState",),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [*sorted(_MODULE_OF)]


def __getattr__(name: str) -> object:
    if name in _MODULE_OF:
        return getattr(import_module(f"octile.parallel.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module 'octile.parallel' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
