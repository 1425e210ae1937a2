"""Forward and backward passes of this rank's model, in the precision of its recipe.

Shapes: B sequences of a micro-batch, S tokens of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.precision import autocast, forward_precision
from octile.ops.high_precision import without_reduced_precision_reduction
from octile.optim import DynamicLossScale
from octile.train.step.progress import Progress


class Passes:
    """The passes of a training step, of a validation and of measurements.

    Args:
        model: the model.
        device: its device.
        compute: the dtype in which what is not quantized is computed on a GPU (`Recipe.compute`).
        progress: the run's progress, of which a loss takes the weight of multi-token prediction.
        loss_scale: the scale of the loss in backward passes; None for recipes without one.
    """

    def __init__(
        self,
        model: DeepseekV3,
        device: torch.device,
        compute: torch.dtype,
        progress: Progress,
        loss_scale: DynamicLossScale | None,
    ):
        self.model, self.device, self.progress = model, device, progress
        self._compute, self._loss_scale = compute, loss_scale

    def autocast(self) -> torch.autocast:
        """Autocast of a forward pass; see `autocast`."""
        return autocast(self.device, self._compute)

    @contextmanager
    def precision(self) -> Iterator[None]:
        """The context of a forward pass: autocast, and GEMMs that sum in FP32 under every recipe."""
        with forward_precision(self.device, self._compute):
            yield

    def prepare(self) -> None:
        """Give the model the values of the next step that its loss takes."""
        self.model.mtp_loss_weight = self.progress.mtp_loss_weight()

    def loss(self, tokens_BS: Tensor) -> Tensor:
        """The loss of a micro-batch, int64 [B, S] on the host or the device."""
        self.prepare()
        tokens_BS = tokens_BS.to(self.device, non_blocking=True)
        with self.precision():
            return self.model(tokens_BS, tokens_BS)

    def scaled(self, loss: Tensor) -> Tensor:
        """A loss times the loss scale, if there is one."""
        return self._loss_scale.scale(loss) if self._loss_scale else loss

    def backward(self, tokens_BS: Tensor, parts: float) -> Tensor:
        """Add the gradients of a micro-batch [B, S], times the loss scale if any; return its share of the loss.

        Args:
            tokens_BS: the micro-batch.
            parts: sequences of the batch over sequences of the micro-batch.
        """
        loss = self.loss(tokens_BS) / parts
        with without_reduced_precision_reduction():
            self.scaled(loss).backward()
        return loss.detach()
