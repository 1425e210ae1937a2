"""Run the lab with `octile train`: telemetry and guards during training, captures afterwards."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor

from octile.checkpoint.files import check_output_file, read_json
from octile.checkpoint.sharded import ShardedCheckpoint
from octile.checkpoint.step_folders import finished_steps, why_state_unusable
from octile.checkpoint.store import Store
from octile.checkpoint.training import find_latest, load_checkpoint
from octile.command_text import quoted_path
from octile.lab.capture import capturing
from octile.lab.guards import Event, Guards, Rule, parse_rules
from octile.lab.layers import layer_weights, match_layers, observed_weights, why_unobserved
from octile.lab.operand_stats import TelemetryRow
from octile.lab.telemetry import telemetry
from octile.models.deepseek_v3 import DeepseekV3
from octile.models.meta import meta_model
from octile.nn.conversion import apply_recipe
from octile.nn.conversion_summary import log
from octile.parallel.device import pick_device
from octile.recipe import GEMMS, GemmName
from octile.report.console import Console
from octile.report.run.lines import Record
from octile.text import format_count
from octile.train.config import TrainConfig
from octile.train.data.packed_tokens import tokens_of
from octile.train.data.token_store import TokenStore
from octile.train.run.deterministic import deterministic
from octile.train.run.folder import RunFolder
from octile.train.run.metrics import MetricsWriter, read_lines
from octile.train.run.recorder import RunHook, StepContext
from octile.train.run.resume import check_settings
from octile.train.step.progress import Progress
from octile.train.trainer import Trainer


def observer(config: TrainConfig) -> RunHook:
    """Return the observer that `octile train` enters around every step: it measures, records, and applies rules.

    Rows are written to RUN/telemetry.jsonl and the loggers ("telemetry/LAYER/PRODUCT_OPERAND_STATISTIC"). Events of
    rules are written to the log and, as {"step", "guard": {…}}, to metrics.jsonl. A resumed run restores which GEMMs
    were switched to high precision, which captures are due, and since when conditions of rules have held.

    Args:
        config: the run's configuration, which has the interval of the telemetry, its layers and the guards.

    Raises:
        FileNotFoundError: the file of the guards does not exist.
        ValueError: the recipe has no GEMM in 8 bits; a pattern matches no layer, or a rule's pattern no measured layer;
            the file of the guards is invalid; or a rule switches a GEMM to BF16, and the recipe is batch-invariant.
    """
    config = config.with_file_texts()
    if config.telemetry_every:
        if config.load_recipe().formats is None:
            raise ValueError(f"telemetry measures GEMMs in 8 bits, and recipe {config.recipe!r} has none")
        measured = tuple(observed_weights(_meta_model(config), config.telemetry_layers).weights)
        for rule in _rules(config):
            match_layers(measured, rule.layers)  # a rule for layers that are not measured would never fire
            if rule.then == "bf16" and config.load_recipe().batch_invariant:
                raise ValueError(
                    f"guards must not switch a GEMM to BF16 under recipe {config.recipe!r}, whose linear layers are "
                    "all in FP8, as they are served"
                )

    def attach(trainer: Trainer, run: RunFolder, metrics: MetricsWriter) -> StepContext:
        return _RunObserver(trainer, run, metrics).around

    return attach


def _rules(config: TrainConfig) -> tuple[Rule, ...]:
    return () if config.guards is None else parse_rules(config.guards_text or "", config.guards)


def _meta_model(config: TrainConfig) -> DeepseekV3:
    """Return the run's model, converted, on the meta device."""
    model = meta_model(config.model)
    apply_recipe(model, config.load_recipe())
    return model


class _RunObserver:
    """Telemetry, guards and captures of one run."""

    def __init__(self, trainer: Trainer, run: RunFolder, metrics: MetricsWriter):
        self.trainer, self.run, self.metrics = trainer, run, metrics
        self.every, self.layers = trainer.config.telemetry_every, trainer.config.telemetry_layers
        self.guards = Guards(_rules(trainer.config))
        due = _guards(run, trainer.steps_done - 1, trainer.steps_done)
        self.to_capture: set[tuple[str, GemmName]] = {
            (guard["layer"], guard["product"]) for guard in due if guard["then"] == "capture"
        }
        restore_switches(trainer, run, 0, trainer.steps_done)
        if run.telemetry_file.exists():
            self.guards.replay(read_lines(run.telemetry_file), _guards(run, 0, trainer.steps_done))

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        measured = self.every and step % self.every == 0
        with ExitStack() as stack:
            measurement = stack.enter_context(telemetry(self.trainer.model, 1, self.layers)) if measured else None
            recorders = [
                stack.enter_context(capturing(self.trainer.model, layer, [product]))
                for layer, product in sorted(self.to_capture)
            ]
            captured, self.to_capture = self.to_capture, set()
            yield
            rows = [{**row, "step": step} for row in measurement.step()] if measurement else []
        for recorder, (layer, product) in zip(recorders, sorted(captured), strict=True):
            path = self.run.captures / f"step_{step:08d}-{layer}-{product}.safetensors"
            recorder.save(path, step, self.trainer.config.recipe, self.run.path.name, _tokens(self.trainer, step))
            log.warning("captured %s of %s at step %d: %s", product, layer, step, path)
        self._write(rows)
        for event in self.guards.check(rows):
            self._act(event)

    def _write(self, rows: list[TelemetryRow]) -> None:
        if not rows:
            return
        with self.run.telemetry_file.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        values: dict[str, float] = {}
        for row in rows:
            prefix = f"telemetry/{row['layer']}/{row['product']}" + (f"_{row['operand']}" if "operand" in row else "")
            numbers = {name: row[name] for name in row if name != "step" and isinstance(row[name], int | float)}
            values |= {f"{prefix}_{name}": number for name, number in numbers.items()}
        self.metrics.draw(values, rows[0]["step"])

    def _act(self, event: Event) -> None:
        log.warning("%s", event)
        if event.rule.then == "capture":
            self.to_capture.add((event.layer, event.product))
            if event.step == self.trainer.config.steps:
                options = f"--step {event.step + 1} --layers {shlex.quote(event.layer)} --products {event.product}"
                command = f"octile lab capture {quoted_path(self.run.path)} {options}"
                log.warning("this was the last step; to capture the next one: %s", command)
        elif event.rule.then == "bf16" and (change := switch(self.trainer, event.layer, event.product)):
            log.warning("from step %d on %s", event.step + 1, change)
        self.metrics.write({"step": event.step, "guard": event.record()})


def switch(trainer: Trainer, layer: str, product: GemmName) -> str | None:
    """Switch a GEMM of a layer to the recipe's `compute` dtype, and return a description of the change.

    The two weights of experts share one recipe, so both are switched. There is no change, and None is returned, if the
    GEMM was switched before.
    """
    module = layer_weights(trainer.model, layer).modules[layer]
    assert module.recipe is not None
    if product in module.recipe.high_precision:
        return None
    module.recipe = module.recipe.without(product)
    path = next(name for name, other in trainer.model.named_modules() if other is module)
    return f"{product} of {path} is computed in {str(module.recipe.compute).removeprefix('torch.')}"


def restore_switches(trainer: Trainer, run: RunFolder, after: int, up_to: int) -> None:
    """Repeat the switches that guards made after one step and up to another."""
    for guard in _guards(run, after, up_to):
        if guard["then"] == "bf16":
            switch(trainer, guard["layer"], guard["product"])


def _guards(run: RunFolder, after: int, up_to: int) -> Iterator[dict[str, Any]]:
    """Yield the events of guards in metrics.jsonl after one step and up to another."""
    for line in read_lines(run.metrics_file):
        guard = line.get("guard")
        if guard and after < line["step"] <= up_to:
            yield guard


def _check_schedules(config: TrainConfig, recorded: Mapping[int, Record], steps: Iterable[int]) -> None:
    """Check that the configuration gives steps the values of its schedules that the run did them with.

    Raises:
        ValueError: it does not, since a resumed run had another number of steps.
    """
    progress = Progress(config)
    for step in steps:
        progress.steps_done = step - 1
        for name, now in {"lr": progress.learning_rate(), **progress.scheduled()}.items():
            if (before := recorded.get(step, {}).get(name, now)) != now:
                raise ValueError(
                    f"step {step} cannot be repeated: the run did it with {name} {before!r}, and the schedules of "
                    f"{config.steps:,} steps, to which it was extended later, give {now!r}"
                )


def capture_run(
    path: Path,
    step: int | None,
    layers: str = "*",
    products: tuple[GemmName, ...] = GEMMS,
    out: Path | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Capture the operands of a step of a run by repeating the step.

    The steps are repeated from the newest checkpoint before that step, or from the beginning if there is none. The
    run's folder is not changed, except for its captures. As where a run is resumed, changed settings are printed, and a
    machine that computes other bits causes a warning.

    Args:
        path: the run's folder.
        step: the step, counted from 1; None for the one after the newest checkpoint.
        layers, products: the layers and GEMMs to capture.
        out: the file to write; RUN/captures/step_N.safetensors if None.
        say: called with a line of progress.

    Returns:
        The file.

    Raises:
        FileNotFoundError: the run or its tokens do not exist.
        IsADirectoryError, NotADirectoryError, PermissionError: the file cannot be written.
        ValueError: the file is a device, does not end in .safetensors, or lies among the run's own files; the run has
            no such step; a checkpoint or a file is damaged; config.json was edited. The run did the step, or one that
            is repeated before it, under other schedules. Or a pattern matches no layer, or only layers match of which
            no GEMM is observed.
    """
    run = RunFolder.open(path)
    config = run.read_config()
    if step is not None and not 1 <= step <= config.steps + 1:
        raise ValueError(f"step must be from 1 to {config.steps + 1} (the step after the last), not {step}")
    out_file = (out or run.captures / "step.safetensors").resolve()
    check_output_file("out", out or out_file, ".safetensors")
    own = (run.path, Path(run.checkpoints_of(config)))  # of a URL no path begins with the second
    is_own = any(out_file.is_relative_to(folder.resolve()) for folder in own)
    if is_own and not out_file.is_relative_to(run.captures.resolve()):
        raise ValueError(f"out must lie in {run.captures} or outside of the run, not among its own files: {out}")
    store, device = Store(run.checkpoints_of(config)), pick_device(config.device)
    checkpoint = find_latest(store, None if step is None else step - 1)
    if (computed := checkpoint or _oldest_with_state(store)) is not None:
        check_settings(config, computed, device, say)
    config = replace(config, skip_limit=config.steps)  # a step with broken gradients can be captured too
    if checkpoint is not None:
        config = replace(config, init_from=None)  # the checkpoint holds the weights
    trainer = Trainer(config, TokenStore.open(run.data), device)
    observed_weights(trainer.model, layers)
    if checkpoint is not None:
        trainer.load(*load_checkpoint(checkpoint.url, check=False))
    step = trainer.steps_done + 1 if step is None else step
    start = f"from {checkpoint.name}" if checkpoint else "from the beginning, since no checkpoint is older"
    say(f"step {step}: {start}, after {format_count(step - trainer.steps_done - 1, 'repeated step')}")
    if unobserved := layer_weights(trainer.model, layers).unobserved:
        say(f"not captured: {why_unobserved(unobserved)}")
    recorded = {line["step"]: line for line in read_lines(run.metrics_file) if "loss" in line}
    _check_schedules(config, recorded, range(trainer.steps_done + 1, step + 1))
    restore_switches(trainer, run, 0, trainer.steps_done)
    screen = Console(stderr=True)
    earlier = range(trainer.steps_done, step - 1)
    with deterministic(config.deterministic):
        for _ in track(earlier, "repeating", console=screen, transient=True, disable=not screen.is_terminal):
            trainer.step()
            restore_switches(trainer, run, trainer.steps_done - 1, trainer.steps_done)
        with capturing(trainer.model, layers, products) as recorder:
            loss = trainer.step()["loss"]
    loss = loss if math.isfinite(loss) else None  # as metrics have it
    if step in recorded and recorded[step]["loss"] != loss:
        say(
            f"step {step}: its loss is {loss}, and was {recorded[step]['loss']} in the run, so the operands have other "
            "bits than the run's, as on another device, with other micro-batches, or on a GPU without --deterministic"
        )
    out = out or run.captures / f"step_{step:08d}.safetensors"
    return recorder.save(out, step, config.recipe, run.path.name, _tokens(trainer, step))


def load_newest_weights(path: Path) -> tuple[DeepseekV3, str] | None:
    """Load the weights of a run's newest checkpoint, as the optimizer updates them; those in `model/` may be in FP8.

    Args:
        path: the folder of a run, or of a model.

    Returns:
        The model on the CPU, float32 and in evaluation mode, and the checkpoint's name; or None if the folder holds no
        run of `octile train`, or the run has no checkpoint.

    Raises:
        ValueError: every checkpoint is damaged, or config.json is.
        OSError: the store of the checkpoints cannot be read.
    """
    run = RunFolder(path)
    if not (run.metrics_file.is_file() and run.config_file.is_file()) or "command" in read_json(run.config_file):
        return None
    config = run.read_config()
    folder = find_latest(Store(run.checkpoints_of(config)))
    if folder is None:
        return None
    checkpoint = ShardedCheckpoint(folder.url, check=False)
    prefix = "model."
    tensors = checkpoint.read_parts(dict.fromkeys(name for name in checkpoint.specs if name.startswith(prefix)))
    model = meta_model(config.model).to(torch.float32).to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.zero_()
    model.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in tensors.items()})
    return model.eval(), folder.name


def _oldest_with_state(store: Store) -> Store | None:
    """Return the oldest checkpoint that says what the run was computed with, or None."""
    for name in finished_steps(store).values():
        folder = store.folder(name)
        if why_state_unusable(folder) is None:
            return folder
    return None


def _tokens(trainer: Trainer, step: int) -> Tensor:
    """Return the token ids of the first micro-batch of a step."""
    return tokens_of(trainer.batches.batch(step - 1)).chunk(trainer.config.micro_batches)[0]
