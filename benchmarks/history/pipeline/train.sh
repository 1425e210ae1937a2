# octile train on a pipeline of two GPUs vs. one GPU: losses and tokens/s of `small`; some 2 minutes with cold kernel caches
set -u
runs=$(mktemp -d) && mkdir "$runs/pp"
options="--preset small --data stdlib --steps 20 --micro-batches 4 --validate-every 20 --val-sequences 16 --checkpoint-every 0"
python3 -m octile train $options --out "$runs/one" > "$runs/one.txt" 2>&1
cp -r "$runs/one/data" "$runs/pp/data"
python3 -m torch.distributed.run --standalone --nproc-per-node 2 -m octile train $options --parallel.pp 2 --out "$runs/pp" > "$runs/pp.txt" 2>&1
python3 - "$runs" <<'P'
import json, statistics, sys
from pathlib import Path

runs = {
    name: [json.loads(line) for line in Path(f"{sys.argv[1]}/{name}/metrics.jsonl").read_text().splitlines()]
    for name in ("one", "pp")
}
steps = {name: {line["step"]: line for line in lines if "loss" in line} for name, lines in runs.items()}
for n in sorted(steps["one"].keys() & steps["pp"].keys()):
    a, b = steps["one"][n], steps["pp"][n]
    norms = f"grad_norm {a['grad_norm']:.6f} {b['grad_norm']:.6f}"
    print(n, a["loss"], b["loss"], f"{b['loss'] / a['loss'] - 1:+.1e}", norms)
for name, lines in runs.items():
    late = [line["tokens_per_s"] for line in steps[name].values() if line["step"] > 10]
    held_out = [line["val_loss"] for line in lines if "val_loss" in line]
    speed = f"{statistics.median(late):,.0f}" if late else "none"
    print(name, "median tokens/s of steps 11 to 20:", speed, "held-out loss:", held_out)
P
