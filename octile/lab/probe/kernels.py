"""Functions that run raw tensor core instructions of a Hopper GPU on matrices."""

from pathlib import Path

import torch
from torch import Tensor

from octile.kernels.cuda.jit import specialize, wgmma
from octile.kernels.cuda.jit.compiler import Cubin

FOLDER = Path(__file__).parent
COLUMNS = 64  # N of the wgmma instruction
NAMES = {
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "tf32",
}
Source = tuple[str, dict[str, int | bool], dict[str, str]]  # arguments of `jit`: a name, constants and headers


def source_of(name: str, a: torch.dtype, b: torch.dtype, steps: int, fp16_accumulator: bool = False) -> Source:
    """Return the kernel that runs a chain of `steps` instructions, "wgmma" or "mma"."""
    kernel, d = f"probe_{name}", "f16" if fp16_accumulator else "f32"
    source = {f"{kernel}.cu": (FOLDER / f"{kernel}.cu").read_text("utf-8")}
    constants: dict[str, int | bool] = {"steps": steps, "half": fp16_accumulator}
    if name == "mma":
        return kernel, constants, source | {"mma.cuh": mma_header(NAMES[a], NAMES[b], d)}
    header = wgmma.header(COLUMNS, NAMES[a], NAMES[b], d)
    return kernel, constants | {"columns": COLUMNS}, source | {"wgmma.cuh": header}


def compile(name: str, a: torch.dtype, b: torch.dtype, steps: int, fp16_accumulator: bool = False) -> Cubin:
    """Compile the kernel for sm_90a; needs no GPU."""
    kernel, constants, headers = source_of(name, a, b, steps, fp16_accumulator)
    return specialize.compile(kernel, constants, "sm_90a", headers)


def run(name: str, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Compute c[M, N] + a[M, K] · b[N, K]ᵀ with a chain of "wgmma" or "mma" instructions.

    Args:
        a, b: contiguous, on one Hopper GPU; K of 32, 64, 96 or 128 bytes; M and N multiples of 64.
        c: float32 or float16, contiguous: the initial accumulators.
    """
    steps = a.shape[1] * a.element_size() // 32
    kernel, constants, headers = source_of(name, a.dtype, b.dtype, steps, c.dtype == torch.float16)
    loaded = specialize.load(kernel, constants, a.device, headers)
    rows, columns, threads = (64, COLUMNS, 128) if name == "wgmma" else (16, 8, 32)
    shared = (rows + columns) * 128 if name == "wgmma" else 0
    d = torch.empty_like(c)
    grid = len(a) // rows * (len(b) // columns)
    pointers = [t.data_ptr() for t in (a, b, c, d)]
    loaded.ready(grid, 1, threads, shared, [*pointers, len(b)])()
    return d


def mma_header(a: str, b: str, d: str) -> str:
    """Generate the device function `mma(d, a, b)`: d[16, 8] += a[16, k] · b[8, k]ᵀ in registers.

    Source: PTX ISA 8.5, section 9.7.14, "mma".
    """
    count, kind, constraint = (4, "float", "f") if d == "f32" else (2, "unsigned", "r")
    sums = ", ".join(f"%{i}" for i in range(count))
    a_words, b_words = (", ".join(f"%{count + i}" for i in which) for which in (range(4), range(4, 6)))
    operands = ", ".join(f'"+{constraint}"(d[{i}])' for i in range(count))
    return f"""\
__device__ __forceinline__ void mma({kind} (&d)[{count}], const unsigned (&a)[4], const unsigned (&b)[2]) {{
    asm volatile("mma.sync.aligned.m16n8k{wgmma.INSTRUCTION_K[a]}.row.col.{d}.{a}.{b}.{d} "
                 "{{{sums}}}, {{{a_words}}}, {{{b_words}}}, {{{sums}}};"
                 : {operands}
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}}
"""
