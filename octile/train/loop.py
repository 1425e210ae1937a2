"""The training loop of `octile train`: from text to a run folder with a model, a report and a sample.

Most of this module makes sure that nothing is lost. A signal ends the loop after the steps that were launched and their
checkpoint. An error of the disk leaves the last checkpoint as it was. All launched steps are read, and their metrics
written, before a validation and before a checkpoint.

On several ranks all of them run the loop, and take the same decisions in it. Rank 0 alone prints and writes the run
folder; what it does while the others wait goes through `Ranks.from_first`, so that its failure ends them, too.
"""

from __future__ import annotations

import os
import shutil
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from octile.checkpoint.files import write_json, write_text
from octile.checkpoint.hugging_face import checkpoint_folder, save
from octile.checkpoint.store import Store
from octile.command_text import train_command
from octile.extras import require
from octile.formats import E4M3
from octile.models.counts import count_parameters
from octile.parallel.device import pick_own_device
from octile.parallel.ranks import Ranks, RanksError, explain, join, leave, will_restart
from octile.recipe import BLOCK, OperandFormat
from octile.report.machine import describe_machine, machine
from octile.report.run.memorization import find_memorization
from octile.report.run.metrics import read_run
from octile.report.run.page import write_run_report
from octile.report.run.spikes import Spike, SpikeDetector, SpikeState
from octile.serve.engine.request import Sampling
from octile.serve.generate import generate_from
from octile.signals import Stopped, stop_requests
from octile.text import format_count
from octile.torchrun import count_ranks
from octile.train.config import FILE_TEXTS, TrainConfig, flatten
from octile.train.data.batches import count_windows
from octile.train.data.corpus import check_source
from octile.train.data.prepare import prepare
from octile.train.data.token_store import MANIFEST, TokenStore
from octile.train.memory.check import check_memory, explain_out_of_memory, is_out_of_memory
from octile.train.run import fine_tune
from octile.train.run.best_model import BestModel
from octile.train.run.checkpoints import RunCheckpoints, check_place
from octile.train.run.console import RunConsole, StepProgress
from octile.train.run.deterministic import deterministic
from octile.train.run.duration import check_duration
from octile.train.run.folder import RunFolder, lock_folder
from octile.train.run.metrics import Metrics, MetricsWriter, NoMetrics, read_lines, truncate_after
from octile.train.run.recipe_check import check_recipe
from octile.train.run.resume import SavedRun, check_goal, check_settings, continued, open_run, print_settings
from octile.train.run.source_digest import source_digest
from octile.train.step.progress import batch_ramp
from octile.train.strategy.pipelined_model import make_pipeline_schedule
from octile.train.trainer import Trainer

SAMPLE_TOKENS = 128
MAX_PASSES = 4  # that are nearly as good as new text (Muennighoff et al., arXiv 2305.16264)
MAX_SPIKE_TEXT = 80  # characters of the hardest sequence in a spike's record

StepContext = Callable[[int], AbstractContextManager[object]]  # entered around each step, given the step's number
RunHook = Callable[[Trainer, RunFolder, MetricsWriter], StepContext]


def no_hook(trainer: Trainer, run: RunFolder, metrics: MetricsWriter) -> StepContext:
    """The hook that does nothing."""
    return lambda step: nullcontext()


def train(config: TrainConfig, resume: bool, console: RunConsole, hook: RunHook = no_hook) -> Path:
    """Train a model and write its run folder.

    Args:
        config: of the run; `config.out` is the folder of a run to resume.
        resume: continue from the newest intact checkpoint.
        console: where progress is printed.
        hook: called when the run is set up, before its configuration is written, so that a hook that raises leaves no
            run behind. The context that it returns is entered around every step; `octile.lab` measures telemetry so.

    Returns:
        The run folder.

    Raises:
        ImportError: a package of the extras `train` or `report` is missing.
        FileExistsError: a new run would overwrite another run, or another process trains it.
        FileNotFoundError: there is no run to resume, or no data; or the checkpoints of the run to resume are gone.
        NotADirectoryError: a file lies in the run folder where a folder is needed.
        ValueError: the data, the configuration or a checkpoint is invalid; or the run takes too long on a CPU.
        FloatingPointError: the loss became NaN or Inf, or gradients did for more than `skip_limit` steps.
        MemoryError: the device has too little memory; the message says what to change.
        RanksError: another rank hangs or has ended.
        Stopped: Ctrl-C or SIGTERM ended the run early.
    """
    require("tokenizers", "filelock", "tensorboard", "psutil", extra="train")
    require("matplotlib", "jinja2", extra="report")  # checked now, not after training when the report is written
    make_pipeline_schedule(config)  # refuses what does not fit, whatever the ranks
    check_world(config)
    device = pick_own_device(config.device)
    if not resume:  # the recipe of a resumed run is in its folder
        check_recipe(config)
    if config.checkpoints is not None and "://" not in config.checkpoints:  # a resumed run may begin elsewhere
        config = replace(config, checkpoints=os.path.abspath(config.checkpoints))
    ranks = join(device, config.parallel.timeout)
    try:
        is_restarted = any(ranks.gather(_is_restarted(config), bool))  # asked on all ranks, of which one may not resume
        path = _train_joined(config, resume or is_restarted, device, console, hook, ranks)
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
        check_recipe(config)
    if config.init_from is not None and not resume:
        fine_tune.check_shape(config, config.init_from)
    if begun is None or not (begun.run.data / MANIFEST).exists():
        check_source(config.data)
    duration = ranks.from_first(lambda: None if begun else check_duration(config, device), str | None)
    check_memory(config, device)
    _agree(ranks, config, resume)
    if config.checkpoints is not None:
        check_place(config.checkpoints, resume, ranks)
    run = begun.run if begun is not None else RunFolder(ranks.from_first(lambda: RunFolder.create(config).path, Path))
    ranks.from_first(run.check_folders)
    is_new, config = config.out is None, replace(config, out=run.path)
    with ExitStack() as stack:
        ranks.from_first_only(lambda: stack.enter_context(lock_folder(run.path, is_new)))
        checkpoints = RunCheckpoints(run.checkpoints_of(config), ranks)
        try:
            checkpoint = checkpoints.latest() if resume else None
            if begun is not None and checkpoint is None:
                _check_restart(begun, config, checkpoints, ranks)
            done = 0 if checkpoint is None else check_goal(config, checkpoint)
            if begun is not None:
                duration = ranks.from_first(lambda: check_duration(config, device, done), str | None)
                print_settings(begun, done, console)
            console.print(f"run folder: {run.path}")
            if config.checkpoints is not None:
                console.print(f"checkpoints go to {config.checkpoints}")
            if duration:
                console.print(duration)
            return _train(config, run, device, resume, checkpoints, checkpoint, console, hook, ranks)
        except KeyboardInterrupt as interrupt:  # before the first step, or the second during one
            message = "stopped before the first step: start the same command again, without --resume"
            if run.config_file.exists():
                message = f"stopped at once, before the first checkpoint; to start again: {config.resume_command}"
                if checkpoints.can_continue():
                    message = f"stopped at once; to continue from the last checkpoint: {config.resume_command}"
            raise Stopped.by(interrupt, message) from None
        except Exception as error:
            if (explained := explain(error)) is error or will_restart():
                raise
            then = "nothing is saved before the first checkpoint"
            if checkpoints.can_continue():
                then = f"to continue: {config.resume_command}"
            raise RanksError(f"{explained}; {then}") from error


def _check_restart(begun: SavedRun, config: TrainConfig, checkpoints: RunCheckpoints, ranks: Ranks) -> None:
    """Refuse to begin a run again whose checkpoints are lost or elsewhere, or whose config.json was edited.

    Raises:
        FileNotFoundError: it had checkpoints, which are gone or elsewhere.
        ValueError: its config.json was edited.
    """
    run, place = begun.run, checkpoints.store.url
    if ranks.from_first(run.summary_file.exists, bool):
        raise FileNotFoundError(
            f"{str(run.path)!r} holds a finished run, but {place} holds none of its checkpoints: "
            "bring them back, or choose another --out"
        )
    if begun.config.checkpoints != config.checkpoints:
        raise FileNotFoundError(
            f"{place} holds no checkpoint of this run, which wrote its checkpoints to "
            f"{run.checkpoints_of(begun.config)}: copy them there first"
        )
    if ranks.from_first(run.is_config_edited, bool):
        raise ValueError(
            f"{run.config_file} was changed after the run began, and no checkpoint was written yet that says "
            "how: change it back, or begin a new run with another --out"
        )
    measured, every = ranks.from_first(lambda: _last_step(run), int), begun.config.checkpoint_every
    if checkpoints.has_completed(measured, every):
        raise FileNotFoundError(
            f"{place} holds no checkpoint of this run, which has done {measured:,} steps "
            f"and saved a checkpoint every {every:,} of them: bring the checkpoints back, give their place "
            "with --checkpoints, or begin a new run with another --out"
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
) -> Path:
    store = open_tokens(config, run.data, resume, console, ranks)
    ranks.agree(f"the training data in {run.data}", store.digest)
    print_passes(config, store, console)
    _check_prompt(config, store)
    if checkpoint is not None:
        check_settings(config, checkpoint, device, console.print)
    with explain_out_of_memory(config, device):
        # a checkpoint holds the weights, and the folder that the run began with may be gone
        trainer = build(config if checkpoint is None else replace(config, init_from=None), store, device, ranks)
    best = BestModel(trainer.model)
    if resume:
        _continue(trainer, best, run, checkpoint, console)
    console.print_model(trainer)
    for description in trainer.strategy.descriptions():
        console.print(description)
    if device.type == "cuda" and (reason := trainer.strategy.why_eager()):
        console.print(f"steps are not captured in CUDA graphs, and launch kernel by kernel: {reason}")
    if config.init_from is not None and checkpoint is None:
        console.print(fine_tune.describe_initial_weights(trainer.model, config.init_from))
    spikes = SpikeDetector(ranks.from_first(lambda: spikes_so_far(run).state, SpikeState))

    with (
        stop_requests(console.acknowledge_stop) as stop,
        console.stopped_by_its_reader(stop),
        nullcontext() if resume or not ranks.is_first else _unmarked_on_failure(run, trainer),
        _report_on_failure(run, console) if ranks.is_first else nullcontext(),
        checkpoints.completed(),
        deterministic(config.deterministic),
        explain_out_of_memory(config, device, trainer),
        closing(trainer),
        closing((MetricsWriter if ranks.is_first else NoMetrics)(run, trainer.steps_done)) as metrics,
        console.steps(config.steps, trainer.steps_done, config.indexer_stage) as progress,
    ):
        recorder = _Recorder(trainer, store, metrics, progress, spikes)
        step_context = hook(trainer, run, metrics)
        ranks.from_first(lambda: run.write_config(config))
        saved_step: int | None = None
        with recorder.saved_on_failure():
            while (
                trainer.steps_done < config.steps
                and not trainer.strategy.must_stop(bool(stop))
                and not best.has_run_out(config.patience)
            ):
                number = trainer.steps_done + 1
                with step_context(number):
                    recorder.record(trainer.advance())
                last = trainer.steps_done == config.steps
                validates = last or trainer.steps_done % config.validate_every == 0
                saves = last or (config.checkpoint_every and trainer.steps_done % config.checkpoint_every == 0)
                if validates or saves:
                    recorder.record(trainer.collect())
                recorder.report_spikes()
                if trainer.steps_done < number:  # steps were discarded, and are launched again
                    continue
                if validates:
                    line = _validate(trainer, metrics)
                    progress.validation(line)
                    if config.indexer_stage != "warm_up":  # whose last model is the best aligned one
                        best.update(trainer.steps_done, line["val_loss"])
                if saves or (validates and best.has_run_out(config.patience)):
                    checkpoints.save(trainer, best, config)
                    saved_step = trainer.steps_done
            recorder.record(trainer.collect())  # a signal ended the loop between two collections
            recorder.report_spikes()
    trainer.release_captured()  # NCCL destroys no communicator whose collectives a graph has
    if trainer.steps_done < config.steps and not best.has_run_out(config.patience):
        if saved_step != trainer.steps_done:
            checkpoints.save(trainer, best, config)
        checkpoints.close()
        message = f"stopped after step {trainer.steps_done}; to continue: {config.resume_command}"
        raise Stopped(message, stop[0] if stop else signal.SIGTERM)
    checkpoints.close()
    stopped_by = next(filter(None, ranks.gather(stop[0] if stop else 0, int)), None)  # a signal to one rank stops all
    if trainer.steps_done < config.steps and best.best is not None:
        console.print(
            f"stopped early at step {trainer.steps_done} of {config.steps}: no held-out loss since step "
            f"{best.best.step} was lower (--patience {config.patience}); to go on: {config.resume_command} "
            "--patience 0"
        )
    message = f"stopped after the last step; to write the model and the report: {config.resume_command}"
    if stopped_by is not None:
        raise Stopped(message, stopped_by)
    try:
        _finish(trainer, best, run, store, console)
    except KeyboardInterrupt as interrupt:
        raise Stopped.by(interrupt, message) from None
    return run.path


def check_world(config: TrainConfig) -> None:
    """Refuse another number of processes than the configuration says, or restarts that would not find their run.

    Raises:
        ValueError: torchrun has started more or fewer; or it restarts them, and `out` is not given.
    """
    started, pp, dp = count_ranks(), config.parallel.pp, config.parallel.dp
    if started != pp * dp:
        begun = f"torchrun has started {started} (WORLD_SIZE)" if started > 1 else "this is one process"
        given = f"parallel.dp is {dp}" if pp == 1 else f"parallel.pp × parallel.dp is {pp} × {dp}"
        fitting = max(started // pp, dp)
        options = f"--parallel.dp {fitting}" if pp == 1 else f"--parallel.pp {pp} --parallel.dp {fitting}"
        sizes = {"pp": pp, "dp": dp, "ep": config.parallel.ep}
        alone = f", or {' '.join(f'--parallel.{name} 1' for name, size in sizes.items() if size > 1)} in this process"
        raise ValueError(
            f"{given}, but {begun}: it must be the number of all processes; {train_command(pp * fitting)} {options} …"
            f"{alone if started == 1 else ''}"
        )
    if pp * dp > 1 and config.out is None and will_restart():
        raise ValueError("out is not given: --max-restarts needs --out RUN, so that restarted ranks find their run")


def _is_restarted(config: TrainConfig) -> bool:
    """Whether torchrun has restarted the ranks of a run that had begun."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    return restarts > 0 and config.out is not None and RunFolder(config.out).config_file.is_file()


def _agree(ranks: Ranks, config: TrainConfig, resume: bool) -> None:
    """Refuse ranks that would train something else.

    Raises:
        ValueError: two ranks differ in code, version of torch or configuration; all ranks raise it.
    """
    if ranks.size == 1:  # whose start need not wait for the digest of all source files
        return
    ranks.agree("octile's code and torch's version", f"octile {source_digest()} and torch {torch.__version__}")
    ranks.agree("--resume", str(resume))
    settings = dict(flatten(config.to_values()))
    own = {name: str(value) for name, value in settings.items()}
    for name, values in differing(ranks.gather(own, dict[str, str])).items():
        rank = next(rank for rank, value in enumerate(values) if value != values[0])
        if name in FILE_TEXTS:
            raise ValueError(
                f"{FILE_TEXTS[name]} must name the same file on all ranks, but that of rank {rank} has other contents "
                "than that of rank 0"
            )
        raise ValueError(
            f"{name} must be the same on all ranks: rank 0 has {values[0]}, but rank {rank} has {values[rank]}"
        )


def differing(settings: list[dict[str, str]]) -> dict[str, list[str]]:
    """The settings of which two ranks have different values, with those of all ranks."""
    names = dict.fromkeys(name for of_rank in settings for name in of_rank)
    values = {name: [of_rank.get(name, "none") for of_rank in settings] for name in names}
    return {name: of_ranks for name, of_ranks in values.items() if len(set(of_ranks)) > 1}


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


def prepare_tokens(config: TrainConfig, folder: Path, console: RunConsole) -> TokenStore:
    """Tokenize the configuration's data into a folder, or reuse the tokens there."""
    with console.stages() as progress:
        store = prepare(
            config.data,
            config.model.vocab_size,
            folder,
            config.sequence_length - 1,  # a window is one token longer than that
            held_out_windows=config.val_sequences,
            tokenizer=None if config.init_from is None else checkpoint_folder(config.init_from),
            progress=progress,
            say=console.print,
        )
    console.print_data(store)
    if (windows := count_windows(store.val, config.sequence_length - 1)) < config.val_sequences:
        console.print(
            f"val_sequences is {config.val_sequences:,}, but so little text is held out: {windows:,} are measured"
        )
    return store


def print_passes(config: TrainConfig, store: TokenStore, console: RunConsole) -> None:
    """Say how often a run reads its text, if that is so often that it memorizes it."""
    passes = batch_ramp(config).before(config.steps) / count_windows(store.train, config.sequence_length - 1)
    if passes > MAX_PASSES:
        text = len(store.train)
        console.print(
            f"the run reads its {text:,} tokens of text {passes:.1f} times and begins to memorize them after about "
            f"{MAX_PASSES}: use more text (--data packages, --data PATH) or fewer tokens (--tokens {MAX_PASSES * text})"
        )


def _check_prompt(config: TrainConfig, store: TokenStore) -> None:
    length, context = 1 + len(store.tokenizer.encode(config.prompt)), config.model.max_position_embeddings
    if length >= context:
        raise ValueError(f"prompt has {length} tokens, which leave no room in the model's context of {context}")


def open_tokens(config: TrainConfig, folder: Path, resume: bool, console: RunConsole, ranks: Ranks) -> TokenStore:
    """The tokens of a run or a comparison, which rank 0 prepares, and the others open.

    What is resumed reads the tokens that it began with, even if their source has changed.
    """
    if not resume or not ranks.from_first((folder / MANIFEST).exists, bool):
        prepared = ranks.from_first_only(lambda: prepare_tokens(config, folder, console))
        if prepared is not None:
            return prepared
    return TokenStore.open(folder)


def _continue(trainer: Trainer, best: BestModel, run: RunFolder, checkpoint: Store | None, console: RunConsole) -> None:
    if checkpoint is None:
        console.print("no checkpoint was written yet: starting from the beginning")
    else:
        from octile.checkpoint.sharded import ShardedCheckpoint  # it takes a second to import

        found = ShardedCheckpoint(checkpoint.url, check=False)  # it was checked when it was chosen
        trainer.load(trainer.strategy.layout.own_rows(found), found.state)
        best.load(trainer.strategy.layout.own_rows(found, best=True), found.state, trainer.steps_done)
        console.print(f"resumed at step {trainer.steps_done} from {checkpoint.name}")
        if trainer.steps_done == trainer.config.steps:
            console.print(
                "all its steps are done: only the model, the sample and the report are written; to train on: --steps N"
            )
    for note in trainer.ranks.from_first(lambda: truncate_after(run, trainer.steps_done), list[str]):
        console.print(note)


def _validate(trainer: Trainer, metrics: MetricsWriter) -> dict[str, Any]:
    """Write the held-out loss, the load of the experts and the scales of the tiles; return the line of the first."""
    step = trainer.steps_done
    line = {"step": step, **trainer.evaluator.validate()}
    metrics.write({"step": step, "expert_load": trainer.expert_load()})
    metrics.write(line)
    scales = trainer.evaluator.tile_scales()
    if scales:
        metrics.write({"step": step, "tile_scales": scales})
    return line


class _Recorder:
    """Writes the metrics of steps in their order and shows them, as they are read."""

    def __init__(
        self,
        trainer: Trainer,
        store: TokenStore,
        metrics: MetricsWriter,
        progress: StepProgress,
        spikes: SpikeDetector,
    ):
        self.trainer, self.store, self.metrics, self.progress = trainer, store, metrics, progress
        self.detector = spikes
        self.spikes: list[tuple[Spike, Metrics]] = []  # that are not reported yet

    def record(self, lines: Iterable[Metrics]) -> None:
        """Write and show lines, and find spikes."""
        for line in lines:
            self.metrics.write(line)
            self.progress.step(line)
            if spike := self.detector.update(line["step"], line["main_loss"]):
                self.spikes.append((spike, line))

    def report_spikes(self) -> None:
        """Report the spikes that were found. It runs the model, so it is not called while a step is observed."""
        found, self.spikes = self.spikes, []
        if found:
            self.trainer.gather_weights()
        for spike, line in found:
            begins = spike.over_at is None
            text = write_spike(spike, self.trainer, self.store, self.metrics, line) if begins else str(spike)
            self.progress.console.print(text)

    @contextmanager
    def saved_on_failure(self) -> Iterator[None]:
        """Record the steps that are not read yet if an exception leaves the context, as far as that is possible.

        A loss or gradients that are not finite are recorded as the reason why the run stopped, for its report.
        """
        try:
            yield
        except Exception as error:
            self.trainer.ranks.announce_failure()
            if isinstance(error, TimeoutError):  # of a rank that waited for another one long enough
                raise
            with suppress(Exception):  # the disk may be full, or the GPU may have failed
                self.record(self.trainer.collect())
                if isinstance(error, FloatingPointError):
                    self.metrics.write({"step": self.trainer.steps_done + 1, "stopped": str(error)})
            raise


def _last_step(run: RunFolder) -> int:
    """The last step that a run has measured; 0 if it has measured none."""
    lines = read_lines(run.metrics_file) if run.metrics_file.exists() else []
    return max((line["step"] for line in lines if "loss" in line), default=0)


def spikes_so_far(run: RunFolder) -> SpikeDetector:
    """A spike detector that has seen the losses of a run to resume."""
    detector = SpikeDetector()
    for line in read_lines(run.metrics_file) if run.metrics_file.exists() else []:
        if line.get("main_loss") is not None:
            detector.update(line["step"], line["main_loss"])
    return detector


def write_spike(spike: Spike, trainer: Trainer, store: TokenStore, metrics: MetricsWriter, line: Metrics) -> str:
    """Record the first step of a loss spike, and describe it with the sequence that has the largest loss.

    The record in metrics.jsonl is {"step", "spike": {"loss", "usual", "scatter", "grad_norm", "sequence_losses",
    "worst_text", "measured_after"}}. The losses of the sequences are measured with the weights after the step
    `measured_after`. On a CPU that is the spike's first step. On a GPU up to 2 · COLLECT_EVERY − 1 steps follow it
    before its loss is collected. Measuring changes nothing that a later step depends on.

    Args:
        spike: the spike, which has just begun.
        trainer: the run, after the spike's first step or a later one.
        store: the run's tokens.
        metrics: where the record goes.
        line: the metrics of the step.
    """
    tokens_BS = trainer.batches.batch(spike.step - 1)
    losses_B = trainer.evaluator.token_losses(tokens_BS).mean(1)
    worst = int(losses_B.argmax())
    text = " ".join(store.tokenizer.decode(tokens_BS[worst].tolist()).split())[:MAX_SPIKE_TEXT]
    record = {
        "loss": spike.loss,
        "usual": spike.usual,
        "scatter": spike.scatter,
        "grad_norm": line["grad_norm"],
        "sequence_losses": losses_B.tolist(),
        "worst_text": text,
        "measured_after": trainer.steps_done,
    }
    metrics.write({"step": spike.step, "spike": record})
    return (
        f"{spike}; the gradient norm was {line['grad_norm']:.3g}; sequence {worst + 1} of {len(losses_B)} has the "
        f"largest loss now, {losses_B[worst]:.3f} (the median is {losses_B.median():.3f}): {text!r}"
    )


def _finish(trainer: Trainer, best: BestModel, run: RunFolder, store: TokenStore, console: RunConsole) -> None:
    """Write the model with the lowest held-out loss, its sample and the report, and the average after the last step."""
    formats = trainer.strategy.recipe.formats
    stored = formats and OperandFormat(E4M3, BLOCK, formats.w.scale)
    as_trained: Literal["fp8", "bf16"] = "fp8" if formats and formats.w == stored else "bf16"
    tokenizer = [store.folder / name for name in ("tokenizer.json", "tokenizer_config.json")]
    ranks = trainer.ranks
    ranks.at("the results")
    if trainer.ema:
        with trainer.evaluator.averaged():
            _save_whole(trainer, run.path / "model_ema", as_trained, tokenizer)
    best.restore()
    _save_whole(trainer, run.model, as_trained, tokenizer)
    _free_all_but_weights(trainer)  # the sample reads the model once more
    ranks.from_first(lambda: _write_results(trainer, best, run, store, console))


def _free_all_but_weights(trainer: Trainer) -> None:
    """Free captured steps, gradients and moments, after the last step: no other may follow, and no checkpoint."""
    trainer.release_captured()
    trainer.strategy.zero_gradients(trainer.optimizer)
    trainer.optimizer.state.clear()


def _save_whole(trainer: Trainer, folder: Path, weights: Literal["fp8", "bf16"], files: list[Path]) -> None:
    model = trainer.strategy.whole_model()
    trainer.ranks.from_first(lambda: save(model, folder, weights, files))


def _write_results(trainer: Trainer, best: BestModel, run: RunFolder, store: TokenStore, console: RunConsole) -> None:
    _write_summary(trainer, best, run, store)
    sample = sample_text(trainer, store, run)
    write_text(run.sample_file, sample)
    report = write_run_report(run.path)
    if memorization := find_memorization(read_run(run.path)):
        console.print(str(memorization))
    console.print_results(run, sample, report, best.best, trainer.steps_done)


@contextmanager
def _unmarked_on_failure(run: RunFolder, trainer: Trainer) -> Iterator[None]:
    """Leave no run behind if its first step fails, so that the corrected command can use the same folder.

    The prepared data stay. A non-finite loss or lack of memory is a result: the run and its report stay.
    """
    try:
        yield
    except (FloatingPointError, MemoryError):
        raise
    except Exception:
        if trainer.steps_done == 0:
            run.config_file.unlink(missing_ok=True)
            run.metrics_file.unlink(missing_ok=True)
            shutil.rmtree(run.tensorboard, ignore_errors=True)
        raise


@contextmanager
def _report_on_failure(run: RunFolder, console: RunConsole) -> Iterator[None]:
    """Write the report of the steps so far if a non-finite loss or lack of memory ends the run."""
    try:
        yield
    except (FloatingPointError, MemoryError):
        console.print(f"report: {write_run_report(run.path)}")
        raise


def sample_text(trainer: Trainer, store: TokenStore, run: RunFolder) -> str:
    """The prompt and a sampled continuation by the model that the run has written, as `octile generate` continues it.

    Greedy decoding of a model after few steps would repeat itself. If the sample fails, the text says why: the model is
    written, and the report does not depend on it.
    """
    prompt = trainer.config.prompt
    available = trainer.config.model.max_position_embeddings - 1 - len(store.tokenizer.encode(prompt))
    sampling = Sampling(min(SAMPLE_TOKENS, available), temperature=0.8, top_p=0.95)
    try:
        return prompt + "".join(generate_from(run.path, prompt, sampling, trainer.device))
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # the frames hold the model
        device = trainer.device.type
        reason = f"out of memory on the {device}" if is_out_of_memory(error) else f"{type(error).__name__}: {error}"
        return f"There is no sample: {reason}"


def _write_summary(trainer: Trainer, best: BestModel, run: RunFolder, store: TokenStore) -> None:
    counts, m = count_parameters(trainer.config.model), store.manifest
    measured_on = machine(trainer.device)
    summary = {
        "preset": trainer.config.preset,
        "recipe": trainer.config.recipe,
        "parameters": counts.total,
        "active_parameters": counts.active,
        "bytes_per_token": m.bytes_per_token,
        "held_out_share": m.held_out_share,
        "held_out_text": f"{m.tokens['val']:,} tokens in {format_count(m.documents['val'], m.unit.removesuffix('s'))}",
        "machine": describe_machine(measured_on),
        "measured_on": measured_on,
        "prompt": trainer.config.prompt,
        "command": trainer.config.full_command,
        **({"model_step": best.best.step, "model_val_loss": best.best.val_loss} if best.best else {}),
    }
    if trainer.steps_done < trainer.config.steps:
        summary["stopped_after_validations"] = trainer.config.patience
    write_json(run.summary_file, summary)
