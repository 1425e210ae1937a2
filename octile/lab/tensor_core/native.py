"""Tensor core arithmetic in C++, compiled on first use by the machine's C++ compiler and cached on disk.

`native.cpp` computes finite results. Rows of outputs that meet a NaN, an Inf or a sum near the end of the range are
computed again by `octile.lab.tensor_core.vectorized`. Without a compiler everything is computed there, and the logger
`octile` reports it once.
"""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from octile.kernels import native
from octile.lab.tensor_core import vectorized
from octile.lab.tensor_core.operand import ZERO_EXPONENT, DecodedOperand
from octile.lab.tensor_core.vectorized import Summation

SOURCE = Path(__file__).with_name("native.cpp")
# -frounding-math: the compiler must not assume the default rounding mode
OPTIONS = ("-std=c++17", "-O3", "-march=native", "-frounding-math", "-fno-math-errno")


class _Problem(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "a_exponent", "b", "b_exponent")),
        *((name, ctypes.c_void_p) for name in ("out", "a_scale", "b_scale", "bad")),
        *((name, ctypes.c_int64) for name in ("m", "n", "k", "interval")),
        *(
            (name, ctypes.c_int32)
            for name in ("terms", "fraction_bits", "output_bits", "floor", "zero_exponent", "promote")
        ),
    )


def sum_products(a: DecodedOperand, b: DecodedOperand, start: Tensor, summation: Summation) -> Tensor:
    """Compute what `vectorized.sum_products` computes, bit for bit.

    FP16 accumulators and truncation "down" are computed by `vectorized.sum_products` itself.
    """
    library = load()
    if (
        library is None
        or summation.fp16_accumulator
        or summation.instruction.truncation == "down"
        or not start.numel()
        or not a.value.shape[1]
    ):
        return vectorized.sum_products(a, b, start, summation)
    out = start.contiguous().clone()
    bad = torch.zeros(start.shape[0], dtype=torch.bool)
    narrow = not summation.instruction.scaled and all(
        fmt.exponent_bits <= 5 for fmt in summation.instruction.formats
    )  # the sum of two exponents fits in a byte
    zero_exponent = -64 if narrow else ZERO_EXPONENT
    packed = [
        t.unflatten(1, (-1, summation.instruction.terms)).transpose(0, 1).contiguous() for t in (a.value, a.exponent)
    ]
    packed += [t.T.contiguous() for t in (b.value, b.exponent)]
    if narrow:
        packed[1::2] = [t.clamp(zero_exponent, 31).to(torch.int8) for t in packed[1::2]]
    scales = [None if s is None else s.contiguous() for s in (summation.a_scale, summation.b_scale)]
    problem = _Problem(
        *(t.data_ptr() for t in packed),
        out.data_ptr(),
        *(None if s is None else s.data_ptr() for s in scales),
        bad.data_ptr(),
        *out.shape,
        a.value.shape[1],
        summation.interval,
        summation.instruction.terms,
        summation.instruction.fraction_bits,
        summation.instruction.output_bits,
        summation.instruction.floor,
        zero_exponent,
        summation.promote,
    )
    wide = a.value.dtype == torch.float64
    library.octile_sum_products(ctypes.byref(problem), wide, narrow, torch.get_num_threads())
    if bad.any():
        rows = DecodedOperand(a.value[bad], a.exponent[bad])
        out[bad] = vectorized.sum_products(rows, b, start[bad], summation.for_rows(bad))
    return out


def load() -> ctypes.CDLL | None:
    """Return the compiled library, or None, with a warning in the log, if there is no compiler or it fails."""
    return native.load(SOURCE, OPTIONS, "the tensor core model runs")
