"""The strategy of data-parallel ranks: ZeRO-1 over all of them, and experts over the ranks of a replica.

Each rank takes its sequences of every step's batch. Losses, gradients and loads are summed over all ranks, so that all
launch, skip and stop the same steps (`octile.parallel`). Gradients are summed during the last micro-batch's backward
pass. If steps are collected late, the updated weights are gathered during the next forward pass: while a step is not
collected, a rank may have old values of the weights that others update.

On symmetric memory the rows of a rank's experts have a limited capacity. If they are more in a step, it and later steps
change nothing; the host then doubles the capacity, and launches them again.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn

from octile.models.deepseek_v3 import DeepseekV3
from octile.models.meta import meta_model
from octile.nn.conversion import apply_recipe
from octile.nn.delayed_scaling import amax_histories
from octile.nn.moe import share_of_experts
from octile.optim import AdamW
from octile.parallel.expert_sharding import ExpertShare
from octile.parallel.ranks import Ranks
from octile.parallel.state import ShardedState
from octile.parallel.symmetric_memory import PeerDispatcher
from octile.recipe import Recipe
from octile.train.config import TrainConfig
from octile.train.strategy.expert_parallel import check_exchange, distribute_experts
from octile.train.strategy.rank_mesh import RankMesh
from octile.train.strategy.single import Strategy
from octile.train.strategy.state_layout import StateLayout

T = TypeVar("T")


class ShardedStrategy(Strategy):
    """How a rank takes part in a run of data-parallel ranks. See `Strategy`.

    Attributes:
        shards: the parts of the parameters that this rank updates.

    Raises:
        ValueError: the ranks cannot exchange rows as the configuration asks.
    """

    gathers_weights = True

    def __init__(self, config: TrainConfig, device: torch.device, recipe: Recipe, ranks: Ranks, groups: RankMesh):
        if groups.hops is not None:
            check_exchange(config, groups.hops, ranks)
        super().__init__(config, device, recipe, ranks, groups)
        if groups.hops is not None:
            own = None
            if self.moes:
                own = distribute_experts(self.model, config, groups.hops, self.recipe, self.too_many_rows)
            self.expert_share = next(found for found in ranks.gather(own, ExpertShare | None) if found is not None)
        self.shards = self._make_shards()
        self.rank, self.size = self.shards.rank, self.shards.size
        self.updated = self.shards.parts
        self.layout = StateLayout(self.model, self.names, config.optim, self.shards, ranks)
        self._stop_is_agreed = False

    def _own_experts(self) -> AbstractContextManager[object]:
        mesh = self.groups.experts
        if mesh is None:
            return nullcontext()
        return share_of_experts(mesh.get_local_rank("expert"), self.config.parallel.ep)

    def _make_shards(self) -> ShardedState:
        return self._shards_of(self.model.stages(), ())

    def _shards_of(self, stages: Sequence[nn.Module] | None, uncounted: Collection[str]) -> ShardedState:
        return ShardedState(
            self.model,
            self.groups.experts,
            getattr(torch, self.config.parallel.reduce),
            stages,
            group=self.groups.data,
            uncounted=uncounted,
            order=self.names.parameters,
        )

    def must_stop(self, requested: bool) -> bool:
        """See `Strategy`."""
        self.wants_stop.fill_(float(requested))
        return self._stop_is_agreed

    def agree_to_stop(self) -> None:
        """See `Strategy`."""
        self._stop_is_agreed = True

    def zero_gradients(self, optimizer: AdamW) -> None:
        """See `Strategy`."""
        optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)  # the optimizer knows only parts of the parameters

    def micro_batches(self, tokens_BS: Tensor) -> tuple[Tensor, ...]:
        """See `Strategy`."""
        return tokens_BS.tensor_split(self.config.micro_batches)

    def begin_gather(self) -> None:
        """See `Strategy`."""
        self.shards.begin_gather()

    def _reducing(self, is_last: bool) -> AbstractContextManager[object]:
        return self.shards.reducing() if is_last else nullcontext()

    def sum_over_ranks(self, totals: Tensor, load: dict[str, Tensor]) -> None:
        """See `Strategy`."""
        self.shards.finish_gather()
        with torch.no_grad():
            self.ranks.begin("sum of the gradients")
            self._reduce_gradients()
            self.ranks.begin("sum of the losses and loads")
            self.ranks.sum_(totals)
            if load:
                total_LE = self._sum_load(torch.stack([*load.values()]))
                for name, total_E in zip(load, total_LE, strict=True):
                    load[name] = total_E
            self._share_histories()
            self.ranks.begin("")

    def _reduce_gradients(self) -> None:
        self.shards.reduce_gradients()

    def _sum_load(self, load_LE: Tensor) -> Tensor:
        """Sum what each rank has counted, which are the tokens of all ranks of its replica."""
        return self.shards.sum_over_replicas(load_LE)

    def _share_histories(self) -> None:
        """Let all ranks have the largest of their newest amaxes."""
        if self.names.histories:
            own = amax_histories(self.model)
            any_history = next(iter((own or amax_histories(self.whole)).values()))  # a stage may have only the head
            none = torch.zeros_like(any_history.amax_OH[:, 0], device=self.device)
            amax = [own[name].amax_OH[:, 0] if name in own else none for name in self.names.histories]
            for name, largest_O in zip(self.names.histories, self.ranks.max_(torch.stack(amax)), strict=True):
                if name in own:
                    own[name].amax_OH[:, 0] = largest_O

    def gradient_norm(self, parameters: Sequence[nn.Parameter]) -> tuple[Tensor, Tensor]:
        """See `Strategy`."""
        return self.shards.gradient_norm()

    def finish_update(self, gathers: bool) -> None:
        """See `Strategy`."""
        if gathers:
            self.shards.gather_weights()
        self.shards.drop_gradients()

    def gather_weights(self) -> None:
        """See `Strategy`."""
        self.shards.gather_weights()

    def with_capacity(self, work: Callable[[], T], release: Callable[[], None]) -> T:
        """See `Strategy`."""
        while True:
            self.too_many_rows.zero_()
            result = work()
            if not self.ranks.sum_(self.too_many_rows).item():
                return result
            release()
            self.grow_capacity(self.ranks.position)

    def grow_capacity(self, where: str) -> None:
        """See `Strategy`."""
        dispatchers = [moe.dispatcher for moe in self.moes.values() if isinstance(moe.dispatcher, PeerDispatcher)]
        for dispatcher in dispatchers:
            dispatcher.max_rows = min(2 * dispatcher.max_rows, dispatcher.enough_rows)
        most = max(self.ranks.gather(max((dispatcher.max_rows for dispatcher in dispatchers), default=0), int))
        warnings.warn(
            f"{where}: the experts of a rank have more rows than capacity, which is doubled to {most:,} rows; what was "
            "computed is discarded and computed again",
            stacklevel=2,
        )

    def whole_model(self) -> DeepseekV3:
        """See `Strategy`."""
        if self.config.parallel.ep == self.config.parallel.pp == 1:
            return self.model
        tensors = {f"model.{name}": t for name, t in self.model.state_dict().items()}
        tensors |= {f"history.{name}": history.amax_OH for name, history in amax_histories(self.model).items()}
        tensors = {name: t.cpu() for name, t in self.layout.whole(tensors).items()}
        scales = self.ranks.gather(self.model.stored_scales, dict[str, Tensor])
        if not self.ranks.is_first:
            return self.model
        model = meta_model(self.config.model)  # which holds the collected tensors instead of a second copy
        with torch.device("meta"):
            apply_recipe(model, self.recipe)
        weights = {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}
        model.load_state_dict(weights, assign=True)
        model.stored_scales = {name: scale for own in scales for name, scale in own.items()}
        for name, history in amax_histories(model).items():
            history.amax_OH = tensors[f"history.{name}"]
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.is_meta:  # the loads of experts, which are no part of the state
                    setattr(module, name, torch.zeros_like(buffer, device="cpu"))
        return model
