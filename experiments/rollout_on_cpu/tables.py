"""Print the tables of docs/rollout_on_a_cpu.md: `python tables.py FILE`, the JSON of `octile lab recompute`."""

import gzip
import json
import sys
from pathlib import Path

path = Path(sys.argv[1])
found = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_text())
own, hopper = found["operators"].values()

print(f"Recorded on: {found['device']}\n")
print("| sums | log-probabilities | equal bits | mean difference, nats | largest |\n|---|---:|---:|---:|---:|")
for row in found["log_probs"]:
    share = f"{row['equal']:,} ({row['equal'] / row['tokens']:.1%})"
    print(f"| {row['sums']} | {row['tokens']:,} | {share} | {row['mean']:.2g} | {row['largest']:.2g} |")

columns = (
    "operator",
    "values",
    "equal, this CPU's sums",
    "equal, Hopper's",
    "or neighbors",
    "largest difference",
    "first in",
)
print(f"\n| {' | '.join(columns)} |")
print("|---|---:|---:|---:|---:|---:|---|")
n_equal = 0
for a, b in zip(own, hopper, strict=True):
    if a["equal"] == a["values"] and b["equal"] == b["values"] and not (a["error"] or b["error"]):
        n_equal += 1
        continue
    first = b["first"] or a["first"] or ["", "–"]
    shares = (f"{each['error'] or format(each['equal'] / max(each['values'], 1), '.2%')}" for each in (a, b))
    name = f"`{a['operator'].removeprefix('octile.')}`"
    near = f"{b['near'] / max(b['values'], 1):.2%}"
    print(f"| {name} | {a['values']:,} | {' | '.join(shares)} | {near} | {b['largest']:.1e} | {first[1]} |")
print(f"| {n_equal} other results | | all | all | all | 0 | – |")
firsts = sorted((tuple(each["first"]), each["operator"]) for each in hopper if each["first"])
if firsts:
    print(f"\nFirst, with Hopper's sums: call {firsts[0][0][0]}, {firsts[0][1]}, in {firsts[0][0][1]}.")
