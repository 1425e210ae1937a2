"""DeepGEMM's own tests, from a checkout of it, on octile's functions in place of its own.

    DEEP_GEMM_SOURCE=~/DeepGEMM pytest tests/gpu/compat/test_deep_gemm_suite.py

Checked with 2.6.1. The checkout need not be built: only its Python is used. The times that its tests print
are not real, see `octile.compat.deep_gemm.__main__`; its assertions and sizes are unchanged.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = os.environ.get("DEEP_GEMM_SOURCE")
TESTS = {
    "test_fp8_fp4": (
        "test_gemm",
        "test_m_grouped_gemm_contiguous",
        "test_m_grouped_gemm_masked",
        "test_k_grouped_gemm_contiguous",
    ),
    "test_bf16": (
        "test_gemm",
        "test_m_grouped_gemm_contiguous",
        "test_m_grouped_gemm_masked",
        "test_k_grouped_gemm_contiguous",
        "test_cublaslt_gemm",
    ),
    "test_einsum": ("test_bmk_bnk_mn", "test_bhr_hdr_bhd", "test_bhd_hdr_bhr", "test_fp8_bhr_hdr_bhd"),
    "test_attention": ("test_gemm_skip_head_mid", "test_mqa_logits", "test_paged_mqa_logits"),
    "test_layout": ("test_sf_layout_kernels", "test_k_grouped_sf_layout_kernels"),
}
RUN = """\
import importlib, random, sys
from pathlib import Path
import torch
from octile.compat.deep_gemm import install
source, file, function = sys.argv[1:]
sys.path.insert(0, str(Path(source) / "tests"))
install(source)
torch.manual_seed(0)
random.seed(0)
getattr(importlib.import_module(file), function)()
"""


def run(source: str, file: str, function: str) -> subprocess.CompletedProcess[str]:
    """Run in a subprocess, since the stand-in, like the library itself, affects the whole process."""
    octile = str(Path(__file__).parents[3])
    path = os.pathsep.join(filter(None, [octile, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "DG_USE_NVIDIA_TOOLS": "1"}
    command = [sys.executable, "-c", RUN, source, file, function]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.mark.skipif(SOURCE is None, reason="DEEP_GEMM_SOURCE names no checkout of DeepGEMM")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("file", "function"), [(file, name) for file, names in TESTS.items() for name in names])
def test_deep_gemms_own_test_passes(file: str, function: str):
    ran = run(SOURCE, file, function)
    assert ran.returncode == 0, f"{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
