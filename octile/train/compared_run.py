"""One run of a comparison: a model is trained, and all that the comparison looks at is measured on the way."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from torch import Tensor

from octile.report.compare.gradients import GradientCheck
from octile.report.compare.result import Curve
from octile.train.config import TrainConfig
from octile.train.gradient_check import check_gradients
from octile.train.loop import pick_device
from octile.train.reference_timer import yardstick
from octile.train.screen import Screen
from octile.train.token_losses import token_losses
from octile.train.token_store import TokenStore
from octile.train.trainer import Trainer


@dataclass(frozen=True, eq=False)
class ComparedRun:
    """A curve; the loss of each held-out token at the end, float32 [N, S], None if the run broke; gradient checks."""

    curve: Curve
    token_losses_NS: Tensor | None
    gradients: tuple[GradientCheck, ...]


def compared_run(
    config: TrainConfig, store: TokenStore, screen: Screen, gradient_steps: tuple[int, ...] = ()
) -> ComparedRun:
    """Trains one model. A run that breaks ends there and says so; the others go on."""
    screen.say(f"{config.recipe}, seed {config.seed}")
    device = pick_device(config.device)
    trainer = Trainer(replace(config, skip_limit=0), store, device)  # where a recipe breaks is what it is asked
    train_loss, speeds, val_steps, val_loss = [], [], [], []
    yardsticks, gradients = [yardstick(device)], []
    diverged_at: int | None = None
    losses_NS: Tensor | None = None
    with screen.progress(config.steps, 0) as shown:
        while trainer.steps_done < config.steps:
            if trainer.steps_done + 1 in gradient_steps:
                gradients.append(check_gradients(trainer))
            try:
                line = trainer.step()
            except FloatingPointError as error:
                screen.say(str(error))
                diverged_at = trainer.steps_done + 1
                break
            shown.step(line)
            train_loss.append(line["main_loss"])
            speeds.append(line["tokens_per_s"])
            last = trainer.steps_done == config.steps
            if last or trainer.steps_done % config.validate_every == 0:
                val_steps.append(trainer.steps_done)
                if last:  # one pass over the held-out text gives the losses of its tokens and their mean
                    losses_NS = token_losses(trainer)
                    val_loss.append(losses_NS.double().mean().item())
                else:
                    val_loss.append(trainer.validate()["val_loss"])
                yardsticks.append(yardstick(device))
                shown.validation({"step": trainer.steps_done, "val_loss": val_loss[-1]})
    tensors, _ = trainer.state()
    curve = Curve(
        recipe=config.recipe,
        seed=config.seed,
        steps=tuple(range(1, len(train_loss) + 1)),
        train_loss=tuple(train_loss),
        val_steps=tuple(val_steps),
        val_loss=tuple(val_loss),
        tokens_per_s=statistics.median(speeds) if speeds else 0.0,
        state_bytes=sum(t.nbytes for t in tensors.values()),
        diverged_at=diverged_at,
        window_loss=() if losses_NS is None else tuple(losses_NS.double().mean(1).tolist()),
        speed_quartiles=_quartiles(speeds),
        yardstick_s=statistics.median(yardsticks),
    )
    return ComparedRun(curve, losses_NS, tuple(gradients))


def _quartiles(speeds: list[float]) -> tuple[float, float] | None:
    """The lower and the upper one, of all steps but the first, in which the program warms up."""
    if len(speeds) < 5:
        return None
    lower, _, upper = statistics.quantiles(speeds[1:], n=4)
    return lower, upper
