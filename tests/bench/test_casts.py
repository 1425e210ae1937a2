"""Tests of what operators are compared with, and that each of them takes the arguments that it is measured with."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from octile.bench.casts import (
    ALIGNMENT,
    GATES,
    HEADS,
    NARROW_COLUMNS,
    SMALL_PART,
    Peak,
    _cases,
    _gate_cases,
    _loss_cases,
    _narrow_cases,
    _optimizer_cases,
    _parameter_shapes,
    bound_of,
    halves,
)
from octile.bench.goals import BOUND_OF_BYTES, BOUND_OF_FLOPS
from octile.train.config import preset


@pytest.mark.parametrize("moved", [1, 2 * ALIGNMENT, 2 * ALIGNMENT + 1, 89_026_560])
def test_a_copy_moves_as_much_between_aligned_buffers(moved: int):
    source, target = halves(moved, "cpu")
    assert source.nbytes == target.nbytes
    assert moved <= 2 * source.nbytes <= moved * (1 + 1 / SMALL_PART) + 2
    assert source.data_ptr() % ALIGNMENT == target.data_ptr() % ALIGNMENT == 0
    assert target.data_ptr() >= source.data_ptr() + source.nbytes


def test_the_optimizer_updates_each_parameter_of_a_preset():
    shapes = _parameter_shapes("tiny")
    (_, adamw, tensors, _), (_, norms, gradients, _) = _optimizer_cases(shapes, "cpu")
    before = [t.clone() for t in tensors]
    assert len(adamw(*tensors)) == 3 * len(shapes)
    changed = [not bool((t == old).all()) for t, old in zip(tensors, before, strict=True)]
    n = len(shapes)
    assert changed == [True] * n + [False] * n + [True] * (2 * n) + [False]
    assert norms(*gradients).shape == (n,)


@pytest.mark.parametrize(("moved", "unit"), [(2**21 + 600, 2**16), (2**26 + 16, ALIGNMENT)])
def test_a_copy_has_no_odd_bytes_that_take_a_kernel_of_their_own(moved: int, unit: int):
    assert halves(moved, "cpu")[0].nbytes % unit == 0


X, WEIGHT = torch.zeros(30, 20), torch.zeros(4, 20)
GATE, GATE_BACKWARD = ("gate", [X, WEIGHT]), ("gate backward", [X, X, X, X, X, WEIGHT])
MOVED, COPY, SMALLEST_COPY = 4800, 10.0, 0.5


@pytest.mark.parametrize(
    ("operator", "flops", "bound"),
    [
        (GATE, 1e6, (BOUND_OF_BYTES, COPY)),
        (GATE, 100.0, (BOUND_OF_FLOPS, 6 * 30 * 20 * 4 / 100)),
        (GATE_BACKWARD, 1e6, (BOUND_OF_BYTES, COPY + SMALLEST_COPY)),
        (GATE_BACKWARD, 100.0, (BOUND_OF_FLOPS, 18 * 30 * 20 * 4 / 100 + SMALLEST_COPY)),
        (("RMSNorm backward", [X, X]), 100.0, (BOUND_OF_BYTES, COPY + SMALLEST_COPY)),
        (("quantize all×all", [X]), 100.0, (BOUND_OF_BYTES, 1.5 * COPY + SMALLEST_COPY)),
        (("quantize 1×128", [X]), 100.0, None),
    ],
    ids=str,
)
def test_an_operator_is_bound_by_the_larger_of_bytes_and_flops_and_by_its_passes(operator, flops, bound):
    found = bound_of(*operator, MOVED, COPY, Peak(flops, SMALLEST_COPY))
    assert found == (None if bound is None else (bound[0], pytest.approx(bound[1])))


GPU_CASES = {  # with fewer rows than a GPU's, and narrower gates
    "256×512": partial(_cases, 256, 512),
    **{f"64×{k}": partial(_narrow_cases, 64, k) for k in NARROW_COLUMNS},
    **{f"4×{v}": partial(_loss_cases, 4, v) for _, v in HEADS["cuda"]},
    **{
        f"gate of {name}": partial(_gate_cases, 48, replace(preset(name).model, hidden_size=256))
        for _, name in GATES["cuda"]
    },
}


@pytest.mark.parametrize("case", GPU_CASES)
def test_operators_take_the_arguments_that_they_are_measured_with(case):
    for what, operator, inputs, _ in GPU_CASES[case]("cpu", torch.bfloat16):
        outputs = operator(*inputs)
        assert sum(t.nbytes for t in ([outputs] if isinstance(outputs, Tensor) else outputs)), what
