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
OPTIONS = ("-std=c++20", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE", "-g1")
SHARED = ("-fPIC", "-shared", "-fno-gnu-unique", "-Wl,-Bsymbolic")  # a process loads many kernels of one name
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
    """The emulator's core. A kernel's library finds its symbols when it is loaded."""
    sources = sorted((HERE / "core").glob("*.cpp"))
    text = "".join(f'#include "{path}"\n' for path in sources)  # with #pragma once
    library = _compile("core", text, _stamp("core") + _stamp("device"), "-O3", "-Wall", f"-I{HERE / 'device'}")
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def kernel(name: str, constants: Mapping[str, int | bool], headers: Mapping[str, str]) -> ctypes.CDLL:
    """A kernel of octile as a library for the CPU, with the emulator's PTX functions."""
    core()
    own = {path.name: f"#include <{path.name}>\n" for path in (HERE / "device").glob("*.cuh")}
    own |= {file: _wgmma(text) if WGMMA.search(text) else text for file, text in headers.items()}
    entry = f"""
#include <entry.h>
extern "C" const emulator::Entry* octile_entry() {{
    static const emulator::Entry entry = emulator::entry_of<{name}>({name});
    return &entry;
}}
"""
    text = "#include <ptx.cuh>\n" + specialize.source(name, constants, own) + entry
    return ctypes.CDLL(str(_compile(name, text, _stamp("device"), "-O2", "-w", f"-I{HERE / 'device'}")))


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


def _stamp(folder: str) -> str:
    return "".join(path.read_text() for path in sorted((HERE / folder).iterdir()))


def _compile(name: str, text: str, stamp: str, *options: str) -> Path:
    """Compile a shared library unless it is stored already. `stamp` is the text of what the source includes."""
    found = compiler()
    if found is None:
        raise FileNotFoundError("the emulator needs a C++ compiler: install g++, or set CXX")
    key = hashlib.sha256(repr((text, stamp, found, OPTIONS, SHARED, options)).encode()).hexdigest()[:16]
    library = _folder() / f"{name}-{key}.so"
    if library.exists():
        return library
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other test workers may compile the same
        if not library.exists():
            source, built = library.with_suffix(".cpp"), library.with_suffix(".new")
            source.write_text(text)
            done = subprocess.run(
                [found, *OPTIONS, *SHARED, *options, "-o", str(built), str(source)],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(f"{found} cannot compile {name}:\n{done.stderr}")
            built.rename(library)
    return library
