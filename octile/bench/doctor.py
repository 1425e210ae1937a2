"""`octile doctor`: this machine, its versions, its GPUs' links, its caches, and which kernels each operator uses."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from octile import __version__
from octile.command_text import quoted_path
from octile.extras import require
from octile.kernels import backends, cpu, disk_cache
from octile.parallel.links import describe_dispatch, describe_nodes, find_links
from octile.report.console import Console, progress_bar
from octile.report.machine import machine, version_of
from octile.text import format_bytes, format_count
from octile.train.data import token_cache

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "safetensors",
    "tokenizers",
    "transformers",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "flash-attn-4",
)
STACK = (
    "stack bytes: local memory per thread, for spilled registers or arrays; "
    "spill bytes: loads and stores of spilled registers, which Triton does not report"
)


def examine() -> dict[str, Any]:
    """Examine this machine.

    Returns:
        {"octile", "machine", "packages", "operators": [{"operator", "kernel", "why"}], "links": [{"first", "second",
        "link", "can_access"}] of each two GPUs, "dispatch": what sends rows to experts on them, "dispatch_across":
        what sends them across nodes, "caches": [{"cache", "folder", "entries", "bytes", "to_empty": a command}],
        "advice": [line]}.
    """
    links = find_links()
    return {
        "octile": __version__,
        "machine": {
            **machine(),
            "platform": platform.platform(),
            "cores": cpu.count_cores(),
            "executable": sys.executable,
        },
        "packages": {name: version_of(name) for name in PACKAGES},
        "operators": [
            {"operator": f"octile::{name}", "kernel": kernel, "why": why}
            for name, (kernel, why) in sorted(backends.choices().items())
        ],
        "links": [link._asdict() for link in links],
        "dispatch": describe_dispatch(torch.cuda.device_count() if torch.cuda.is_available() else 0, links),
        "dispatch_across": describe_nodes(),
        "caches": _caches(),
        "advice": _advice(),
    }


def _caches() -> list[dict[str, Any]]:
    """The caches on disk: of compiled kernels and of tokens; none for a user without a home."""
    try:
        kernels, tokens = disk_cache.folder(), token_cache.folder()
    except RuntimeError:
        return []
    caches = (
        ("compiled kernels", kernels, list(kernels.glob("*.compiled")), f"rm {quoted_path(kernels)}/*.compiled"),
        ("tokens", tokens, [path for path in tokens.glob("*") if path.is_dir()], f"rm -r {quoted_path(tokens)}"),
    )
    return [
        {
            "cache": name,
            "folder": str(folder),
            "entries": len(entries),
            "bytes": sum(_size(path) for entry in entries for path in (entry, *entry.glob("*"))),
            "to_empty": command,
        }
        for name, folder, entries, command in caches
    ]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # another process has removed it meanwhile
        return 0


def check_architecture(name: str, architecture: str) -> None:
    """Refuse an architecture that the kernels are not compiled for. The message begins with `name`.

    Raises:
        ImportError: Triton is not installed.
        ValueError: it is another one.
    """
    require("triton", extra="cuda")
    from octile.kernels.triton.compile_all import ARCHITECTURES

    if architecture.removesuffix("a") not in ARCHITECTURES:
        raise ValueError(f"{name} must be one of {', '.join(ARCHITECTURES)}, not {architecture!r}")


def compile_kernels(architecture: str | None, is_quiet: bool = False) -> dict[str, Any]:
    """Compile the kernels and list the resources that they use. Needs no GPU. A terminal shows a bar meanwhile.

    Args:
        architecture: "sm_80", "sm_86", "sm_89", "sm_90" or "sm_100"; None: that of the GPU, or sm_90 without one.
        is_quiet: show no bar.

    Returns:
        {"architecture", "compilers", "rows"}. A row has "kernel", "case", "registers", "stack_bytes" and
        "shared_bytes". Rows of Hopper's CUDA C++ kernels also have "spill_bytes", "warnings", and the seconds of
        compilation, in parallel with others: "nvrtc_seconds" and, where NVCC is installed, "nvcc_seconds".

    Raises:
        ImportError: Triton or NVRTC is not installed.
        ValueError: the architecture is none of these.
    """
    require("triton", extra="cuda")
    from octile.kernels.triton.compile_all import cases, compile_all

    if architecture is None and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        architecture = f"sm_{major}{minor}"
    generation = (architecture or "sm_90").removesuffix("a")  # sm_90a has all that sm_90 has
    with progress_bar("compiling Triton kernels", len(cases()), is_quiet) as advance:
        rows = [asdict(kernel) for kernel in compile_all(generation, advance)]
    compilers = [f"Triton {version_of('triton')}"]
    if generation == "sm_90":
        found, used = _compile_cuda(is_quiet)
        rows, compilers = rows + found, compilers + used
    return {"architecture": generation, "compilers": compilers, "rows": rows}


def _compile_cuda(is_quiet: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Compile the CUDA C++ kernels with NVRTC and, to time it, with NVCC. Return their rows and the compilers."""
    from octile.kernels.cuda.compile_all import compile_concurrently, specializations
    from octile.kernels.cuda.jit import compiler

    rows: list[dict[str, Any]] = []
    used: list[str] = []
    with Console(stderr=True, quiet=is_quiet).status("planning CUDA C++ kernels"):
        kernels = specializations()
    for name in ("nvrtc", "nvcc"):
        with _environment(compiler.SETTING, name):
            try:
                used.append(compiler.compiler())
            except FileNotFoundError:  # NVCC is optional
                break
            with progress_bar(f"compiling CUDA C++ kernels, {name}", len(kernels), is_quiet) as advance:
                found = [asdict(kernel) for kernel in compile_concurrently(kernels, advance)]
        rows = rows or found
        for row, compiled in zip(rows, found, strict=True):
            row[f"{name}_seconds"] = compiled["seconds"]
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
    """Print what `examine` found, as tables or as JSON."""
    if as_json:
        print(json.dumps(found, indent=2))
        return
    from octile.report.table import ScreenTable

    console = Console()
    for title in ("machine", "packages"):
        table = ScreenTable(title=title, show_header=False, title_justify="left")
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        for name, value in found[title].items():
            table.add_row(name, "–" if value is None else str(value))
        console.print(table)
    table = ScreenTable(title="operators", title_justify="left")
    table.add_column("operator", no_wrap=True)
    table.add_column("kernel")
    table.add_column("why", justify="right")
    numbers = dict[tuple[str, str], int]()  # of the reasons
    for row in found["operators"]:
        number = numbers.setdefault((row["kernel"], row["why"]), len(numbers) + 1)
        table.add_row(row["operator"], row["kernel"], str(number))
    console.print(table)
    for (kernel, why), number in numbers.items():
        console.print_line(f"{number}. {kernel}: {why}")
    _show_links(console, found)
    for cache in found["caches"]:
        size = f"{format_bytes(cache['bytes'])} in {format_count(cache['entries'], 'item')}"
        remedy = f"; to empty it: {cache['to_empty']}" if cache["entries"] else ""
        console.print_line(f"cache of {cache['cache']}, {cache['folder']}: {size}{remedy}")
    for line in found["advice"]:
        console.print_line(line)
    if "kernels" in found:
        _show_kernels(console, found["kernels"])


def _show_links(console: Console, found: dict[str, Any]) -> None:
    from octile.report.table import ScreenTable

    if found["links"]:
        table = ScreenTable(title="links between GPUs", title_justify="left")
        for name in ("GPUs", "link", "access to each other's memory"):
            table.add_column(name)
        for row in found["links"]:
            table.add_row(f"{row['first']} and {row['second']}", row["link"], "yes" if row["can_access"] else "no")
        console.print(table)
    console.print_line(f"dispatch to experts on other ranks: {found['dispatch']}")
    console.print_line(f"dispatch across nodes: {found['dispatch_across']}")


def _show_kernels(console: Console, kernels: dict[str, Any]) -> None:
    from octile.report.table import ScreenTable

    table = ScreenTable(title=f"kernels, compiled for {kernels['architecture']}", title_justify="left")
    columns = dict.fromkeys(name for row in kernels["rows"] for name in row if row[name] != "")
    for name in columns:
        is_text = name in ("kernel", "case", "warnings")
        table.add_column(name.replace("_", "\n"), justify="left" if is_text else "right")
    for row in kernels["rows"]:
        cells = (row.get(name, "") for name in columns)
        table.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in cells))
    console.print(table)
    console.print_line(f"by {', '.join(kernels['compilers'])}")
    console.print_line(STACK)


def _advice() -> list[str]:
    lines = []
    if torch.cuda.is_available() and find_spec("triton") is None:
        lines.append('install Triton to use the GPU: pip install "octile[cuda]"')
    if torch.get_num_threads() > cpu.count_cores():
        lines.append(f"torch uses {torch.get_num_threads()} threads on fewer cores: set OMP_NUM_THREADS")
    return lines
