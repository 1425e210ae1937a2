"""Tests of a device's memory, and of what a process can have of it."""

from pathlib import Path

import psutil
import pytest
import torch

from octile.train.memory import device as device_memory
from octile.train.memory.device import available_memory, is_out_of_memory

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_the_memory_of_the_cpu_is_found():
    assert device_memory.device_memory(CPU) > 10**9


@pytest.mark.parametrize(
    ("free", "held", "share", "expected"),
    [(900, 0, 1.0, 900), (300, 0, 1.0, 300), (300, 500, 1.0, 800), (900, 0, 0.5, 500)],
    ids=["nothing", "another process", "this process", "a limit"],
)
def test_what_is_available_of_a_gpu_that_is_used_by(monkeypatch, free, held, share, expected):
    shares = {2: share}  # torch takes no device without an index for a share
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: held)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: shares[device])
    assert available_memory(GPU) == expected


def test_the_machine_s_memory_is_what_is_left_of_it(monkeypatch):
    monkeypatch.setattr(device_memory, "CGROUPS", Path("/nowhere"))
    assert 0 < available_memory(CPU) <= psutil.virtual_memory().total


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    """Write the files of a memory cgroup, and make it that of this process."""

    def write(line: str, folder: str, **files: str) -> None:
        (tmp_path / "cgroup").write_text(line + "\n")
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / folder / name.replace("__", ".")).write_text(text)

    monkeypatch.setattr(device_memory, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(device_memory, "CGROUP_FILES", tmp_path)
    return write


def test_the_limit_of_a_container_counts(cgroup):
    stat = "anon 5000\ninactive_file 1000"
    cgroup("0::/", "", memory__max="9000\n", memory__current="6000\n", memory__stat=stat)
    assert available_memory(CPU) == 4000


def test_the_limit_of_a_cgroup_above_counts(cgroup):
    limits = {"memory__current": "6000\n", "memory__stat": "inactive_file 0"}
    cgroup("0::/job/step", "job", memory__max="7000\n", **limits)
    cgroup("0::/job/step", "job/step", memory__max="max\n", **limits)
    assert available_memory(CPU) == 1000


def test_the_limit_of_a_cgroup_of_version_1_counts(cgroup):
    files = {
        "memory__limit_in_bytes": "9000",
        "memory__usage_in_bytes": "6000",
        "memory__stat": "total_inactive_file 0",
    }
    cgroup("4:memory:/job", "memory/job", **files)
    assert available_memory(CPU) == 3000


def test_without_a_limit_the_machine_s_memory_counts(cgroup):
    cgroup("0::/", "", memory__max="max\n", memory__current="6000\n", memory__stat="inactive_file 0")
    assert available_memory(CPU) > 10**6


def test_an_error_of_the_real_allocator_is_recognized():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55)
    assert is_out_of_memory(caught.value)
