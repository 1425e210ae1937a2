"""The loop of `octile rl`: from a model and a reward to a run folder with a better model."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import torch

from octile.atomic_files import write_json, write_text
from octile.chat.template import ChatTemplate
from octile.checkpoint.files import explaining_failures
from octile.extras import require
from octile.parallel.device import pick_device
from octile.report.rl import render_rl_report
from octile.rl.config import RLConfig
from octile.rl.console import print_result, progress, summarize
from octile.rl.prompts import ArithmeticPrompts, FilePrompts, Prompts
from octile.rl.rewards import Rewards
from octile.rl.run import (
    Checkpoint,
    continued,
    create_folder,
    read_config,
    save_model,
    save_state,
    write_config,
    write_start,
)
from octile.rl.trainer import RLTrainer, check_length, longest_prompt
from octile.serve.weights.load import Folder
from octile.signals import Stopped, stop_requests
from octile.train.memory.device import is_out_of_memory
from octile.train.run.console import RunConsole
from octile.train.run.deterministic import deterministic
from octile.train.run.folder import START, RunFolder, lock_folder
from octile.train.run.loggers import require_loggers
from octile.train.run.metrics import open_metrics, read_lines, truncate_after
from octile.train.run.results import unmarked_on_failure

TEXTS_EVERY = 100  # steps from one whose texts are stored to the next


def train(config: RLConfig, resume: bool, console: RunConsole) -> Path:
    """Train a model by its rewards and write its run folder.

    Args:
        config: the configuration of the run; `config.out` is the folder of a run to resume.
        resume: continue from the newest intact checkpoint.
        console: where progress is printed.

    Returns:
        The run folder.

    Raises:
        ImportError: a package of the extras `train` or `report`, or of a logger, is missing.
        FileExistsError: a new run would overwrite another run, or another process trains it.
        FileNotFoundError: there is no model, no run to resume, or no file of prompts or of the reward.
        ValueError: the configuration, a file or a checkpoint is invalid.
        FloatingPointError: logits or gradients are not finite.
        MemoryError: memory ran out in a step.
        RuntimeError, TypeError: as for `Rewards`.
        Stopped: Ctrl-C or SIGTERM ended the run early.
    """
    require("tokenizers", "filelock", "psutil", extra="train")
    require("matplotlib", "jinja2", extra="report")  # checked now, not when the report is written
    require_loggers(config.log)
    device = pick_device(config.device)
    is_new = not resume and config.out is None
    source = config.out / START if resume and config.out is not None else config.model
    assert source is not None
    config = continued(read_config(source.parent), config) if resume else config.with_digests()
    folder = Folder.open(source)
    prompts, rewards = open_prompts(config, folder), Rewards(config.reward)
    check_length(folder, longest_prompt(folder, prompts), config.max_new_tokens)
    run = RunFolder(source.parent) if resume else create_folder(config)
    run.check_folders()
    config = replace(config, out=run.path)
    with ExitStack() as stack:
        stack.enter_context(lock_folder(run.path, is_new))
        stack.enter_context(explaining_failures(lambda: _how_to_continue(config, run)))
        checkpoint = Checkpoint(run)
        if resume:
            checkpoint.check(config, device)
        else:
            write_start(config, run)
        return _train(config, run, checkpoint, resume, device, prompts, rewards, console)


def _how_to_continue(config: RLConfig, run: RunFolder) -> str:
    if not run.config_file.exists():
        return "start the same command again, without --resume"
    return f"to continue: {config.resume_command}"


def open_prompts(config: RLConfig, folder: Folder) -> Prompts:
    """Return the prompts that a configuration names, for the model of a folder.

    Raises:
        FileNotFoundError, ValueError: as for `FilePrompts`; or the folder has a chat template that cannot be read.
    """
    if config.prompts is None:
        return ArithmeticPrompts(config.seed)
    return FilePrompts(config.prompts, config.seed, ChatTemplate.load(folder.path, folder.tokenizer))


def _train(
    config: RLConfig,
    run: RunFolder,
    checkpoint: Checkpoint,
    resume: bool,
    device: torch.device,
    prompts: Prompts,
    rewards: Rewards,
    console: RunConsole,
) -> Path:
    console.print(f"run folder: {run.path}")
    trainer = RLTrainer(config, run.path / START, prompts, rewards, device)
    mode = "exact" if trainer.is_exact else "default: its log-probabilities are not those of training, bit for bit"
    console.print(f"engine: {mode}, on {device.type}")
    if resume:
        checkpoint.restore(trainer)
        console.print(f"resumed at step {trainer.steps_done}" + (f" from {checkpoint.name}" if checkpoint.name else ""))
        for note in truncate_after(run, trainer.steps_done):
            console.print(note)
    saved = checkpoint.steps_done if resume else None
    with (
        stop_requests(console.acknowledge_stop) as stop,
        console.stopped_by_its_reader(stop),
        nullcontext() if resume else unmarked_on_failure(run, lambda: trainer.steps_done),
        deterministic(config.deterministic),
        open_metrics(run, config.log, config.to_values(), trainer.steps_done) as metrics,
        progress(console, config.steps, trainer.steps_done) as bar,
    ):
        write_config(run, config)
        while trainer.steps_done < config.steps and not stop:
            with _saved_on_failure(run, trainer, config, saved, console):
                line = trainer.step()
            metrics.write(line)
            bar.step(line)
            number = trainer.steps_done
            if number == 1 or number % TEXTS_EVERY == 0:
                metrics.write({"step": number, "texts": trainer.texts()})
            if number == config.steps or (config.checkpoint_every and number % config.checkpoint_every == 0):
                save_state(run, trainer, config)
                saved = number
        if saved != trainer.steps_done:
            save_state(run, trainer, config)
    if trainer.steps_done < config.steps:
        message = f"stopped after step {trainer.steps_done}; to continue: {config.resume_command}"
        raise Stopped(message, stop[0] if stop else signal.SIGTERM)
    save_model(trainer.model, run.model, run.path / START)
    lines = read_lines(run.metrics_file)
    steps, texts = ([line for line in lines if key in line] for key in ("reward", "texts"))
    if not steps:  # whoever has deleted the file needs the model all the same
        console.print(f"model:  {run.model}; {run.metrics_file} has no steps, so there is no report")
        return run.path
    summary = summarize(steps)
    write_json(run.summary_file, summary)
    report = run.path / "report.html"
    write_text(report, render_rl_report(f"octile rl · {run.path.name}", steps, texts, summary, config.to_values()))
    print_result(console, run.path, summary, prompts.of_step(0, 1)[0], report)
    return run.path


@contextmanager
def _saved_on_failure(
    run: RunFolder, trainer: RLTrainer, config: RLConfig, saved: int | None, console: RunConsole
) -> Iterator[None]:
    """Save the steps before one that fails, as far as that is possible, and say what to do if memory has run out.

    Args:
        run, trainer, config, console: those of the run.
        saved: the step of the last checkpoint; None without one.

    Raises:
        MemoryError: memory ran out.
    """
    try:
        yield
    except Exception as error:
        done = trainer.steps_done
        if done and saved != done and trainer.is_between_steps:
            with suppress(Exception):  # the disk may be full, or the GPU may have failed
                save_state(run, trainer, config)
                console.print(f"saved step {done}; to continue: {config.resume_command}")
        if is_out_of_memory(error):
            raise MemoryError(
                f"out of memory at step {done + 1} on the {trainer.device.type}: {config.resume_command} "
                f"--micro-batches {2 * config.micro_batches} needs less (now {config.micro_batches}), as does a new "
                "run with a smaller --group-size, --prompts-per-step or --max-new-tokens"
            ) from error
        raise
