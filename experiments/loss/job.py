"""One training run of the experiment, a process of its own: `python -m experiments.loss.job STORE JOB OUT.json`.

OUT.json is written again every few seconds with all that was measured so far. Ctrl-C or SIGTERM end the run after the
step under way; the held-out text is measured once more and the file says "stopped". A run whose numbers break says
"diverged", which is a result: its loss is NaN or infinite, or HOPELESS nats or more as a mean over EVERY steps, or
gradients that are not finite were skipped for more steps in a row than the trainer lets pass. What fails otherwise is
the caller's to note, from the exit status and the log.

What others go on from lies beside OUT.json, as JOB.pt.
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

from experiments.loss import branch
from experiments.loss.jobs import Job
from experiments.loss.recipes import around, nudge, recipe
from octile.models.counts import count_parameters
from octile.nn.fused.quantize import quantize_weight
from octile.nn.linear import Linear
from octile.nn.moe import Experts
from octile.report.machine import machine
from octile.train.batches import validation_windows
from octile.train.draft_acceptance import draft_acceptance
from octile.train.loop import pick_device
from octile.train.token_losses import token_losses
from octile.train.token_store import TokenStore
from octile.train.trainer import Trainer

EVERY = 20  # steps between lines
LOOKS = 10  # at held-out text, before the end
LOOK_WINDOWS, LAST_WINDOWS = 256, 1536
WRITE_EVERY = 5.0  # seconds
HOPELESS = 30.0  # nats a token: no run comes back from there


@dataclass
class Result:
    """What the file holds. Losses in nats a token; of every EVERY steps the mean."""

    job: dict[str, Any]
    state: str = "running"
    facts: dict[str, Any] = field(default_factory=dict)  # machine and commit, the whole configuration, sizes, costs
    steps: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    grad_norm: list[float] = field(default_factory=list)
    speed: list[float] = field(default_factory=list)
    imbalance: list[list[float]] = field(default_factory=list)  # of each layer: its busiest expert's load, of the mean
    loads: list[list[list[float]]] = field(default_factory=list)  # of each layer's experts, of the mean; of `balance`
    mtp_loss: list[float] = field(default_factory=list)
    skipped: int = 0
    val_steps: list[int] = field(default_factory=list)
    val_loss: list[float] = field(default_factory=list)
    val_error: list[float] = field(default_factory=list)  # standard error over windows
    window_loss: list[float] = field(default_factory=list)  # at the end
    last_load: dict[str, list[int]] = field(default_factory=dict)
    drafts: dict[str, float] = field(default_factory=dict)
    why: str = ""

    def write(self, out: Path) -> None:
        beside = out.with_suffix(".part")
        beside.write_text(json.dumps(self.__dict__))
        beside.replace(out)


def run(store: TokenStore, job: Job, out: Path) -> Result:
    device = pick_device("auto")
    config = job.config()
    result = Result(job.to_json(), facts={"machine": machine(device)})
    result.write(out)
    begin = time.perf_counter()
    trainer = Trainer(config, store, device, recipe(job.recipe))
    result.facts["config"] = json.loads(replace(trainer.config, recipe=job.recipe).to_json())
    if job.after:
        branch.continue_from(trainer, out.with_name(f"{job.after}.pt"))
    nudge(job.recipe, trainer.model)
    first, end = trainer.steps_done, round(config.steps * job.until)
    length = config.sequence_length - 1
    looks = validation_windows(store.val, length, LOOK_WINDOWS)
    every_look = max(1, config.steps // LOOKS)
    lines: list[dict[str, Any]] = []
    written = time.monotonic()
    with _signals() as stop, around(job.recipe):
        while trainer.steps_done < end and not stop:
            try:
                line = trainer.step()
            except FloatingPointError as error:
                result.state, result.why = "diverged", str(error)
                break
            lines.append(line)
            result.skipped = line["skipped"]
            if len(lines) == EVERY or trainer.steps_done == end:
                _note(result, lines, trainer)
                lines = []
                if not result.loss[-1] < HOPELESS:
                    result.state, result.why = "diverged", f"the loss is {result.loss[-1]}"
                    break
            if trainer.steps_done == first + 1:
                result.facts |= _facts(trainer, time.perf_counter() - begin)
            last = trainer.steps_done == end
            if trainer.steps_done % every_look == 0 and not last:
                _look(result, trainer, looks)
            if time.monotonic() - written > WRITE_EVERY:
                result.facts["seconds"] = trainer.seconds
                result.write(out)
                written = time.monotonic()
        if result.state == "running":
            _last_look(result, trainer, validation_windows(store.val, length, LAST_WINDOWS))
            result.state = "done" if trainer.steps_done == end else "stopped"
            if job.until < 1 and result.state == "done":
                branch.save(trainer, out.with_suffix(".pt"))
    result.facts |= {"seconds": trainer.seconds, "steps_done": trainer.steps_done, "tokens": trainer.tokens}
    if device.type == "cuda":
        result.facts["peak_GiB"] = torch.cuda.max_memory_allocated() / 2**30
    result.write(out)
    return result


def _note(result: Result, lines: list[dict[str, Any]], trainer: Trainer) -> None:
    result.steps.append(trainer.steps_done)
    for name, key in (("loss", "main_loss"), ("grad_norm", "grad_norm"), ("mtp_loss", "mtp_loss")):
        getattr(result, name).append(_short(statistics.fmean(line[key] for line in lines)))
    result.speed.append(round(statistics.median(line["tokens_per_s"] for line in lines)))
    load = [[n * len(of) / max(sum(of), 1) for n in of] for of in trainer.expert_load().values()]
    result.imbalance.append([_short(max(of)) for of in load])
    if result.job["group"] == "balance":  # of all runs they would be most of the file
        result.loads.append([[round(n, 3) for n in of] for of in load])


def _look(result: Result, trainer: Trainer, windows: torch.Tensor) -> list[float]:
    losses_N = token_losses(trainer, windows).double().mean(1)
    result.val_steps.append(trainer.steps_done)
    result.val_loss.append(losses_N.mean().item())
    result.val_error.append(_short(losses_N.std().item() / len(losses_N) ** 0.5))
    return losses_N.tolist()


def _last_look(result: Result, trainer: Trainer, windows: torch.Tensor) -> None:
    result.window_loss = [_short(loss, 6) for loss in _look(result, trainer, windows)]
    result.last_load = trainer.expert_load()
    if trainer.config.model.num_nextn_predict_layers:
        result.drafts = draft_acceptance(trainer, windows[:LOOK_WINDOWS]).__dict__


def _facts(trainer: Trainer, ready: float) -> dict[str, Any]:
    """What is known after the first step: sizes, and the bytes a parameter that training keeps, by kind."""
    counts = count_parameters(trainer.config.model)
    parameters = sum(p.numel() for p in trainer.model.parameters())
    return {
        "parameters": counts.total,
        "active": counts.active,
        "steps_asked": trainer.config.steps,
        "bytes_a_parameter": trainer.optimizer.bytes_per_parameter() | {"copies": _copies(trainer) / parameters},
        "ready_s": ready,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if trainer.device.type == "cuda" else "cpu",
    }


def _copies(trainer: Trainer) -> int:
    """Bytes of the weights as their products read them, which are made once a step."""
    total = 0
    for layer in trainer.model.modules():
        if not isinstance(layer, Linear | Experts) or layer.recipe is None:
            continue
        formats = layer.recipe.formats
        for weight in (layer.weight,) if isinstance(layer, Linear) else (layer.gate_up, layer.down):
            if formats is None:
                total += weight.numel() * layer.recipe.compute.itemsize
                continue
            both = quantize_weight(
                weight.detach(), replace(formats.w, amax="current"), None, cache=False, needs_dgrad=True
            )
            parts = (t.untyped_storage() for q in both for t in (q.data, q.scale))
            total += sum({part.data_ptr(): part.nbytes() for part in parts}.values())
    return total


def _short(value: float, digits: int = 5) -> float:
    return float(f"{value:.{digits}g}")


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects Ctrl-C and SIGTERM instead of dying of them."""
    caught: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: caught.append(number))
    yield caught


def main(store: Path, job: Path, out: Path) -> None:
    run(TokenStore.open(store), Job(**json.loads(job.read_text())), out)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
