"""How the ranks of a run are arranged: a pipeline's ranks are dp apart, and each has dp ranks with the same stages.

    rank = pipeline rank · dp + replica · ep + expert rank          for example pp 2, dp 4, ep 2:

    pipeline rank 0     0 1   2 3       two replicas of the first stage, whose experts two ranks share
    pipeline rank 1     4 5   6 7       the same of the second; ranks 1 and 5 have the same sequences

Each group's collectives wait as long as those of all ranks do.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from octile.parallel.ranks import Ranks
from octile.train.config import ParallelConfig


class RankMesh(NamedTuple):
    """The process groups of a rank.

    Attributes:
        data: the ranks that have the same layers, and share the sequences of a batch; None: all ranks.
        pipeline: those that have the same sequences, and the stages in order; None: there is no pipeline.
        experts: the mesh [replicas, ranks of a replica] of the ranks of `data`; None: each rank has all experts.
        hops: the ranks of this rank's replica, which share the experts; on several hosts as the mesh [hosts, ranks
            of a host], so that a row crosses once. torchrun says how many ranks a host has, and numbers them so. On
            hosts with unequal numbers of ranks all of them are one hop; also on hosts of one rank, unless rows are
            exchanged on symmetric memory, which across hosts needs the mesh.
    """

    data: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None
    experts: DeviceMesh | None = None
    hops: dist.ProcessGroup | DeviceMesh | None = None

    @classmethod
    def of(cls, config: ParallelConfig, ranks: Ranks, device_type: str) -> RankMesh:
        """Make the groups, on all ranks."""
        data = pipeline = experts = None
        hops: dist.ProcessGroup | DeviceMesh | None = None
        pp, dp, ep, size = config.pp, config.dp, config.ep, ranks.size
        host_sizes = set(ranks.gather(int(os.environ.get("LOCAL_WORLD_SIZE") or ep), int))
        local = host_sizes.pop() if len(host_sizes) == 1 else ep  # ranks of a host; all ranks must make the same groups
        if pp > 1:
            data = _own_group([range(first, first + dp) for first in range(0, size, dp)], ranks)
            pipeline = _own_group([range(first, size, dp) for first in range(dp)], ranks)
        if ep > 1:
            same_experts = [range(s + e, s + dp, ep) for s in range(0, size, dp) for e in range(ep)]
            replicas = _own_group(same_experts, ranks)
            hops = replica_ranks = _own_group([range(first, first + ep) for first in range(0, size, ep)], ranks)
            first = ranks.rank // dp * dp
            rows = [[*range(replica, replica + ep)] for replica in range(first, first + dp, ep)]
            names = ("replica", "expert")
            experts = DeviceMesh.from_group([replicas, replica_ranks], device_type, rows, mesh_dim_names=names)
        least = 1 if config.exchange == "symmetric_memory" else 2
        if least <= local < ep and ep % local == 0:
            across = _own_group([range(s + r, s + ep, local) for s in range(0, size, ep) for r in range(local)], ranks)
            in_host = _own_group([range(first, first + local) for first in range(0, size, local)], ranks)
            first = ranks.rank // ep * ep
            rows = [[*range(host, host + local)] for host in range(first, first + ep, local)]
            hops = DeviceMesh.from_group([across, in_host], device_type, rows, mesh_dim_names=("host", "rank"))
        return cls(data, pipeline, experts, hops)


def _own_group(groups: Sequence[range], ranks: Ranks) -> dist.ProcessGroup:
    """Make groups, which have all ranks together, and return that of this rank."""
    own, _ = dist.new_subgroups_by_enumeration([[*group] for group in groups], timeout=ranks.timeout)
    return own
