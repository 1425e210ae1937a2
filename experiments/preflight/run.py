"""Was the preflight right? What it predicts of a model, and what a run in 8 bits from there then does, step by step.

    python experiments/preflight/run.py

The tiny model is trained in BF16. Then, for each recipe: the preflight looks at it, on the last batches that it saw;
and the training continues from the same checkpoint in 8 bits. At some of these steps the products that the step itself
makes are compared with the exact ones (`octile.lab.preflight_check.observe_step`). Beside the first prediction
stands one that is made anew, of the weights and the batch of that step: what is left of the difference is not the
model's change.
"""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octile.checkpoint.files import write_text
from octile.checkpoint.training import latest_checkpoint, load_checkpoint, save_checkpoint
from octile.lab.preflight import GemmKey, Preflight, preflight
from octile.lab.preflight_check import observe_step
from octile.lab.what_if import Error
from octile.recipe import Recipe
from octile.report.machine import machine
from octile.train.config import TrainConfig, tiny
from octile.train.console import RunConsole
from octile.train.loop import pick_device, prepare_tokens
from octile.train.token_store import TokenStore
from octile.train.trainer import Trainer

MEASURED = (1, 10, 50, 100)  # steps in 8 bits
WORST = 10


def run_on(config: TrainConfig, store: TokenStore, recipe: Recipe, checkpoint: Path) -> Trainer:
    """The trained model, about to go on under a recipe."""
    trainer = Trainer(config, store, pick_device("cpu"), recipe)
    tensors, state = load_checkpoint(checkpoint)
    trainer.load(tensors, state)
    return trainer


def look(trainer: Trainer, recipe: Recipe, least_snr_db: float, steps: range) -> Preflight:
    """The preflight of the model as it is, on the batches of some steps."""
    batches = [trainer.batches.batch(step) for step in steps]
    pairs: list[tuple[Tensor, Tensor]] = [(tokens, tokens) for tokens in batches]
    trainer.model.train()  # a validation leaves it without the losses that are only trained on
    return preflight(trainer.model, pairs, recipe, least_snr_db=least_snr_db)


def predicted(found: Preflight) -> dict[str, float]:
    """Product of weight → dB; of experts, the one that loses most."""
    return {f"{risk.gemm} {risk.weight}": db for risk in found.risks if (db := risk.total.snr_db) is not None}


def seen(errors: dict[GemmKey, Error], found: Preflight) -> dict[str, float]:
    """The same of what a step did."""
    weights = {risk.weight for risk in found.risks}
    worst: dict[str, float] = {}
    for (layer, product), error in errors.items():
        name = f"{product} {layer if layer in weights else layer.rpartition('.')[0]}"
        if error.snr_db is not None:
            worst[name] = min(worst.get(name, math.inf), error.snr_db)
    return worst


def agreement(before: dict[str, float], after: dict[str, float], least_db: float) -> dict[str, Any]:
    """How far a prediction is from what was found, dB, and whether it puts the products in the same order."""
    names = sorted(before.keys() & after.keys())
    x, y = (torch.tensor([values[name] for name in names], dtype=torch.float64) for values in (before, after))
    ranks = torch.stack([t.argsort().argsort().double() for t in (x, y)])
    apart = dict(zip(names, (y - x).tolist(), strict=True))
    below = [{name for name in names if values[name] < least_db} for values in (before, after)]
    worst = [set(sorted(names, key=values.__getitem__)[:WORST]) for values in (before, after)]
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
    """Trains on; measures at some steps where there is a prediction."""
    begin, losses, steps = trainer.steps_done, [], []
    first = predicted(found) if found else {}
    products: dict[str, Any] = {name: {"predicted": db, "found": [], "anew": []} for name, db in first.items()}
    for step in range(1, MEASURED[-1] + 1):
        if found is None or step not in MEASURED:
            losses.append(trainer.step()["main_loss"])
            continue
        again = predicted(look(trainer, recipe, found.least_snr_db, range(begin + step - 1, begin + step)))
        with observe_step(trainer.model) as errors:
            losses.append(trainer.step()["main_loss"])
        real = seen(errors, found)
        steps.append(
            {
                "step": step,
                "first_prediction": agreement(first, real, found.least_snr_db),
                "prediction_anew": agreement(again, real, found.least_snr_db),
            }
        )
        for name, kept in products.items():
            kept["found"].append(real.get(name))
            kept["anew"].append(again.get(name))
    return {"val_loss": trainer.validate()["val_loss"], "loss": losses, "measured": steps, "products_db": products}


def rounded(value: Any) -> Any:
    """Numbers to four digits behind the point, all the way down."""
    if isinstance(value, dict):
        return {name: rounded(v) for name, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return round(value, 4) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares a preflight with the run that follows.")
    parser.add_argument("--recipes", nargs="+", default=["deepseek_v3", "per_tensor", "hybrid_e5m2", "int8_tiles"])
    parser.add_argument("--before", type=int, default=150, help="steps in BF16")
    parser.add_argument("--least-snr", type=float, default=20.0, help="dB below which an exception is advised")
    parser.add_argument("--out", type=Path, default=Path("runs/lab-preflight"), help="folder (default: %(default)s)")
    asked = parser.parse_args()
    console = RunConsole()
    config = replace(tiny(), recipe="bf16", steps=asked.before + MEASURED[-1])
    store = prepare_tokens(config, asked.out / "data", console)
    trainer = Trainer(config, store, pick_device("cpu"))
    checkpoint = latest_checkpoint(asked.out / "checkpoints", asked.before)  # of an earlier try
    if checkpoint:
        trainer.load(*load_checkpoint(checkpoint))
    while trainer.steps_done < asked.before:
        trainer.step()
    checkpoint = save_checkpoint(asked.out / "checkpoints", trainer.steps_done, *trainer.state())
    console.print(f"BF16, {asked.before} steps: held-out loss {trainer.validate()['val_loss']:.4f}")
    result: dict[str, Any] = {"machine": machine(), "before": asked.before, "least_snr_db": asked.least_snr, "runs": []}

    def keep(name: str, recipe: Recipe, found: Preflight | None) -> None:
        on = run_on(config, store, recipe, checkpoint)
        run = continue_in(recipe, on, found if not recipe.exceptions else None)
        exceptions = {module: sorted(products) for module, products in recipe.exceptions}
        result["runs"].append({"recipe": name, "exceptions": exceptions, **run})
        write_text(asked.out / "preflight.json", json.dumps(rounded(result), allow_nan=False) + "\n")
        console.print(f"{name}, {len(exceptions)} exceptions: held-out loss {run['val_loss']:.4f}")
        for at in run["measured"]:
            said = at["first_prediction"]
            console.print(
                f"  step {at['step']}: {said['rms_db']:.2f} dB apart (anew {at['prediction_anew']['rms_db']:.2f}),"
                f" rank correlation {said['rank_correlation']:.2f}, {said['of_the_worst_ten']} of the worst {WORST}"
            )

    last = range(asked.before - 2, asked.before)
    keep("bf16", Recipe.bf16(), None)
    for name in asked.recipes:
        found = look(trainer, Recipe.named(name), asked.least_snr, last)
        for recipe in dict.fromkeys([Recipe.named(name), found.recipe]):
            keep(name, recipe, found)


if __name__ == "__main__":
    main()
