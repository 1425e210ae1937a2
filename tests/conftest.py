"""One thread, a cache of the session's own and a fixed hypothesis profile: every run computes the same thing.

Without a GPU Triton's kernels run in its interpreter, which has to be chosen before Triton is imported by anyone.
"""

import atexit
import errno
import io
import os
import shutil
import tempfile
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)
if "OCTILE_CACHE_DIR" not in os.environ:  # workers of pytest-xdist find that of the session
    from octile.kernels import disk_cache

    cache = tempfile.mkdtemp(prefix="octile-cache-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    for kernel in disk_cache.folder().glob("*.compiled"):  # which would take seconds to compile
        shutil.copy2(kernel, cache)
    os.environ["OCTILE_CACHE_DIR"] = cache
settings.register_profile(
    "octile", deadline=None, derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("octile")


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return full_disk(n): after the call only n more bytes can be written."""

    from octile.checkpoint import files

    class Limited(io.BufferedRandom):
        free = 0

        def write(self, data) -> int:
            Limited.free -= memoryview(data).nbytes
            if Limited.free < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)

    def fill(free: int) -> None:
        Limited.free = free
        monkeypatch.setattr(files, "open", open_on_full_disk, raising=False)

    def open_on_full_disk(path, mode="r"):
        return Limited(io.FileIO(path, mode)) if "w" in mode else open(path, mode)

    return fill
