"""Paired differences from exact mode of the runs of one beginner: means of five seeds with 95% intervals."""

import gzip
import json
import statistics
import sys
from pathlib import Path

ENGINES = ("exact", "default", "corrected")
SEEDS = range(5)
STUDENT = 2.776  # the 97.5% quantile of Student's distribution with four degrees of freedom


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
        "equal bits": sum(record["delta_equal"] for record in records) / tokens,
        "mean difference": sum(record["delta_mean"] * record["delta_tokens"] for record in records) / tokens,
        "largest difference": max(record["delta_largest"] for record in records),
    }


def main(folder: Path) -> None:
    runs = {engine: [figures(folder / f"{engine}_{seed}.jsonl.gz") for seed in SEEDS] for engine in ENGINES}
    for engine, of_seeds in runs.items():
        for seed, values in zip(SEEDS, of_seeds, strict=True):
            print(engine, seed, *(f"{name} {value:.4f}" for name, value in values.items()), sep="; ")
    for engine in ("default", "corrected"):
        for name in ("mean reward", "mean reward of the last ten steps", "mean gradient norm"):
            differences = [other[name] - exact[name] for other, exact in zip(runs[engine], runs["exact"], strict=True)]
            half = STUDENT * statistics.stdev(differences) / len(differences) ** 0.5
            print(f"{engine} - exact, {name}: {statistics.mean(differences):+.4f} ± {half:.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
