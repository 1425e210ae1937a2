"""Derive the efficiencies of GEMMs and operators that the plan has from records of kernels.

    python -m tools.fit_plan_efficiencies

In octile/plan/efficiencies.toml. GEMMs: the share of the peak, the part of the shorter of computing and loading that is
not hidden, and the latency, by least squares of the relative error over a record of kernels as those of the profiles of
steps below (benchmarks/history/plan/gemm_c0c5c621_h200.json.gz); for weight gradients without GEMMs of few rows, which
are none. Operators: the median over the shapes of benchmarks/results/h200_casts.json, of rows of 256 to 1024 and of
7168 channels. What GEMMs reach in steps of what they reach alone, and attention: the median over the profiles of
`tools.compare_plan_kernels`.

In octile/plan/clusters/h100_8.toml. GEMMs and operators in the same way, over h100_gemm.json and h100_casts.json. The
latency is that of GEMMs that are no weight gradients.

In octile/plan/clusters/h800_2048.toml. GEMMs of DeepSeek-V3's training: least squares over `DEEPSEEK`.
"""

import json
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np

from octile.plan.durations import seconds
from octile.plan.hardware import read_cluster, read_efficiencies
from tools.compare_plan_kernels import profiles, read_json
from tools.kernel_kinds import kind_of

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
GEMMS = {
    "h200": "benchmarks/history/plan/gemm_c0c5c621_h200.json.gz",
    "h100": "benchmarks/results/h100_gemm.json",
}
FORWARD, WEIGHT_GRADIENT = ("FP8", "FP8, grouped", "FP8, masked"), ("FP8 1D1D +=", "FP8, wgrad +=")
OPERATORS = {
    "quantize": ("quantize 1×128",),
    "requantize": ("requantize 1×128, transposed",),
    "norm": ("RMSNorm, 1×128",),
    "norm_backward": ("RMSNorm backward",),
    "swiglu": ("SwiGLU, 1×128",),
    "swiglu_backward": ("SwiGLU backward, 1×128 and transposed",),
    "permute": ("permute to 8 experts", "permute to 8 places"),
    "unpermute": ("unpermute, sums of 8",),
    "rotate": ("rotate in place",),
    "latent_keys": ("latent keys",),
    "latent_keys_backward": ("latent keys backward",),
    "cross_entropy": ("cross-entropy", "cross-entropy backward"),
    "optimizer": ("AdamW, BF16 moments",),
}
LEAST_ROWS = 1024  # of a weight
# DeepSeek's GEMMs of 4,096 rows and more on H800: groups, M, N, K, TFLOP/s of DeepGEMM's first version, and how many
# times as fast it is as the CUTLASS kernels that DeepSeek had before (DeepGEMM a6d97a1, README). The published profile
# of training (profile-data, train.json) has these: cutlass::device_kernel<dpsk::grouped_gemm::cuda::fp8_ptp128c…>.
DEEPSEEK = (
    (1, 4096, 2112, 7168, 1058, 1.1),
    (1, 4096, 24576, 1536, 990, 1.0),
    (1, 4096, 32768, 512, 590, 1.0),
    (1, 4096, 7168, 16384, 1358, 1.2),
    (1, 4096, 4096, 7168, 1304, 1.1),
    (1, 4096, 7168, 2048, 1025, 1.1),
    (4, 8192, 4096, 7168, 1297, 1.2),
    (4, 8192, 7168, 2048, 1099, 1.2),
    (8, 4096, 4096, 7168, 1288, 1.2),
    (8, 4096, 7168, 2048, 1093, 1.1),
)
CHANNELS = ("256", "512", "1024", "7168")


def gemm_cases(kinds: tuple[str, ...], chip: str = "h200") -> list[tuple[float, float, float]]:
    """FLOPs, bytes and seconds of each GEMM in the record of a chip."""
    cases = {}
    for row in read_json(GEMMS[chip])["rows"]:
        if row["unit"] == "TFLOP/s" and row["what"] in kinds:
            *groups, m, n, k = map(int, row["case"].split("×"))
            if kinds == WEIGHT_GRADIENT and m < LEAST_ROWS:
                continue
            g = groups[0] if groups else 1
            flops, out_bytes = 2 * g * m * n * k, 2 if kinds == FORWARD else 8
            cases[row["what"], row["case"]] = (
                flops, g * (m * k + n * k + out_bytes * m * n), flops / (row["value"] * 1e12)
            )  # fmt: skip
    return list(cases.values())


def gemm_errors(
    kinds: tuple[str, ...], share: float, unhidden: float, latency: float, chip: str = "h200"
) -> np.ndarray:
    """The relative error of the formula for each GEMM of the record of a chip."""
    return _errors(gemm_cases(kinds, chip), f"{chip}_8", share, unhidden, latency)


def deepseek_errors(share: float, unhidden: float, latency: float) -> np.ndarray:
    """The relative error of the formula for each GEMM of `DEEPSEEK`."""
    cases = []
    for g, m, n, k, tflops, speedup in DEEPSEEK:
        flops = 2 * g * m * n * k
        cases.append((flops, g * (m * k + n * k + 2 * m * n), flops / (tflops * 1e12 / speedup)))
    return _errors(cases, "h800_2048", share, unhidden, latency)


def _errors(
    cases: list[tuple[float, float, float]], cluster: str, share: float, unhidden: float, latency: float
) -> np.ndarray:
    gpu, copy = read_cluster(cluster).gpu, read_cluster(cluster).reached.copy
    flops, moved, seconds = np.array(cases).T
    compute, memory = flops / (share * gpu.fp8_peak), moved / (copy * gpu.memory_bandwidth)
    estimate = latency + np.maximum(compute, memory) + unhidden * np.minimum(compute, memory)
    return estimate / seconds - 1


def gemm_slowdown(in_step: float) -> float:
    """How much longer FP8 GEMMs take in profiles of steps than the formula says: the median over the profiles.

    A GEMM that leaves SMs to an exchange counts with the share of the SMs that it has.
    """
    ratios = []
    for profile in profiles():
        reached = asdict(read_efficiencies()) | {"gemm_in_step": in_step}
        cluster = replace(profile.cluster, efficiencies=reached)
        planned = sum(seconds(work, cluster) for work in profile.work if work.unit in ("fp8_gemm", "fp8_wgrad"))
        sms = cluster.gpu.multiprocessors
        found = sum(k.time * min(k.blocks / sms, 1) for k in profile.kernels if kind_of(k.name) == "FP8 GEMMs")
        ratios.append(found / 1e6 / planned)
    return median(ratios)


def attention_shares(phase: str) -> float:
    """The share of the BF16 peak that attention reaches in profiles of steps, "forward" or "backward": the median."""
    shares = []
    for profile in profiles():
        work = [work for work in profile.work if work.unit == f"attention_{phase}"]
        flops = sum(piece.flops * (1 + read_efficiencies().attention_keys / piece.keys) for piece in work)
        kernels = [
            k for k in profile.kernels if kind_of(k.name) == "attention" and ("fprop" in k.name) == (phase == "forward")
        ]
        shares.append(flops / profile.cluster.gpu.bf16_peak / (sum(k.time for k in kernels) / 1e6))
    return median(shares)


def operator_shares(chip: str = "h200") -> dict[str, float]:
    """The share of the memory bandwidth of each kind of operator on a chip."""
    bandwidth = read_cluster(f"{chip}_8").gpu.memory_bandwidth
    rows = json.loads((RESULTS / f"{chip}_casts.json").read_text(encoding="utf-8"))["rows"]
    rows = [row for row in rows if row["against"]["peer"] == "copy"]  # a row with a bound repeats the speed
    shares = {}
    for name, operators in OPERATORS.items():
        values = [
            row["value"] * 1e9
            for row in rows
            if row["what"] in operators and (name in ("cross_entropy", "optimizer") or _has_channels(row["case"]))
        ]
        shares[name] = median(values) / bandwidth
    return shares


def _has_channels(case: str) -> bool:
    return case.split("×")[-1] in CHANNELS


def main() -> None:
    """Print the fitted values."""
    latencies, latency_of_ours = np.arange(3, 7, 0.25) * 1e-6, [read_efficiencies().gemm_latency]
    latency_of_h100 = [read_cluster("h100_8").reached.gemm_latency]
    for name, errors, latency in (
        ("fp8_gemm", partial(gemm_errors, FORWARD), latencies),
        ("fp8_wgrad", partial(gemm_errors, WEIGHT_GRADIENT), latencies),
        ("fp8_gemm on h100_8", partial(gemm_errors, FORWARD, chip="h100"), latencies),
        ("fp8_wgrad on h100_8", partial(gemm_errors, WEIGHT_GRADIENT, chip="h100"), latency_of_h100),
        ("fp8_gemm on h800_2048", deepseek_errors, latency_of_ours),
    ):
        grid = product(np.arange(0.5, 0.8, 0.005), np.arange(0, 1.01, 0.05), latency)
        best = min(grid, key=lambda point: float((errors(*point) ** 2).mean()))
        error = np.abs(errors(*best))
        share, unhidden, latency = best
        print(f"{name} = {share:.3f}, unhidden {unhidden:.2f}, latency {latency:.2e}: mean error {error.mean():.1%}")
    in_step = min(np.arange(0.9, 1.001, 0.005), key=lambda share: abs(gemm_slowdown(share) - 1))
    print(f"gemm_in_step = {in_step:.3f}")
    shares = {f"attention_{phase}": attention_shares(phase) for phase in ("forward", "backward")}
    for name, share in (shares | operator_shares()).items():
        print(f"{name} = {share:.3f}")
    for name, share in operator_shares("h100").items():
        print(f"{name} on h100_8 = {share:.3f}")


if __name__ == "__main__":
    main()
