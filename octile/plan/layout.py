"""A layout: how a model's layers, experts and batch are divided among the GPUs of a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal, Protocol

from octile.models.config import ModelConfig
from octile.parallel.schedules import Schedule, make_schedule
from octile.validation import Range, check_fields

Count = Annotated[int, Range(at_least=1, at_most=2**24)]
ScheduleName = Literal["gpipe", "1f1b", "zb1p", "dualpipe", "dualpipev", "chimera"]
Masters = Literal["sharded", "replicated"]

_make_schedule = lru_cache(make_schedule)  # a search asks for the same ones again and again


class Nodes(Protocol):
    """What a layout divides: the GPUs of a cluster, in nodes of equal size."""

    @property
    def gpus(self) -> int:
        """All GPUs."""

    @property
    def gpus_per_node(self) -> int:
        """GPUs that NVLink connects."""


@dataclass(frozen=True)
class Layout:
    """How a training step is divided among GPUs.

    Attributes:
        pp: ranks of the pipeline.
        ep: ranks of expert parallelism; it divides the data-parallel ranks.
        schedule: name of the schedule of the pipeline.
        batch_size: sequences of a step.
        micro_batch_size: sequences of a micro-batch on one rank.
        sequence_length: tokens of a sequence.
        recompute: whether norms and attention's up-projections are recomputed in the backward pass.
        masters: "sharded": weights in BF16 on every rank, FP32 masters with the moments (ZeRO-1); "replicated": FP32
            weights on every rank, as `octile train` has them; the moments are sharded in both.
        optimizer: "adamw", or "muon" for the matrices of the layers.
        spare_rows: rows of the experts' tensors that no token has, of those that tokens have.
        is_balanced: whether all experts get as many tokens; otherwise their loads differ as measured.

    Raises:
        TypeError, ValueError: a field is not what its annotation says.
    """

    pp: Count = 1
    ep: Count = 1
    schedule: ScheduleName = "1f1b"
    batch_size: Count = 256
    micro_batch_size: Count = 1
    sequence_length: Count = 4096
    recompute: bool = True
    masters: Masters = "sharded"
    optimizer: Literal["adamw", "muon"] = "adamw"
    spare_rows: Annotated[float, Range(at_least=0)] = 0.0
    is_balanced: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def stages(self) -> int:
        """Stages of the pipeline; DualPipeV has two on each rank."""
        return 2 * self.pp if self.schedule == "dualpipev" else self.pp

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch on one rank."""
        return self.micro_batch_size * self.sequence_length

    def dp(self, cluster: Nodes) -> int:
        """Data-parallel ranks."""
        return cluster.gpus // self.pp

    def micro_batches(self, cluster: Nodes) -> int:
        """Micro-batches of a step on one rank."""
        return self.batch_size // (self.dp(cluster) * self.micro_batch_size)

    def check(self, c: ModelConfig, cluster: Nodes) -> None:
        """Refuse a layout that does not divide the GPUs, the experts, the layers or the batch.

        Raises:
            ValueError: naming the constraint.
        """
        if cluster.gpus % self.pp:
            raise ValueError(f"pp must divide the {cluster.gpus:,} GPUs, not {self.pp}")
        dp = self.dp(cluster)
        if dp % self.ep:
            raise ValueError(f"ep must divide the {dp:,} data-parallel ranks (GPUs / pp), not {self.ep}")
        if c.n_routed_experts % self.ep:
            raise ValueError(f"ep must divide the {c.n_routed_experts} experts, not {self.ep}")
        if self.ep > cluster.gpus_per_node and self.ep % cluster.gpus_per_node:
            raise ValueError(f"ep must be whole nodes of {cluster.gpus_per_node} GPUs, not {self.ep}")
        nodes = max(1, self.ep // cluster.gpus_per_node)
        for units, what in ((nodes, "nodes"), (self.ep, "ranks")):
            if units < c.n_group and c.n_group % units:
                raise ValueError(f"ep {self.ep}: {units} {what} must divide the {c.n_group} groups of experts")
            if units >= c.n_group and units % c.n_group:
                raise ValueError(f"ep {self.ep}: the {c.n_group} groups of experts must divide {units} {what}")
        layers = c.num_hidden_layers
        if self.stages > layers:
            raise ValueError(f"pp must be at most one stage per layer, {layers}, not {self.stages} stages")
        if self.batch_size % (dp * self.micro_batch_size):
            raise ValueError(
                f"batch_size must be a multiple of {dp * self.micro_batch_size:,} (dp {dp:,} × micro_batch_size "
                f"{self.micro_batch_size}), not {self.batch_size:,}"
            )
        if self.sequence_length > c.max_position_embeddings:
            longest = c.max_position_embeddings
            raise ValueError(f"sequence_length must be at most the model's {longest:,}, not {self.sequence_length:,}")

    def make_schedule(self, cluster: Nodes) -> Schedule:
        """The pipeline's schedule.

        Raises:
            ValueError: it does not allow the stages and micro-batches.
        """
        return _make_schedule(self.schedule, self.stages, self.micro_batches(cluster))

    def __str__(self) -> str:
        recomputed = "" if self.recompute else ", nothing recomputed"
        rows = f", {self.micro_batch_size} sequences at a time" if self.micro_batch_size > 1 else ""
        optimizer = ", Muon" if self.optimizer == "muon" else ""
        return f"PP{self.pp} × EP{self.ep}, {self.schedule}{rows}{recomputed}{optimizer}"
