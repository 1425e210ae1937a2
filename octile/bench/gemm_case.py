"""A GEMM of `bench.shapes` with its operands: octile's call, the expected result, and the bytes that it moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.bench.shapes import ALIGNMENT, MASKED_ROWS, Case
from octile.ops.grouped import grouped_matmul_nt_out, grouped_wgrad_out, masked_grouped_matmul_nt_out
from octile.ops.matmul import matmul_nt_out
from octile.scaled import ScaledTensor, quantize

MAX_DOUBLES = 2**26  # that are compared at once
MAX_DIFFERENCE = 1e-3  # from the GEMM of the values before quantization, see `difference`


@dataclass(frozen=True, eq=False)
class PreparedCase:
    """A case with its operands, random normal values.

    Attributes:
        case: the GEMM.
        x, w: the values before quantization: x[M, K] · w[N, K]ᵀ. Grouped: x[T, K], w[G, N, K]. Masked:
            x[G, MASKED_ROWS, K]. Wgrad: x[M, T], w[N, T], whose groups are ranges of columns.
        a, b: x and w quantized along K (wgrad: along T).
        sizes: int32 [G]: the ends of the groups, in a masked case the counts; None if dense.
        out: the output of every call.
    """

    case: Case
    x: Tensor
    w: Tensor
    a: ScaledTensor
    b: ScaledTensor
    sizes: Tensor | None
    out: Tensor

    @cached_property
    def call(self) -> Callable[[], Tensor]:
        """octile's GEMM through torch's dispatcher, into `out`."""
        a, b, out, sizes = _flat(self.a), _flat(self.b), self.out, self.sizes
        add = self.case.accumulate
        if self.case.kind == "dense":
            return lambda: matmul_nt_out(out, *a, *b, add) or out
        if self.case.kind == "grouped":
            return lambda: grouped_matmul_nt_out(out, *a, *b, sizes, ALIGNMENT) or out
        if self.case.kind == "masked":
            return lambda: masked_grouped_matmul_nt_out(out, *a, *b, sizes, self.case.expected_rows) or out
        dy, x = _flat(self.a.mT), _flat(self.b.mT)
        return lambda: grouped_wgrad_out(out, *dy, *x, sizes, add) or out

    def high_precision(self) -> Tensor:
        """Compute the GEMM of x and w with torch."""
        if self.case.kind == "dense":
            return self.x @ self.w.mT
        if self.case.kind == "grouped":
            return F.grouped_mm(self.x, self.w.mT, offs=self.sizes)
        if self.case.kind == "wgrad":
            return F.grouped_mm(self.x, self.w.mT, offs=self.sizes)
        rows = zip(self.x, self.w, self.case.sizes, strict=True)
        return torch.cat([x[:count] @ w.mT for x, w, count in rows])  # torch has no masked GEMM

    def used(self, out: Tensor) -> Tensor:
        """Return the part of a result that is defined: in a masked case the rows in use."""
        if self.case.kind != "masked":
            return out
        return torch.cat([rows[:count] for rows, count in zip(out, self.case.sizes, strict=True)])

    def check(self, call: Callable[[], Tensor | None], expected: Tensor, out: Tensor, limit: float) -> float:
        """Call a GEMM and compare its result with the expected one.

        Args:
            call: writes into `out`, or returns its result.
            expected: the result of `high_precision`.
            out: filled with NaN before, or with random values if the case accumulates.
            limit: for `difference`.

        Returns:
            The `difference`.

        Raises:
            ArithmeticError: it exceeds the limit.
        """
        if out.dtype == torch.float32 and self.case.accumulate:
            before = out.normal_().clone()
            result = call()
            found = (out if result is None else result) - (before if result is None or result is out else 0)
        else:
            out.fill_(torch.nan)
            result = call()
            found = out if result is None else result
        measured = difference(self.used(found), expected)
        if not measured < limit:  # also for NaN
            raise ArithmeticError(f"the result differs from the high-precision GEMM by {measured:.1e} > {limit:g}")
        return measured

    @property
    def bytes(self) -> int:
        """Bytes of the operands with their scales and of the output, which counts twice if it is added to."""
        case, scale = self.case, 4 / 128
        rows = case.m if case.kind == "dense" else sum(case.sizes)
        if case.kind == "wgrad":
            operands = (case.m + case.n) * rows * (1 + scale)
            written = case.groups * case.m * case.n
        else:
            scale_b = scale if case.tiles else scale / 128
            operands = rows * case.k * (1 + scale) + case.groups * case.n * case.k * (1 + scale_b)
            written = rows * case.n
        return int(operands + written * self.out.itemsize * (2 if case.accumulate else 1))


def prepare_case(case: Case, device: str) -> PreparedCase:
    """Make the operands of a case. x and w are BF16 on a GPU and FP32 on a CPU, where that GEMM is the fastest."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype, generator=generator)

    g, m, n, k = case.groups, case.m, case.n, case.k
    total = sum(case.sizes)
    x_shape, w_shape, shape = {
        "dense": ((m, k), (n, k), (m, n)),
        "grouped": ((total, k), (g, n, k), (total, n)),
        "masked": ((g, MASKED_ROWS, k), (g, n, k), (g, MASKED_ROWS, n)),
        "wgrad": ((m, total), (n, total), (g, m, n)),
    }[case.kind]
    x, w = randn(*x_shape), randn(*w_shape)
    sizes = case.sizes if case.kind == "masked" else list(accumulate(case.sizes))
    out_dtype = torch.float32 if case.accumulate else torch.bfloat16
    return PreparedCase(
        case,
        x,
        w,
        quantize(x),
        quantize(w, (1, 128) if case.tiles else (128, 128)),
        None if case.kind == "dense" else torch.tensor(sizes, dtype=torch.int32, device=device),
        torch.empty(shape, dtype=out_dtype, device=device),
    )


def group_slices(case: Case) -> list[slice]:
    """Return the rows (wgrad: tokens) of each group."""
    return [slice(start, end) for start, end in pairwise([0, *accumulate(case.sizes)])]


def difference(found: Tensor, expected: Tensor) -> float:
    """Compute 1 − 2Σxy / Σ(x²+y²): 0 for equal matrices, some 7e-4 for E4M3 GEMMs of random normal values."""
    both = total = 0.0
    for x, y in zip(found.flatten().split(MAX_DOUBLES), expected.flatten().split(MAX_DOUBLES), strict=True):
        x, y = x.double(), y.double()
        both, total = both + (x * y).sum(), total + (x * x + y * y).sum()
    return float(1 - 2 * both / total)


def _flat(q: ScaledTensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
    return q.data, q.scale, q.block
