"""Every kernel that DeepSeek-V3's shapes need, and every cast, compiled without a GPU, with what each one uses."""

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat

from octile.kernels.cuda.gemm import candidates
from octile.kernels.cuda.gemm.config import GemmConfig
from octile.kernels.cuda.jit import specialize
from octile.kernels.cuda.quantize import catalog


@dataclass(frozen=True)
class Compiled:
    """What a kernel uses; registers, stack, spills, seconds and warnings as in `compiler.Cubin`.

    Attributes:
        case: the first of the shapes that take it, or the cast.
        shared_bytes: of a block, with what the launch adds.
    """

    kernel: str
    case: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int
    seconds: float
    warnings: str


def compile_all(architecture: str = "sm_90a") -> list[Compiled]:
    """Compiles every kernel, or reads it from the disk.

    Raises:
        ValueError: the architecture is not sm_90a: the kernels are written for Hopper.
        RuntimeError: a kernel does not compile.
    """
    if architecture != "sm_90a":
        raise ValueError(f"architecture must be sm_90a, not {architecture!r}")
    cases: dict[GemmConfig, list[str]] = {}  # several shapes may take one kernel
    for case, config in candidates.v3_configs().items():
        cases.setdefault(config, []).append(case)
    names = [others[0] + (f" and {len(others) - 1} more" if others[1:] else "") for others in cases.values()]
    of_casts = catalog.launches()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        products = pool.map(compile_gemm, names, cases, repeat(architecture))
        casts = pool.map(_compile, of_casts, *zip(*of_casts.values(), strict=True), repeat(architecture))
        return [*products, *casts]


def compile_gemm(case: str, config: GemmConfig, architecture: str = "sm_90a") -> Compiled:
    """A product's kernel, compiled or read from the disk."""
    return _compile(case, "gemm", config.constants(), config.shared_bytes, architecture, config.headers())


def _compile(
    case: str,
    kernel: str,
    constants: Mapping[str, int | bool],
    shared_bytes: int,
    architecture: str,
    headers: Mapping[str, str] | None = None,
) -> Compiled:
    cubin = specialize.compile(kernel, constants, architecture, headers)
    shared, warnings = cubin.static_shared_bytes + shared_bytes, "; ".join(cubin.warnings)
    return Compiled(
        kernel, case, cubin.registers, cubin.stack_bytes, cubin.spill_bytes, shared, cubin.seconds, warnings
    )
