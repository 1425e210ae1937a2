#!/usr/bin/env bash
# Teach additions of four digits, with and without equal bits, on all GPUs of a machine; metrics go to the folder $1.
# README.md, "Four digits", says why. PRESET, BEGIN, STEPS, SEEDS and MAX_LOSS make it short.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
out=$1 work=${WORK:-$(mktemp -d)} preset=${PRESET:-small} steps=${STEPS:-60} seeds=${SEEDS:-0 1 2 3 4}
begin=${BEGIN:-6000} gpus=$(python3 -c 'import torch; print(torch.cuda.device_count() or 1)')
mkdir -p "$out" "$work"

python3 experiments/rl/four_digits.py "$work"

beginner() { # name, GPU, steps, batch size
    CUDA_VISIBLE_DEVICES=$(($2 % gpus)) python3 -m octile train --preset "$preset" --recipe exact --data "$work/examples" \
        --steps "$3" --batch-size "$4" --sequence-length 256 --out "$work/$1" >"$out/$1.txt" 2>&1
    cp "$work/$1/metrics.jsonl" "$out/$1.jsonl"
}
beginner beginner_16 0 "$begin" 16 &
beginner beginner_64 1 $((begin / 2)) 64 &
wait -n
wait -n
grep -h "lowest held-out" "$out"/beginner_*.txt

# The one with the lower held-out loss, also without its recipe: the same weights, with another forward pass.
best=$(python3 - "$work" "${MAX_LOSS:-0.42}" <<'PY'
import json, sys
from pathlib import Path
folders = [Path(sys.argv[1], name) for name in ("beginner_16", "beginner_64")]
def loss(folder):
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return min(record["val_loss"] for record in records if "val_loss" in record)
best = min(folders, key=loss)
print(best / "model")
if loss(best) > float(sys.argv[2]):
    sys.exit(f"the best beginner has {loss(best):.3f} nats, too many to go on")
PY
)
cp -r "$best" "$work/default" && rm "$work/default/octile.json" # which has the checksum of config.json
python3 - "$work/default/config.json" <<'PY'
import json, sys
from pathlib import Path
path = Path(sys.argv[1])
config = json.loads(path.read_text())
del config["octile_recipe"]
path.write_text(json.dumps(config, indent=2))
PY

run() { # engine, seed, GPU, model, further arguments
    CUDA_VISIBLE_DEVICES=$3 python3 -m octile rl "$4" --prompts "$work/prompts.jsonl" --seed "$2" --steps "$steps" --lr 1e-4 \
        --checkpoint-every 0 --out "$work/$1_$2" "${@:5}" >"$out/$1_$2.txt" 2>&1 || echo "$1 $2 failed"
    gzip -nc "$work/$1_$2/metrics.jsonl" >"$out/$1_$2.jsonl.gz"
    tail -n 5 "$out/$1_$2.txt" | grep -E "^reward|^log-prob" | sed "s/^/$1 $2: /"
}
gpu=0
for seed in $seeds; do
    for engine in exact default corrected; do
        model=$work/default further=()
        [[ $engine == exact ]] && model=$best
        [[ $engine == corrected ]] && further=(--importance-limit 2)
        run $engine "$seed" $((gpu % gpus)) "$model" "${further[@]}" &
        gpu=$((gpu + 1))
    done
done
wait
