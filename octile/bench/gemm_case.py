"""A product of `bench.shapes` with its operands: what octile calls, what the result should be, what it moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from octile.bench.shapes import MASKED_ROWS, Case
from octile.ops.grouped import grouped_matmul_nt_out, grouped_wgrad_out, masked_grouped_matmul_nt_out
from octile.ops.matmul import matmul_nt_out
from octile.scaled import ScaledTensor, quantize

MAX_DIFFERENCE = 1e-3  # from the product of the numbers before they were quantised, see `difference`


@dataclass(frozen=True, eq=False)
class PreparedCase:
    """Operands of a case: random normal numbers.

    Attributes:
        x, w: as they were before they were quantised: x[M, K] · w[N, K]ᵀ, with groups as `case.kind` has them: grouped
            x[T, K], w[G, N, K]; masked x[G, MASKED_ROWS, K]; wgrad x[M, T], w[N, T], so groups are columns of both.
        a, b: x and w quantised along K (of wgrad: T).
        sizes: int32 [G]: offsets of the groups' ends, of a masked case the counts; None where it is dense.
        out: what every call writes into.
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
        """octile's product, dispatch included, into out."""
        a, b, out, sizes = _parts(self.a), _parts(self.b), self.out, self.sizes
        add = self.case.accumulate
        if self.case.kind == "dense":
            return lambda: matmul_nt_out(out, *a, *b, add) or out
        if self.case.kind == "grouped":
            return lambda: grouped_matmul_nt_out(out, *a, *b, sizes) or out
        if self.case.kind == "masked":
            return lambda: masked_grouped_matmul_nt_out(out, *a, *b, sizes, self.case.expected_rows) or out
        dy, x = _parts(self.a.mT), _parts(self.b.mT)
        return lambda: grouped_wgrad_out(out, *dy, *x, sizes, add) or out

    def high_precision(self) -> Tensor:
        """The product of x and w, by torch."""
        if self.case.kind == "dense":
            return self.x @ self.w.mT
        if self.case.kind == "grouped":
            return F.grouped_mm(self.x, self.w.mT, offs=self.sizes)
        if self.case.kind == "wgrad":
            return F.grouped_mm(self.x, self.w.mT, offs=self.sizes)
        rows = zip(self.x, self.w, self.case.sizes, strict=True)
        return torch.cat([x[:count] @ w.mT for x, w, count in rows])  # torch has no masked product

    def used(self, out: Tensor) -> Tensor:
        """Of a result what counts: of a masked one, the rows in use."""
        if self.case.kind != "masked":
            return out
        return torch.cat([rows[:count] for rows, count in zip(out, self.case.sizes, strict=True)])

    def check(self, call: Callable[[], Tensor | None], expected: Tensor, out: Tensor, limit: float) -> float:
        """How far what `call` writes into out, which is poisoned before, or returns, is from the expected.

        Raises:
            ArithmeticError: farther than the limit.
        """
        if out.dtype == torch.float32 and self.case.accumulate:
            before = out.normal_().clone()
            result = call()
            found = (out if result is None else result) - (before if result is None or result is out else 0)
        else:
            out.fill_(torch.nan)
            result = call()
            found = out if result is None else result
        far = difference(self.used(found), expected)
        if not far < limit:  # NaN is not
            raise ArithmeticError(f"the result differs from that of plain numbers by {far:.1e}, more than {limit:g}")
        return far

    @property
    def bytes(self) -> int:
        """Read and written: operands with their scales, and the result, read as well where it is added to."""
        case, scale = self.case, 4 / 128
        rows = case.m if case.kind == "dense" else sum(case.sizes)
        if case.kind == "wgrad":
            operands = (case.m + case.n) * rows * (1 + scale)
            written = case.groups * case.m * case.n
        else:
            of_b = scale if case.tiles else scale / 128
            operands = rows * case.k * (1 + scale) + case.groups * case.n * case.k * (1 + of_b)
            written = rows * case.n
        return int(operands + written * self.out.itemsize * (2 if case.accumulate else 1))


def prepare_case(case: Case, device: str, seed: int = 0) -> PreparedCase:
    """Makes the operands; plain ones are BF16 on a GPU and FP32 on a CPU, whose fastest exact product that is."""
    generator = torch.Generator(device).manual_seed(seed)
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
    """Where each group lies among all rows, or tokens."""
    return [slice(start, end) for start, end in pairwise([0, *accumulate(case.sizes)])]


def difference(found: Tensor, expected: Tensor) -> float:
    """1 − 2Σxy / Σ(x²+y²): 0 for equal matrices; of products in E4M3 of random normal numbers some 7e-4."""
    x, y = found.double(), expected.double()
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def _parts(q: ScaledTensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
    return q.data, q.scale, q.block
