"""Time the kernels of experts' GEMMs with groups of any sizes, as the cost model chooses them: kernels.py [JSON].

Gate and up, and the down-projection, of mixtures of public models, for 256 to 16,384 tokens; 40 mixtures are drawn to
choose the spread of sizes that the cost model assumes, and 40 others to check it. Tokens choose experts at random, or
the sizes are drawn from 0.6 to 1.4 of their mean. Each GEMM is timed with the kernel that was chosen before (the model
took groups to be larger than a tile) and with those of several spreads, interleaved, with a flushed L2 cache, after
each result was compared with the high-precision GEMM.
"""

from __future__ import annotations

import json
import math
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from octile.bench import tune
from octile.bench.gemm_case import MAX_DIFFERENCE, prepare_case
from octile.bench.kernel_time import wait_for_gpu, work_seconds
from octile.bench.model_shapes import FAMILIES
from octile.bench.shapes import Case
from octile.kernels.cuda.gemm import cost_model
from octile.kernels.cuda.gemm.candidates import candidates
from octile.kernels.cuda.gemm.config import GemmConfig, Schedule
from octile.kernels.cuda.gemm.cost_model import Chip, rounded

MAX_WEIGHTS = 2**30  # weights of a GEMM: of more experts a rank has a half, a quarter, …
MIXTURES = [model for family in FAMILIES.values() for model in family if model.n_experts]


@dataclass(frozen=True)
class AnySizes(Case):
    experts: int = 0
    chosen: int = 0
    tokens: int = 0
    at_random: bool = True

    @cached_property
    def sizes(self) -> list[int]:
        draw, counts = random.Random(self.tokens), [0] * self.experts
        if not self.at_random:
            return [round(self.m * draw.uniform(0.6, 1.4)) for _ in range(self.groups)]
        for _ in range(self.tokens):
            for e in draw.sample(range(self.experts), self.chosen):
                counts[e] += 1
        return counts[: self.groups]


def cases(seed: str) -> list[tuple[str, AnySizes]]:
    draw, found = random.Random(seed), []
    for _ in range(40):
        m = draw.choice(MIXTURES)
        tokens, groups = int(2 ** draw.uniform(8, 14)), m.n_experts
        while groups * 2 * m.expert_intermediate * m.hidden > MAX_WEIGHTS and groups % 2 == 0:
            groups //= 2
        rows, at_random = max(1, tokens * m.per_token // m.n_experts), draw.random() < 0.5
        for n, k in ((2 * m.expert_intermediate, m.hidden), (m.hidden, m.expert_intermediate)):
            settings = {"experts": m.n_experts, "chosen": m.per_token, "tokens": tokens, "at_random": at_random}
            name = f"{m.name}, {tokens} tokens, {'at random' if at_random else '0.6 to 1.4'}"
            found.append((name, AnySizes("grouped", rows, n, k, groups, **settings)))
    return found


def tiles_before(p, c) -> int:
    if p.schedule is not Schedule.GROUPED:
        return num_tiles(p, c)
    unused_rows = (c.cluster_tile_m - math.gcd(c.cluster_tile_m, p.alignment)) / 2
    along_m = max(math.ceil((p.m + p.groups * unused_rows) / c.cluster_tile_m), p.groups)
    return along_m * -(-p.n // c.cluster_tile_n) * c.cluster_size


num_tiles = cost_model.num_tiles
SEEDS = ("to choose", "to check")
SPREADS = (0.1, 0.2, 0.3, 0.4)


def kernels(p, chip: Chip) -> dict[str, GemmConfig]:
    """The kernel before, and that of each spread."""
    cost_model.num_tiles = tiles_before
    found = {"before": candidates(p, chip)[0]}
    cost_model.num_tiles, sizes = num_tiles, cost_model.GROUP_SIZES
    for spread in SPREADS:
        cost_model.GROUP_SIZES = tuple(1 - spread + 2 * spread * (i + 0.5) / 13 for i in range(13))
        found[str(spread)] = candidates(p, chip)[0]
    cost_model.GROUP_SIZES = sizes
    return found


def main() -> None:
    chip, todo = Chip(132), []
    for seed in SEEDS:
        for name, case in cases(seed):
            todo.append((seed, name, case, kernels(rounded(replace(tune.problem(case), alignment=1)), chip)))
    print(
        sum(len(set(found.values())) > 1 for *_, found in todo),
        "of",
        len(todo),
        "GEMMs have several kernels",
        flush=True,
    )
    if not torch.cuda.is_available():
        return
    with ThreadPoolExecutor(14) as pool:
        list(pool.map(tune.why_not_usable, {c for *_, found in todo for c in found.values()}))
    rows = []
    for seed, name, case, found in todo:
        if len(set(found.values())) == 1:
            rows.append([seed, name, case.name, dict.fromkeys(found, 1.0), {}])
            continue
        setup = prepare_case(case, "cuda")
        expected, calls = setup.high_precision(), {}
        for config in dict.fromkeys(found.values()):
            calls[str(config)] = call = tune.launcher(setup, config)
            call()
            wait_for_gpu()
            setup.check(call, expected, setup.out, MAX_DIFFERENCE)
        times = work_seconds(calls, rounds=10)
        taken = {label: times[str(config)] for label, config in found.items()}
        names = {label: f"{c.tile_m}×{c.tile_n} {c.cluster_m}×{c.cluster_n}" for label, c in found.items()}
        us = ", ".join(f"{label}: {1e6 * taken[label]:.1f} µs ({names[label]})" for label in found)
        print(f"{case.name}, {name}: {us}", flush=True)
        rows.append([seed, name, case.name, taken, names])
        del setup, expected, calls
        if len(sys.argv) > 1:
            with open(sys.argv[1], "w") as file:
                json.dump(rows, file)
    for seed in SEEDS:
        for label in map(str, SPREADS):
            ratios = [taken["before"] / taken[label] for which, _, _, taken, _ in rows if which == seed]
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            print(f"{seed}, spread {label}: {mean:.4f} × as fast, {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main()
