"""Measurements of a model on held-out text during a run, which change nothing that a later step depends on.

Shapes: N windows, S tokens of each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from octile.nn.delayed_scaling import amax_histories
from octile.nn.weight_cache import frozen_weights
from octile.ops.high_precision import without_reduced_precision_reduction
from octile.optim import EMA, AdamW
from octile.train.data.packed_tokens import count_labels, is_packed
from octile.train.step.diagnostics import record_tile_scales
from octile.train.step.passes import Passes
from octile.train.step.progress import Progress
from octile.train.strategy.single import Strategy

T = TypeVar("T")


class Evaluator:
    """Measures the model of a run. All ranks must make the same calls.

    Args:
        strategy: the strategy, with this rank's model.
        passes: the passes of that model.
        progress: the run's progress.
        optimizer: the optimizer of the parameters that this rank updates.
        ema: the moving average of these parameters; None if there is none.
        held_out: the windows of held-out text, int64 [N, S]; [N, S, 2] if they are packed.
        release: frees captured steps.
    """

    def __init__(
        self,
        strategy: Strategy,
        passes: Passes,
        progress: Progress,
        optimizer: AdamW,
        ema: EMA | None,
        held_out: Tensor,
        release: Callable[[], None],
    ):
        self.strategy, self._passes, self.progress = strategy, passes, progress
        self._optimizer, self._ema, self._release = optimizer, ema, release
        self.held_out = held_out
        self._labels_2 = count_labels(held_out).clamp(min=1) if is_packed(held_out) else None

    @torch.no_grad()
    def validate(self) -> dict[str, Any]:
        """The held-out loss of the main head in nats per token, and that of the averaged weights, if any.

        `val_tokens` is how many tokens are predicted: S − 1 of a window, and of a packed one those with a loss.
        """
        tokens = self.held_out[:, 1:].numel() if self._labels_2 is None else int(self._labels_2[0])
        line = {"val_loss": self._held_out_loss(), "val_tokens": tokens}
        if self._ema:
            with self.averaged():
                line["ema_val_loss"] = self._held_out_loss()
        return line

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Replace the model's weights by their moving average inside the context, and restore them after it.

        On several ranks only each rank's parts are restored after a failure.
        """
        assert self._ema is not None
        with self._ema.applied(self.strategy.updated):
            self.strategy.gather_weights()
            yield
        self.strategy.gather_weights()  # not after a failure, which other ranks may not have

    def with_capacity(self, work: Callable[[], T]) -> T:
        """Run forward passes, and once more with more capacity if the experts of a rank had too many rows.

        Args:
            work: changes nothing, or the same if it is repeated.
        """
        return self.strategy.with_capacity(work, self._release)

    def _held_out_loss(self) -> float:
        self.strategy.model.eval()
        self.strategy.ranks.at(f"validation after step {self.progress.steps_done}")
        return self.with_capacity(self._own_held_out_loss)

    def _own_held_out_loss(self) -> float:
        strategy, at_once = self.strategy, self.progress.config.micro_batch_size
        own_NS = self.held_out.tensor_split(strategy.size)[strategy.rank]
        starts = range(0, math.ceil(len(self.held_out) / strategy.size), at_once)
        batches = [own_NS[start : start + at_once] for start in starts]
        total = torch.zeros((), device=strategy.device)
        labels_2 = None if self._labels_2 is None else self._labels_2.to(strategy.device) / len(self.held_out)
        with frozen_weights(strategy.model):
            # ranks must make the same calls, also without sequences
            filled = [tokens_BS if len(tokens_BS) else self.held_out[:1] for tokens_BS in batches]
            for loss, tokens_BS in zip(strategy.main_losses(self._passes, filled, labels_2), batches, strict=True):
                total += loss * len(tokens_BS)
        if not strategy.counts_losses:
            total.zero_()
        return strategy.ranks.sum_(total).item() / len(self.held_out)

    @torch.no_grad()
    def token_losses(self, windows: Tensor | None = None) -> Tensor:
        """The main head's loss of each token but the first of its window: float32 [N, S − 1] on the CPU, in nats.

        Args:
            windows: int64 [N, S], or [N, S, 2]; the held-out windows if not given. Tokens of packed sequences that are
                not to be predicted have the loss 0. Where all are, the mean is the val_loss of `validate`, up to the
                order of summation.
        """
        self.strategy.model.eval()
        given_NS = self.held_out if windows is None else windows
        return self.with_capacity(lambda: self._token_losses(given_NS))

    def _token_losses(self, windows: Tensor) -> Tensor:
        at_once = self.progress.config.micro_batch_size
        # a new small tensor for each batch would split the memory that the next batch's logits need in one piece
        losses_NS = torch.empty(len(windows), windows.shape[1] - 1)
        with frozen_weights(self.strategy.model), self._passes.precision():
            self.strategy.token_losses(self._passes, windows.split(at_once), losses_NS.split(at_once))
        return losses_NS

    def sequence_losses(self, windows: Tensor) -> Tensor:
        """The main head's mean loss of each window, float32 [N] on the CPU; 0 for one without labels."""
        losses_NS = self.token_losses(windows)
        if not is_packed(windows):
            return losses_NS.mean(1)
        labels_N = torch.stack([count_labels(window[None])[0] for window in windows])
        return losses_NS.sum(1) / labels_N.clamp(min=1)

    def tile_scales(self) -> dict[str, Any]:
        """Histograms of the scales in a forward and backward pass on held-out text, which changes no state."""
        return self.with_capacity(self._tile_scales)

    def _tile_scales(self) -> dict[str, Any]:
        self.strategy.model.train()
        self.strategy.zero_gradients(self._optimizer)
        with self.preserved(), record_tile_scales() as histograms, without_reduced_precision_reduction():
            self.strategy.backward_on(self._passes, self.held_out)
        return self.strategy.sum_histograms(histograms())

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Restore what a forward and backward pass inside the context changes: amax histories and gradients."""
        model = self.strategy.model
        amax = {name: history.amax_OH.clone() for name, history in amax_histories(model).items()}
        try:
            yield
        finally:
            for name, history in amax_histories(model).items():
                history.amax_OH.copy_(amax[name])
            self.strategy.zero_gradients(self._optimizer)

    def first_non_finite(self, tokens_BS: Tensor) -> str:
        """The first parameter or module that is not finite in forward passes of this rank's part of a batch."""
        return self.strategy.first_non_finite(self._passes, tokens_BS)
