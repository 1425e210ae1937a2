"""Finds when a run began to memorize its training text: held-out loss rises from there, while training loss falls."""

from dataclasses import dataclass

import numpy as np

from octile.report.run.metrics import Floats, Run

MIN_VALIDATIONS = 2  # after the lowest held-out loss
MIN_RISE = 0.005  # of the held-out loss; less is noise


@dataclass(frozen=True)
class Memorization:
    """The losses between which a run memorized, in nats per token; printed as a sentence.

    Attributes:
        step: step of the lowest held-out loss.
        held_out: the held-out loss there, and at the last validation.
        training: the mean training loss before these two, since the validation before.
    """

    step: int
    held_out: tuple[float, float]
    training: tuple[float, float]

    def __str__(self) -> str:
        (held_out, held_out_end), (training, training_end) = self.held_out, self.training
        return (
            f"after step {self.step:,} the run memorized its training text: held-out loss rose from {held_out:.3f} to "
            f"{held_out_end:.3f}, while training loss fell from {training:.3f} to {training_end:.3f}"
        )


def find_memorization(run: Run) -> Memorization | None:
    """When a run began to memorize, or None."""
    steps, losses = run.series("val_loss")
    known = np.isfinite(losses) & (steps > 0)  # before the first step there is no training loss
    steps, losses = steps[known], losses[known]
    if not len(losses):
        return None
    best = int(np.argmin(losses))
    if len(losses) - 1 - best < MIN_VALIDATIONS or losses[-1] < (1 + MIN_RISE) * losses[best]:
        return None
    training = (_training_loss(run, steps, best), _training_loss(run, steps, len(steps) - 1))
    if not training[1] < training[0]:
        return None
    return Memorization(int(steps[best]), (float(losses[best]), float(losses[-1])), training)


def _training_loss(run: Run, validations: Floats, index: int) -> float:
    """The mean training loss of the steps before a validation, since the one before it."""
    first = validations[index - 1] if index else 0.0
    steps, losses = run.series("main_loss")
    return float(np.mean(losses[(steps > first) & (steps <= validations[index]) & np.isfinite(losses)]))
