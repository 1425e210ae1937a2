"""Times decode steps of V2-Lite's shape: python3 decode.py 32 64 256; PYTHONPATH chooses the tree."""
import sys
from dataclasses import replace
import torch
import octile
from octile.bench.rows import Row
from octile.bench.serve import engine as e
batches = tuple(map(int, sys.argv[1:])) or (32, 256)
device = torch.device("cuda")
shape = replace(e.V2_LITE, batches=batches)
print(octile.__file__, torch.cuda.get_device_name(), flush=True)
runner = e._runner(shape, device, True, shape.prefill * shape.prompt)
for batch in batches:
    for _ in range(2):
        step, model, profile = e.decoded_step(runner, shape, batch)
        print(f"batch {batch} step {1e3*step.seconds:.4f} ms, graph {1e3*(model or 0):.4f} ms, tokens/s {batch/step.seconds:.0f}", flush=True)
    for row in profile: print("   ", row.what, row.value, row.unit, flush=True)
for row in e.prefill_rows(runner, shape): print("   ", row.case, row.what, row.value, row.unit, flush=True)
