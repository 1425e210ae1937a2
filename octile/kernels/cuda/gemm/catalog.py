"""Catalog of the GEMM kernels: the shapes of DeepSeek-V3 whose kernels are compiled and checked without a GPU."""

from dataclasses import replace
from typing import Any

from octile.kernels.cuda.gemm import bf16
from octile.kernels.cuda.gemm.candidates import best
from octile.kernels.cuda.gemm.config import GemmConfig, Scales, Schedule, Store
from octile.kernels.cuda.gemm.cost_model import Chip, Problem, rounded

CHIPS = (Chip(132), Chip(132, memory_bandwidth=3.35232e12, name="NVIDIA H100 80GB HBM3"))  # an H200, and an H100
LARGE = (
    (4096, 2112, 7168), (4096, 576, 7168), (4096, 24576, 1536), (4096, 32768, 512),
    (4096, 7168, 16384), (4096, 4096, 7168), (4096, 7168, 2048), (8192, 8192, 8192),
)  # fmt: skip
SMALL = ((2112, 7168), (24576, 1536), (7168, 16384), (4096, 7168), (7168, 2048))
EXPERTS = ((6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048))
FLOAT: dict[str, Any] = {"out_float": True}
WGRAD: dict[str, Any] = {"b_scales": Scales.PER_ROW}
ONE_SCALE: dict[str, Any] = {"a_scales": Scales.PER_TENSOR, "b_scales": Scales.PER_TENSOR}


def configs() -> dict[str, GemmConfig]:
    """Return the configurations that each case is launched with on an H200 and on an H100, by its name."""
    problems = {f"dense {m}×{n}×{k}": Problem(m, n, k) for m, n, k in LARGE}
    problems |= {
        f"dense {m}×{n}×{k}": Problem(m, n, k, transposable=True)
        for m in (1, 8, 16, 32, 64, 128, 256)
        for n, k in SMALL
    }
    for m, n, k in LARGE:
        shape = f"{m}×{n}×{k}"
        problems[f"wgrad, adding, {shape}"] = Problem(m, n, k, accumulate=True, **WGRAD, **FLOAT)
        problems[f"wgrad, float32, {shape}"] = Problem(m, n, k, **WGRAD, **FLOAT)
        problems[f"wgrad, bfloat16, {shape}"] = Problem(m, n, k, **WGRAD)
        problems[f"dense, adding to bfloat16, {shape}"] = Problem(m, n, k, accumulate=True)
        problems[f"dense, adding what is rounded, 32×{n}×{k}"] = Problem(
            32, n, k, accumulate=True, transposable=True, row_invariant=True
        )
        problems[f"dense, float32, {shape}"] = Problem(m, n, k, **FLOAT)
        problems[f"one scale, {shape}"] = Problem(m, n, k, **ONE_SCALE)
    for n, k in SMALL:
        problems[f"wgrad, adding, 128×{n}×{k}"] = Problem(128, n, k, accumulate=True, **WGRAD, **FLOAT)
        problems[f"wgrad, bfloat16, 128×{n}×{k}"] = Problem(128, n, k, **WGRAD)
    for n, k in EXPERTS:
        for groups, rows in ((4, 8192), (8, 4096), (256, 16)):
            name = f"grouped, {groups} of {rows}×{n}×{k}"
            problems[name] = Problem(groups * rows, n, k, groups, Schedule.GROUPED)
            problems[f"{name}, into a result"] = replace(problems[name], zero_rest=False)
        for groups, rows in ((32, 192), (6, 1024), (32, 20), (6, 20)):
            name = f"masked, {groups} of some {rows}×{n}×{k}"
            problems[name] = Problem(rows, n, k, groups, Schedule.MASKED)
    for groups, tokens in ((4, 8192), (8, 4096), (16, 2048)):
        for m, n in ((4096, 7168), (7168, 2048)):
            for accumulate in (False, True):
                name = f"grouped wgrad{', adding' if accumulate else ''}, {groups} of {m}×{n}×{tokens}"
                all_tokens = groups * tokens
                problems[name] = Problem(
                    m, n, all_tokens, groups, Schedule.ALONG_K, accumulate=accumulate, **WGRAD, **FLOAT
                )
            name = f"grouped wgrad, bfloat16, {groups} of {m}×{n}×{tokens}"
            problems[name] = Problem(m, n, groups * tokens, groups, Schedule.ALONG_K, **WGRAD)
    problems |= {
        "dense, any strides": Problem(4096, 2111, 7168, store=Store.SINGLE),
        "dense, no promotion": Problem(4096, 4096, 7168, promote=False, **ONE_SCALE),
        "dense, E5M2 times E4M3": Problem(4096, 4096, 7168, a_e5m2=True),
    }
    others = {
        "dense, BF16 with results in FP32": bf16.CONFIG,
        "several matrices in BF16": replace(bf16.OF_GROUPS, out_float=False),
        "several wide matrices in BF16": replace(bf16.OF_WIDE_GROUPS, out_float=False),
    }
    chosen = {name: [best(rounded(problem), chip) for chip in CHIPS] for name, problem in problems.items()}
    h200, h100 = ({name: best_of_each[i] for name, best_of_each in chosen.items()} for i in range(len(CHIPS)))
    h100 = {f"{name}, on an H100": config for name, config in h100.items() if config not in h200.values()}
    return h200 | h100 | others
