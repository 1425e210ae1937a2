"""Compiler of the emulator's core and of kernels, with the system's C++ compiler; results are stored on disk."""

import ctypes
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from octile.kernels.cuda.jit import specialize

HERE = Path(__file__).parent
# Contraction would fuse operations that kernels round separately. Kernels read memory as another type than was written.
OPTIONS = ("-std=c++20", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-g1", "-fPIC")
OPTIONS += ("-fno-gnu-unique",)  # a process loads many kernels of one name
SHARED = ("-shared", "-Wl,-Bsymbolic")
# Most kernels run once, so that compiling them fast matters more. The core has loaded the libraries that they need.
# Paths are relative to HERE: all clones of octile on a machine share what is compiled.
KERNEL = ("-Og", "-w", "-Idevice")
WGMMA = re.compile(
    r"void (\w+)\(\s*float[^,]*, (const uint32_t|uint64_t).*"
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k\d+\.f32\.(\w+)\.(\w+).* add, 1, 1(?:, (\d))?(?:, (\d))?;",
    re.DOTALL,
)


def compiler() -> str | None:
    """The path of the C++ compiler, or None."""
    return shutil.which(os.environ.get("CXX", "g++"))


@functools.cache
def core() -> ctypes.CDLL:
    """The emulator's core. A kernel's library finds its symbols, and those of its libraries, when it is loaded."""
    sources = sorted((HERE / "core").glob("*.cpp"))
    text = "".join(f'#include "core/{path.name}"\n' for path in sources)  # with #pragma once
    options = ("-O3", "-Wall", "-I.", "-Idevice", *SHARED)
    library = _compile("core.so", text, _stamp("core") + _stamp("device"), options)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def kernel(name: str, constants: Mapping[str, int | bool], headers: Mapping[str, str]) -> ctypes.CDLL:
    """A kernel of octile as a library for the CPU, with the emulator's PTX functions."""
    own = _device_headers() | {file: _wgmma(text) if WGMMA.search(text) else text for file, text in headers.items()}
    entry = f"""
extern "C" const emulator::Entry* octile_entry() {{
    static const emulator::Entry entry = emulator::entry_of<{name}>({name});
    return &entry;
}}
"""
    return _library(name, specialize.source(name, constants, own) + entry)


@functools.cache
def _library(name: str, text: str) -> ctypes.CDLL:
    core()
    prelude = _prelude()
    options = (*KERNEL, *SHARED, "-nodefaultlibs", "-include", str(prelude.with_suffix("")))
    return ctypes.CDLL(str(_compile(f"{name}.so", text, _stamp("device"), options)))


@functools.cache
def _prelude() -> Path:
    """What all kernels include first, precompiled; it lies next to its source, PRELUDE.h."""
    text = "#include <ptx.cuh>\n#include <entry.h>\n"
    return _compile("prelude.h.gch", text, _stamp("device"), (*KERNEL, "-x", "c++-header"))


@functools.cache
def _device_headers() -> dict[str, str]:
    """What kernels include instead of the headers of octile that have the same names."""
    return {path.name: f"#include <{path.name}>\n" for path in (HERE / "device").glob("*.cuh")}


def _wgmma(header: str) -> str:
    """The emulated header of wgmma.py: a call of the core with the types of the instruction."""
    name, left, n, a, b, *transposed = WGMMA.search(header).groups()  # type: ignore[union-attr]
    in_registers = left != "uint64_t"
    left, at, registers = ("const uint32_t (&a)[4]", "0", "a") if in_registers else ("uint64_t a", "a", "nullptr")
    first, second = (t or "0" for t in (["0", *transposed] if in_registers else transposed)[:2])
    return f"""\
#pragma once
namespace ptx {{
inline void {name}(float (&d)[{int(n) // 2}], {left}, uint64_t b, bool accumulate) {{
    emulator::wgmma(
        d, {int(n) // 2}, {at}, b, accumulate, emulator::{a}, emulator::{b}, {registers}, {first}, {second});
}}
}}  // namespace ptx
"""


def _folder() -> Path:
    folder = Path(tempfile.gettempdir(), f"octile-emulator-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@functools.cache
def _stamp(folder: str) -> str:
    return "".join(path.read_text("utf-8") for path in sorted((HERE / folder).iterdir()))


def _compile(file: str, text: str, stamp: str, options: tuple[str, ...]) -> Path:
    """Compile a file unless it is stored already. `stamp` is the text of what the source includes."""
    found = compiler()
    if found is None:
        raise FileNotFoundError("the emulator needs a C++ compiler: install g++, or set CXX")
    key = hashlib.sha256(repr((text, stamp, found, OPTIONS, options)).encode()).hexdigest()[:16]
    name, _, suffix = file.partition(".")
    output = _folder() / f"{name}-{key}.{suffix}"
    if output.exists():
        return output
    with open(output.with_suffix(".lock"), "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other test workers may compile the same
        if not output.exists():
            source, built = output.with_suffix(".cpp" if suffix == "so" else ""), output.with_suffix(".new")
            source.write_text(text, "utf-8")
            done = subprocess.run(
                [found, *OPTIONS, *options, "-o", str(built), str(source)],
                cwd=HERE,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(f"{found} cannot compile {name}:\n{done.stderr}")
            built.rename(output)
    return output
