"""`octile doctor`: this machine, its versions, and which kernel serves which operator, and why."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from octile import __version__
from octile.report.machine import machine, version_of

PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "transformers", "cuda-core", "cuda-bindings")
OPERATORS = (
    "quantize",
    "quantize_with_scale",
    "dequantize",
    "matmul_nt",
    "matmul_nt_out",
    "grouped_matmul_nt",
    "masked_grouped_matmul_nt",
    "grouped_wgrad",
)
WITHOUT_TRITON = {  # on a GPU too these run in torch, several launches where a kernel would need one
    "quantize, to E5M6": "12 bits, two values packed in three bytes: there is no Triton kernel",
    "quantize_with_scale": "the scale is given, so it is a plain elementwise cast: there is no Triton kernel",
    "dequantize, of E5M6": "12 bits, two values packed in three bytes: there is no Triton kernel",
}


def examine() -> dict[str, Any]:
    """{"octile", "machine", "packages", "operators": [{"operator", "kernel", "why"}], "advice": [line]}."""
    return {
        "octile": __version__,
        "machine": {
            **machine(),
            "platform": platform.platform(),
            "cores": _cores(),
            "executable": sys.executable,
        },
        "packages": {name: version_of(name) for name in PACKAGES},
        "operators": _operators(),
        "advice": _advice(),
    }


def compile_kernels(architecture: str | None) -> list[dict[str, Any]]:
    """What each Triton kernel uses: {"kernel", "case", "registers", "stack_bytes", "shared_bytes"}; needs no GPU.

    Args:
        architecture: "sm_80", "sm_86", "sm_89", "sm_90" (or "sm_90a"), "sm_100"; None is the GPU here, else sm_90.

    Raises:
        ImportError: Triton is not installed.
        ValueError: the architecture is none of these.
    """
    if find_spec("triton") is None:
        raise ImportError("compiling the kernels needs Triton: pip install octile[cuda]")
    from octile.kernels.triton.compiled import compile_all

    if architecture is None and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        architecture = f"sm_{major}{minor}"
    return [asdict(kernel) for kernel in compile_all((architecture or "sm_90").removesuffix("a"))]


def show(found: dict[str, Any], as_json: bool) -> None:
    """Prints what `examine` found, for a person or as JSON."""
    if as_json:
        print(json.dumps(found, indent=2))
        return
    console = Console()
    for title in ("machine", "packages"):
        table = Table(title=title, show_header=False, title_justify="left")
        for name, value in found[title].items():
            table.add_row(name, "not there" if value is None else str(value))
        console.print(table)
    table = Table("operator", "kernel", title="operators", title_justify="left")
    for row in found["operators"]:
        table.add_row(row["operator"], row["kernel"])
    console.print(table)
    for kernel, why in dict.fromkeys((row["kernel"], row["why"]) for row in found["operators"]):
        console.print(f"{kernel}: {why}", highlight=False)
    for line in found["advice"]:
        console.print(line, highlight=False)
    if "kernels" in found:
        table = Table(title="kernels", title_justify="left")
        for name in found["kernels"][0]:
            table.add_column(name.replace("_", " "), justify="left" if name in ("kernel", "case") else "right")
        for row in found["kernels"]:
            table.add_row(*map(str, row.values()))
        console.print(table)


def _operators() -> list[dict[str, str]]:
    kernel, why = _kernel()
    served = dict.fromkeys(OPERATORS, (kernel, why))
    if kernel == "Triton":
        served |= {name: ("reference (torch, GPU)", reason) for name, reason in WITHOUT_TRITON.items()}
    return [{"operator": f"octile::{name}", "kernel": k, "why": w} for name, (k, w) in sorted(served.items())]


def _kernel() -> tuple[str, str]:
    """The kernels that the operators take on tensors of the best device here, and the reason."""
    if not torch.cuda.is_available():
        return "reference (torch, CPU)", "torch finds no GPU: the same code runs on the operators' specification"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 0):
        return "none", f"sm_{major}{minor} is older than sm_80, the oldest that the Triton kernels compile for"
    if find_spec("triton") is None:
        return "none", "Triton is not installed: pip install octile[cuda]"
    if (major, minor) >= (8, 9):
        return "Triton", f"sm_{major}{minor} multiplies FP8; the portable kernels promote to FP32 every 128"
    return "Triton", f"sm_{major}{minor} has no FP8 product: operands are converted to FP16, exactly"


def _advice() -> list[str]:
    lines = []
    if torch.cuda.is_available() and find_spec("triton") is None:
        lines.append("install Triton to use the GPU: pip install octile[cuda]")
    if torch.get_num_threads() > _cores():
        lines.append(f"torch uses {torch.get_num_threads()} threads on fewer cores: set OMP_NUM_THREADS")
    return lines


def _cores() -> int:
    """The cores that this process may use; where the system does not tell, as on macOS, all that there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
