"""The strategy of the ranks of a pipeline, of which each has the layers of its stages.

Losses and loads are those of all ranks even so, and every number that is decided by is a sum that counts what several
ranks have once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle, islice

import torch
import torch.distributed as dist
from torch import Tensor

from octile.models.deepseek_v3 import DeepseekV3
from octile.models.stages import with_stages
from octile.parallel.ranks import Ranks
from octile.parallel.schedules import Schedule
from octile.parallel.state import ShardedState
from octile.recipe import Recipe
from octile.train.config import TrainConfig
from octile.train.pipeline_layout import describe_pipeline, pipeline_layers
from octile.train.step.diagnostics import Histogram, add_histograms, first_non_finite
from octile.train.step.passes import Passes
from octile.train.strategy.pipelined_model import PipelinedModel
from octile.train.strategy.rank_mesh import RankMesh
from octile.train.strategy.sharded import ShardedStrategy


class PipelinedStrategy(ShardedStrategy):
    """How a rank takes part in a run on a pipeline. See `Strategy`.

    Args:
        config, device, recipe, ranks, groups: as in `Strategy`.
        schedule: the schedule of the pipeline.

    Attributes:
        pipelined: this rank's stages, and the passes through those of all ranks.

    Raises:
        ValueError: as for `ShardedStrategy`; or the ranks divide the layers in different ways, as each computes it.
    """

    def __init__(
        self,
        config: TrainConfig,
        device: torch.device,
        recipe: Recipe,
        ranks: Ranks,
        groups: RankMesh,
        schedule: Schedule,
    ):
        self._schedule, self._layers = schedule, pipeline_layers(config, schedule)
        ranks.agree("the layers of the pipeline's stages", ", ".join(str(len(own)) for own in self._layers))
        super().__init__(config, device, recipe, ranks, groups)
        self.counts_losses = self.pipelined.is_first
        self.gathers_weights = self.size > 1
        # Ranks capture a step together or not at all, since an eager one asks the others what a captured one does not.
        # Only here can they differ: a rank without experts waits for no rows.
        self._some_rank_waits = any(ranks.gather(super()._waits_for_rows(), bool))

    def _make_model(self) -> DeepseekV3:
        model = self._initial_model(torch.device("cpu"))
        own = self._schedule.stages(dist.get_rank(self.groups.pipeline))
        return with_stages(model, self._layers, own).to(self.device)

    def _make_shards(self) -> ShardedState:
        assert self.groups.pipeline is not None
        pipeline = self.groups.pipeline
        self.pipelined = PipelinedModel(self.model, self._schedule, self._layers, pipeline, self.ranks.begin)
        return self._shards_of(None, self.pipelined.copies())

    def descriptions(self) -> list[str]:
        """See `Strategy`."""
        return [*super().descriptions(), describe_pipeline(self._schedule, self._layers)]

    def _waits_for_rows(self) -> bool:
        return self._some_rank_waits

    def losses(self, passes: Passes, tokens_BS: Tensor, sequences: int, load: dict[str, Tensor]) -> Tensor:
        """See `Strategy`. The losses are counted on the pipeline's first rank."""
        micro_batches = [t.to(self.device, non_blocking=True) for t in self.micro_batches(tokens_BS)]
        passes.prepare()
        with passes.precision():
            shares_M4 = self.pipelined.train(micro_batches, lambda t: sequences / len(t), passes.scaled, load)
        sums = torch.zeros(1 + len(self.loss_parts), device=self.device)
        for share_4 in shares_M4 if self.counts_losses else ():
            sums = sums + share_4  # in the order in which one process adds them up
        return sums

    def _reduce_gradients(self) -> None:
        super()._reduce_gradients()
        self.pipelined.sum_copies(dict(self.shards.parts.named_parameters()))

    def _sum_load(self, load_LE: Tensor) -> Tensor:
        total_LE = super()._sum_load(load_LE)
        dist.all_reduce(total_LE, group=self.pipelined.group)
        return total_LE

    def main_losses(
        self, passes: Passes, batches: Sequence[Tensor], labels_2: Tensor | None = None
    ) -> Iterable[Tensor]:
        """See `Strategy`. Sequences are not packed."""
        with passes.precision():
            yield from self.pipelined.main_losses([tokens_BS.to(self.device) for tokens_BS in batches])

    def token_losses(self, passes: Passes, batches: Sequence[Tensor], losses: Sequence[Tensor]) -> None:
        """See `Strategy`."""
        found = self.pipelined.token_losses([tokens_BS.to(self.device) for tokens_BS in batches])
        for losses_BS, found_BS in zip(losses, found, strict=True):
            losses_BS.copy_(found_BS)

    def backward_on(self, passes: Passes, windows: Tensor) -> None:
        """See `Strategy`."""
        micro_batches = islice(cycle(windows.to(self.device).split(1)), self.config.micro_batches)
        with passes.precision():
            self.pipelined.train([*micro_batches], lambda _: 1.0, lambda loss: loss, self.no_load())

    def sum_histograms(self, own: dict[str, Histogram]) -> dict[str, Histogram]:
        """See `Strategy`."""
        return add_histograms(self.ranks.gather(own if self.rank == 0 else {}, dict[str, Histogram]))

    def first_non_finite(self, passes: Passes, tokens_BS: Tensor) -> str:
        """See `Strategy`."""
        micro_batches = self.micro_batches(tokens_BS)
        names = [f"parameter {name}" for name in self.names.parameters] + [n for n, _ in self.whole.named_modules()]
        order = {name: index for index, name in enumerate(names)}

        def gather(own: str) -> list[str]:  # in the order of the layers, not of the ranks
            return sorted(self.ranks.gather(own, str), key=lambda name: order.get(name, len(order)))

        with passes.precision():
            return first_non_finite(
                self.model, lambda: self.pipelined.forward([t.to(self.device) for t in micro_batches]), gather
            )

    def check_copies(self) -> None:
        """See `Strategy`."""
        self.ranks.begin("comparison of the copies")
        self.pipelined.check_copies(dict(self.shards.parts.named_parameters()))
