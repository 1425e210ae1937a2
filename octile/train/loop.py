"""`octile train`: from text to a run folder with a model, a report and a sample.

The loop itself is short; what surrounds it makes sure that nothing is lost: a signal ends it after the step under way,
with a checkpoint, and so does an error of the disk leave the last checkpoint as it was.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import torch

from octile.checkpoint.files import write_json, write_text
from octile.checkpoint.hugging_face import checkpoint_folder, save
from octile.checkpoint.training import latest_checkpoint, load_checkpoint, save_checkpoint
from octile.extras import require
from octile.formats import E4M3
from octile.models.counts import count_parameters
from octile.recipe import BLOCK, OperandFormat
from octile.report.machine import in_words, machine
from octile.report.run.page import write_run_report
from octile.train import fine_tune
from octile.train.batches import count_windows
from octile.train.config import TrainConfig, changed
from octile.train.data import prepare
from octile.train.deterministic import deterministic
from octile.train.generate import Sampling, generate_text
from octile.train.memory import check_memory
from octile.train.out_of_memory import explained
from octile.train.run_folder import MetricsWriter, RunFolder, Stopped
from octile.train.run_lock import taken
from octile.train.run_recipe import recipe_of, with_recipe_text
from octile.train.screen import Screen
from octile.train.spike_report import spikes_so_far, write_spike
from octile.train.token_store import TokenStore
from octile.train.trainer import Trainer

SAMPLE_TOKENS = 128

Around = Callable[[int], AbstractContextManager[object]]  # entered for each step, which is given by its number
Observer = Callable[[Trainer, RunFolder, MetricsWriter], Around]


def unobserved(trainer: Trainer, run: RunFolder, metrics: MetricsWriter) -> Around:
    """Looks at nothing."""
    return lambda step: nullcontext()


def train(config: TrainConfig, resume: bool, screen: Screen, observer: Observer = unobserved) -> Path:
    """Trains a model and leaves a run folder.

    Args:
        config: of the run; `config.out` is where a resumed run lies.
        resume: continue from the newest checkpoint that is whole.
        screen: where progress is shown.
        observer: called once the run is set up, before its configuration is written, so that what it refuses leaves no
            run; what it returns is entered around every step (`octile.lab` does this).

    Returns:
        The run folder.

    Raises:
        FileExistsError: a new run would overwrite another, or another process trains it; FileNotFoundError: there is
            none to resume, or no data.
        ValueError: the data, the configuration or a checkpoint is not what it should be.
        FloatingPointError: the loss became NaN or Inf, or gradients did for more than `skip_limit` steps.
        MemoryError: the device has too little memory; says what to change.
        Stopped: by Ctrl-C or SIGTERM.
    """
    require("tokenizers", "filelock", "tensorboard", extra="train")
    require("matplotlib", "jinja2", extra="report")  # now, not when the report is written
    device = pick_device(config.device)
    run, config = _resumed(config, screen) if resume else (None, with_recipe_text(config))
    recipe_of(config)  # an unknown one is refused before anything is written
    if config.init_from is not None and not resume:
        fine_tune.check_shape(config, config.init_from)
    check_memory(config, device)
    run = run or RunFolder.create(config)
    with taken(run.path):
        screen.say(f"run folder: {run.path}")
        return _train(config, run, device, resume, screen, observer)


def _train(
    config: TrainConfig, run: RunFolder, device: torch.device, resume: bool, screen: Screen, observer: Observer
) -> Path:
    store = _tokens(config, run, resume, screen)
    _check_prompt(config, store)
    checkpoint = latest_checkpoint(run.checkpoints) if resume else None
    with explained(config, device):
        # a checkpoint holds the weights: the folder that the run began with may be gone
        trainer = build(config if checkpoint is None else replace(config, init_from=None), store, device)
    if resume:
        _continue(trainer, run, checkpoint, screen)
    screen.model(trainer)
    if config.init_from is not None and checkpoint is None:
        screen.say(fine_tune.in_words(trainer.model, config.init_from))
    spikes = spikes_so_far(run)

    with (
        _signals() as stop,
        _reported(run, screen),
        deterministic(config.deterministic),
        explained(config, device, trainer),
        closing(MetricsWriter(run, trainer.steps_done)) as metrics,
        screen.progress(config.steps, trainer.steps_done) as shown,
    ):
        around = observer(trainer, run, metrics)
        run.write_config(config)
        while trainer.steps_done < config.steps and not stop:
            with around(trainer.steps_done + 1):
                line = trainer.step()
            metrics.write(line)
            shown.step(line)
            if spike := spikes.look(line["step"], line["main_loss"]):
                begins = spike.over_at is None
                screen.say(write_spike(spike, trainer, store, metrics, line) if begins else str(spike))
            last = trainer.steps_done == config.steps
            if last or trainer.steps_done % config.validate_every == 0:
                shown.validation(_look(trainer, metrics))
            if last or (config.checkpoint_every and trainer.steps_done % config.checkpoint_every == 0):
                _checkpoint(trainer, run)
    again = f"octile train --resume --out {run.path}"
    if trainer.steps_done < config.steps:
        _checkpoint(trainer, run)
        raise Stopped(f"stopped after step {trainer.steps_done}; to continue: {again}")
    try:
        _finish(trainer, run, store, screen)
    except KeyboardInterrupt:
        raise Stopped(f"stopped when all steps were done; to write the model and the report: {again}") from None
    return run.path


def build(config: TrainConfig, store: TokenStore, device: torch.device) -> Trainer:
    """A trainer whose vocabulary is as large as the configuration's, whatever the tokenizer used of it."""
    if store.manifest.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"the data has {store.manifest.vocab_size} tokens, the model's vocab_size is {config.model.vocab_size}"
        )
    return Trainer(config, store, device)


def prepare_tokens(config: TrainConfig, folder: Path, screen: Screen) -> TokenStore:
    """The tokens of the configuration's data, built in folder or found there."""
    with screen.stages() as progress:
        store = prepare(
            config.data,
            config.model.vocab_size,
            folder,
            config.sequence_length - 1,  # a window is one token longer than that
            held_out_windows=config.val_sequences,
            tokenizer=None if config.init_from is None else checkpoint_folder(config.init_from),
            progress=progress,
        )
    screen.data(store)
    if (windows := count_windows(store.val, config.sequence_length - 1)) < config.val_sequences:
        screen.say(
            f"val_sequences is {config.val_sequences:,}, but so little text is held out: {windows:,} are measured"
        )
    return store


def _check_prompt(config: TrainConfig, store: TokenStore) -> None:
    length, context = 1 + len(store.tokenizer.encode(config.prompt)), config.model.max_position_embeddings
    if length >= context:
        raise ValueError(f"prompt has {length} tokens, which leave no room in the model's context of {context}")


def pick_device(name: str) -> torch.device:
    """The device of that name; "auto" is a GPU where there is one.

    Raises:
        ValueError: a GPU is asked for and there is none.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but torch finds no GPU here: use --device cpu or auto")
    return torch.device(name)


def _resumed(config: TrainConfig, screen: Screen) -> tuple[RunFolder, TrainConfig]:
    """The run that goes on, and with which configuration: what is asked, and the recipe that it began with."""
    if config.out is None:
        raise ValueError("out is not given: --resume needs --out RUN, the run to continue")
    run = RunFolder.open(config.out)
    saved = run.read_config()
    if config.recipe_text is None and config.recipe == saved.recipe:
        config = replace(config, recipe_text=saved.recipe_text)
    different = changed(saved, config)
    if different:
        raise ValueError(
            f"a resumed run keeps its configuration, but {', '.join(different)} would differ from {run.path}"
        )
    if saved.steps != config.steps:
        screen.say(f"steps were {saved.steps} and are now {config.steps}: the learning rate follows the new number")
    if saved.micro_batches != config.micro_batches:
        screen.say(
            f"micro_batches were {saved.micro_batches} and are now {config.micro_batches}: the same sums in another "
            "order, so the run is not the one to the bit that it would have been"
        )
    file = Path(config.recipe)
    if saved.recipe_text is None:
        config = with_recipe_text(config)  # a run of an earlier version kept a file's name only
    elif file.is_file() and file.read_text(encoding="utf-8", errors="replace") != saved.recipe_text:
        screen.say(f"{file} has changed since the run began: the run keeps the recipe that it began with")
    return run, config


def _tokens(config: TrainConfig, run: RunFolder, resume: bool, screen: Screen) -> TokenStore:
    """A resumed run reads the tokens that it began with, whatever became of their source."""
    if resume and (run.data / "manifest.json").exists():
        return TokenStore.open(run.data)
    return prepare_tokens(config, run.data, screen)


def _continue(trainer: Trainer, run: RunFolder, checkpoint: Path | None, screen: Screen) -> None:
    if checkpoint is None:
        screen.say("no checkpoint was written yet: starting from the beginning")
    else:
        trainer.load(*load_checkpoint(checkpoint, check=False))  # it was checked when it was chosen
        if trainer.steps_done > trainer.config.steps:
            raise ValueError(f"steps is {trainer.config.steps}, but the run has done {trainer.steps_done} already")
        screen.say(f"resumed at step {trainer.steps_done} from {checkpoint.name}")
    run.forget_after(trainer.steps_done)


def _look(trainer: Trainer, metrics: MetricsWriter) -> dict[str, Any]:
    """Measures what is measured now and then; returns the validation's line."""
    step = trainer.steps_done
    line = {"step": step, **trainer.validate()}
    metrics.write({"step": step, "expert_load": trainer.expert_load()})
    metrics.write(line)
    scales = trainer.tile_scales()
    if scales:
        metrics.write({"step": step, "tile_scales": scales})
    return line


def _checkpoint(trainer: Trainer, run: RunFolder) -> None:
    tensors, state = trainer.state()
    save_checkpoint(run.checkpoints, trainer.steps_done, tensors, state)


def _finish(trainer: Trainer, run: RunFolder, store: TokenStore, screen: Screen) -> None:
    """Leaves the model, the sample and the report."""
    formats = trainer.recipe.formats
    as_trained: Literal["fp8", "bf16"] = "fp8" if formats and formats.w == OperandFormat(E4M3, BLOCK) else "bf16"
    tokenizer = [store.folder / name for name in ("tokenizer.json", "tokenizer_config.json")]
    save(trainer.model, run.model, as_trained, tokenizer)
    if trainer.ema:
        with trainer.ema.applied(trainer.model):
            save(trainer.model, run.path / "model_ema", as_trained, tokenizer)
    _write_summary(trainer, run, store)
    sample = sample_text(trainer, store)
    write_text(run.sample_file, sample)
    report = write_run_report(run.path)
    screen.finish(run, sample, report)


@contextmanager
def _reported(run: RunFolder, screen: Screen) -> Iterator[None]:
    """Leaves the report of what there is when numbers or memory end a run."""
    try:
        yield
    except (FloatingPointError, MemoryError):
        screen.say(f"report: {write_run_report(run.path)}")
        raise


def sample_text(trainer: Trainer, store: TokenStore) -> str:
    """The prompt and a continuation, drawn: the likeliest text of a young model runs in circles."""
    prompt = trainer.config.prompt
    room = trainer.config.model.max_position_embeddings - 1 - len(store.tokenizer.encode(prompt))
    sampling = Sampling(max(0, min(SAMPLE_TOKENS, room)), temperature=0.8, top_p=0.95)
    return prompt + "".join(generate_text(trainer.model, store.tokenizer, prompt, sampling))


def _write_summary(trainer: Trainer, run: RunFolder, store: TokenStore) -> None:
    counts = count_parameters(trainer.config.model)
    measured_on = machine(trainer.device)
    summary = {
        "preset": trainer.config.preset,
        "recipe": trainer.config.recipe,
        "parameters": counts.total,
        "active_parameters": counts.active,
        "bytes_per_token": store.manifest.bytes["val"] / store.manifest.tokens["val"],
        "machine": in_words(measured_on),
        "measured_on": measured_on,
        "prompt": trainer.config.prompt,
    }
    write_json(run.summary_file, summary)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects Ctrl-C and SIGTERM instead of dying of them; a second one kills as usual."""
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
