"""Paired differences from exact mode of the runs of one beginner: means of the seeds with 95% intervals."""

import gzip
import json
import statistics
import sys
from pathlib import Path

ENGINES = ("exact", "default", "corrected")
STUDENT = {3: 4.303, 5: 2.776}  # by seeds: the 97.5% quantile of Student's distribution with one degree less
COMPARED = ("mean reward", "mean reward of the last ten steps", "mean gradient norm", "mean KL")


def steps(path: Path) -> list[dict]:
    with gzip.open(path, "rt") as lines:
        return [record for record in map(json.loads, lines) if "reward" in record]


def figures(path: Path) -> dict[str, float]:
    records = steps(path)
    rewards = [record["reward"] for record in records]
    tokens = sum(record["delta_tokens"] for record in records)
    return {
        "mean reward": statistics.mean(rewards),
        "mean reward of the last ten steps": statistics.mean(rewards[-10:]),
        "mean gradient norm": statistics.mean(record["grad_norm"] for record in records),
        "mean KL": statistics.mean(record["kl"] for record in records),
        "equal bits": sum(record["delta_equal"] for record in records) / tokens,
        "mean difference": sum(record["delta_mean"] * record["delta_tokens"] for record in records) / tokens,
        "largest difference": max(record["delta_largest"] for record in records),
    }


def main(folder: Path) -> None:
    seeds = sorted(int(path.name.split("_")[1].split(".")[0]) for path in folder.glob("exact_*.jsonl.gz"))
    runs = {engine: [figures(folder / f"{engine}_{seed}.jsonl.gz") for seed in seeds] for engine in ENGINES}
    for engine, of_seeds in runs.items():
        for seed, values in zip(seeds, of_seeds, strict=True):
            print(engine, seed, *(f"{name} {value:.4f}" for name, value in values.items()), sep="; ")
    for engine in ("default", "corrected"):
        for name in COMPARED:
            differences = [other[name] - exact[name] for other, exact in zip(runs[engine], runs["exact"], strict=True)]
            half = STUDENT[len(seeds)] * statistics.stdev(differences) / len(differences) ** 0.5
            print(f"{engine} - exact, {name}: {statistics.mean(differences):+.4f} ± {half:.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
