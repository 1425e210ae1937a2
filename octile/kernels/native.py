"""C++ for the CPU, compiled on first use by the machine's C++ compiler and cached on disk."""

import ctypes
import functools
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

log = logging.getLogger("octile")
COMPILERS = ("c++", "g++", "clang++")
# -ffp-contract=off: each product and each sum is rounded, as torch's are
OPTIONS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")


@functools.cache
def load(source: Path, options: tuple[str, ...], what: str) -> ctypes.CDLL | None:
    """Return the compiled library, or None, with a warning in the log, if there is no compiler or it fails.

    Args:
        source: a C++ file that includes nothing but the standard library.
        options: options of the compiler, such as `OPTIONS`.
        what: the name of what is compiled, for the warning.
    """
    path = next(filter(None, map(shutil.which, COMPILERS)), None)
    if path is None:
        log.warning("no C++ compiler (%s) was found: %s in plain torch", ", ".join(COMPILERS), what)
        return None
    try:
        from octile.kernels import disk_cache

        machine = _run(path, "-march=native", "-dM", "-E", "-x", "c++", os.devnull)  # the CPU's instruction sets
        identity = [source.read_text(encoding="utf-8"), *options, path, machine]
        built = disk_cache.fetch(source.stem, identity, lambda: _build(path, source, options))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "native.so")
            file.write_bytes(built)
            return ctypes.CDLL(str(file))
    except (OSError, UnicodeError, ImportError, subprocess.CalledProcessError) as error:
        message = getattr(error, "stderr", "") or error
        log.warning("%s could not be compiled or loaded: %s in plain torch: %s", source.name, what, message)
        return None


def _build(path: str, source: Path, options: tuple[str, ...]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "native.so")
        _run(path, *options, "-shared", "-fPIC", "-pthread", str(source), "-o", str(file))
        return file.read_bytes()


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
