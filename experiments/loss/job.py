"""Run one training run of the experiment in its own process: `python -m experiments.loss.job STORE JOB OUT`.

OUT, JOB.json.gz, is rewritten every few seconds with all measurements so far. Its "state" is

running   until the end
done      all steps were run
stopped   Ctrl-C or SIGTERM ended the run after the current step; the held-out loss is measured once more
diverged  a result of its own: the mean loss over STEPS_PER_LINE steps is NaN, infinite or at least DIVERGED_LOSS nats,
          or more consecutive steps than the trainer allows had gradients that are not finite

A run from which none continues is also evaluated with the mean of its weights after the last fifth of its steps, taken
every STEPS_PER_LINE steps.

A run that is done is then evaluated under another recipe, too: BF16 under `deepseek_v3`, others under BF16. The
difference is what evaluation in FP8 costs, whatever the weights were trained in. Other failures are recorded by the
caller, from the exit status and the log. The weights and moments from which other jobs continue are written next to
OUT, as JOB.pt.
"""

from __future__ import annotations

import json
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.loss import branch
from experiments.loss.draft_acceptance import draft_acceptance
from experiments.loss.jobs import Job
from experiments.loss.recipes import accumulator_context, nudge, recipe
from experiments.loss.runs import write_result
from octile.models.counts import count_parameters
from octile.nn.fused.quantize import quantize_weight
from octile.nn.linear import Linear
from octile.nn.moe import Experts
from octile.parallel.device import pick_device
from octile.report.machine import machine
from octile.train.data.batches import validation_windows
from octile.train.data.token_store import TokenStore
from octile.train.trainer import Trainer

STEPS_PER_LINE = 20  # steps between lines
VALIDATIONS = 10  # measurements of the held-out loss before the end
VALIDATION_WINDOWS, FINAL_WINDOWS = 256, 1536
WRITE_INTERVAL = 5.0  # seconds
AVERAGED = 0.2  # the share of the steps over which weights are averaged
DIVERGED_LOSS = 30.0  # nats a token; no run recovers from there


@dataclass
class Result:
    """The content of the result file. Losses are means over STEPS_PER_LINE steps, in nats a token."""

    job: dict[str, Any]
    state: str = "running"
    facts: dict[str, Any] = field(default_factory=dict)  # machine, commit, text_tokens, configuration, sizes, costs
    steps: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    speed: list[float] = field(default_factory=list)
    imbalance: list[list[float]] = field(default_factory=list)  # maximum expert load / mean of each layer
    loads: list[list[list[float]]] = field(
        default_factory=list
    )  # load / mean of each expert, by layer; group `balance`
    mtp_loss: list[float] = field(default_factory=list)
    skipped: int = 0
    val_steps: list[int] = field(default_factory=list)
    val_loss: list[float] = field(default_factory=list)
    val_error: list[float] = field(default_factory=list)  # standard error over the held-out windows
    window_loss: list[float] = field(default_factory=list)  # of each held-out window at the end
    averaged_window_loss: list[float] = field(default_factory=list)  # the same of the averaged weights
    other_window_loss: dict[str, list[float]] = field(default_factory=dict)  # of the same weights under another recipe
    last_load: dict[str, list[int]] = field(default_factory=dict)
    drafts: dict[str, float] = field(default_factory=dict)
    why: str = ""

    def write(self, out: Path) -> None:
        """Replace the file."""
        write_result(out, self.__dict__)


def run(store: TokenStore, job: Job, out: Path) -> Result:
    """Train the job and write its result to `out`."""
    device = pick_device("auto")
    config = job.config()
    result = Result(job.to_json(), facts={"machine": machine(device), "text_tokens": store.manifest.tokens["train"]})
    result.write(out)
    begin = time.perf_counter()
    trainer = Trainer(config, store, device, recipe(job.recipe))
    result.facts["config"] = json.loads(replace(trainer.config, recipe=job.recipe).to_json())
    if job.after:
        branch.continue_from(trainer, out.with_name(f"{job.after}.pt"))
    nudge(job.recipe, trainer.model)
    first, end = trainer.steps_done, round(config.steps * job.until)
    length = config.sequence_length - 1
    windows, final_windows = (validation_windows(store.val, length, n) for n in (VALIDATION_WINDOWS, FINAL_WINDOWS))
    validation_interval = max(1, config.steps // VALIDATIONS)
    average = WeightAverage(trainer.model)
    lines: list[dict[str, Any]] = []
    written = time.monotonic()
    with _signals() as stop, accumulator_context(job.recipe):
        while trainer.steps_done < end and not stop:
            try:
                line = trainer.step()
            except FloatingPointError as error:
                result.state, result.why = "diverged", str(error)
                break
            lines.append(line)
            result.skipped = line["skipped"]
            if len(lines) == STEPS_PER_LINE or trainer.steps_done == end:
                _record(result, lines, trainer)
                lines = []
                if not job.is_trunk and trainer.steps_done > (1 - AVERAGED) * config.steps:
                    average.add()
                if not result.loss[-1] < DIVERGED_LOSS:
                    result.state, result.why = "diverged", f"the loss is {result.loss[-1]}"
                    break
            if trainer.steps_done == first + 1:
                result.facts |= _first_facts(trainer, time.perf_counter() - begin)
            last = trainer.steps_done == end
            if trainer.steps_done % validation_interval == 0 and not last:
                _validate(result, trainer, windows)
            if time.monotonic() - written > WRITE_INTERVAL:
                result.facts["seconds"] = trainer.progress.seconds
                result.write(out)
                written = time.monotonic()
        if result.state == "running":
            _validate_at_end(result, trainer, final_windows)
            result.state = "done" if trainer.steps_done == end else "stopped"
            if average.count:
                with average.applied():
                    losses_N = window_losses(trainer, final_windows)
                result.averaged_window_loss = [_rounded(loss, 6) for loss in losses_N.tolist()]
            if job.is_trunk and result.state == "done":
                branch.save(trainer, out.with_name(f"{job.name}.pt"))
    result.facts |= {
        "seconds": trainer.progress.seconds,
        "steps_done": trainer.steps_done,
        "tokens": trainer.progress.tokens,
    }
    if device.type == "cuda":
        result.facts["peak_GiB"] = torch.cuda.max_memory_allocated() / 2**30
    result.write(out)
    if result.state == "done" and not job.is_trunk:
        other = "deepseek_v3" if trainer.strategy.recipe.formats is None else "bf16"
        losses_N = losses_under(other, trainer, final_windows)
        result.other_window_loss[other] = [_rounded(loss, 6) for loss in losses_N.tolist()]
        result.write(out)
    return result


def _record(result: Result, lines: list[dict[str, Any]], trainer: Trainer) -> None:
    result.steps.append(trainer.steps_done)
    for name, key in (("loss", "main_loss"), ("grad_norm", "grad_norm"), ("mtp_loss", "mtp_loss")):
        getattr(result, name).append(_rounded(statistics.fmean(line[key] for line in lines)))
    result.speed.append(round(statistics.median(line["tokens_per_s"] for line in lines)))
    loads = [[n * len(layer) / max(sum(layer), 1) for n in layer] for layer in trainer.expert_load().values()]
    result.imbalance.append([_rounded(max(layer)) for layer in loads])
    if result.job["group"] == "balance":  # for all runs these would be most of the file
        result.loads.append([[round(n, 3) for n in layer] for layer in loads])


def _validate(result: Result, trainer: Trainer, windows: Tensor) -> list[float]:
    losses_N = window_losses(trainer, windows)
    result.val_steps.append(trainer.steps_done)
    result.val_loss.append(losses_N.mean().item())
    result.val_error.append(_rounded(losses_N.std().item() / len(losses_N) ** 0.5))
    return losses_N.tolist()


def _validate_at_end(result: Result, trainer: Trainer, windows: Tensor) -> None:
    result.window_loss = [_rounded(loss, 6) for loss in _validate(result, trainer, windows)]
    result.last_load = trainer.expert_load()
    if trainer.config.model.num_nextn_predict_layers:
        result.drafts = draft_acceptance(trainer, windows[:VALIDATION_WINDOWS]).__dict__


class WeightAverage:
    """The mean of a model's parameters at several steps, in float32 on their device."""

    def __init__(self, model: nn.Module):
        self.count = 0
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._means: list[Tensor] = []

    @torch.no_grad()
    def add(self) -> None:
        """Add the parameters as they are now."""
        self.count += 1
        if self.count == 1:
            self._means = [p.detach().float().clone() for p in self._parameters]
        else:
            torch._foreach_lerp_(self._means, [p.float() for p in self._parameters], 1 / self.count)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replace the parameters by the mean inside the context, and restore them bit for bit after it."""
        own = [p.detach().clone() for p in self._parameters]
        with torch.no_grad():
            torch._foreach_copy_(self._parameters, self._means)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, own)


def window_losses(trainer: Trainer, windows: Tensor) -> Tensor:
    """Return the loss of each window, float64 [N], of the trainer's weights."""
    return trainer.evaluator.token_losses(windows).double().mean(1)


def losses_under(name: str, trainer: Trainer, windows: Tensor) -> Tensor:
    """Return the loss of each window, float64 [N], of the trainer's weights under another recipe, which it then has."""
    trainer.strategy.use_recipe(recipe(name))
    return window_losses(trainer, windows)


def _first_facts(trainer: Trainer, ready: float) -> dict[str, Any]:
    """Return what is known after the first step: sizes, and the bytes per parameter that training stores, by kind."""
    counts = count_parameters(trainer.config.model)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    return {
        "parameters": counts.total,
        "active": counts.active,
        "steps_asked": trainer.config.steps,
        "bytes_a_parameter": trainer.optimizer.bytes_per_parameter() | {"copies": _operand_bytes(trainer) / parameters},
        "ready_s": ready,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if trainer.device.type == "cuda" else "cpu",
    }


def _operand_bytes(trainer: Trainer) -> int:
    """Return the bytes of the weights in the formats that GEMMs read, which are quantized once a step."""
    total = 0
    for layer in trainer.model.modules():
        if not isinstance(layer, Linear | Experts) or layer.recipe is None:
            continue
        formats = layer.recipe.formats
        for weight in (layer.weight,) if isinstance(layer, Linear) else (layer.gate_up, layer.down):
            if formats is None:
                total += weight.numel() * layer.recipe.compute.itemsize
                continue
            operands = quantize_weight(
                weight.detach(), replace(formats.w, amax="current"), None, cache=False, needs_dgrad=True
            )
            storages = (t.untyped_storage() for q in operands for t in (q.data, q.scale))
            total += sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    return total


def _rounded(value: float, digits: int = 5) -> float:
    return float(f"{value:.{digits}g}")


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM in a list instead of exiting."""
    caught: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: caught.append(number))
    yield caught


def main(store: Path, job: Path, out: Path) -> None:
    run(TokenStore.open(store), Job(**json.loads(job.read_text())), out)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
