"""Compile all of octile's CUDA kernels without a GPU: those of the catalogs, with what each one uses."""

import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from octile.kernels.cuda.attention import catalog as attention_catalog
from octile.kernels.cuda.attention import mla_catalog, sparse_catalog
from octile.kernels.cuda.few_rows import catalog as few_rows_catalog
from octile.kernels.cuda.gate import catalog as gate_catalog
from octile.kernels.cuda.gemm import catalog as gemm_catalog
from octile.kernels.cuda.gemm.config import GemmConfig
from octile.kernels.cuda.jit import specialize
from octile.kernels.cuda.jit.mapped import MappedLaunch
from octile.kernels.cuda.quantize import catalog as quantize_catalog
from octile.kernels.cuda.routing import catalog as routing_catalog

AnyPlan = MappedLaunch | mla_catalog.KernelPlan


class Specialization(NamedTuple):
    """A kernel with the constants and headers that it is compiled with, and the dynamic shared memory of its launch.

    Attributes:
        case: the first of the shapes that are launched with it, or the quantization.
    """

    kernel: str
    case: str
    constants: Mapping[str, int | bool]
    shared_bytes: int
    headers: Mapping[str, str] | None = None


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled kernel and what it uses; registers, stack, spills, seconds and warnings as in `compiler.Cubin`.

    Attributes:
        case: the first of the shapes that are launched with it, or the quantization.
        shared_bytes: shared memory of a thread block, with the dynamic part that the launch adds.
    """

    kernel: str
    case: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    seconds: float
    warnings: str


def compile_concurrently(
    kernels: Iterable[Specialization], advance: Callable[[int], object] = lambda n: None
) -> list[CompiledKernel]:
    """Compile as many kernels at a time as there are CPUs, or read them from the disk cache.

    Args:
        kernels: the kernels.
        advance: called with 1 for each kernel, in their order, once it is compiled.
    """
    compiled = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for kernel in pool.map(_compile, kernels):
            compiled.append(kernel)
            advance(1)
    return compiled


def compile_gemm(case: str, config: GemmConfig) -> CompiledKernel:
    """Compile the kernel of a GEMM, or read it from the disk cache."""
    return _compile(_gemm(case, config))


def specializations() -> list[Specialization]:
    """Return what the catalogs' shapes and quantizations launch; shapes may share the kernel of a GEMM."""
    cases: dict[GemmConfig, list[str]] = {}  # several shapes may share a kernel
    for case, config in gemm_catalog.configs().items():
        cases.setdefault(config, []).append(case)
    names = [others[0] + (f" and {len(others) - 1} more" if others[1:] else "") for others in cases.values()]
    launches = quantize_catalog.launches() | routing_catalog.launches()
    plans: dict[str, AnyPlan] = {
        **gate_catalog.plans(), **attention_catalog.plans(), **mla_catalog.plans(), **sparse_catalog.plans(),
        **few_rows_catalog.plans(),
    }  # fmt: skip
    return [
        *map(_gemm, names, cases),
        *(Specialization(made.name, case, made.constants, made.shared_bytes) for case, made in launches.items()),
        *(
            Specialization(p.kernel, case, p.constants, p.constants["shared_bytes"], p.headers)
            for case, p in plans.items()
        ),
    ]


def _gemm(case: str, config: GemmConfig) -> Specialization:
    return Specialization("gemm", case, config.constants(), config.shared_bytes, config.headers())


def _compile(kernel: Specialization) -> CompiledKernel:
    cubin = specialize.compile(kernel.kernel, kernel.constants, "sm_90a", kernel.headers)
    return CompiledKernel(
        kernel.kernel,
        kernel.case,
        cubin.registers,
        cubin.stack_bytes,
        cubin.spill_bytes,
        cubin.static_shared_bytes + kernel.shared_bytes,
        cubin.seconds,
        "; ".join(cubin.warnings),
    )
