"""Compile all of octile's CUDA kernels without a GPU: those of the catalogs, with what each one uses."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat

from octile.kernels.cuda.attention import catalog as attention_catalog
from octile.kernels.cuda.attention import mla_catalog, mqa_logits, sparse_catalog
from octile.kernels.cuda.few_rows import catalog as few_rows_catalog
from octile.kernels.cuda.gate import catalog as gate_catalog
from octile.kernels.cuda.gate import launcher as gate_launcher
from octile.kernels.cuda.gemm import catalog as gemm_catalog
from octile.kernels.cuda.gemm.config import GemmConfig
from octile.kernels.cuda.jit import specialize
from octile.kernels.cuda.quantize import catalog as quantize_catalog
from octile.kernels.cuda.routing import catalog as routing_catalog

AnyPlan = gate_launcher.LaunchPlan | mqa_logits.LaunchPlan | mla_catalog.KernelPlan


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


def compile_all(architecture: str = "sm_90a") -> list[CompiledKernel]:
    """Compile every kernel of the catalogs, or read it from the disk cache.

    Raises:
        ValueError: the architecture is not sm_90a: the kernels are written for Hopper.
        RuntimeError: a kernel does not compile.
    """
    if architecture != "sm_90a":
        raise ValueError(f"architecture must be sm_90a, not {architecture!r}")
    cases: dict[GemmConfig, list[str]] = {}  # several shapes may share a kernel
    for case, config in gemm_catalog.configs().items():
        cases.setdefault(config, []).append(case)
    names = [others[0] + (f" and {len(others) - 1} more" if others[1:] else "") for others in cases.values()]
    launches = quantize_catalog.launches() | routing_catalog.launches()
    plans: dict[str, AnyPlan] = {
        **gate_catalog.plans(), **attention_catalog.plans(), **mla_catalog.plans(), **sparse_catalog.plans(),
        **few_rows_catalog.plans(),
    }  # fmt: skip
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        gemms = pool.map(compile_gemm, names, cases)
        others = pool.map(_compile, launches, *zip(*launches.values(), strict=True), repeat(architecture))
        planned = pool.map(_compile_plan, plans, plans.values(), repeat(architecture))
        return [*gemms, *others, *planned]


def _compile_plan(case: str, plan: AnyPlan, architecture: str) -> CompiledKernel:
    return _compile(case, plan.kernel, plan.constants, plan.constants["shared_bytes"], architecture, plan.headers)


def compile_gemm(case: str, config: GemmConfig) -> CompiledKernel:
    """Compile the kernel of a GEMM, or read it from the disk cache."""
    return _compile(case, "gemm", config.constants(), config.shared_bytes, "sm_90a", config.headers())


def _compile(
    case: str,
    kernel: str,
    constants: Mapping[str, int | bool],
    shared_bytes: int,
    architecture: str,
    headers: Mapping[str, str] | None = None,
) -> CompiledKernel:
    cubin = specialize.compile(kernel, constants, architecture, headers)
    shared, warnings = cubin.static_shared_bytes + shared_bytes, "; ".join(cubin.warnings)
    return CompiledKernel(
        kernel, case, cubin.registers, cubin.stack_bytes, cubin.spill_bytes, shared, cubin.seconds, warnings
    )
