"""Memory of a device: how much it has, how much of it this process can have, and which errors say that it ran out."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from octile.extras import require

OUT_OF_MEMORY = ("out of memory", "DefaultCPUAllocator: can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
CGROUPS, CGROUP_FILES = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def device_memory(device: torch.device) -> int:
    """Bytes of memory that the device has, free or in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_memory(device: torch.device) -> int:
    """Bytes that this process can have on the device.

    On a GPU they include what torch holds already, and what other processes hold is left out. On a CPU they are in
    addition to what the process holds, without swapping, within the limits of its cgroups.
    """
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        free, total = torch.cuda.mem_get_info(index)
        limit = int(torch.cuda.get_per_process_memory_fraction(index) * total)
        return min(free + torch.cuda.memory_reserved(index), limit)
    require("psutil", extra="train")
    import psutil

    return min([psutil.virtual_memory().available, *_left_in_cgroups()])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception reports that a device has no more memory."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in OUT_OF_MEMORY)


def _left_in_cgroups() -> list[int]:
    """The bytes that each memory limit on this process leaves, as containers and batch systems set them."""
    left = []
    for line in CGROUPS.read_text("utf-8").splitlines() if CGROUPS.exists() else []:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = CGROUP_FILES, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = CGROUP_FILES / "memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(root) and (found := _left(folder, *names)) is not None:
                left.append(found)
    return left


def _left(folder: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    """The bytes that one cgroup leaves; None if it has no limit, or is not visible from inside a container."""
    try:
        most = (folder / limit).read_text("utf-8").strip()
        used = int((folder / usage).read_text("utf-8"))
        stat = dict(line.split() for line in (folder / "memory.stat").read_text("utf-8").splitlines())
    except OSError:
        return None
    if most == "max":
        return None
    return max(int(most) - used + int(stat.get(reclaimable, 0)), 0)
