"""Train one model with Muon and with AdamW, at a few learning rates each, on the same tokens in the same order.

    python -m experiments.muon.run 30m OUT      four runs of 32M tokens each on a GPU, at 35M active parameters
    python -m experiments.muon.run tiny OUT     four runs of 250 steps of the preset `tiny`, on a CPU
    python -m experiments.muon.run --table OUT  the table again

Runs of one learning rate begin with the same weights. A run that ended is not repeated. OUT/NAME.json.gz is a run's
result: its configuration, machine, losses, and at the end the loss of each held-out window. OUT/data has the tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.loss.runs import read_runs, result_file, write_result
from experiments.loss.sizes import run_config
from octile.train.config import TrainConfig, preset

TOKENS = {"30m": 32e6, "tiny": 250 * 4 * 128}
DATA = {"30m": "packages", "tiny": "stdlib"}
OPTIMIZERS = ("adamw", "muon")
RATES = [1.0, 2.0]  # times the learning rate that the size has elsewhere
HELD_OUT = 512  # windows
STEPS_PER_POINT = 10  # of a recorded loss, which is their mean
VALIDATIONS = 5


def config_of(size: str, optimizer: str, rate: float, tokens: float) -> TrainConfig:
    """The configuration of a run: of a size of the loss experiment, or of the preset `tiny`."""
    if size == "tiny":
        config = preset("tiny")
        config = replace(config, steps=config.steps_for(int(tokens)))
    else:
        config = run_config(size, tokens)
    return replace(config, optim=replace(config.optim, name=optimizer, lr=rate * config.optim.lr))


def train(config: TrainConfig, folder: Path, name: str) -> dict[str, Any]:
    """Train a run on the tokens in OUT/data, and return its result."""
    import torch

    from octile.parallel.device import pick_device
    from octile.report.machine import machine
    from octile.train.data.batches import validation_windows
    from octile.train.data.token_store import TokenStore
    from octile.train.trainer import Trainer

    device, store = pick_device("auto"), TokenStore.open(folder / "data")
    trainer = Trainer(config, store, device)
    windows = validation_windows(store.val, config.sequence_length - 1, HELD_OUT)
    result: dict[str, Any] = {
        "job": {"name": name},
        "machine": machine(device),
        "config": json.loads(trainer.config.to_json()),
        "text_tokens": store.manifest.tokens["train"],
        "parameters": sum(p.numel() for p in trainer.model.parameters()),
        "state_bytes": trainer.optimizer.state_bytes(),
        "val_steps": [],
        "val_loss": [],
        "why": "",
    }
    lines: list[dict[str, Any]] = []
    try:
        while trainer.steps_done < config.steps or len(lines) < config.steps:
            lines += trainer.advance() if trainer.steps_done < config.steps else trainer.collect()
            if trainer.steps_done % -(-config.steps // VALIDATIONS) == 0 and trainer.steps_done < config.steps:
                lines += trainer.collect()
                result["val_steps"].append(trainer.steps_done)
                result["val_loss"].append(trainer.evaluator.validate()["val_loss"])
    except FloatingPointError as error:
        result["why"] = str(error)
    else:
        losses_N = trainer.evaluator.token_losses(windows).double().mean(1)
        result["val_steps"].append(trainer.steps_done)
        result["val_loss"].append(losses_N.mean().item())
        result["window_loss"] = [round(loss, 5) for loss in losses_N.tolist()]
    points = [lines[i : i + STEPS_PER_POINT] for i in range(0, len(lines), STEPS_PER_POINT)]
    result |= {
        "steps": [point[-1]["step"] for point in points],
        "loss": [statistics.fmean(line["main_loss"] for line in point) for point in points],
        "tokens": lines[-1]["tokens"] if lines else 0,
        "seconds": trainer.progress.seconds,
        "tokens_per_s": statistics.median(line["tokens_per_s"] for line in lines) if lines else None,
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
    }
    trainer.close()
    return result


def table(runs: list[Mapping[str, Any]]) -> str:
    """A line per run, the lowest held-out loss first; and that loss with Muon relative to that with AdamW."""
    from octile.bench.rows import align_columns

    done = sorted((run for run in runs if not run["why"]), key=lambda run: run["val_loss"][-1])
    rows = [["run", "learning rate", "steps", "held-out loss", "±", "tokens/s", "state bytes/parameter"]]
    for run in done:
        losses = run["window_loss"]
        rows.append([
            run["job"]["name"],
            f"{run['config']['optim']['lr']:g}",
            str(run["steps"][-1]),
            f"{run['val_loss'][-1]:.4f}",
            f"{statistics.stdev(losses) / len(losses) ** 0.5:.4f}",
            f"{run['tokens_per_s']:,.0f}",
            f"{run['state_bytes'] / run['parameters']:.2f}",
        ])  # fmt: skip
    text = align_columns(rows, right=set(rows[0]) - {"run"})
    text += "".join(f"\n{run['job']['name']} stopped: {run['why']}" for run in runs if run["why"])
    best = {name: next((r for r in done if r["config"]["optim"]["name"] == name), None) for name in OPTIMIZERS}
    if best["adamw"] and best["muon"]:
        pairs = zip(best["muon"]["window_loss"], best["adamw"]["window_loss"], strict=True)
        gaps = [muon - adamw for muon, adamw in pairs]
        adamw, error = best["adamw"]["val_loss"][-1], statistics.stdev(gaps) / len(gaps) ** 0.5
        gap = best["muon"]["val_loss"][-1] - adamw
        text += (
            f"\nMuon's lowest held-out loss, relative to AdamW's lowest: {gap / adamw:+.2%} ± {error / adamw:.2%} "
            "(standard error over held-out windows; one seed)"
        )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", nargs="?", choices=sorted(TOKENS))
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--rates", type=float, nargs="+", default=RATES, help="times the usual learning rate of the size"
    )
    parser.add_argument("--tokens", type=float, help="of a run, instead of those of its size")
    parser.add_argument("--data", help="the text, as of octile train; if not given, packages or, for tiny, stdlib")
    parser.add_argument("--table", action="store_true", help="only print the table of OUT")
    asked = parser.parse_args()
    if asked.table:
        print(table(read_runs(asked.out)))
        return
    if asked.size is None:
        parser.error(f"the size is needed: {' or '.join(sorted(TOKENS))}")
    tokens = TOKENS[asked.size] if asked.tokens is None else asked.tokens
    configs = {
        f"{asked.size}-{optimizer}-{rate:g}": config_of(asked.size, optimizer, rate, tokens)
        for rate in asked.rates
        for optimizer in OPTIMIZERS
    }
    first = next(iter(configs.values()))
    from octile.train.data.prepare import prepare

    prepare(
        asked.data or DATA[asked.size],
        first.model.vocab_size,
        asked.out / "data",
        first.sequence_length - 1,
        held_out_windows=HELD_OUT,
    )
    for name, config in configs.items():
        file = result_file(asked.out, name)
        if not file.exists():
            print(f"{name}: {config.steps} steps", file=sys.stderr, flush=True)
            write_result(file, train(config, asked.out, name))
    print(table(read_runs(asked.out)))


if __name__ == "__main__":
    main()
