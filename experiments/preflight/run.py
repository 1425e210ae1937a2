"""Compare what a preflight predicts with what the run that follows measures, step by step.

    python experiments/preflight/run.py

The `tiny` model is trained in BF16. Then, for each recipe, a preflight predicts the error of every GEMM from the last
batches, and training continues from the same checkpoint under the recipe. At some of these steps the GEMMs of the step
itself are compared with the exact ones (`octile.lab.preflight_check.observe_step`). A second prediction, from the
weights and the batch of that very step, separates the preflight's own error from the change of the model.
"""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octile.atomic_files import write_text
from octile.checkpoint.training import latest_checkpoint, load_checkpoint, save_checkpoint
from octile.lab.preflight import GemmKey, Preflight, preflight
from octile.lab.preflight_check import observe_step
from octile.lab.what_if import Error
from octile.parallel.device import pick_device
from octile.recipe import Recipe
from octile.report.machine import machine
from octile.train.config import TrainConfig, tiny
from octile.train.data.token_store import TokenStore
from octile.train.run.console import RunConsole
from octile.train.run.tokens import prepare_tokens
from octile.train.trainer import Trainer

MEASURED = (1, 10, 50, 100)  # steps after the checkpoint
N_WORST = 10


def load_trainer(config: TrainConfig, store: TokenStore, recipe: Recipe, checkpoint: Path) -> Trainer:
    """Return a trainer that continues from a checkpoint under a recipe."""
    trainer = Trainer(config, store, pick_device("cpu"), recipe)
    tensors, state = load_checkpoint(checkpoint)
    trainer.load(tensors, state)
    return trainer


def run_preflight(trainer: Trainer, recipe: Recipe, least_snr_db: float, steps: range) -> Preflight:
    """Run the preflight of the trainer's model on the batches of some steps."""
    batches = [trainer.batches.batch(step) for step in steps]
    pairs: list[tuple[Tensor, Tensor]] = [(tokens, tokens) for tokens in batches]
    trainer.model.train()  # validation left it in evaluation mode
    return preflight(trainer.model, pairs, recipe, least_snr_db=least_snr_db)


def predicted_db(found: Preflight) -> dict[str, float]:
    """Return the predicted SNR in dB by GEMM and weight; for experts, the lowest."""
    return {f"{risk.gemm} {risk.weight}": db for risk in found.risks if (db := risk.total.snr_db) is not None}


def measured_db(errors: dict[GemmKey, Error], found: Preflight) -> dict[str, float]:
    """Return the measured SNR of a step in dB, in the form of `predicted_db`."""
    weights = {risk.weight for risk in found.risks}
    worst: dict[str, float] = {}
    for (layer, gemm), error in errors.items():
        name = f"{gemm} {layer if layer in weights else layer.rpartition('.')[0]}"
        if error.snr_db is not None:
            worst[name] = min(worst.get(name, math.inf), error.snr_db)
    return worst


def agreement(before: dict[str, float], after: dict[str, float], least_db: float) -> dict[str, Any]:
    """Compare a prediction with a measurement: differences in dB, rank correlation, GEMMs below the limit."""
    names = sorted(before.keys() & after.keys())
    x, y = (torch.tensor([values[name] for name in names], dtype=torch.float64) for values in (before, after))
    ranks = torch.stack([t.argsort().argsort().double() for t in (x, y)])
    apart = dict(zip(names, (y - x).tolist(), strict=True))
    below = [{name for name in names if values[name] < least_db} for values in (before, after)]
    worst = [set(sorted(names, key=values.__getitem__)[:N_WORST]) for values in (before, after)]
    return {
        "products": len(names),
        "rms_db": (y - x).square().mean().sqrt().item(),
        "mean_db": (y - x).mean().item(),
        "rank_correlation": torch.corrcoef(ranks)[0, 1].item(),
        "of_the_worst_ten": len(worst[0] & worst[1]),
        "below_least": {"predicted": sorted(below[0]), "found": sorted(below[1])},
        "misses_db": dict(sorted(apart.items(), key=lambda item: -abs(item[1]))[:5]),
    }


def continue_in(recipe: Recipe, trainer: Trainer, found: Preflight | None) -> dict[str, Any]:
    """Train on, and measure at the steps in MEASURED if there is a prediction."""
    begin, losses, steps = trainer.steps_done, [], []
    first = predicted_db(found) if found else {}
    gemms: dict[str, Any] = {name: {"predicted": db, "found": [], "anew": []} for name, db in first.items()}
    for step in range(1, MEASURED[-1] + 1):
        if found is None or step not in MEASURED:
            losses.append(trainer.step()["main_loss"])
            continue
        again = predicted_db(run_preflight(trainer, recipe, found.least_snr_db, range(begin + step - 1, begin + step)))
        with observe_step(trainer.model) as errors:
            losses.append(trainer.step()["main_loss"])
        real = measured_db(errors, found)
        steps.append(
            {
                "step": step,
                "first_prediction": agreement(first, real, found.least_snr_db),
                "prediction_anew": agreement(again, real, found.least_snr_db),
            }
        )
        for name, values in gemms.items():
            values["found"].append(real.get(name))
            values["anew"].append(again.get(name))
    return {
        "val_loss": trainer.evaluator.validate()["val_loss"],
        "loss": losses,
        "measured": steps,
        "products_db": gemms,
    }


def rounded(value: Any) -> Any:
    """Round the numbers of a nested value to four decimals."""
    if isinstance(value, dict):
        return {name: rounded(v) for name, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return round(value, 4) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a preflight with the run that follows.")
    parser.add_argument("--recipes", nargs="+", default=["deepseek_v3", "per_tensor", "hybrid_e5m2", "int8_tiles"])
    parser.add_argument("--before", type=int, default=150, help="steps in BF16")
    parser.add_argument("--least-snr", type=float, default=20.0, help="dB below which an exception is advised")
    parser.add_argument("--out", type=Path, default=Path("runs/lab-preflight"), help="folder (default: %(default)s)")
    asked = parser.parse_args()
    console = RunConsole()
    config = replace(tiny(), recipe="bf16", steps=asked.before + MEASURED[-1])
    store = prepare_tokens(config, asked.out / "data", console)
    trainer = Trainer(config, store, pick_device("cpu"))
    checkpoint = latest_checkpoint(asked.out / "checkpoints", asked.before)  # of an earlier attempt
    if checkpoint:
        trainer.load(*load_checkpoint(checkpoint))
    while trainer.steps_done < asked.before:
        trainer.step()
    checkpoint = save_checkpoint(asked.out / "checkpoints", trainer.steps_done, *trainer.state())
    console.print(f"BF16, {asked.before} steps: held-out loss {trainer.evaluator.validate()['val_loss']:.4f}")
    result: dict[str, Any] = {"machine": machine(), "before": asked.before, "least_snr_db": asked.least_snr, "runs": []}

    def run_recipe(name: str, recipe: Recipe, found: Preflight | None) -> None:
        trainer = load_trainer(config, store, recipe, checkpoint)
        run = continue_in(recipe, trainer, found if not recipe.exceptions else None)
        exceptions = {module: sorted(gemms) for module, gemms in recipe.exceptions}
        result["runs"].append({"recipe": name, "exceptions": exceptions, **run})
        write_text(asked.out / "preflight.json", json.dumps(rounded(result), allow_nan=False) + "\n")
        console.print(f"{name}, {len(exceptions)} exceptions: held-out loss {run['val_loss']:.4f}")
        for at in run["measured"]:
            first = at["first_prediction"]
            console.print(
                f"  step {at['step']}: {first['rms_db']:.2f} dB apart"
                f" (second prediction {at['prediction_anew']['rms_db']:.2f}),"
                f" rank correlation {first['rank_correlation']:.2f}, {first['of_the_worst_ten']} of the worst {N_WORST}"
            )

    last = range(asked.before - 2, asked.before)
    run_recipe("bf16", Recipe.bf16(), None)
    for name in asked.recipes:
        found = run_preflight(trainer, Recipe.named(name), asked.least_snr, last)
        for recipe in dict.fromkeys([Recipe.named(name), found.recipe]):
            run_recipe(name, recipe, found)


if __name__ == "__main__":
    main()
