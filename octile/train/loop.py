"""The training loop of `octile train`: from text to a run folder with a model, a report and a sample.

Most of this module makes sure that nothing is lost. A signal ends the loop after the steps that were launched and their
checkpoint. An error of the disk leaves the last checkpoint as it was. All launched steps are collected, and their
metrics written, before a validation and before a checkpoint.

On several ranks all of them run the loop, and take the same decisions in it. Rank 0 alone prints and writes the run
folder; what it does while the others wait goes through `Ranks.from_first`, so that its failure ends them, too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from octile.checkpoint.convert.size import predict_size
from octile.checkpoint.files import explaining_failures
from octile.checkpoint.store import Store
from octile.extras import require
from octile.kernels.compile_ahead import KernelsAhead
from octile.parallel.device import pick_own_device
from octile.parallel.ranks import Ranks, RanksError, explain, failure_before, join, leave, will_restart
from octile.report.run.lines import Record
from octile.report.run.spikes import SpikeDetector, SpikeState
from octile.signals import Stopped, stop_requests, termination_ignored
from octile.torchrun import check_rendezvous
from octile.train.config import TrainConfig
from octile.train.data.examples import is_examples
from octile.train.data.token_store import MANIFEST, TokenStore
from octile.train.memory.check import check_memory
from octile.train.pipeline_layout import make_pipeline_schedule
from octile.train.run import fine_tune
from octile.train.run.best_model import BestModel
from octile.train.run.checkpoints import RunCheckpoints, check_address
from octile.train.run.console import RunConsole
from octile.train.run.deterministic import deterministic
from octile.train.run.disk_space import check_disk_space
from octile.train.run.duration import check_duration
from octile.train.run.folder import RunFolder, lock_folder
from octile.train.run.kernels_ahead import compile_ahead
from octile.train.run.loggers import require_loggers
from octile.train.run.metrics import NoMetrics, open_metrics
from octile.train.run.out_of_memory import explain_out_of_memory
from octile.train.run.rank_checks import check_agreement, check_world, is_restarted
from octile.train.run.recipe_check import check_recipe
from octile.train.run.recorder import RunHook, RunRecorder, no_hook
from octile.train.run.results import finish, report_on_failure, stored_format, unmarked_on_failure
from octile.train.run.resume import (
    check_goal,
    check_restart,
    check_settings,
    continued,
    open_run,
    print_settings,
    restore_run,
)
from octile.train.run.spikes import spikes_so_far
from octile.train.run.tokens import check_data, check_prompt, open_tokens, print_passes
from octile.train.trainer import Trainer


class LoopHooks(Protocol):
    """What a run or a comparison does between its steps. All ranks do the same."""

    def around(self, step: int) -> AbstractContextManager[object]:
        """The context in which a step is launched, given its number, and older steps are collected."""
        ...

    def record(self, lines: Iterable[Record]) -> None:
        """Take the metrics of steps that were collected, in their order."""
        ...

    def between_steps(self) -> None:
        """Do what must not be observed with a step."""
        ...

    def validate(self) -> None:
        """Measure the model after the last launched step, which is collected."""
        ...

    def save(self) -> None:
        """Save the state after the last launched step, which is collected."""
        ...

    def is_finished(self) -> bool:
        """Whether to launch no further step, although the run has some."""
        ...


def run_steps(trainer: Trainer, hooks: LoopHooks, stop: Sequence[int]) -> None:
    """Launch the steps of a run that are left, collect them, and validate and save when that is due.

    All launched steps are collected before a validation, before a checkpoint and at the end.

    Args:
        trainer: the trainer of the run.
        hooks: called between the steps.
        stop: signals that were caught; as soon as there is one, no further step is launched.

    Raises:
        FloatingPointError: see `Trainer.collect`.
    """
    config = trainer.config
    while trainer.steps_done < config.steps and not trainer.strategy.must_stop(bool(stop)) and not hooks.is_finished():
        number = trainer.steps_done + 1
        with hooks.around(number):
            hooks.record(trainer.advance())
        last = trainer.steps_done == config.steps
        validates = last or trainer.steps_done % config.validate_every == 0
        saves = last or (config.checkpoint_every and trainer.steps_done % config.checkpoint_every == 0)
        if validates or saves:
            hooks.record(trainer.collect())
        hooks.between_steps()
        if trainer.steps_done < number:  # steps were discarded, and are launched again
            continue
        if validates:
            hooks.validate()
        if saves or (validates and hooks.is_finished()):
            hooks.save()
    hooks.record(trainer.collect())  # a signal ended the loop between two collections
    hooks.between_steps()


def train(config: TrainConfig, resume: bool, console: RunConsole, hook: RunHook = no_hook) -> Path:
    """Train a model and write its run folder.

    Args:
        config: the configuration of the run; `config.out` is the folder of a run to resume.
        resume: continue from the newest intact checkpoint.
        console: where progress is printed.
        hook: called when the run is set up, before its configuration is written, so that a hook that raises leaves no
            run behind. The context that it returns is entered around every step; `octile.lab` measures telemetry so.

    Returns:
        The run folder.

    Raises:
        ImportError: a package of the extras `train` or `report`, or of a logger, is missing.
        FileExistsError: a new run would overwrite another run, or another process trains it.
        FileNotFoundError: there is no run to resume, or no data; or the checkpoints of the run to resume are gone.
        NotADirectoryError: a file lies in the run folder where a folder is needed.
        ValueError: the data, the configuration or a checkpoint is invalid; or the run takes too long on a CPU.
        FloatingPointError: the loss became NaN or Inf, or gradients did for more than `skip_limit` steps.
        MemoryError: the device has too little memory; the message says what to change.
        RanksError: another rank hangs or has ended.
        Stopped: Ctrl-C or SIGTERM ended the run early.
    """
    require("tokenizers", "filelock", "psutil", extra="train")
    require("matplotlib", "jinja2", extra="report")  # checked now, not after training when the report is written
    require_loggers(config.log)
    make_pipeline_schedule(config)  # refuses what does not fit, whatever the ranks
    check_world(config)
    device = pick_own_device(config.device)
    if not resume:  # the recipe of a resumed run is in its folder
        fine_tune.check_examples(config)
        check_recipe(config)
    check_rendezvous()
    if config.checkpoints is not None and "://" not in config.checkpoints:  # a resumed run may begin elsewhere
        config = replace(config, checkpoints=os.path.abspath(config.checkpoints))
    ranks = join(device, config.parallel.timeout)
    try:
        resume |= any(ranks.gather(is_restarted(config), bool))  # asked on all ranks, of which one may not resume
        path = _train_joined(config, resume, device, console, hook, ranks)
    except KeyboardInterrupt as interrupt:
        if (lost := failure_before(interrupt)) is not None:
            raise explain(lost) from interrupt
        raise
    except Exception as error:
        if (explained := explain(error)) is not error:
            raise explained from error
        raise
    leave()
    return path


def _train_joined(
    config: TrainConfig, resume: bool, device: torch.device, console: RunConsole, hook: RunHook, ranks: Ranks
) -> Path:
    if resume and config.out is None:
        raise ValueError("out is not given: --resume needs --out RUN, the run to continue")
    begun = open_run(config.out, config.checkpoints) if resume and config.out is not None else None
    config = continued(begun, config) if begun is not None else config.with_file_texts()
    if begun is not None:
        fine_tune.check_examples(config)
        check_recipe(config)
    if config.init_from is not None and not resume:
        fine_tune.check_shape(config, config.init_from)
    if begun is None or not (begun.run.data / MANIFEST).exists():
        check_data(config)
    duration = ranks.from_first(lambda: None if begun else check_duration(config, device), str | None)
    check_memory(config, device)
    check_agreement(ranks, config, resume)
    if config.checkpoints is not None:
        check_address(config.checkpoints, resume, ranks)
    run = begun.run if begun is not None else RunFolder(ranks.from_first(lambda: RunFolder.create(config).path, Path))
    ranks.from_first(run.check_folders)
    is_new, config = config.out is None, replace(config, out=run.path)
    with ExitStack() as stack:
        ranks.from_first_only(lambda: stack.enter_context(lock_folder(run.path, is_new)))
        checkpoints = RunCheckpoints(run.checkpoints_of(config), ranks)
        stack.enter_context(explaining_failures(lambda: _how_to_continue(config, run, checkpoints)))
        stack.enter_context(console.stopped_before("the first step"))
        # torchrun sends SIGTERM to the other ranks when one has ended, while they find how to continue
        while_saying = termination_ignored if ranks.size > 1 else nullcontext
        try:
            checkpoint = checkpoints.latest() if resume else None
            if begun is not None and checkpoint is None:
                check_restart(begun, config, checkpoints, ranks)
            done = 0 if checkpoint is None else check_goal(config, checkpoint)
            if begun is not None:
                duration = ranks.from_first(lambda: check_duration(config, device, done), str | None)
                print_settings(begun, done, console)
            ranks.from_first(lambda: check_disk_space(config, run, checkpoints.store, done))
            console.print(f"run folder: {run.path}")
            if config.checkpoints is not None:
                console.print(f"checkpoints go to {config.checkpoints}")
            if duration:
                console.print(duration)
            if (kernels := compile_ahead(config, device, done)) is not None:
                stack.callback(kernels.close)
            return _train(config, run, device, resume, checkpoints, checkpoint, console, hook, ranks, kernels)
        except KeyboardInterrupt as interrupt:  # before the first step, or the second during one
            with while_saying():
                if (lost := failure_before(interrupt)) is not None:
                    raise _lost(lost, config, checkpoints) from interrupt
                when = "at once" if run.config_file.exists() else "before the first step"
                how = _how_to_continue(config, run, checkpoints)
                raise Stopped.by(interrupt, f"stopped {when}; {how}") from None
        except Exception as error:
            with while_saying():
                if (lost_error := _lost(error, config, checkpoints)) is error:
                    raise
                raise lost_error from error


def _lost(error: Exception, config: TrainConfig, checkpoints: RunCheckpoints) -> Exception:
    """Say how to continue after an error of the connection to another rank; return any other error."""
    if (explained := explain(error)) is error or will_restart():
        return explained
    if (can_continue := checkpoints.can_continue()) is None:
        then = _unknown(config, checkpoints)
    elif can_continue:
        then = f"to continue: {config.resume_command}"
    else:
        then = "nothing is saved before the first checkpoint"
    return RanksError(f"{explained}; {then}")


def _how_to_continue(config: TrainConfig, run: RunFolder, checkpoints: RunCheckpoints) -> str:
    if not run.config_file.exists():
        is_cached = (run.data / MANIFEST).exists() and not is_examples(config.data)
        data = "" if is_cached else "; it prepares the data anew"
        return f"start the same command again, without --resume{data}"
    if (can_continue := checkpoints.can_continue()) is None:
        return _unknown(config, checkpoints)
    if can_continue:
        return f"to continue from the last checkpoint: {config.resume_command}"
    return f"nothing is saved before the first checkpoint; to start again: {config.resume_command}"


def _unknown(config: TrainConfig, checkpoints: RunCheckpoints) -> str:
    """What to do after a failure if the store of the checkpoints does not answer."""
    return (
        f"{checkpoints.store.url} cannot be read now, so that it is unknown whether there is a checkpoint; to continue "
        f"from the last one, or to start again: {config.resume_command}"
    )


def _train(
    config: TrainConfig,
    run: RunFolder,
    device: torch.device,
    resume: bool,
    checkpoints: RunCheckpoints,
    checkpoint: Store | None,
    console: RunConsole,
    hook: RunHook,
    ranks: Ranks,
    kernels: KernelsAhead | None,
) -> Path:
    store = open_tokens(config, run.data, resume, console, ranks)
    ranks.agree(f"the training data in {run.data}", store.digest)
    print_passes(config, store, console)
    check_prompt(config, store)
    if checkpoint is not None:
        check_settings(config, checkpoint, device, console.print)
    with explain_out_of_memory(config, device):
        # a checkpoint holds the weights, and the folder that the run began with may be gone
        trainer = build(config if checkpoint is None else replace(config, init_from=None), store, device, ranks)
    best = BestModel(trainer.model)
    if resume:
        restore_run(trainer, best, run, checkpoint, console)
    console.print_model(trainer)
    for description in trainer.strategy.descriptions():
        console.print(description)
    if config.init_from is not None and checkpoint is None:
        console.print(fine_tune.describe_initial_weights(trainer.model, config.init_from))
        if stored_format(trainer) == "fp8":
            for warning in predict_size(config.model).warnings:
                console.print(f"warning: model/ is going to be in FP8, and {warning}")
    detector = SpikeDetector(ranks.from_first(lambda: spikes_so_far(run).state, SpikeState))

    with (
        stop_requests(console.acknowledge_stop) as stop,
        console.stopped_by_its_reader(stop),
        nullcontext() if resume or not ranks.is_first else unmarked_on_failure(run, lambda: trainer.steps_done),
        report_on_failure(run, console) if ranks.is_first else nullcontext(),
        checkpoints.completed(),
        deterministic(config.deterministic),
        explain_out_of_memory(config, device, trainer),
        closing(trainer),
        (
            open_metrics(run, config.log, config.to_values(), trainer.steps_done)
            if ranks.is_first
            else nullcontext(NoMetrics())
        ) as metrics,
        console.steps(config.steps, trainer.steps_done, config.indexer_stage) as progress,
    ):
        recorder = RunRecorder(
            config, trainer, store, metrics, progress, detector, best, checkpoints, hook(trainer, run, metrics)
        )
        ranks.from_first(lambda: run.write_config(config))
        if kernels is not None:
            kernels.wait_for_plan()
            kernels.report_to(progress.compiling)
        with recorder.saved_on_failure():
            if config.init_from is not None and checkpoint is None:  # a checkpoint holds what was measured
                recorder.begin()
            run_steps(trainer, recorder, stop)
    trainer.release_captured()  # NCCL destroys no communicator whose collectives a graph has
    if trainer.steps_done < config.steps and not best.has_run_out(config.patience):
        if recorder.saved_step != trainer.steps_done:
            recorder.save()
        checkpoints.close()
        message = f"stopped after step {trainer.steps_done}; to continue: {config.resume_command}"
        raise Stopped(message, stop[0] if stop else signal.SIGTERM)
    checkpoints.close()
    stopped_by = next(filter(None, ranks.gather(stop[0] if stop else 0, int)), None)  # a signal to one rank stops all
    if trainer.steps_done < config.steps and best.best is not None:
        found = f"since step {best.best.step} was lower"
        if best.is_above_start:
            found = "was lower than before the first step"
        console.print(
            f"stopped early at step {trainer.steps_done} of {config.steps}: no held-out loss {found} "
            f"(--patience {config.patience}); to go on: {config.resume_command} --patience 0"
        )
    message = f"stopped after the last step; to write the model and the report: {config.resume_command}"
    if stopped_by is not None:
        raise Stopped(message, stopped_by)
    try:
        finish(trainer, best, run, store, console)
    except KeyboardInterrupt as interrupt:
        raise Stopped.by(interrupt, message) from None
    return run.path


def build(config: TrainConfig, store: TokenStore, device: torch.device, ranks: Ranks | None = None) -> Trainer:
    """Build the trainer of a run.

    Raises:
        ValueError: the tokenizer has more tokens than the model's vocabulary.
    """
    if store.manifest.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"the data has {store.manifest.vocab_size} tokens, the model's vocab_size is {config.model.vocab_size}"
        )
    return Trainer(config, store, device, None, ranks)
