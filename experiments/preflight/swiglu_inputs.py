"""Measure why wgrad of the down projections loses more than predicted: SwiGLU's output is recomputed in backward.

    python experiments/preflight/swiglu_inputs.py runs/lab-preflight     # the folder of run.py

It measures the first FP8 step in three variants: inputs of SwiGLU saved in FP8, recomputed, and layers not fused.
"""

import sys
from dataclasses import replace
from pathlib import Path

from run import load_checkpoint, load_trainer, measured_db, observe_step, predicted_db, run_preflight, tiny

from octile.checkpoint.training import latest_checkpoint
from octile.recipe import Recipe
from octile.train.data.token_store import TokenStore

folder = Path(sys.argv[1])
checkpoint = latest_checkpoint(folder / "checkpoints")
assert checkpoint is not None
_, state = load_checkpoint(checkpoint)
for label, inputs in {
    "saved": Recipe.deepseek_v3().swiglu_inputs,
    "recomputed": "recomputed",
    "not fused": None,
}.items():
    recipe = replace(Recipe.deepseek_v3(), swiglu_inputs=inputs)
    config = replace(tiny(), recipe="bf16")
    trainer = load_trainer(config, TokenStore.open(folder / "data"), recipe, checkpoint)
    step = state["steps_done"]
    prediction = run_preflight(trainer, recipe, 20.0, range(step, step + 1))
    with observe_step(trainer.model) as errors:
        trainer.step()
    before, found = predicted_db(prediction), measured_db(errors, prediction)
    apart = [found[name] - db for name, db in before.items() if name.startswith("wgrad") and "down" in name]
    print(f"{label:>11}: " + " ".join(f"{db:+.1f}" for db in apart) + " dB")
