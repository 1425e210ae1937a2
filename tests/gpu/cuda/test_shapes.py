"""Tests of the benchmark's GEMMs on the GPU: every element is compared with an FP64 GEMM of the same 8-bit operands."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from octile.bench import shapes
from octile.bench.gemm_case import PreparedCase, group_slices, prepare_case
from octile.bench.shapes import Case
from tests.gpu.cuda.test_gemm import _check, _values


@pytest.mark.parametrize("case", shapes.GPU, ids=lambda case: f"{case.name} {case.what}")
def test_every_element_lies_within_the_bound(case: Case):
    _check_case(prepare_case(case, "cuda"))


def _check_case(s: PreparedCase) -> None:
    if s.case.accumulate:
        s.out.normal_()
    else:
        s.out.fill_(torch.nan)
    before = s.out.clone() if s.case.accumulate else torch.zeros_like(s.out)
    s.call()
    a, b = (_values((q.data, q.scale, q.block)) for q in (s.a, s.b))
    for of_a, of_b, place in _groups(s, a, b):
        _check(s.out[place], of_a, of_b, before[place].double())


def _groups(s: PreparedCase, a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor, tuple[int | slice, ...]]]:
    """Yield for each group its part of a, of b, and the index of its result."""
    if s.case.kind == "dense":
        yield a, b, ()
    for g, rows in enumerate(group_slices(s.case)):
        if s.case.kind == "grouped":
            yield a[rows], b[g], (rows,)
        elif s.case.kind == "masked":
            used = slice(s.case.sizes[g])
            yield a[g, used], b[g], (g, used)
        elif s.case.kind == "wgrad":
            yield a[:, rows], b[:, rows], (g,)
