"""Tests of the time per kind of kernel, computed from a profile."""

import pytest

from experiments.loss.probe import kind, summary
from octile.train.step.kernel_records import KernelRecord


def test_idle_is_what_is_left_between_the_first_and_the_last():
    found = summary([KernelRecord("product", 0, 10), KernelRecord("adamw", 30, 10)], steps=2)
    assert found["idle_share"] == pytest.approx(0.5)
    assert found["span_ms"] == pytest.approx(0.02)
    assert found["kinds"]["FP8 product"] == {"ms": pytest.approx(0.005), "share": pytest.approx(0.5)}
    assert found["kernels_a_step"] == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("product", "FP8 product"),
        ("_wgrad", "FP8 product"),
        ("nvjet_sm90_tst_192x192_64x4_1x2_h_bz_coopB_TNN", "BF16 product"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("swiglu_backward", "cast, fused with what makes it"),
        ("unpermute", "permute, routing"),
        ("void at::native::vectorized_elementwise_kernel<4>", "elementwise"),
        ("Memcpy HtoD", "copy"),
        ("something new", "other"),
    ],
)
def test_a_kernels_kind_follows_from_its_name(name, expected):
    assert kind(name) == expected
