"""Measure the host time of warm GEMMs and quantizations without a GPU: all of a call but the driver.

    taskset --cpu-list 1 python -m tools.host_time

The driver is replaced by a fake one, as for `tools.count_frames`. Prints the least and the median of the means of 400
calls in µs: without torch's dispatcher, and with it, as under a profiler. The figures compare states of the tree on one
machine. On a GPU a call takes some µs more, of which most is the driver's.
"""

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octile.formats import BLOCK, COLUMN_TILE, TILE
from octile.kernels.cuda.jit import driver
from octile.ops import grouped, matmul, norm, swiglu, transpose
from octile.ops.operator import LIBRARIES, Operator
from octile.ops.quantize import dequantize, quantize
from tools.count_frames import FakeKernel, fake_gpu

CALLS, REPEATS = 400, 25
M, N, K, G = 256, 512, 1024, 4
OPERATORS = (
    matmul.matmul_nt,
    matmul.matmul_nt_out,
    grouped.grouped_matmul_nt,
    grouped.grouped_matmul_nt_out,
    grouped.masked_grouped_matmul_nt,
    grouped.masked_grouped_matmul_nt_out,
    grouped.grouped_wgrad,
    grouped.grouped_wgrad_out,
    quantize,
    dequantize,
    transpose.quantize_rows_and_columns,
    transpose.requantize_transposed,
    transpose.quantize_and_transpose,
    transpose.quantize_transposed,
    transpose.quantize_joined,
    swiglu.swiglu_quantize_and_save,
    swiglu.swiglu_backward_quantize,
    norm.rms_norm_quantize,
)


def arguments() -> list[tuple[Any, ...]]:
    """Return the arguments of each operator."""

    def operand(*shape: int, block: tuple[int, int] = TILE) -> tuple[Tensor, Tensor, tuple[int, int]]:
        return *quantize(torch.ones(shape), *block, "e4m3", False), block

    def transposed(rows: int, columns: int) -> tuple[Tensor, Tensor, tuple[int, int]]:
        data, scale, _ = operand(rows, columns)
        return data.mT, scale.mT, COLUMN_TILE

    a, b, groups = operand(M, K), operand(N, K, block=BLOCK), operand(G, N, K, block=BLOCK)
    masked, dy, x = operand(G, M, K), transposed(N, M), transposed(K, M)
    offs, bf16 = torch.arange(1, G + 1, dtype=torch.int32) * (M // G), torch.bfloat16
    values, weight = torch.ones(M, K, dtype=bf16), torch.ones(N, K, dtype=bf16)
    out, masked_out, dw = torch.zeros(M, N, dtype=bf16), torch.zeros(G, M, N, dtype=bf16), torch.zeros(G, N, K)
    return [
        (*a, *b, bf16),
        (out, *a, *b, False),
        (*a, *groups, offs, bf16),
        (out, *a, *groups, offs),
        (*masked, *groups, offs, bf16, M // G),
        (masked_out, *masked, *groups, offs, M // G),
        (*dy, *x, offs, torch.float32),
        (dw, *dy, *x, offs, True),
        (values, *TILE, "e4m3", True),
        (*a[:2], *TILE, bf16),
        (values, "e4m3", True),
        (*a[:2], True),
        (weight, "e4m3", True),
        (weight, "e4m3", True, values),
        ([weight, weight], "e4m3", True, True, False),
        (values, values, "e4m3", True, "e4m3", True),
        (values, *a[:1], *a[:1], *a[1:2], *a[1:2], None, "e4m3", True, "e4m3", True),
        (values, torch.ones(K, dtype=bf16), 1e-6, "e4m3", True, False),
    ]


def microseconds(call: Callable[..., object], args: tuple[Any, ...]) -> str:
    """Return the least and the median of the means of `CALLS` calls."""
    for _ in range(CALLS):
        call(*args)
    means = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for _ in range(CALLS):
            call(*args)
        means.append((time.perf_counter() - start) / CALLS * 1e6)
    return f"{min(means):9.2f}{statistics.median(means):9.2f}"


def main() -> None:
    given = arguments()
    for operator in OPERATORS:
        entry = operator._entry(operator.kernels["cuda"])
        LIBRARIES[operator.name].impl(operator.name, entry, "CPU")  # for the dispatcher
    gc.disable()
    success = (driver.SUCCESS,)
    can_call_kernel = Operator._can_call_kernel
    print(f"{'':32}{'least':>9}{'median':>9}{'least':>9}{'median':>9}   µs; without the dispatcher, and with it")
    with torch.no_grad(), fake_gpu(OPERATORS, lambda *_: FakeKernel("gemm", b"", 0), lambda *_: success):
        Operator._can_call_kernel = can_call_kernel  # type: ignore[method-assign]
        for operator, args in zip(OPERATORS, given, strict=True):
            print(f"{operator.name:32}{microseconds(operator, args)}{microseconds(operator.overload, args)}")


if __name__ == "__main__":
    main()
