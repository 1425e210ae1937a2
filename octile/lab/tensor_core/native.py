"""`octile.lab.tensor_core.vectorized` in C++: compiled when it is first used, by the compiler that the machine has,
and kept.

`native.cpp` computes what is finite and leaves the rest to the plain form: whole rows of outputs that meet a NaN, an
Inf or a sum near the end of its range. Without a compiler everything is left to the plain form, and the logger `octile`
says so, once.
"""

import ctypes
import functools
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from octile.lab.tensor_core import vectorized
from octile.lab.tensor_core.operand import ZERO_EXPONENT, DecodedOperand
from octile.lab.tensor_core.vectorized import Summation

log = logging.getLogger("octile")
SOURCE = Path(__file__).with_name("native.cpp")
COMPILERS = ("c++", "g++", "clang++")
# -frounding-math: the compiler must not compute in the rounding mode that it assumes
OPTIONS = ("-std=c++17", "-O3", "-march=native", "-frounding-math", "-fno-math-errno")


class _Problem(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "a_exponent", "b", "b_exponent")),
        *((name, ctypes.c_void_p) for name in ("out", "a_scale", "b_scale", "bad")),
        *((name, ctypes.c_int64) for name in ("m", "n", "k", "interval")),
        *((name, ctypes.c_int32) for name in ("terms", "fraction_bits", "output_bits", "floor", "nothing", "promote")),
    )


def sum_products(a: DecodedOperand, b: DecodedOperand, start: Tensor, how: Summation) -> Tensor:
    """Compute what `vectorized.sum_products` computes, bit for bit; FP16 and `truncation="down"` are left to it."""
    library = load()
    if (
        library is None
        or how.fp16_accumulator
        or how.instruction.truncation == "down"
        or not start.numel()
        or not a.value.shape[1]
    ):
        return vectorized.sum_products(a, b, start, how)
    out = start.contiguous().clone()
    bad = torch.zeros(start.shape[0], dtype=torch.bool)
    narrow = not how.instruction.scaled and all(
        fmt.exponent_bits <= 5 for fmt in how.instruction.formats
    )  # sums of two fit a byte
    nothing = -64 if narrow else ZERO_EXPONENT
    held = [t.unflatten(1, (-1, how.instruction.terms)).transpose(0, 1).contiguous() for t in (a.value, a.exponent)]
    held += [t.T.contiguous() for t in (b.value, b.exponent)]
    if narrow:
        held[1::2] = [t.clamp(nothing, 31).to(torch.int8) for t in held[1::2]]
    scales = [None if s is None else s.contiguous() for s in (how.a_scale, how.b_scale)]
    problem = _Problem(
        *(t.data_ptr() for t in held),
        out.data_ptr(),
        *(None if s is None else s.data_ptr() for s in scales),
        bad.data_ptr(),
        *out.shape,
        a.value.shape[1],
        how.interval,
        how.instruction.terms,
        how.instruction.fraction_bits,
        how.instruction.output_bits,
        how.instruction.floor,
        nothing,
        how.promote,
    )
    wide = a.value.dtype == torch.float64
    library.octile_sum_products(ctypes.byref(problem), wide, narrow, torch.get_num_threads())
    if bad.any():
        rows = DecodedOperand(a.value[bad], a.exponent[bad])
        out[bad] = vectorized.sum_products(rows, b, start[bad], how.of_rows(bad))
    return out


@functools.cache
def load() -> ctypes.CDLL | None:
    """The compiled form; None where there is no compiler or it fails, which the log then says."""
    path = next(filter(None, map(shutil.which, COMPILERS)), None)
    if path is None:
        log.warning("no C++ compiler (%s) was found: the tensor core is modeled in plain torch", ", ".join(COMPILERS))
        return None
    try:
        from octile.kernels import disk_cache

        machine = _run(path, "-march=native", "-dM", "-E", "-x", "c++", os.devnull)  # the CPU's instruction sets
        source = SOURCE.read_text()
        built = disk_cache.fetch("tensor_core", [source, *OPTIONS, path, machine], lambda: _build(path))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "tensor_core.so")
            file.write_bytes(built)
            return ctypes.CDLL(str(file))
    except (OSError, ImportError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or error
        log.warning("%s cannot compile the model of the tensor core, plain torch is used instead: %s", path, said)
        return None


def _build(path: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tensor_core.so")
        _run(path, *OPTIONS, "-shared", "-fPIC", "-pthread", str(SOURCE), "-o", str(file))
        return file.read_bytes()


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
