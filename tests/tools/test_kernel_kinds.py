"""Tests of the kinds of kernels."""

import pytest

from tools.kernel_kinds import kind_of


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gemm", "FP8 GEMMs"),
        ("nvjet_sm90_tst_192x192_64x4_1x2_h_bz_coopB_TNN", "BF16 GEMMs"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("gate_backward_gemms", "BF16 GEMMs"),
        ("gate", "BF16 GEMMs"),
        ("gate_backward", "routing"),
        ("unpermute", "routing"),
        ("void at::native::vectorized_gather_kernel<16, int>(char*, char*, int*)", "routing"),
        ("void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*)", "elementwise"),
        ("void at::native::vectorized_elementwise_kernel<4>", "elementwise"),
        ("swiglu_backward", "quantization and norms"),
        ("rms_norm_backward", "quantization and norms"),
        ("adamw", "optimizer"),
        ("Memcpy HtoD", "others"),
        ("Memset (Unknown)", "others"),
    ],
)
def test_a_kernels_kind_follows_from_its_name(name, expected):
    assert kind_of(name) == expected
