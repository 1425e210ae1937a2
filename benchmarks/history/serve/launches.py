"""Time decode steps of V2-Lite's shape, and prompts: `python launches.py 32 256`; PYTHONPATH chooses the octile."""

import sys
from dataclasses import replace

import torch

from octile.bench.serve import engine

batches = tuple(map(int, sys.argv[1:])) or (32, 256)
shape = replace(engine.V2_LITE, batches=batches)
runner = engine._runner(shape, torch.device("cuda"), True, shape.prefill * shape.prompt)
for batch in batches:
    for _ in range(2):
        step, model, profile = engine.decoded_step(runner, shape, batch)
        speed = f"tokens/s {batch / step.seconds:.0f}"
        print(f"batch {batch} step {1e3 * step.seconds:.4f} ms, graph {1e3 * (model or 0):.4f} ms, {speed}", flush=True)
    for row in profile:
        print("   ", row.what, row.value, row.unit, flush=True)
for row in engine.prefill_rows(runner, shape):
    print("   ", row.case, row.what, row.value, row.unit, flush=True)
