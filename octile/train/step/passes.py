"""Forward and backward passes of this rank's model, in the precision of its recipe.

Shapes: B sequences of a micro-batch, S tokens of each.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.fused.cross_entropy import cross_entropies
from octile.nn.packed_texts import TextStatistics
from octile.nn.precision import forward_precision
from octile.ops.cross_entropy import IGNORED
from octile.ops.high_precision import without_reduced_precision_reduction
from octile.optim import DynamicLossScale
from octile.train.data.packed_tokens import is_packed, unpacked
from octile.train.step.progress import Progress


class Passes:
    """The passes of a training step, of a validation and of measurements.

    Args:
        model: the model.
        device: its device.
        compute: the dtype in which what is not quantized is computed on a GPU (`Recipe.compute`).
        progress: the run's progress, of which a loss takes the weight of multi-token prediction.
        loss_scale: the scale of the loss in backward passes; None for recipes without one.
        statistics: what is known of all packed texts; None if sequences are not packed.
    """

    def __init__(
        self,
        model: DeepseekV3,
        device: torch.device,
        compute: torch.dtype,
        progress: Progress,
        loss_scale: DynamicLossScale | None,
        statistics: TextStatistics | None = None,
    ):
        self.model, self.device, self.progress = model, device, progress
        self._compute, self._loss_scale, self._statistics = compute, loss_scale, statistics

    def precision(self) -> AbstractContextManager[None]:
        """The context of a forward pass: autocast, and GEMMs that sum in FP32 under every recipe."""
        return forward_precision(self.device, self._compute)

    def prepare(self) -> None:
        """Give the model the values of the next step that its loss takes."""
        self.model.mtp_loss_weight = self.progress.mtp_loss_weight()

    def loss(self, batch: Tensor, labels_2: Tensor | None = None) -> Tensor:
        """The loss of a micro-batch on the host or the device, int64 [B, S], or [B, S, 2] of packed sequences.

        Args:
            batch: the micro-batch.
            labels_2: float32 [2], by how many labels of a packed sequence the losses are divided, those of the next
                tokens and of the tokens after them; if not given, by as many as there are.
        """
        self.prepare()
        batch = batch.to(self.device, non_blocking=True)
        if not is_packed(batch):
            with self.precision():
                return self.model(batch, batch)
        tokens_BS, labels_BS, texts = unpacked(batch, self._statistics)
        n_labels_2 = texts.count_labels(labels_BS).clamp(min=1) if labels_2 is None else labels_2 * len(batch)
        with self.precision():
            return self.model(tokens_BS, labels_BS, texts, n_labels_2)

    def token_losses(self, batch: Tensor) -> Tensor:
        """The losses of `token_losses` on the device of the model."""
        return token_losses(self.model, batch.to(self.device), self._statistics)

    def scaled(self, loss: Tensor) -> Tensor:
        """A loss times the loss scale, if there is one."""
        return self._loss_scale.scale(loss) if self._loss_scale else loss

    def backward(self, batch: Tensor, parts: float, labels_2: Tensor | None = None) -> Tensor:
        """Add the gradients of a micro-batch, times the loss scale if any; return its share of the loss.

        Args:
            batch, labels_2: as in `loss`.
            parts: sequences of the batch over sequences of the micro-batch.
        """
        loss = self.loss(batch, labels_2) / parts
        with without_reduced_precision_reduction():
            self.scaled(loss).backward()
        return loss.detach()


def token_losses(model: DeepseekV3, batch: Tensor, statistics: TextStatistics | None = None) -> Tensor:
    """The main head's loss of each token but the first of its sequence, in nats, [B, S − 1]; 0 where it has none.

    Args:
        model: the model.
        batch: int64 [B, S], or [B, S, 2] of packed sequences, on the device of the model.
        statistics: as in `PackedTexts`.
    """
    texts = None
    tokens_BS = labels_BS = batch
    if is_packed(batch):
        tokens_BS, labels_BS, texts = unpacked(batch, statistics)
    next_BS = labels_BS[:, 1:] if texts is None else texts.next_labels(labels_BS)
    return cross_entropies(model(tokens_BS, None, texts), F.pad(next_BS, (0, 1), value=IGNORED))[:, :-1]
