"""One training run of a comparison, with everything that the comparison measures."""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from octile.checkpoint.step_folders import STATE
from octile.checkpoint.training import latest_checkpoint, load_checkpoint, save_checkpoint
from octile.parallel.device import pick_device
from octile.report.compare.file import read_curve, read_gradient_check
from octile.report.compare.gradients import GradientCheck
from octile.report.compare.result import Curve
from octile.report.run.lines import Record
from octile.signals import Stopped
from octile.train.compare.gradient_check import check_gradients
from octile.train.config import COMPARE_RESUMABLE, TrainConfig, describe_changes, differences
from octile.train.data.token_store import TokenStore
from octile.train.loop import run_steps
from octile.train.run.console import RunConsole, StepProgress
from octile.train.run.duration import reference_time
from octile.train.run.machine import computed_on, warn_of_another_machine
from octile.train.trainer import Trainer

CHECKPOINTS, FINISHED = "checkpoints", "finished"


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


@dataclass
class Measurements:
    """What a run has measured so far."""

    train_loss: list[float] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)
    val_steps: list[int] = field(default_factory=list)
    val_loss: list[float] = field(default_factory=list)
    reference_times: list[float] = field(default_factory=list)
    gradients: list[GradientCheck] = field(default_factory=list)


class _Measuring:
    """The `LoopHooks` of a run of a comparison, which measure it and save its state.

    Args:
        config: the configuration of the run.
        trainer: the trainer of the run.
        measured: what the run has measured before.
        progress: where metrics are shown.
        gradient_steps: the steps at which gradients are compared with BF16's.
        folder: where the state is saved; None: nowhere.

    Attributes:
        token_losses_NS: the loss of each held-out token after the last step, float32 [N, S]; None before it.
    """

    def __init__(
        self,
        config: TrainConfig,
        trainer: Trainer,
        measured: Measurements,
        progress: StepProgress,
        gradient_steps: tuple[int, ...],
        folder: Path | None,
    ):
        self.config, self.trainer, self.measured, self.progress = config, trainer, measured, progress
        self.gradient_steps, self.folder = gradient_steps, folder
        self.token_losses_NS: Tensor | None = None

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        if step in self.gradient_steps:
            self.record(self.trainer.collect())  # a run that diverged before measures no gradients
            self.measured.gradients.append(check_gradients(self.trainer))
        yield

    def record(self, lines: Iterable[Record]) -> None:
        for line in lines:
            self.progress.step(line)
            self.measured.train_loss.append(line["main_loss"])
            self.measured.speeds.append(line["tokens_per_s"])

    def between_steps(self) -> None:
        pass

    def validate(self) -> None:
        step, measured, evaluator = self.trainer.steps_done, self.measured, self.trainer.evaluator
        if step == self.config.steps:  # one pass over the held-out text gives the losses of its tokens and their mean
            self.token_losses_NS = evaluator.token_losses()
            val_loss = self.token_losses_NS.double().mean().item()
        else:
            val_loss = evaluator.validate()["val_loss"]
        measured.val_steps.append(step)
        measured.val_loss.append(val_loss)
        measured.reference_times.append(reference_time(self.trainer.device))
        self.progress.validation({"step": step, "val_loss": val_loss})

    def save(self) -> None:
        if self.folder is not None and self.trainer.steps_done < self.config.steps:  # then the result is saved
            _save(self.trainer, self.measured, self.config, self.folder)

    def is_finished(self) -> bool:
        return False


def train_compared_run(
    config: TrainConfig,
    store: TokenStore,
    console: RunConsole,
    gradient_steps: tuple[int, ...] = (),
    folder: Path | None = None,
    stop: Sequence[int] = (),
) -> ComparedRun:
    """Train one model and measure it. A run that diverges ends early, and prints at which step.

    Args:
        config: the configuration of the run.
        store: the tokens.
        console: where progress is printed.
        gradient_steps: the steps at which gradients are compared with BF16's.
        folder: where the run's state is saved every `checkpoint_every` steps, and its result at the end. A run that is
            finished there is read, and one that was interrupted continues. None: nothing is saved.
        stop: signals that were caught; as soon as there is one, the run is saved and ends after the steps that were
            launched. After the last step its result is saved, which the comparison reads when it is resumed.

    Raises:
        Stopped: there was a signal.
    """
    title = f"{config.recipe}, seed {config.seed}"
    if folder is not None and (finished := latest_checkpoint(folder / FINISHED)) is not None:
        console.print(f"{title}: finished before")
        return _read_finished(finished, config, store)
    console.print(title)
    device = pick_device(config.device)
    # no skipped steps: a comparison reports at which step a recipe diverges
    trainer = Trainer(replace(config, skip_limit=0), store, device)
    measured = Measurements()
    if folder is not None and (checkpoint := latest_checkpoint(folder / CHECKPOINTS)) is not None:
        measured = _load(trainer, checkpoint, config)
        console.print(f"resumed at step {trainer.steps_done}")
    elif folder is not None and folder.is_dir():
        console.print(f"{folder} holds no complete checkpoint: the run begins again")
    measured.reference_times.append(reference_time(device))
    diverged_at: int | None = None
    with closing(trainer), console.steps(config.steps, trainer.steps_done, config.indexer_stage) as progress:
        hooks = _Measuring(config, trainer, measured, progress, gradient_steps, folder)
        try:
            run_steps(trainer, hooks, stop)
        except FloatingPointError as error:
            console.print(str(error))
            diverged_at = trainer.steps_done + 1
        if trainer.steps_done < config.steps and diverged_at is None:
            hooks.save()
            raise Stopped(f"stopped after step {trainer.steps_done} of {title}", stop[0])
    losses_NS = hooks.token_losses_NS
    tensors, _ = trainer.state()
    curve = Curve(
        recipe=config.recipe,
        seed=config.seed,
        steps=tuple(range(1, len(measured.train_loss) + 1)),
        train_loss=tuple(measured.train_loss),
        val_steps=tuple(measured.val_steps),
        val_loss=tuple(measured.val_loss),
        tokens_per_s=statistics.median(measured.speeds) if measured.speeds else 0.0,
        state_bytes=sum(t.nbytes for t in tensors.values()),
        diverged_at=diverged_at,
        window_loss=() if losses_NS is None else tuple(losses_NS.double().mean(1).tolist()),
        speed_quartiles=_quartiles(measured.speeds),
        yardstick_s=statistics.median(measured.reference_times),
    )
    run = ComparedRun(curve, losses_NS, tuple(measured.gradients))
    if folder is not None:
        _save_finished(run, trainer.steps_done, config, store, folder)
    if stop:
        raise Stopped(f"stopped after step {trainer.steps_done} of {title}", stop[0])
    return run


def _load(trainer: Trainer, checkpoint: Path, config: TrainConfig) -> Measurements:
    """Continue from a checkpoint, whose tensors are freed again; return what the run has measured until then."""
    tensors, state = load_checkpoint(checkpoint, check=False)
    _check_config(state, config, checkpoint)
    warn_of_another_machine(f"{config.recipe}, seed {config.seed}, {checkpoint.name}", state, trainer.device)
    trainer.load(tensors, state)
    checks = [read_gradient_check(found) for found in state["measured"]["gradients"]]
    return Measurements(**{**state["measured"], "gradients": checks})


def _check_config(state: Mapping[str, Any], config: TrainConfig, checkpoint: Path) -> None:
    """Refuse the state of a run that was trained with other settings, because comparison.json was edited."""
    changes = differences(TrainConfig.from_state(state, str(checkpoint / STATE)), config)
    if changes := {name: change for name, change in changes.items() if name not in COMPARE_RESUMABLE}:
        raise ValueError(
            f"comparison.json was changed after {config.recipe}, seed {config.seed}, began: "
            f"{describe_changes(changes)}; change it back, or begin a new comparison"
        )


def _save(trainer: Trainer, measured: Measurements, config: TrainConfig, folder: Path) -> None:
    tensors, state = trainer.state()
    more = {
        "config": config.to_values(),
        "measured": asdict(measured),
        "computed_on": computed_on(trainer.device),
    }
    save_checkpoint(folder / CHECKPOINTS, trainer.steps_done, tensors, {**state, **more}, keep=1)


def _save_finished(run: ComparedRun, step: int, config: TrainConfig, store: TokenStore, folder: Path) -> None:
    """Save the result of a run, and delete its checkpoints."""
    tensors = {} if run.token_losses_NS is None else {"token_losses": run.token_losses_NS}
    state = {
        "config": config.to_values(),
        "data": store.digest,
        "curve": asdict(run.curve),
        "gradients": [asdict(check) for check in run.gradients],
    }
    save_checkpoint(folder / FINISHED, step, tensors, state)
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)


def _read_finished(checkpoint: Path, config: TrainConfig, store: TokenStore) -> ComparedRun:
    tensors, state = load_checkpoint(checkpoint, check=False)
    _check_config(state, config, checkpoint)
    if state.get("data", store.digest) != store.digest:
        raise ValueError(
            f"the tokens in {store.folder} are not those that {config.recipe}, seed {config.seed}, was trained on: "
            "bring them back, or begin a new comparison"
        )
    gradients = tuple(map(read_gradient_check, state["gradients"]))
    return ComparedRun(read_curve(state["curve"]), tensors.get("token_losses"), gradients)


def _quartiles(speeds: list[float]) -> tuple[float, float] | None:
    """The lower and the upper quartile of all steps but the first, which includes warm-up; None for fewer than five."""
    if len(speeds) < 5:
        return None
    lower, _, upper = statistics.quantiles(speeds[1:], n=4)
    return lower, upper
