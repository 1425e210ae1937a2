"""The lab beside a training run: telemetry and guards while `octile train` works, captures when it is over."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from octile.checkpoint.training import latest_checkpoint, load_checkpoint
from octile.lab.capture import capturing
from octile.lab.guards import Action, Event, Guards, Rule
from octile.lab.layers import layer_weights, matching
from octile.lab.operand_stats import Row
from octile.lab.telemetry import telemetry
from octile.models.deepseek_v3 import DeepseekV3
from octile.nn.conversion import apply_recipe, log
from octile.recipe import GEMMS, GemmName
from octile.train.config import TrainConfig
from octile.train.deterministic import deterministic
from octile.train.loop import RunHook, StepContext, pick_device
from octile.train.run_folder import MetricsWriter, RunFolder, read_lines
from octile.train.token_store import TokenStore
from octile.train.trainer import Trainer


def observer(config: TrainConfig, every: int, layers: str = "*", rules: tuple[Rule, ...] = ()) -> RunHook:
    """What `octile train` enters around every step: measures, writes down, and does what the rules say.

    Rows go to RUN/telemetry.jsonl and TensorBoard ("telemetry/LAYER/PRODUCT_OPERAND_FIGURE"), what a rule does to the
    log and, as {"step", "guard": {…}}, to metrics.jsonl. A run that is resumed continues with the products switched
    that were switched, with the captures that were due, and with the rules knowing what they knew.

    Args:
        config: of the run.
        every: n measures the steps n, 2n, …; 0 none.
        layers: patterns of layers' names.
        rules: as `read_rules` gives them.

    Raises:
        ValueError: every is negative or more than the run's steps, there are rules or chosen layers but nothing is
            measured, the recipe makes no product in 8 bits, a pattern matches no layer, or a rule's no layer that is
            measured.
    """
    if not 0 <= every <= config.steps:
        raise ValueError(
            f"telemetry_every must be from 1 to {config.steps}, the run's steps, or 0 for none; not {every}"
        )
    if rules and not every:
        raise ValueError("guards look at telemetry: add --telemetry-every N")
    if layers != "*" and not every:
        raise ValueError("telemetry_layers says of what telemetry is taken: add --telemetry-every N")
    if every and config.load_recipe().formats is None:
        raise ValueError(f"telemetry measures products in 8 bits, and recipe {config.recipe!r} makes none")
    if every:
        measured = tuple(layer_weights(_layers_of(config), layers).weights)
        for rule in rules:
            matching(measured, rule.layers)  # a rule for layers that nobody measures would never fire

    def attach(trainer: Trainer, run: RunFolder, metrics: MetricsWriter) -> StepContext:
        return _Beside(trainer, run, metrics, every, layers, Guards(rules)).around

    return attach


def _layers_of(config: TrainConfig) -> DeepseekV3:
    """A run's model without its weights."""
    with torch.device("meta"):
        model = DeepseekV3(config.model)
    apply_recipe(model, config.load_recipe())
    return model


class _Beside:
    """One run and what looks on."""

    def __init__(
        self, trainer: Trainer, run: RunFolder, metrics: MetricsWriter, every: int, layers: str, guards: Guards
    ):
        self.trainer, self.run, self.metrics = trainer, run, metrics
        self.every, self.layers, self.guards = every, layers, guards
        due = _guards(run, "capture", trainer.steps_done - 1, trainer.steps_done)
        self.to_capture: set[tuple[str, GemmName]] = {(guard["layer"], guard["product"]) for guard in due}
        switch_again(trainer, run, 0, trainer.steps_done)
        if run.telemetry_file.exists():
            guards.look(read_lines(run.telemetry_file))

    @contextmanager
    def around(self, step: int) -> Iterator[None]:
        measured = self.every and step % self.every == 0
        with ExitStack() as stack:
            watching = stack.enter_context(telemetry(self.trainer.model, 1, self.layers)) if measured else None
            recorders = [
                stack.enter_context(capturing(self.trainer.model, layer, [product]))
                for layer, product in sorted(self.to_capture)
            ]
            wanted, self.to_capture = self.to_capture, set()
            yield
            rows = [{**row, "step": step} for row in watching.step()] if watching else []
        for recorder, (layer, product) in zip(recorders, sorted(wanted), strict=True):
            path = self.run.captures / f"step_{step:08d}-{layer}-{product}.safetensors"
            recorder.save(path, step, self.trainer.recipe.name, self.run.path.name, _tokens(self.trainer, step))
            log.warning("captured %s of %s at step %d: %s", product, layer, step, path)
        self._write(rows)
        for event in self.guards.look(rows):
            self._act(event)

    def _write(self, rows: list[Row]) -> None:
        if not rows:
            return
        with self.run.telemetry_file.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        for row in rows:
            place = f"telemetry/{row['layer']}/{row['product']}" + (f"_{row['operand']}" if "operand" in row else "")
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float):
                    self.metrics.draw(f"{place}_{name}", value, row["step"])

    def _act(self, event: Event) -> None:
        log.warning("%s", event)
        if event.rule.then == "capture":
            self.to_capture.add((event.layer, event.product))
            if event.step == self.trainer.config.steps:
                options = f"--step {event.step + 1} --layers {event.layer} --products {event.product}"
                log.warning("no step follows; to capture the next: octile lab capture %s %s", self.run.path, options)
        elif event.rule.then == "bf16":
            log.warning("from step %d on %s", event.step + 1, switch(self.trainer, event.layer, event.product))
        self.metrics.write({"step": event.step, "guard": event.record()})


def switch(trainer: Trainer, layer: str, product: GemmName) -> str:
    """Makes a product of a layer in the recipe's `compute` type from now on; says what was done.

    Experts' two weights share one recipe, so both are switched.
    """
    module = layer_weights(trainer.model, layer).modules[layer]
    assert module.recipe is not None
    module.recipe = module.recipe.without(product)
    whole = next(name for name, other in trainer.model.named_modules() if other is module)
    return f"{product} of {whole} is made in {str(module.recipe.compute).removeprefix('torch.')}"


def switch_again(trainer: Trainer, run: RunFolder, after: int, up_to: int) -> None:
    """Repeats the switches that guards made after one step and up to another."""
    for guard in _guards(run, "bf16", after, up_to):
        switch(trainer, guard["layer"], guard["product"])


def _guards(run: RunFolder, then: Action, after: int, up_to: int) -> Iterator[dict[str, Any]]:
    """What guards did after one step and up to another, as metrics.jsonl keeps it."""
    for line in read_lines(run.metrics_file) if run.metrics_file.exists() else []:
        guard = line.get("guard")
        if guard and guard["then"] == then and after < line["step"] <= up_to:
            yield guard


def capture_run(
    path: Path,
    step: int | None,
    layers: str = "*",
    products: tuple[GemmName, ...] = GEMMS,
    out: Path | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Captures the operands of a step of a run, by doing the step again.

    The run's newest checkpoint before that step is loaded, or the run is begun anew where there is none, and the steps
    from there on are done as the run did them. Nothing in the run's folder changes but its captures.

    Args:
        path: the run's folder.
        step: counted from 1; the one after the newest checkpoint if None.
        layers, products: which to keep.
        out: the file; RUN/captures/step_N.safetensors if None.
        say: shows a line of progress.

    Returns:
        The file.

    Raises:
        FileNotFoundError: there is no run, or its tokens are gone.
        ValueError: the run has no such step; a checkpoint or a file is damaged; a pattern matches no layer.
    """
    run = RunFolder.open(path)
    config = run.read_config()
    if step is not None and not 1 <= step <= config.steps + 1:
        raise ValueError(f"step must be from 1 to {config.steps + 1} for this run, not {step}")
    checkpoint = latest_checkpoint(run.checkpoints, None if step is None else step - 1)
    config = replace(config, skip_limit=config.steps)  # a step with broken gradients is one to look at
    if checkpoint is not None:
        config = replace(config, init_from=None)  # the checkpoint holds the weights
    trainer = Trainer(config, TokenStore.open(run.data), pick_device(config.device))
    layer_weights(trainer.model, layers)
    if checkpoint is not None:
        trainer.load(*load_checkpoint(checkpoint, check=False))
    step = trainer.steps_done + 1 if step is None else step
    begun = f"from {checkpoint.name}" if checkpoint else "from the beginning, since no checkpoint is older"
    say(f"step {step}: {begun}, {step - trainer.steps_done - 1} steps before it are done again")
    switch_again(trainer, run, 0, trainer.steps_done)
    screen = Console(stderr=True)
    again = range(trainer.steps_done, step - 1)
    with deterministic(config.deterministic):
        for _ in track(again, "repeating", console=screen, transient=True, disable=not screen.is_terminal):
            trainer.step()
            switch_again(trainer, run, trainer.steps_done - 1, trainer.steps_done)
        with capturing(trainer.model, layers, products) as recorder:
            trainer.step()
    out = out or run.captures / f"step_{step:08d}.safetensors"
    return recorder.save(out, step, config.recipe, run.path.name, _tokens(trainer, step))


def _tokens(trainer: Trainer, step: int) -> Tensor:
    """What the model read in the first micro-batch of a step."""
    return trainer.batches.batch(step - 1).chunk(trainer.config.micro_batches)[0]
