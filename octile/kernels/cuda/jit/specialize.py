"""Specialization of kernels: a template with named constants becomes source text, machine code and a loaded kernel.

A template such as `gemm.cu` reads its constants from a namespace that is written before it:

    namespace config { constexpr int tile_m = 128; constexpr bool accumulate = false; }
    #include "gemm.cu"                 // extern "C" __global__ void gemm(...)

Includes in quotes are pasted here, each file once. So the compiler reads one text, whose hash names the cached kernel,
and which is saved if it does not compile. Includes in angle brackets are left to the compiler.
"""

import re
import threading
from collections.abc import Hashable, Mapping
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from octile.kernels import disk_cache, planning
from octile.kernels.cuda.jit import compiler
from octile.kernels.cuda.jit.compiler import Cubin

if TYPE_CHECKING:
    from octile.kernels.cuda.jit.driver import Kernel

FOLDER = Path(__file__).parents[1]
# below it, with templates and their headers
FOLDERS = ("jit", "gemm", "quantize", "gate", "routing", "attention", "few_rows")
INCLUDE = re.compile(r'\s*#\s*include\s+"([^"]+)"')
ONCE = re.compile(r"\s*#\s*pragma\s+once\b")

_loaded: "dict[tuple[object, ...], Kernel]" = {}
_loading: dict[tuple[object, ...], threading.Lock] = {}  # one for each kernel, so that several load at the same time
_ahead: dict[Hashable, Future[Cubin]] = {}  # kernels that were planned, until they are loaded


def load(
    name: str, constants: Mapping[str, int | bool], device: torch.device, headers: Mapping[str, str] | None = None
) -> "Kernel":
    """Return the kernel on a GPU; the first call of the process compiles it or reads it from the disk cache.

    That first call must not be captured in a CUDA graph: loading allocates memory.

    Args:
        name, constants, headers: as for `source`.
        device: a CUDA device with its index; or meta, where the kernel is planned and not loaded.

    Raises:
        ValueError: the device is another one, or on meta nothing is planned.
        RuntimeError: the compiler or the driver refuses the kernel.
        NotLaunched: the device is meta.
    """
    key = (name, device, *constants.items(), *(headers or {}).items())
    if (kernel := _loaded.get(key)) is None:
        if device.type == "meta":
            planning.record(PlannedKernel(name, constants, headers))
            raise planning.NotLaunched(name)
        if device.type != "cuda" or device.index is None:
            raise ValueError(f"device must be a CUDA device with an index, not {str(device)!r}")
        from octile.kernels.cuda.jit.driver import Kernel  # late: compiling needs no driver

        with _loading.setdefault(key, threading.Lock()):
            if (kernel := _loaded.get(key)) is None:
                cubin = _compiled(name, constants, architecture(device), headers)
                kernel = _loaded[key] = Kernel(name, cubin.image, device.index)
    return kernel


@dataclass(frozen=True)
class PlannedKernel:
    """A kernel of a launch on the meta device; name, constants and headers as for `source`."""

    name: str
    constants: Mapping[str, int | bool]
    headers: Mapping[str, str] | None = None

    @property
    def key(self) -> Hashable:
        """What decides on the machine code, for a GPU and a compiler."""
        return (self.name, *self.constants.items(), *(self.headers or {}).items())

    def compile_ahead(self, pool: Executor, device: torch.device) -> Future[Cubin]:
        """Have a pool compile the kernel for a GPU, or read it from the disk cache, before it is loaded.

        `load` waits for a kernel that is being compiled, and compiles itself one that still waits for a thread of the
        pool. An error stays in the result: `load` compiles the kernel once more, and raises its own.
        """
        made_for = architecture(device)
        if (future := _ahead.get((self.key, made_for))) is None:
            future = pool.submit(compile, self.name, self.constants, made_for, self.headers)
            _ahead[self.key, made_for] = future
        return future


def _compiled(
    name: str, constants: Mapping[str, int | bool], architecture: str, headers: Mapping[str, str] | None
) -> Cubin:
    """Return the result of `PlannedKernel.compile_ahead`, or of `compile`."""
    future = _ahead.pop((PlannedKernel(name, constants, headers).key, architecture), None)
    if future is not None and not future.cancel():
        with suppress(Exception):
            return future.result()
    return compile(name, constants, architecture, headers)


def architecture(device: torch.device) -> str:
    """Return the architecture of a GPU with its specific instructions: "sm_90a" on Hopper."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def compile(
    name: str,
    constants: Mapping[str, int | bool],
    architecture: str = "sm_90a",
    headers: Mapping[str, str] | None = None,
) -> Cubin:
    """Return the machine code of a kernel and what it uses, from the disk cache if it is there; needs no GPU.

    Args:
        name, constants, headers: as for `source`.
        architecture: "sm_90a".

    Raises:
        RuntimeError: it does not compile; shows the compiler's message and the path of the saved source.
        PermissionError: the cache folder is not private to the user.
        ValueError, TypeError, FileNotFoundError, ImportError: as for `source` and `compiler.compiler`.
    """
    text = source(name, constants, headers)
    identity = (text, *compiler.OPTIONS, compiler.compiler(), architecture)
    return Cubin.from_bytes(
        disk_cache.fetch(name, identity, lambda: compiler.compile(name, text, architecture).to_bytes())
    )


def source(name: str, constants: Mapping[str, int | bool], headers: Mapping[str, str] | None = None) -> str:
    """Return the whole text of a kernel.

    Args:
        name: name of the template, `name.cu` in one of FOLDERS, and of its entry point.
        constants: become `constexpr int` and `constexpr bool` in the namespace `config`; an IntEnum is an int.
        headers: generated texts, by the name under which they are included.

    Raises:
        TypeError: a constant is neither int nor bool.
        ValueError: a constant's name is no identifier, or its value does not fit 32 bits.
        FileNotFoundError: the template, or what it includes, does not exist.
    """
    lines = [_constant(key, value) for key, value in constants.items()]
    prologue = "\n".join(['#line 1 "config"', "namespace config {", *lines, "}  // namespace config"])
    return f"{prologue}\n{_paste(f'{name}.cu', headers or {}, set())}\n"


def _constant(name: str, value: int | bool) -> str:
    if not name.isidentifier() or not name.isascii():
        raise ValueError(f"the name of a constant must be an identifier, not {name!r}")
    if isinstance(value, bool):
        return f"[[maybe_unused]] constexpr bool {name} = {str(value).lower()};"
    if not isinstance(value, int):
        raise TypeError(f"the constant {name} must be int or bool, not {type(value).__name__}")
    if not -(2**31) < value < 2**31:
        raise ValueError(f"the constant {name} must fit 32 bits, {int(value)} does not")
    return f"[[maybe_unused]] constexpr int {name} = {int(value)};"


def _paste(name: str, headers: Mapping[str, str], pasted: set[str]) -> str:
    """Return the text of a file with the files that it includes; compiler messages keep their file names and lines."""
    pasted.add(name)
    shown, text = _find(name, headers)
    lines = [f'#line 1 "{shown}"']
    for number, line in enumerate(text.splitlines(), start=1):
        if "#" not in line:  # most lines
            lines.append(line)
            continue
        include = INCLUDE.match(line)
        if include and include[1] not in pasted:
            lines += [_paste(include[1], headers, pasted), f'#line {number + 1} "{shown}"']
        else:
            lines.append("" if include or ONCE.match(line) else line)
    return "\n".join(lines)


def _find(name: str, headers: Mapping[str, str]) -> tuple[str, str]:
    if name in headers:
        return f"generated/{name}", headers[name]
    for path in (FOLDER / folder / name for folder in FOLDERS):
        if path.is_file():
            return f"octile/kernels/cuda/{path.relative_to(FOLDER).as_posix()}", path.read_text(encoding="utf-8")
    raise FileNotFoundError(f"{name} is in none of {', '.join(FOLDERS)} below {FOLDER}, nor given as a header")
