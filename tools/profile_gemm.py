"""Profile the GEMM kernels with Nsight Compute (ncu).

    python -m tools.profile_gemm OUT.json          profiles CASES and prints a table
    python -m tools.profile_gemm --run             the program that is profiled: each case once, after a warm-up

It reports time, registers, shared memory, activity of the tensor cores, the L2 cache and memory, and stall reasons of
every kernel. Clocks are not locked (`--clock-control none`), as in `octile bench gemm`.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from octile.bench.shapes import Case

CASES = [
    Case("dense", 8192, 8192, 8192),
    Case("dense", 4096, 2112, 7168),
    Case("dense", 4096, 7168, 2048),
    Case("dense", 128, 2112, 7168),
    Case("dense", 128, 7168, 16384),
    Case("dense", 4096, 4096, 7168, tiles=True),
    Case("dense", 4096, 4096, 7168, tiles=True, accumulate=True),
    Case("grouped", 8192, 6144, 7168, 4),
    Case("masked", 192, 6144, 7168, 32),
    Case("wgrad", 4096, 7168, 8192, 4, tiles=True, accumulate=True),
]
KERNELS = r"regex:^gemm$|fp8.*gemm"  # octile's and DeepGEMM's
WANTED = (  # if this ncu has them for this chip; sections report the rest
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__pipe_tensor_op_gmma_cycles_active.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active",
    "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "gpu__time_duration.sum",
    "lts__t_bytes.sum.per_second",
    "lts__t_sector_hit_rate.pct",
    "dram__bytes.sum.per_second",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l1tex__data_bank_conflicts_pipe_lsu.sum",
    "launch__registers_per_thread",
    "launch__shared_mem_per_block_dynamic",
)
SECTIONS = ("LaunchStats", "SpeedOfLight", "WarpStateStats", "MemoryWorkloadAnalysis")
STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+?)_per_issue_active\.ratio")
COLUMNS = {  # of the printed table: title, pattern of the metric
    "tensor %": r"sm__(pipe_tensor\w*_cycles_active|inst_executed_pipe_tensor\w*)\.avg\.pct_of_peak_sustained_active",
    "L2 hit %": r"lts__t_sector_hit_rate\.pct",
    "memory %": r"dram__throughput\.avg\.pct_of_peak_sustained_elapsed",
    "registers": r"launch__registers_per_thread",
    "shared bytes": r"launch__shared_mem_per_block_dynamic",
}


def parse(text: str) -> list[dict[str, Any]]:
    """Parse the output of ncu's `--csv --page raw` into {"kernel", "metrics", "stalls"} for each kernel.

    The table has a line of names, one of units and one per kernel; lines before it are ncu's own messages. A metric is
    {"value", "unit"}. Stalls are the warps that wait for a reason, per issued instruction, the largest first.

    Raises:
        ValueError: there is no table in the text.
    """
    lines = text.splitlines()
    begin = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if begin is None:
        raise ValueError("this is no table of ncu's raw page: " + " ".join(lines[:3])[:300])
    names, units, *rows = csv.reader(lines[begin:])
    return [_kernel(dict(zip(names, row, strict=True)), dict(zip(names, units, strict=True))) for row in rows if row]


def _kernel(row: dict[str, str], units: dict[str, str]) -> dict[str, Any]:
    numbers = {name: _number(value) for name, value in row.items() if "__" in name}
    metrics = {name: {"value": v, "unit": units[name]} for name, v in numbers.items() if v is not None}
    stalls = {m[1]: metrics.pop(name)["value"] for name in list(metrics) if (m := STALL.fullmatch(name))}
    largest_first = dict(sorted(stalls.items(), key=lambda item: -item[1]))
    return {"kernel": row["Kernel Name"], "metrics": metrics, "stalls": largest_first}


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def known(listed: str, wanted: Iterable[str] = WANTED) -> list[str]:
    """Return the wanted metrics whose base name is in the output of `ncu --query-metrics`."""
    bases = set(re.findall(r"^\s*(\w+__\w+)", listed, re.MULTILINE))
    return [name for name in wanted if name.partition(".")[0] in bases or name.startswith("launch__")]


def profile(out: Path) -> None:
    """Profile the cases, write the file and print the table."""
    from octile.report.machine import machine

    listed = subprocess.run(["ncu", "--query-metrics", "--chip", "gh100"], capture_output=True, text=True, check=False)
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "ncu.csv")
        sections = [word for name in SECTIONS for word in ("--section", name)]
        metrics = ["--metrics", ",".join(known(listed.stdout) or WANTED[-2:])]
        command = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--kernel-name", KERNELS, *sections]
        command += [*metrics, "--csv", "--page", "raw", "--log-file", str(table)]
        ran = subprocess.run(
            [*command, sys.executable, "-m", "tools.profile_gemm", "--run"],
            stdout=subprocess.PIPE, stderr=sys.stderr, text=True, check=False,
        )  # fmt: skip
        kernels = parse(table.read_text("utf-8") if table.exists() else ran.stdout)
    calls = [line.removeprefix("call: ") for line in ran.stdout.splitlines() if line.startswith("call: ")]
    if len(calls) == len(kernels):  # one kernel a call, in order
        for call, kernel in zip(calls, kernels, strict=True):
            kernel["case"] = call
    else:
        print(f"{len(kernels)} kernels of {len(calls)} calls: they are not named by case", file=sys.stderr)
    out.write_text(json.dumps({"machine": machine(), "kernels": kernels}, indent=1), "utf-8")
    print(show(kernels))


def show(kernels: list[dict[str, Any]]) -> str:
    """Format a line per kernel, with the three largest stall reasons."""
    from octile.bench.rows import align_columns

    lines = [["case", "kernel", *COLUMNS, "warps wait for"]]
    for kernel in kernels:
        cells = [kernel.get("case", "?"), kernel["kernel"].partition("<")[0][:32]]
        for pattern in COLUMNS.values():
            found = (m["value"] for name, m in kernel["metrics"].items() if re.fullmatch(pattern, name))
            value = max(found, default=None)
            cells.append("" if value is None else f"{value:,.1f}".removesuffix(".0"))
        waits = list(kernel["stalls"].items())[:3]
        lines.append([*cells, ", ".join(f"{reason} {value:.2f}" for reason, value in waits)])
    return align_columns(lines, right=set(COLUMNS))


def run() -> None:
    """Run each case once to warm up, then once with the profiler on."""
    import torch

    from octile.bench.gemm_case import prepare_case
    from octile.bench.gemm_peers import deep_gemm_call

    for case in CASES:
        setup = prepare_case(case, "cuda")
        calls = {"octile": setup.call}
        if find_spec("deep_gemm") and (case.accumulate or not case.tiles):  # the form that DeepGEMM supports on Hopper
            calls["DeepGEMM"] = deep_gemm_call(setup)
        for name, call in calls.items():
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            print(f"call: {name} {case.name} {case.what}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run() if sys.argv[1] == "--run" else profile(Path(sys.argv[1]))
