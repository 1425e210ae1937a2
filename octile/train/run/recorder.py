"""What `octile train` does between its steps: writes and shows metrics, validates, and saves checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

from octile.report.run.lines import Record
from octile.report.run.spikes import Spike, SpikeDetector
from octile.train.config import TrainConfig
from octile.train.data.token_store import TokenStore
from octile.train.run.best_model import BestModel
from octile.train.run.checkpoints import RunCheckpoints
from octile.train.run.console import StepProgress
from octile.train.run.folder import RunFolder
from octile.train.run.metrics import MetricsWriter
from octile.train.run.spikes import write_spike
from octile.train.trainer import Trainer

StepContext = Callable[[int], AbstractContextManager[object]]  # entered around each step, given the step's number
RunHook = Callable[[Trainer, RunFolder, MetricsWriter], StepContext]


def no_hook(trainer: Trainer, run: RunFolder, metrics: MetricsWriter) -> StepContext:
    """The hook that does nothing."""
    return lambda step: nullcontext()


class RunRecorder:
    """The `LoopHooks` of a run.

    Args:
        config: the configuration of the run, which a checkpoint repeats.
        trainer: the trainer of the run.
        store: the tokens of the run.
        metrics: where measurements are written.
        progress: where they are shown.
        detector: has seen the losses of all steps before.
        best: the model with the lowest held-out loss.
        checkpoints: the checkpoints of the run.
        around: the context of each step.

    Attributes:
        saved_step: the step of the last checkpoint of this process; None before the first.
    """

    def __init__(
        self,
        config: TrainConfig,
        trainer: Trainer,
        store: TokenStore,
        metrics: MetricsWriter,
        progress: StepProgress,
        detector: SpikeDetector,
        best: BestModel,
        checkpoints: RunCheckpoints,
        around: StepContext,
    ):
        self.config, self.trainer, self.store = config, trainer, store
        self.metrics, self.progress, self.detector = metrics, progress, detector
        self.best, self.checkpoints, self._around = best, checkpoints, around
        self.saved_step: int | None = None
        self._spikes: list[tuple[Spike, Record]] = []  # that are not reported yet

    def around(self, step: int) -> AbstractContextManager[object]:
        """The context of a step."""
        return self._around(step)

    def record(self, lines: Iterable[Record]) -> None:
        """Write and show the metrics of steps in their order, and find spikes."""
        for line in lines:
            self.metrics.write(line)
            self.progress.step(line)
            if spike := self.detector.update(line["step"], line["main_loss"]):
                self._spikes.append((spike, line))

    def between_steps(self) -> None:
        """Report the spikes that were found. It runs the model, so it is not called while a step is observed."""
        found, self._spikes = self._spikes, []
        if found:
            self.trainer.gather_weights()
        for spike, line in found:
            begins = spike.over_at is None
            text = write_spike(spike, self.trainer, self.store, self.metrics, line) if begins else str(spike)
            self.progress.console.print(text)

    def begin(self) -> None:
        """Write the held-out loss of the weights that a run begins with, of which no step has been launched."""
        line = {"step": 0, **self.trainer.evaluator.validate()}
        self.metrics.write(line)
        self.progress.validation(line)
        if self.config.indexer_stage != "warm_up":
            self.best.begin(line["val_loss"])

    def validate(self) -> None:
        """Write the held-out loss, the load of the experts and the scales of the tiles, and update the best model."""
        step = self.trainer.steps_done
        line = {"step": step, **self.trainer.evaluator.validate()}
        self.metrics.write({"step": step, "expert_load": self.trainer.expert_load()})
        self.metrics.write(line)
        scales = self.trainer.evaluator.tile_scales()
        if scales:
            self.metrics.write({"step": step, "tile_scales": scales})
        self.progress.validation(line)
        if self.config.indexer_stage != "warm_up":  # whose last model is the best aligned one
            self.best.update(step, line["val_loss"])

    def save(self) -> None:
        """Save a checkpoint of the last step."""
        self.checkpoints.save(self.trainer, self.best, self.config)
        self.saved_step = self.trainer.steps_done

    def is_finished(self) -> bool:
        """Whether no validation of the last ones was an improvement (`TrainConfig.patience`)."""
        return self.best.has_run_out(self.config.patience)

    @contextmanager
    def saved_on_failure(self) -> Iterator[None]:
        """Record the steps that are not collected yet if an exception leaves the context, as far as that is possible.

        Several ranks collect them only if all have the exception: one alone would wait for the others. A loss or
        gradients that are not finite, which all ranks find, are recorded as the reason why the run stopped, for its
        report.
        """
        try:
            yield
        except Exception as error:
            ranks, is_not_finite = self.trainer.ranks, isinstance(error, FloatingPointError)
            ranks.announce_failure()
            if isinstance(error, TimeoutError):  # of a GPU that the host waited for long enough
                raise
            with suppress(Exception):  # the disk may be full, or the GPU may have failed
                if ranks.size == 1 or is_not_finite:
                    self.record(self.trainer.collect())
                if is_not_finite:
                    self.metrics.write({"step": self.trainer.steps_done + 1, "stopped": str(error)})
            raise
