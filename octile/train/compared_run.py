"""One training run of a comparison, with everything that the comparison measures."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octile.report.compare.gradients import GradientCheck
from octile.report.compare.result import Curve
from octile.train.config import TrainConfig
from octile.train.console import RunConsole
from octile.train.gradient_check import check_gradients
from octile.train.loop import pick_device
from octile.train.token_losses import token_losses
from octile.train.token_store import TokenStore
from octile.train.trainer import Trainer

REFERENCE_SIZE = 512


@dataclass(frozen=True, eq=False)
class ComparedRun:
    """The measurements of one run.

    Attributes:
        curve: losses, speed and memory.
        token_losses_NS: the loss of each held-out token at the end, float32 [N, S]; None if the run diverged.
        gradients: comparisons of the gradients with BF16's.
    """

    curve: Curve
    token_losses_NS: Tensor | None
    gradients: tuple[GradientCheck, ...]


def train_compared_run(
    config: TrainConfig, store: TokenStore, console: RunConsole, gradient_steps: tuple[int, ...] = ()
) -> ComparedRun:
    """Train one model and measure it. A run that diverges ends early, and prints at which step."""
    console.print(f"{config.recipe}, seed {config.seed}")
    device = pick_device(config.device)
    # no skipped steps: a comparison reports at which step a recipe diverges
    trainer = Trainer(replace(config, skip_limit=0), store, device)
    train_loss, speeds, val_steps, val_loss = [], [], [], []
    reference_times, gradients = [reference_time(device)], []
    diverged_at: int | None = None
    losses_NS: Tensor | None = None
    with console.steps(config.steps, 0) as progress:
        while trainer.steps_done < config.steps:
            if trainer.steps_done + 1 in gradient_steps:
                gradients.append(check_gradients(trainer))
            try:
                line = trainer.step()
            except FloatingPointError as error:
                console.print(str(error))
                diverged_at = trainer.steps_done + 1
                break
            progress.step(line)
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
                reference_times.append(reference_time(device))
                progress.validation({"step": trainer.steps_done, "val_loss": val_loss[-1]})
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
        yardstick_s=statistics.median(reference_times),
    )
    return ComparedRun(curve, losses_NS, tuple(gradients))


def _quartiles(speeds: list[float]) -> tuple[float, float] | None:
    """The lower and the upper quartile of all steps but the first, which includes warm-up; None for fewer than five."""
    if len(speeds) < 5:
        return None
    lower, _, upper = statistics.quantiles(speeds[1:], n=4)
    return lower, upper


def reference_time(device: torch.device) -> float:
    """Seconds for one FP32 GEMM of REFERENCE_SIZE³ on the device: the median of five, after one that is not counted.

    The runs of a comparison follow one another. If other programs use the machine during one of them, this time grows
    with the time of its steps, so that the report can tell a busy machine from a slow recipe.
    """
    a = torch.ones(REFERENCE_SIZE, REFERENCE_SIZE, device=device)
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])
