"""Tests of the time per kind of kernel, computed from a profile."""

import pytest

from experiments.loss.probe import summary
from octile.train.step.kernel_records import KernelRecord


def test_idle_is_what_is_left_between_the_first_and_the_last():
    found = summary([KernelRecord("gemm", 0, 10), KernelRecord("adamw", 30, 10)], steps=2)
    assert found["idle_share"] == pytest.approx(0.5)
    assert found["span_ms"] == pytest.approx(0.02)
    assert found["kinds"]["FP8 GEMMs"] == {"ms": pytest.approx(0.005), "share": pytest.approx(0.5)}
    assert found["kernels_a_step"] == 1
