"""Time grouped GEMMs by the sizes of their groups: python ragged.py.

64 experts of which each token chooses six at random; sizes as that gives them, and rounded to multiples. Kernels are
timed interleaved, with a flushed L2 cache; the result of each with groups of rows was compared with the high-precision
GEMM before.
"""

import random
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from octile.bench import tune
from octile.bench.gemm_case import MAX_DIFFERENCE, prepare_case
from octile.bench.kernel_time import wait_for_gpu, work_seconds
from octile.bench.shapes import Case
from octile.kernels.cuda.gemm import num_sms
from octile.kernels.cuda.gemm.candidates import candidates, choose
from octile.kernels.cuda.gemm.cost_model import Chip, rounded

TILES = {(192, 128, 1, 1), (192, 128, 1, 2), (256, 128, 1, 1), (128, 192, 1, 1)}


@dataclass(frozen=True)
class Ragged(Case):
    multiple: int = 1

    @cached_property
    def sizes(self):
        mean = self.k if self.kind == "wgrad" else self.m
        draw, counts = random.Random(0), [0] * self.groups
        for _ in range(mean * self.groups // 6):
            for e in draw.sample(range(self.groups), 6):
                counts[e] += 1
        return [round(count / self.multiple) * self.multiple for count in counts]


CASES = []
for m, n, k in (
    (768, 2816, 2048), (768, 2048, 1408), (192, 2816, 2048), (192, 2048, 1408),
    (3072, 1024, 2048), (3072, 2048, 512), (3072, 512, 2048), (3072, 2048, 1024),
):  # fmt: skip
    CASES += [Ragged("grouped", m, n, k, 64, multiple=multiple) for multiple in (1, 4, 64)]
    CASES.append(Case("dense", m * 64, n, k))
for m, n, k in ((1024, 2048, 3072), (2048, 512, 3072), (2816, 2048, 768)):
    CASES += [Ragged("wgrad", m, n, k, 64, True, True, multiple=multiple) for multiple in (1, 16, 128)]


def name(c):
    order = "N" if c.raster_along_n else "M"
    return f"{c.tile_m}×{c.tile_n}, cluster {c.cluster_m}×{c.cluster_n}, {c.stages} stages, along {order}"


def kernels(case, chip):
    p = tune.problem(case)
    if isinstance(case, Ragged):
        p = replace(p, alignment=1)
    p, found = rounded(p), {}
    for c in (choose(p, chip), *candidates(p, chip)):
        key = c.tile_m, c.tile_n, c.cluster_m, c.cluster_n
        if not found or (key in TILES and c.accumulators == c.split_k == 1 and not c.ping_pong):
            found.setdefault(key, c)
    return list(found.values())


gpu = torch.cuda.is_available()
chip = num_sms.chip(0) if gpu else Chip(132)
todo = [(case, kernels(case, chip)) for case in CASES]
every = list(dict.fromkeys(c for _, configs in todo for c in configs))
print(len(every), "kernels", flush=True)
if not gpu:
    sys.exit()
with ThreadPoolExecutor(16) as pool:
    why = dict(zip(every, pool.map(tune.why_not_usable, every), strict=True))
for case, configs in todo:
    setup, calls = prepare_case(case, "cuda"), {}
    expected = setup.high_precision() if case.kind == "grouped" else None
    for c in configs:
        if why[c]:
            continue
        calls[name(c)] = call = tune.launcher(setup, c)
        call()
        wait_for_gpu()
        if expected is not None:
            setup.check(call, expected, setup.out, MAX_DIFFERENCE)
    times = work_seconds(calls, rounds=12)
    print(case.name, case.what, f"multiples of {case.multiple}" if isinstance(case, Ragged) else "", flush=True)
    for kernel, t in times.items():
        print(f"  {1e6 * t:8.1f} µs {case.flops / t / 1e12:6.0f} TFLOP/s  {kernel}", flush=True)
    del setup, calls, expected
