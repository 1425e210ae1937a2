"""Compilers of CUDA C++ to machine code for one architecture: NVRTC in this process, or NVCC. They need no GPU.

Both take the same text and the same options. NVRTC is the default: it comes as a wheel, needs no C++ compiler and
starts no process. NVCC is for comparison: set OCTILE_CUDA_COMPILER=nvcc.
"""

import functools
import json
import os
import re
import subprocess
import tempfile
import time
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

SETTING = "OCTILE_CUDA_COMPILER"
# No --use_fast_math: it flushes denormals and approximates divisions, but scales and sums here are IEEE numbers.
# -lineinfo costs nothing at run time and lets a profiler point at the source.
OPTIONS = ("-std=c++20", "-lineinfo", "--ptxas-options=-v")
TIMEOUT_SECONDS = 600  # of NVCC


@dataclass(frozen=True)
class Cubin:
    """A compiled kernel and what it uses.

    Attributes:
        image: the machine code, an ELF file.
        registers: registers of a thread. A kernel that moves registers between warpgroups (setmaxnreg) is reported with
            those that its launch bounds grant to each thread.
        stack_bytes: local memory of a thread: arrays that are indexed at run time, and registers that did not fit.
        spill_bytes: stores and loads of registers that did not fit, together.
        static_shared_bytes: shared memory declared in the source; the dynamic part is set at the launch.
        seconds: duration of the compilation.
        compiler: name and version of the compiler.
        log: the compiler's output.
    """

    image: bytes
    registers: int
    stack_bytes: int
    spill_bytes: int
    static_shared_bytes: int
    seconds: float
    compiler: str
    log: str

    def to_bytes(self) -> bytes:
        """Return the content of a file: a line of JSON, and the machine code."""
        facts = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "image"}
        return json.dumps(facts).encode() + b"\n" + self.image

    @classmethod
    def from_bytes(cls, stored: bytes) -> "Cubin":
        """Read a compiled kernel as `to_bytes` wrote it: a line of JSON with its facts, then the machine code."""
        facts, _, image = stored.partition(b"\n")
        return cls(image, **json.loads(facts))

    @property
    def warnings(self) -> list[str]:
        """Warnings of the compiler.

        Those of ptxas have a number and report that a kernel is slower than it was written to be: wgmma instructions
        are serialized, a wait is inserted between them, setmaxnreg is ignored.
        """
        return re.findall(r".*(?:warning|\(C\d+\)).*", self.log)


def compiler() -> str:
    """Return name and version of the compiler that is set, such as "nvrtc 13.0 (13.0.88)".

    Raises:
        ValueError: the environment variable OCTILE_CUDA_COMPILER is neither nvrtc nor nvcc.
        ImportError: NVRTC is not installed.
        FileNotFoundError: there is no NVCC.
    """
    return _nvcc_version() if _setting() == "nvcc" else _nvrtc_version()


def compile(name: str, source: str, architecture: str) -> Cubin:
    """Compile the text of a kernel.

    Args:
        name: name of the kernel, for messages.
        source: CUDA C++ that includes no file.
        architecture: such as "sm_90a".

    Raises:
        RuntimeError: the source has an error; shows the compiler's message and the path of the saved source.
        ValueError, ImportError, FileNotFoundError: as for `compiler`.
    """
    compiler_version = compiler()
    options = (f"--gpu-architecture={architecture}", *OPTIONS)
    start = time.perf_counter()
    image, log = (_nvcc if _setting() == "nvcc" else _nvrtc)(name, source, options)
    seconds = time.perf_counter() - start
    if image is None:
        raise RuntimeError(
            f"{compiler_version} cannot compile {name} for {architecture}; source saved: {_save(name, source)}\n{log}"
        )
    return Cubin(image, **resources(log), seconds=seconds, compiler=compiler_version, log=log)


def resources(log: str) -> dict[str, int]:
    """Parse `Cubin`'s figures from the output of ptxas -v.

    Raises:
        RuntimeError: the output has no such figures.
    """
    registers = re.findall(r"Used (\d+) registers", log)
    stacks = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if not registers or not stacks:
        raise RuntimeError(f"the compiler does not report which registers and stack the kernel uses:\n{log}")
    return {
        "registers": max(map(int, registers)),
        "stack_bytes": max(int(stack) for stack, _, _ in stacks),
        "spill_bytes": sum(int(stores) + int(loads) for _, stores, loads in stacks),
        "static_shared_bytes": max(map(int, re.findall(r"(\d+) bytes smem", log)), default=0),
    }


def _setting() -> str:
    name = os.environ.get(SETTING) or "nvrtc"
    if name not in ("nvrtc", "nvcc"):
        raise ValueError(f"{SETTING} must be nvrtc or nvcc, not {name!r}")
    return name


def _save(name: str, source: str) -> str:
    descriptor, path = tempfile.mkstemp(prefix=f"octile-{name}-", suffix=".cu")
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(source)
    return path


def _nvrtc(name: str, source: str, options: tuple[str, ...]) -> tuple[bytes | None, str]:
    nvrtc = _import_nvrtc()
    options = (*options, "--no-cache")  # with a driver NVRTC caches results itself, without the output of ptxas
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []))
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = bytes(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
        _checked(nvrtc.nvrtcGetProgramLog(program, log))  # writes into the bytes object, which is not shared yet
        text = log.rstrip(b"\0").decode(errors="replace")
        if error.value:
            return None, text or error.name
        image = bytes(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, image))
        return image, text
    finally:
        _checked(nvrtc.nvrtcDestroyProgram(program))


def _checked(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if error.value:
        raise RuntimeError(f"NVRTC: {error.name}")
    return values[0] if values else None


def _import_nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError:
        raise ImportError('compiling the CUDA kernels needs NVRTC: pip install "octile[cuda]"') from None
    return nvrtc


@functools.cache
def _nvrtc_version() -> str:
    nvrtc = _import_nvrtc()
    try:
        error, major, minor = nvrtc.nvrtcVersion()
    except RuntimeError as missing:  # the bindings are there, the library is not
        raise ImportError(f'compiling the CUDA kernels needs NVRTC: pip install "octile[cuda]" ({missing})') from None
    _checked((error,))
    try:
        build = version("nvidia-cuda-nvrtc")
    except PackageNotFoundError:  # NVRTC of an installed CUDA toolkit
        build = "system"
    return f"nvrtc {major}.{minor} ({build})"


def _nvcc(name: str, source: str, options: tuple[str, ...]) -> tuple[bytes | None, str]:
    with tempfile.TemporaryDirectory() as folder:
        text, image = Path(folder, f"{name}.cu"), Path(folder, f"{name}.cubin")
        text.write_text(source, encoding="utf-8")
        done = _run(_find_nvcc(), "--cubin", *options, "-o", str(image), str(text))
        return (None if done.returncode else image.read_bytes()), done.stdout


@functools.cache
def _nvcc_version() -> str:
    release = re.search(r"release ([\d.]+), V([\d.]+)", _run(_find_nvcc(), "--version").stdout)
    if release is None:
        raise RuntimeError(f"{_find_nvcc()} --version does not name its release")
    return f"nvcc {release[1]} ({release[2]})"


def _find_nvcc() -> str:
    from cuda.pathfinder import find_nvidia_binary_utility  # searches wheels, conda, CUDA_HOME and the PATH

    path = find_nvidia_binary_utility("nvcc")
    if path is None:
        raise FileNotFoundError(
            f"{SETTING}=nvcc, but there is no nvcc: install a CUDA toolkit, or pip install nvidia-cuda-nvcc"
        )
    return path


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
