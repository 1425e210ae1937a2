"""Tests of the benchmark's GEMMs on the GPU: every element is compared with an FP64 GEMM of the same 8-bit operands."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from octile.bench import shapes
from octile.bench.gemm_case import PreparedCase, group_slices, prepare_case
from octile.bench.shapes import Case
from tests.gpu.cuda.test_gemm import Quantized, _check, _values


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
    for a, b, index in _groups(s):
        _check(s.out[index], a, b, before[index].double())


def _groups(s: PreparedCase) -> Iterator[tuple[Tensor, Tensor, tuple[int | slice, ...]]]:
    """Yield for each group its part of a and b in FP64, and its result's index. All at once would take many GiB."""
    a, b = ((q.data, q.scale, q.block) for q in (s.a, s.b))
    if s.case.kind == "dense":
        yield _values(a), _values(b), ()
        return
    for g, rows in enumerate(group_slices(s.case)):
        if s.case.kind == "grouped":
            yield _values(_part(a, rows)), _values(_part(b, g)), (rows,)
        elif s.case.kind == "masked":
            used = slice(s.case.sizes[g])
            yield _values(_part(_part(a, g), used)), _values(_part(b, g)), (g, used)
        else:
            yield _columns(a, rows), _columns(b, rows), (g,)


def _part(operand: Quantized, index: int | slice) -> Quantized:
    """Matrices of a stack, or rows of a matrix that has a scale for each row."""
    data, scale, block = operand
    return data[index], scale[index], block


def _columns(operand: Quantized, columns: slice) -> Tensor:
    """Values in FP64 of some columns of a matrix that has scales for each 128 columns."""
    data, scale, block = operand
    start, stop = columns.start // 128, -(-columns.stop // 128)
    values = _values((data[:, 128 * start : 128 * stop], scale[:, start:stop], block))
    return values[:, columns.start - 128 * start : columns.stop - 128 * start]
