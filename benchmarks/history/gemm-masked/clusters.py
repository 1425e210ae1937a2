"""Time masked GEMMs with tiles of 256 rows, in clusters of 1×2 and without: python clusters.py.

Of the list and of the drawn shapes of twelve seeds those for which the cost model chooses such a cluster.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

from octile.bench import shapes, tune
from octile.bench.drawn import drawn_cases
from octile.bench.gemm_case import prepare_case
from octile.bench.kernel_time import kernel_seconds
from octile.kernels.cuda.gemm import num_sms
from octile.kernels.cuda.gemm.candidates import choose
from octile.kernels.cuda.gemm.cost_model import Chip, rounded

gpu = torch.cuda.is_available()
chip = num_sms.chip(0) if gpu else Chip(132)
cases = [*shapes.GPU, *(case for seed in range(12) for case in drawn_cases(seed))]
todo = {}
for case in cases:
    if case.kind != "masked":
        continue
    config = choose(rounded(tune.problem(case)), chip)
    if config.tile_m == 256 and config.cluster_n == 2:
        todo[case.name] = (case, {"1x2": config, "1x1": replace(config, cluster_n=1)})
print(len(todo), flush=True)
if gpu:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(tune.why_not_usable, {c for _, configs in todo.values() for c in configs.values()}))
    for case, configs in todo.values():
        setup = prepare_case(case, "cuda")
        t = kernel_seconds({name: tune.launcher(setup, c) for name, c in configs.items()}, 20)
        what = f"{case.name:22s} {case.what:24s} st{configs['1x2'].stages}"
        times = f"1x2 {1e6 * t['1x2']:8.1f} 1x1 {1e6 * t['1x1']:8.1f} {t['1x2'] / t['1x1']:.3f}"
        print(what, times, flush=True)
        del setup
        torch.cuda.empty_cache()
