"""How far a run is, and the values of its next step that the configuration determines."""

from __future__ import annotations

import math
from typing import Any

from octile.optim import BatchRamp, WarmupConstantCosine
from octile.train.config import TrainConfig


class Progress:
    """The steps that a run has launched, and what its next step takes from the configuration.

    Args:
        config: the configuration of the run.

    Attributes:
        steps_done: the steps that were launched and not discarded.
        tokens: the tokens of these steps.
        seconds: the time of those that were collected.
    """

    def __init__(self, config: TrainConfig):
        self.config = config
        self.steps_done, self.tokens, self.seconds = 0, 0, 0.0
        self._schedule, self._batch_ramp = schedule(config), batch_ramp(config)

    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        return self._schedule(self.steps_done)

    def batch_size(self) -> int:
        """The sequences of the next step's batch, on all ranks."""
        return self._batch_ramp.size(self.steps_done)

    def balance_speed(self) -> float:
        """γ of the next step; 0 while the indexers alone are trained."""
        optim = self.config.optim
        if self.config.indexer_stage == "warm_up":
            return 0.0
        return optim.balance_speed if self.steps_done < self._step_at(optim.balance_end) else 0.0

    def mtp_loss_weight(self) -> float:
        """The weight of the next step's multi-token prediction loss."""
        optim = self.config.optim
        changed = self.steps_done >= self._step_at(optim.mtp_change)
        return optim.late_mtp_loss_weight if changed else self.config.model.mtp_loss_weight

    def _step_at(self, share: float) -> float:
        """The number of steps before a share of the run; infinity for the whole run, which may be extended."""
        return round(self.config.steps * share) if share < 1 else math.inf

    def scheduled(self) -> dict[str, Any]:
        """The values of the next step that the configuration changes during the run, by their names in the metrics."""
        config = self.config
        return {
            **({"batch_size": self.batch_size()} if config.batch_ramp else {}),
            **({"balance_speed": self.balance_speed()} if config.optim.balance_end < 1 else {}),
            **({"mtp_loss_weight": self.mtp_loss_weight()} if config.optim.mtp_change < 1 else {}),
        }


def schedule(config: TrainConfig) -> WarmupConstantCosine:
    """The learning rate schedule of a run: warm-up, constant, cosine, and the two constant parts of the tail."""
    optim = config.optim
    shares = (optim.warmup, optim.decay, optim.tail, optim.last_tail)
    warmup, decay, tail, last_tail = (round(config.steps * share) for share in shares)
    return WarmupConstantCosine(
        peak=optim.lr,
        warmup_steps=warmup,
        constant_steps=max(config.steps - warmup - decay - tail - last_tail, 0),
        decay_steps=decay,
        floor=optim.lr * optim.final_lr,
        floor_steps=tail if optim.last_tail else None,
        last=optim.lr * optim.last_lr if optim.last_tail else 0.0,
    )


def batch_ramp(config: TrainConfig) -> BatchRamp:
    """The sequences of each step of a run."""
    initial = config.batch_size if config.initial_batch_size is None else config.initial_batch_size
    return BatchRamp(initial, config.batch_size, round(config.steps * config.batch_ramp))
