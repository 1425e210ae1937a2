"""Record some thousand results of a real tensor core, which the tests replay on machines without one.

A file holds for each case the tensors `CASE.a` [32, K], `CASE.b` [24, K], `CASE.c` and `CASE.d` [32, 24], and in its
metadata the GPU that computed them.
"""

import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from octile.lab.probe.compare import InstructionChain, Run
from octile.lab.probe.tiles import accumulator, operand

ROWS, COLUMNS = 32, 24
FINITE_ROWS, FINITE_COLUMNS = (
    26,
    20,
)  # operands without NaN and Inf, since one such operand hides the effect of all others
SIDE = 64  # the smallest size that the kernels take
DTYPES = {str(d)[6:]: d for d in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32)}


def record(
    path: Path, cases: list[InstructionChain], run: Run, device: torch.device, about: dict[str, str], seed: int
) -> int:
    """Write the file, and return the number of outputs in it."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for case in cases:
        a = _operand(case.a, FINITE_ROWS, case.k, generator, opposite=False)
        b = _operand(case.b, FINITE_COLUMNS, case.k, generator, opposite=True)
        c = accumulator(a, b, generator, special=True, fp16_accumulator=case.fp16_accumulator)
        recorded = a[:ROWS], b[:COLUMNS], c[:ROWS, :COLUMNS], run(case.name, a, b, c)[:ROWS, :COLUMNS]
        tensors |= {f"{_key(case)}.{name}": t.cpu().contiguous() for name, t in zip("abcd", recorded, strict=True)}
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata=about)
    os.replace(partial, path)
    return len(cases) * ROWS * COLUMNS


def _operand(dtype: torch.dtype, finite: int, k: int, generator: torch.Generator, opposite: bool) -> Tensor:
    """Draw an operand [SIDE, k] whose rows from `finite` on hold NaN and Inf."""
    plain, special = (operand(dtype, SIDE, k, generator, opposite, special) for special in (False, True))
    return torch.cat((plain[:finite], special[finite:]))


def _key(case: InstructionChain) -> str:
    return f"{case.name} {str(case.a)[6:]} {str(case.b)[6:]} {case.steps}{' half' if case.fp16_accumulator else ''}"
