"""`octile doctor`: this machine, its versions, and which kernel serves which operator, and why."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import torch
from rich.table import Table

from octile import __version__
from octile.report.console import Console
from octile.report.machine import machine, version_of

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "safetensors",
    "tokenizers",
    "transformers",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
)
OPERATORS = (
    "quantize",
    "quantize_with_scale",
    "dequantize",
    "quantize_rows_and_columns",
    "requantize_transposed",
    "quantize_and_transpose",
    "swiglu_quantize",
    "swiglu_quantize_and_save",
    "swiglu_backward_quantize",
    "rms_norm_quantize",
    "rms_norm_backward",
    "permute",
    "unpermute",
    "high_precision_grouped_nt",
    "high_precision_grouped_tn",
    "attention",
    "attention_backward",
    "rotate_",
    "latent_keys",
    "latent_keys_backward",
    "gate_logits",
    "gate_logits_backward",
    "adamw",
    "matmul_nt",
    "matmul_nt_out",
    "packed_matmul_nt",
    "grouped_matmul_nt",
    "grouped_matmul_nt_out",
    "masked_grouped_matmul_nt",
    "masked_grouped_matmul_nt_out",
    "grouped_wgrad",
    "grouped_wgrad_out",
)
PRODUCTS = [name for name in OPERATORS if ("matmul" in name and name != "packed_matmul_nt") or "wgrad" in name]
CASTS = [name for name in OPERATORS if "quantize" in name]
ATTENTION = ("attention", "attention_backward")
GATE = ("gate_logits", "gate_logits_backward")
STACK = (
    "stack bytes: local memory of a thread, for registers that did not fit or for arrays; "
    "spill bytes: loads and stores of such registers, which Triton does not tell"
)


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


def compile_kernels(architecture: str | None) -> dict[str, Any]:
    """{"architecture", "compilers", "rows": [what a kernel uses]}; needs no GPU.

    A row has "kernel", "case", "registers", "stack_bytes" and "shared_bytes". Those for Hopper in CUDA C++ have what
    the compiler tells besides: "spill_bytes", "warnings", and the seconds that it took while others ran beside it,
    "nvrtc_seconds" and, where there is an NVCC, "nvcc_seconds".

    Args:
        architecture: "sm_80", "sm_86", "sm_89", "sm_90" or "sm_100"; None is the GPU here, else sm_90.

    Raises:
        ImportError: Triton or NVRTC is not installed.
        ValueError: the architecture is none of these.
    """
    if find_spec("triton") is None:
        raise ImportError('compiling the kernels needs Triton: pip install "octile[cuda]"')
    from octile.kernels.triton.compile_all import compile_all

    if architecture is None and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        architecture = f"sm_{major}{minor}"
    generation = (architecture or "sm_90").removesuffix("a")  # sm_90a is sm_90, with all that only Hopper has
    rows = [asdict(kernel) for kernel in compile_all(generation)]
    compilers = [f"Triton {version_of('triton')}"]
    if generation == "sm_90":
        found, used = _compile_cuda()
        rows, compilers = rows + found, compilers + used
    return {"architecture": generation, "compilers": compilers, "rows": rows}


def _compile_cuda() -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of the kernels in CUDA C++, compiled by NVRTC and, to know how long it takes, by NVCC; and the compilers."""
    from octile.kernels.cuda import compile_all
    from octile.kernels.cuda.jit import compiler

    rows: list[dict[str, Any]] = []
    used: list[str] = []
    for name in ("nvrtc", "nvcc"):
        with _environment(compiler.SETTING, name):
            try:
                used.append(compiler.compiler())
            except FileNotFoundError:  # there is no NVCC, and nothing needs one
                break
            found = [asdict(kernel) for kernel in compile_all.compile_all("sm_90a")]
        rows = rows or found
        for row, again in zip(rows, found, strict=True):
            row[f"{name}_seconds"] = again["seconds"]
    for row in rows:
        del row["seconds"]
    return rows, used


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


def show(found: dict[str, Any], as_json: bool) -> None:
    """Prints what `examine` found, for a person or as JSON."""
    if as_json:
        print(json.dumps(found, indent=2))
        return
    console = Console()
    for title in ("machine", "packages"):
        table = Table(title=title, show_header=False, title_justify="left")
        for name, value in found[title].items():
            table.add_row(name, "–" if value is None else str(value))
        console.print(table)
    table = Table(title="operators", title_justify="left")
    table.add_column("operator", overflow="fold")  # a name that is cut is no name
    table.add_column("kernel")
    for row in found["operators"]:
        table.add_row(row["operator"], row["kernel"])
    console.print(table)
    for kernel, why in dict.fromkeys((row["kernel"], row["why"]) for row in found["operators"]):
        console.print(f"{kernel}: {why}", highlight=False)
    for line in found["advice"]:
        console.print(line, highlight=False)
    if "kernels" in found:
        _show_kernels(console, found["kernels"])


def _show_kernels(console: Console, kernels: dict[str, Any]) -> None:
    table = Table(title=f"kernels, compiled for {kernels['architecture']}", title_justify="left")
    columns = dict.fromkeys(name for row in kernels["rows"] for name in row if row[name] != "")
    for name in columns:
        is_text = name in ("kernel", "case", "warnings")
        table.add_column(name.replace("_", "\n"), justify="left" if is_text else "right", overflow="fold")
    for row in kernels["rows"]:
        cells = (row.get(name, "") for name in columns)
        table.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells))
    console.print(table)
    console.print(f"by {', '.join(kernels['compilers'])}", highlight=False)
    console.print(STACK, highlight=False)


def _operators() -> list[dict[str, str]]:
    served = dict.fromkeys(OPERATORS, _kernel())
    if served["matmul_nt"][0] == "Triton" and torch.cuda.get_device_capability() == (9, 0):
        served |= dict.fromkeys([*PRODUCTS, *CASTS], _of_hopper())
    if served["attention"][0] == "Triton":
        served |= dict.fromkeys(ATTENTION, ("torch", "attention takes cuDNN or FlashAttention, as torch's own does"))
        served |= dict.fromkeys(GATE, ("torch", "FP32 numbers are multiplied as three BF16 parts each"))
    return [{"operator": f"octile::{name}", "kernel": k, "why": w} for name, (k, w) in sorted(served.items())]


def _kernel() -> tuple[str, str]:
    """The kernels that the operators take on tensors of the best device here, and the reason."""
    if not torch.cuda.is_available():
        return "reference (torch, CPU)", "torch finds no GPU: products run on the CPU reference (slow, exact)"
    major, minor = torch.cuda.get_device_capability()
    if (major, minor) < (8, 0):
        return "none", f"sm_{major}{minor} is older than sm_80, the oldest that the Triton kernels compile for"
    if find_spec("triton") is None:
        return "none", 'Triton is not installed: pip install "octile[cuda]"'
    if (major, minor) >= (8, 9):
        return "Triton", f"sm_{major}{minor} multiplies FP8; the portable kernels promote to FP32 every 128"
    return "Triton", f"sm_{major}{minor} has no FP8 product: operands are converted to FP16, exactly"


def _of_hopper() -> tuple[str, str]:
    """The kernels of products and casts on Hopper, which has its own."""
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return "Triton", 'Hopper\'s own kernels need cuda-bindings and NVRTC: pip install "octile[cuda]"'
    rest = "products of INT8, say, or casts of rows that do not begin at multiples of 16 bytes"
    return "CUDA C++", f"sm_90 has kernels of its own; what they do not take goes to Triton's: {rest}"


def _advice() -> list[str]:
    lines = []
    if torch.cuda.is_available() and find_spec("triton") is None:
        lines.append('install Triton to use the GPU: pip install "octile[cuda]"')
    if torch.get_num_threads() > _cores():
        lines.append(f"torch uses {torch.get_num_threads()} threads on fewer cores: set OMP_NUM_THREADS")
    return lines


def _cores() -> int:
    """The cores that this process may use; where the system does not tell, as on macOS, all that there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
