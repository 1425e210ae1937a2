"""Raw tensor core instructions of a Hopper GPU as functions of matrices."""

from pathlib import Path

import torch
from torch import Tensor

from octile.kernels.cuda import jit, wgmma
from octile.kernels.cuda.compiler import Cubin

FOLDER = Path(__file__).parent
COLUMNS = 64  # of a wgmma
NAMES = {
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "tf32",
}
Text = tuple[str, dict[str, int | bool], dict[str, str]]  # what `jit` takes: a name, constants and headers


def text(name: str, a: torch.dtype, b: torch.dtype, steps: int) -> Text:
    """The kernel of an instruction, "wgmma" or "mma", in chains of so many."""
    kernel = f"probe_{name}"
    source = {f"{kernel}.cu": (FOLDER / f"{kernel}.cu").read_text()}
    if name == "mma":
        return kernel, {"steps": steps}, source | {"mma.cuh": mma_header(NAMES[a], NAMES[b])}
    constants: dict[str, int | bool] = {"steps": steps, "columns": COLUMNS}
    return kernel, constants, source | {"wgmma.cuh": wgmma.header(COLUMNS, NAMES[a], NAMES[b])}


def compile(name: str, a: torch.dtype, b: torch.dtype, steps: int) -> Cubin:
    """The machine code for sm_90a, without a GPU."""
    kernel, constants, headers = text(name, a, b, steps)
    return jit.compile(kernel, constants, "sm_90a", headers)


def run(name: str, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """c[M, N] + a[M, K] · b[N, K]ᵀ by a chain of "wgmma" or "mma" instructions.

    Args:
        a, b: contiguous, on one Hopper GPU; K of 32, 64, 96 or 128 bytes; M and N multiples of 64.
        c: float32, contiguous.
    """
    from octile.kernels.cuda.driver import current_stream

    steps = a.shape[1] * a.element_size() // 32
    kernel, constants, headers = text(name, a.dtype, b.dtype, steps)
    loaded = jit.load(kernel, constants, a.device, headers)
    rows, columns, threads = (64, COLUMNS, 128) if name == "wgmma" else (16, 8, 32)
    shared = (rows + columns) * 128 if name == "wgmma" else 0
    d = torch.empty_like(c)
    grid = len(a) // rows * (len(b) // columns)
    pointers = [t.data_ptr() for t in (a, b, c, d)]
    stream = current_stream(a.device.index or 0)
    loaded.launch(grid, 1, threads, shared, [*pointers, len(b)], stream)
    return d


def mma_header(a: str, b: str) -> str:
    """`mma(d, a, b)`: d[16, 8] += a[16, k] · b[8, k]ᵀ in registers.  Source: PTX ISA 8.5, section 9.7.14, "mma"."""
    return f"""\
__device__ __forceinline__ void mma(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {{
    asm volatile("mma.sync.aligned.m16n8k{wgmma.STEP[a]}.row.col.f32.{a}.{b}.f32 "
                 "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}}
"""
