"""Print the tables of docs/rollout_on_a_cpu.md: `python tables.py FILE`, the JSON of `octile lab recompute`."""

import gzip
import json
import sys
from pathlib import Path

path = Path(sys.argv[1])
found = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_text())
names, ways = list(found["operators"]), list(found["operators"].values())

print(f"Recorded on: {found['device']}\n")
print("| computed with | log-probabilities | equal bits | mean difference, nats | largest |\n|---|---:|---:|---:|---:|")
for row in found["log_probs"]:
    share = f"{row['equal']:,} ({row['equal'] / row['tokens']:.1%})"
    print(f"| {row['sums']} | {row['tokens']:,} | {share} | {row['mean']:.2g} | {row['largest']:.2g} |")

columns = ["operator", "values", *(f"equal, {name}" for name in names)]
columns += ["or neighbors", "largest difference", "first in"]
print(f"\n| {' | '.join(columns)} |")
print(f"|---|{'---:|' * (len(columns) - 2)}---|")
n_equal = 0
for each in zip(*ways, strict=True):
    if all(a["equal"] == a["values"] and not a["error"] for a in each):
        n_equal += 1
        continue
    last = each[-1]
    first = next((a["first"][1] for a in reversed(each) if a["first"]), "–")
    shares = " | ".join(a["error"] or f"{a['equal'] / max(a['values'], 1):.3%}" for a in each)
    name = f"`{last['operator'].removeprefix('octile.')}`"
    near = f"{last['near'] / max(last['values'], 1):.3%}"
    print(f"| {name} | {last['values']:,} | {shares} | {near} | {last['largest']:.1e} | {first} |")
print(f"| {n_equal} other results | | {'all | ' * len(names)}all | 0 | – |")
for name, way in zip(names, ways, strict=True):
    firsts = sorted((tuple(each["first"]), each["operator"]) for each in way if each["first"])
    if firsts:
        print(f"\nFirst, with {name}: call {firsts[0][0][0]}, {firsts[0][1]}, in {firsts[0][0][1]}.")
