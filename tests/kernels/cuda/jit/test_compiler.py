"""Tests of the compilers: source becomes machine code without a GPU, and their log is read and reported."""

import re
import tempfile
from pathlib import Path

import pytest

from octile.kernels.cuda.jit import compiler

KERNEL = """
extern "C" __global__ void __launch_bounds__(128) smoke(float* x, int n) {
    __shared__ float shared[64];
    shared[threadIdx.x % 64] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = shared[n % 64];
}
"""
STACK = 'extern "C" __global__ void smoke(int* x) { int a[99]; for (int& e : a) e = x[0]++; x[1] = a[x[2]]; }'
SPILL = """
extern "C" __global__ void __launch_bounds__(1024, 2) smoke(float* x) {
    float a[80];
#pragma unroll
    for (int i = 0; i < 80; i++) a[i] = x[i * 1024];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 80; i++) x[i * 1024 + 1] = a[79 - i];
}
"""


@pytest.fixture(autouse=True)
def private_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(params=["nvrtc", "nvcc"])
def each(request, monkeypatch) -> str:
    """Run the test with each compiler that is installed; NVRTC is among the requirements of the tests."""
    monkeypatch.setenv("OCTILE_CUDA_COMPILER", request.param)
    if request.param == "nvcc":
        try:
            compiler.compiler()
        except FileNotFoundError:
            pytest.skip("needs NVCC")
    return request.param


@pytest.mark.slow
def test_a_kernel_becomes_an_elf_file_for_its_architecture(each):
    cubin = compiler.compile("smoke", KERNEL, "sm_90a")
    assert cubin.image[:4] == b"\x7fELF"
    assert b"smoke" in cubin.image
    assert re.fullmatch(each + r" \d+\.\d+ \(.+\)", cubin.compiler)
    assert "for 'sm_90a'" in cubin.log


@pytest.mark.slow
def test_resource_usage_is_read_from_the_log(each):
    cubin = compiler.compile("smoke", KERNEL, "sm_90a")
    assert cubin.static_shared_bytes == 64 * 4
    assert 0 < cubin.registers < 64
    assert (cubin.stack_bytes, cubin.spill_bytes) == (0, 0)
    assert cubin.seconds > 0


@pytest.mark.slow
def test_an_array_indexed_at_run_time_shows_as_stack(each):
    cubin = compiler.compile("smoke", STACK, "sm_90a")
    assert cubin.stack_bytes >= 99 * 4
    assert cubin.spill_bytes == 0


@pytest.mark.slow
def test_registers_that_do_not_fit_show_as_spills(each):
    assert compiler.compile("smoke", SPILL, "sm_90a").spill_bytes > 0


@pytest.mark.slow
def test_an_error_shows_the_message_and_stores_the_source(each):
    with pytest.raises(RuntimeError, match='identifier "y" is undefined') as raised:
        compiler.compile("smoke", KERNEL.replace("x[threadIdx.x] =", "y[threadIdx.x] ="), "sm_90a")
    saved = Path(re.search(r"source saved: (\S+)", str(raised.value))[1])
    assert "y[threadIdx.x] = shared" in saved.read_text()


def test_an_unknown_architecture_is_refused(each):
    with pytest.raises(RuntimeError, match="sm_1"):
        compiler.compile("smoke", KERNEL, "sm_1")


def test_an_unknown_compiler_is_refused(monkeypatch):
    monkeypatch.setenv("OCTILE_CUDA_COMPILER", "gcc")
    with pytest.raises(ValueError, match="OCTILE_CUDA_COMPILER must be nvrtc or nvcc, not 'gcc'"):
        compiler.compiler()


def test_a_log_without_figures_does_not_read_as_zero():
    with pytest.raises(RuntimeError, match="does not report"):
        compiler.resources("ptxas info    : 5 bytes gmem")


def test_compiler_warnings_are_found():
    log = """ptxas info    : (C7517) warpgroup.wait is injected in around line 129 by compiler
ptxas info    : Used 8 registers
product.cu(3): warning #177-D: variable "i" was declared but never referenced"""
    found = compiler.Cubin(b"", 0, 0, 0, 0, seconds=0.0, compiler="", log=log).warnings
    assert found == [log.splitlines()[0], log.splitlines()[2]]


def test_a_cubin_survives_its_bytes():
    cubin = compiler.Cubin(b"\x7fELF\n\0code\n", 168, 0, 0, 1024, seconds=0.5, compiler="nvrtc 13.0", log="two\nlines")
    assert compiler.Cubin.from_bytes(cubin.to_bytes()) == cubin
