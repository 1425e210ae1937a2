"""What a training step computes on the device: gradients, the decision to skip, and the update.

Both functions are captured in CUDA graphs where that is possible (`octile.train.step.captured`), so the host reads
nothing of a device in them then.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octile.nn.delayed_scaling import end_step
from octile.nn.tables import tables_once
from octile.optim import AdamW, DynamicLossScale, clip_factor
from octile.train.step.passes import Passes
from octile.train.step.progress import Progress
from octile.train.step.skips import Skips
from octile.train.strategy.single import Strategy


class Computed(NamedTuple):
    """The result of a step's forward and backward pass.

    Attributes:
        values: float32: the loss and its main, MTP and balance parts, with indexers also theirs; the norm of the
            gradient before clipping, and the index of the last parameter whose gradient is not finite, or −1. Then how
            many ranks want to stop, and on how many the experts had too many rows.
        load: int64 [E] for each MoE layer, the tokens of each expert.
        skip: bool [], whether the update must change nothing.
        overflowed: whether the gradients were not finite, and a smaller loss scale may help.
    """

    values: Tensor
    load: dict[str, Tensor]
    skip: Tensor
    overflowed: bool


class StepComputation:
    """The gradients and the update of a run's steps.

    Args:
        strategy: the strategy, with this rank's model.
        passes: the passes of that model.
        progress: the run's progress.
        optimizer: the optimizer of the parameters that this rank updates.
        skips: the rule by which steps are skipped.
        loss_scale: the scale of the loss; None for recipes without one.
        clip: the largest norm of a gradient that is not clipped.

    Attributes:
        width: the numbers of `Computed.values`.
        is_ahead: whether later steps may be launched before this one is collected. Updated weights are then gathered in
            the next step's passes, otherwise after the update.
        sequences: the sequences of this step's batch, on all ranks.
    """

    def __init__(
        self,
        strategy: Strategy,
        passes: Passes,
        progress: Progress,
        optimizer: AdamW,
        skips: Skips,
        loss_scale: DynamicLossScale | None,
        clip: float,
    ):
        self._strategy, self._passes, self._progress = strategy, passes, progress
        self._optimizer, self._skips, self._loss_scale, self._clip = optimizer, skips, loss_scale, clip
        self._n_losses = 1 + len(strategy.loss_parts)
        self.width = self._n_losses + 4
        self.is_ahead, self.sequences = False, 0

    def compute(self, tokens_BS: Tensor) -> Computed:
        """Run the forward and backward pass, and compute the norm of the gradients, which `update` clips.

        On several ranks, tokens are those of this rank, and the results are sums over the ranks.
        """
        strategy = self._strategy
        strategy.model.train()
        strategy.zero_gradients(self._optimizer)
        strategy.too_many_rows.zero_()
        if self.is_ahead:
            strategy.begin_gather()
        load = strategy.no_load()
        with tables_once():  # of positions, the same for all micro-batches of sequences that are not packed
            sums = strategy.losses(self._passes, tokens_BS, self.sequences, load)
        totals = torch.cat([sums, torch.stack([strategy.wants_stop, strategy.too_many_rows])])
        strategy.sum_over_ranks(totals, load)
        parameters = list(strategy.updated.parameters())
        overflowed = False
        if self._loss_scale:
            finite = self._loss_scale.unscale_(parameters, lambda own: all(strategy.ranks.gather(own, bool)))
            overflowed = not finite and self._loss_scale.value > 1.0
        norm, last_broken = strategy.gradient_norm(parameters)
        skip = self._skips.decide(totals[0], norm, overflowed, totals[-1])
        values = torch.stack([*totals[: self._n_losses], norm, last_broken.float(), *totals[self._n_losses :]])
        return Computed(values, load, skip, overflowed)

    def update(self, learning_rate: float | Tensor, result: Computed) -> None:
        """Update weights and biases of gates with the result of `compute`, except in a step that is skipped."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        factor = clip_factor(result.values[self._n_losses], self._clip)
        self._strategy.ranks.begin("update of the weights")  # for which ranks may exchange rows
        self._optimizer.step(skip=result.skip, gradient_scale=factor)
        self._strategy.ranks.begin("")
        self._strategy.finish_update(gathers=not self.is_ahead)
        end_step(self._strategy.model, result.skip)
        speed = torch.where(result.skip, 0.0, self._progress.balance_speed())
        for name, moe in self._strategy.moes.items():
            moe.gate.balance(result.load[name], speed)
