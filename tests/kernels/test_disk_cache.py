"""Tests of the disk cache of kernels: built once by many processes, rebuilt if damaged, and private to the user."""

import errno
import logging
import subprocess
import sys
from pathlib import Path

import filelock
import pytest

from octile.kernels import disk_cache

BUILT = b"\x7fELF\n\0code 168\n"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("OCTILE_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setattr(disk_cache, "_warned", False)
    return tmp_path / "kernels"


class Build:
    """Counts how often it is asked for BUILT."""

    count = 0

    def __call__(self) -> bytes:
        self.count += 1
        return BUILT


@pytest.fixture
def build() -> Build:
    return Build()


def test_a_kernel_is_built_once_and_read_back(folder, build):
    assert [disk_cache.fetch("product", ["text"], build) for _ in range(3)] == [BUILT] * 3
    assert build.count == 1


@pytest.mark.parametrize("other", [["text", "b"], ["texta"], ["text", "a", ""], ["a", "text"]])
def test_another_identity_is_another_kernel(folder, build, other):
    disk_cache.fetch("product", ["text", "a"], build)
    disk_cache.fetch("product", other, build)
    assert build.count == 2


def test_the_file_names_its_kernel(folder, build):
    disk_cache.fetch("product", ["text"], build)
    assert [path.name[:8] for path in folder.glob("*.compiled")] == ["product-"]
    assert {path.name[:8] for path in folder.iterdir()} == {"product-"}


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b[:40], lambda b: b.replace(b"168", b"169"), bytes.swapcase]
)
def test_a_damaged_file_is_built_again_and_logged(folder, build, damage, caplog):
    disk_cache.fetch("product", ["text"], build)
    (entry,) = folder.glob("*.compiled")
    whole = entry.read_bytes()
    entry.write_bytes(damage(whole))
    assert disk_cache.fetch("product", ["text"], build) == BUILT
    assert build.count == 2
    assert "is damaged: it is built again" in caplog.text
    assert entry.read_bytes() == whole


def test_a_folder_that_is_emptied_while_a_process_waits_does_no_harm(folder, build, monkeypatch):
    class Emptying(filelock.FileLock):
        def acquire(self, *args, **kwargs):
            proxy = super().acquire(*args, **kwargs)
            for path in folder.iterdir():
                path.unlink()
            return proxy

    monkeypatch.setattr(filelock, "FileLock", Emptying)
    assert disk_cache.fetch("product", ["text"], build) == BUILT
    assert [path.suffix for path in folder.iterdir()] == [".compiled"]


def test_without_user_ids_the_folder_is_not_checked(folder, build, monkeypatch):
    monkeypatch.delattr(disk_cache.os, "geteuid")  # as on Windows
    assert disk_cache.fetch("product", ["text"], build) == BUILT


def test_a_failed_build_is_not_stored(folder, build):
    def fail() -> bytes:
        raise RuntimeError("no such instruction")

    with pytest.raises(RuntimeError, match="no such instruction"):
        disk_cache.fetch("product", ["text"], fail)
    assert disk_cache.fetch("product", ["text"], build) == BUILT


PROCESSES = """
import os, sys, time
from octile.kernels import disk_cache

def build(index):
    with open(sys.argv[1], "a") as file:
        file.write(f"{index}\\n")
    time.sleep(0.2)  # a compilation that others would also start
    return bytes([index]) * 100_000

begin, begun = os.pipe()
children = []
for _ in range(64):
    if (child := os.fork()) == 0:
        os.close(begun)
        os.read(begin, 1)  # until all processes are there
        for index in (0, 1, 2):
            assert disk_cache.fetch("product", [str(index)], lambda: build(index)) == bytes([index]) * 100_000
        os._exit(0)
    children.append(child)
os.close(begun)
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


@pytest.mark.slow
def test_64_processes_at_once_build_each_kernel_once(folder, tmp_path):
    built = tmp_path / "built"
    subprocess.run([sys.executable, "-c", PROCESSES, str(built)], check=True)
    assert sorted(built.read_text().split()) == ["0", "1", "2"]
    assert not list(folder.glob("*.partial"))


def warnings(caplog) -> int:
    return sum(record.levelno == logging.WARNING and "cannot be stored" in record.message for record in caplog.records)


def test_on_a_full_disk_kernels_are_built_in_memory_with_one_warning(folder, build, monkeypatch, caplog):
    def write_half(path: Path, content: bytes) -> None:
        with open(path, "wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_half)
    assert [disk_cache.fetch("product", ["text"], build) for _ in range(3)] == [BUILT] * 3
    assert build.count == 3
    assert warnings(caplog) == 1
    assert sum(path.stat().st_size for path in folder.iterdir()) == 0


def test_in_a_read_only_folder_kernels_are_found_or_built_in_memory(folder, build, monkeypatch, caplog):
    disk_cache.fetch("product", ["text"], build)

    def refuse(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(disk_cache.os, "open", refuse)
    assert disk_cache.fetch("product", ["text"], build) == BUILT
    assert build.count == 1
    assert [disk_cache.fetch("product", ["other"], build) for _ in range(2)] == [BUILT] * 2
    assert (build.count, warnings(caplog)) == (3, 1)


def test_where_no_folder_can_be_made_kernels_are_built_in_memory(tmp_path, build, monkeypatch, caplog):
    monkeypatch.setattr(disk_cache, "_warned", False)
    (tmp_path / "file").touch()
    monkeypatch.setenv("OCTILE_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    assert disk_cache.fetch("product", ["text"], build) == BUILT
    assert warnings(caplog) == 1


def test_a_new_folder_is_private(folder, build):
    disk_cache.fetch("product", ["text"], build)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_others_may_write_to_is_refused(folder, build):
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="others may write to octile's cache"):
        disk_cache.fetch("product", ["text"], build)


def test_a_folder_of_another_user_is_refused(folder, build, monkeypatch):
    monkeypatch.setattr(disk_cache.os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(PermissionError, match=r"must belong to the user \d+ who runs this"):
        disk_cache.fetch("product", ["text"], build)


def test_the_folder_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("OCTILE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert disk_cache.folder() == tmp_path / ".cache" / "octile"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert disk_cache.folder() == tmp_path / "xdg" / "octile"
    monkeypatch.setenv("OCTILE_CACHE_DIR", str(tmp_path / "own"))
    assert disk_cache.folder() == tmp_path / "own"
