"""Why wgrad of the down projections loses more than was predicted: SwiGLU's output is made again from 8-bit inputs.

    python experiments/preflight/kept.py runs/lab-preflight     # where run.py worked

The first step in 8 bits, with SwiGLU's inputs kept in 8 bits, made again, and layers that are no one function.
"""

import sys
from dataclasses import replace
from pathlib import Path

from run import load_checkpoint, look, observe_step, predicted, run_on, seen, tiny

from octile.checkpoint.training import latest_checkpoint
from octile.recipe import Recipe
from octile.train.token_store import TokenStore

folder = Path(sys.argv[1])
checkpoint = latest_checkpoint(folder / "checkpoints")
assert checkpoint is not None
_, state = load_checkpoint(checkpoint)
for said, kept in {"kept": Recipe.deepseek_v3().swiglu_inputs, "made again": "recomputed", "not fused": None}.items():
    recipe = replace(Recipe.deepseek_v3(), swiglu_inputs=kept)
    config = replace(tiny(), recipe="bf16")
    on = run_on(config, TokenStore.open(folder / "data"), recipe, checkpoint)
    step = state["steps_done"]
    prediction = look(on, recipe, 20.0, range(step, step + 1))
    with observe_step(on.model) as errors:
        on.step()
    before, found = predicted(prediction), seen(errors, prediction)
    apart = [found[name] - db for name, db in before.items() if name.startswith("wgrad") and "down" in name]
    print(f"{said:>11}: " + " ".join(f"{db:+.1f}" for db in apart) + " dB")
