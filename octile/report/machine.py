"""The machine, software versions and commit of a measurement."""

import os
import platform
import subprocess
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from octile import __version__
from octile.text import format_count

SOURCE = Path(__file__).parents[2]  # the repository, if octile runs from its source tree


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """Describe the machine and the software as a dictionary for JSON.

    Args:
        device: where the work runs; the GPU, if there is one, if not given.

    Returns:
        {"date", "octile", "commit", "torch", "triton", "python", "cpu", "threads", "gpu"}; None for what does not
        exist here.
    """
    gpu = torch.cuda.is_available() and (device is None or device.type == "cuda")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "octile": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "python": platform.python_version(),
        "cpu": _cpu(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if gpu else None,
    }


def describe_machine(found: Mapping[str, Any]) -> str:
    """The result of `machine` as a short phrase: processor, threads, torch version."""
    return f"{found['gpu'] or found['cpu']}, {format_count(found['threads'], 'thread')}, torch {found['torch']}"


def version_of(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the source tree, with "+" if files differ from it.

    A tree without history, such as a copy for a job, has the commit that OCTILE_COMMIT names; else it is None.
    """
    if not (SOURCE / ".git").exists():  # git would search the parent folders and find another repository
        return os.environ.get("OCTILE_COMMIT") or None
    command = ["git", "-C", str(SOURCE), "describe", "--always", "--dirty=+", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
