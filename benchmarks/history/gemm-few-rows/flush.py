"""Time GEMMs of few rows beside DeepGEMM, the L2 cache flushed by writing and by reading: python flush.py.

Those of the list and of the shapes drawn by the date. Kernels take turns, each after a flush. The stored output, of
1 December 2026, was printed by an earlier version.
"""

import math
import statistics

import torch
import triton
import triton.language as tl

from octile.bench import shapes
from octile.bench.drawn import default_seed, drawn_cases
from octile.bench.gemm_case import prepare_case
from octile.bench.gemm_peers import deep_gemm_call
from octile.bench.kernel_time import kernel_seconds, record_kernels, seconds_between
from octile.bench.timing import FLUSH_BYTES

ROUNDS, BLOCK = 20, 8192


@triton.jit
def flush_by_reading(x, out, N: tl.constexpr):
    values = tl.load(x + tl.program_id(0).to(tl.int64) * N + tl.arange(0, N))
    if tl.max(values, 0) == 123456789:
        tl.store(out, 1)


def seconds_after_reading(calls):
    flush, out = (torch.zeros(n, dtype=torch.int32, device="cuda") for n in (FLUSH_BYTES // 4, 1))

    def interleaved():
        for _ in range(ROUNDS):
            for call in calls.values():
                flush_by_reading[(len(flush) // BLOCK,)](flush, out, N=BLOCK, num_warps=8)
                call()

    interleaved()
    times = seconds_between(record_kernels(interleaved), "flush_by_reading", ROUNDS * len(calls))
    return {name: statistics.median(times[i :: len(calls)]) for i, name in enumerate(calls)}


ratios = {}
for of, case in [("list", c) for c in shapes.GPU] + [("drawn", c) for c in drawn_cases(default_seed())]:
    if case.kind != "dense" or case.m > 256 or case.tiles:
        continue
    setup = prepare_case(case, "cuda")
    calls = {"octile": setup.call, "DeepGEMM": deep_gemm_call(setup)}
    line, both = f"{of:6s}{case.name:18s} {case.what:20s}", []
    for way, t in (("written", kernel_seconds(calls, ROUNDS)), ("read", seconds_after_reading(calls))):
        both.append(t["DeepGEMM"] / t["octile"])
        line += f" {way} {1e6 * t['octile']:7.2f} {1e6 * t['DeepGEMM']:7.2f} {both[-1]:.3f}  "
    print(line, flush=True)
    rows = "1 to 7" if case.m < 8 else "8 to 256"
    ratios.setdefault((of, rows), []).append(both)
    del setup, calls
    torch.cuda.empty_cache()
for group, pairs in ratios.items():
    means = [math.exp(statistics.mean(math.log(pair[i]) for pair in pairs)) for i in (0, 1)]
    print(group, len(pairs), f"written {means[0]:.3f} read {means[1]:.3f}")
