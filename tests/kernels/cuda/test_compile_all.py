"""Every plan of every CUDA kernel that DeepSeek-V3's shapes need compiles for Hopper without spills."""

import pytest

from octile.bench.shapes import MIDDLE
from octile.bench.tune import problem
from octile.kernels.cuda.compile_all import (
    CompiledKernel,
    Specialization,
    compile_concurrently,
    compile_gemm,
    specializations,
)
from octile.kernels.cuda.gemm.candidates import choose
from octile.kernels.cuda.gemm.catalog import configs
from octile.kernels.cuda.gemm.cost_model import Chip
from octile.kernels.cuda.jit import specialize
from octile.kernels.hopper import SHARED_BYTES

pytestmark = pytest.mark.exhaustive  # the tests of each kernel compile it, too, for an emulation of its threads

SOURCES = sorted(path.stem for path in specialize.FOLDER.glob("*/*.cu"))


@pytest.fixture(scope="module")
def catalogs() -> dict[str, list[Specialization]]:
    """The specializations of each kernel."""
    found: dict[str, list[Specialization]] = {}
    for kernel in specializations():
        found.setdefault(kernel.kernel, []).append(kernel)
    return found


@pytest.fixture(scope="module", params=SOURCES)
def compiled(request: pytest.FixtureRequest, catalogs: dict[str, list[Specialization]]) -> list[CompiledKernel]:
    """A kernel in each form, one kernel at a time, since all take minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("OCTILE_CUDA_COMPILER", raising=False)
        return compile_concurrently(catalogs[request.param])


def test_kernels_for_the_rows_of_inference_do_not_spill():
    chosen = {choose(problem(case), Chip(132)) for case in MIDDLE}
    assert [config for config in chosen if compile_gemm("", config).stack_bytes] == []


def test_there_is_a_gemm_for_each_plan(catalogs):
    assert len(catalogs["gemm"]) == len(set(configs().values())) > 0


def test_every_kernel_is_in_a_catalog(catalogs):
    assert sorted(catalogs) == SOURCES


def test_nothing_spills(compiled):
    assert [kernel for kernel in compiled if kernel.spill_bytes] == []


def test_local_memory_is_not_used(compiled):
    assert [kernel for kernel in compiled if kernel.stack_bytes] == []


def test_the_compiler_warns_of_nothing(compiled):
    assert [kernel for kernel in compiled if kernel.warnings] == []


def test_shared_memory_suffices(compiled):
    assert [kernel for kernel in compiled if kernel.shared_bytes > SHARED_BYTES] == []
