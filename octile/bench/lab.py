"""`octile bench lab`: how fast the model of the tensor core is, in C++ and in plain torch, beside an FP32 product."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from octile.bench.rows import LEGEND, Row, beside, table
from octile.bench.timing import seconds
from octile.lab import native, vectorised
from octile.lab.architectures import instruction
from octile.lab.operand import Operand, decode
from octile.lab.vectorised import Sum

Form = Callable[[Operand, Operand, Tensor, Sum], Tensor]
SIZE = 512
CASES = (("sm_90", torch.float8_e4m3fn), ("sm_100", torch.float8_e4m3fn), ("sm_90", torch.bfloat16))


def rows() -> Iterator[Row]:
    """GFLOP/s on the CPU, promoted every 128, operands decoded in the time."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(SIZE, SIZE, generator=generator) for _ in range(2))
    for arch, dtype in CASES:
        row = instruction(arch, dtype, dtype)
        a, b, how = x.to(dtype), w.to(dtype), Sum(row, 128, promote=True)
        start = torch.zeros(SIZE, SIZE)
        forms = {
            form.__name__.rpartition(".")[2]: partial(_sum, form.sum_products, a, b, start, how)
            for form in (native, vectorised)
        }
        times = seconds({**forms, "FP32": lambda: x @ w.T}, rounds=10)
        speed = {name: 2 * SIZE**3 / taken / 1e9 for name, taken in times.items()}
        for name in forms:
            case = f"{arch} {row.name} {dtype}".replace("torch.", "")
            yield beside(case, name, speed[name], "GFLOP/s", "torch's FP32 product", speed["FP32"])


def show(found: Sequence[Row]) -> str:
    """The table."""
    return f"{table(found)}\n\n{LEGEND}"


def _sum(form: Form, a: Tensor, b: Tensor, start: Tensor, how: Sum) -> Tensor:
    return form(decode(a, how.row), decode(b, how.row), start, how)
