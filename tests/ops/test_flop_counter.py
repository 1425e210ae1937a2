"""When formulas of FLOPs are registered, and those of each operator; layers are in tests/compatibility."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from octile.ops.grouped import (
    grouped_matmul_nt,
    grouped_matmul_nt_out,
    grouped_wgrad,
    grouped_wgrad_out,
    masked_grouped_matmul_nt,
    masked_grouped_matmul_nt_out,
)
from octile.ops.high_precision import high_precision_grouped_nt, high_precision_grouped_tn
from octile.ops.matmul import matmul_nt, matmul_nt_out
from octile.ops.operator import LIBRARIES, operator
from octile.ops.packed import packed_matmul_nt
from octile.ops.row_invariant import row_invariant_matmul_nt, row_invariant_matmul_nt_out, row_invariant_scaled_nt_out
from tests.fresh_python import run_python

T, N, K, G = 6, 48, 32, 3
TILE = (1, 128)
OFFS = torch.tensor([2, 2, 5], dtype=torch.int32)  # the last row is in no group
COUNT = """
x = torch.zeros(6, 32)
with FlopCounterMode(display=False) as counter:
    octile.nn.Linear(32, 48)(x)
print(counter.get_total_flops())
"""


def encoded(*shape: int, block: tuple[int, int] = TILE) -> tuple[object, ...]:
    scales = *shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1])
    return torch.ones(shape).to(torch.float8_e4m3fn), torch.ones(scales), block


def packed(rows: int) -> tuple[Tensor, Tensor, int]:
    return encoded(rows, K)[0], torch.full((rows, 1), 0x7F7F7F7F, dtype=torch.int32), 128


OUT = torch.zeros(T, N)
A, B, B_OF_GROUPS = encoded(T, K), encoded(N, K), encoded(G, N, K, block=(128, 128))
DY, X = encoded(T, N, block=(128, 1)), encoded(T, K, block=(128, 1))
MASKED, COUNTS = encoded(G, T, K), torch.tensor([6, 0, 1], dtype=torch.int32)
CALLS: dict[str, tuple[Callable[[], object], int]] = {  # and the multiplications of each
    "dense": (lambda: matmul_nt(*A, *B, torch.float32), T * N * K),
    "dense, out": (lambda: matmul_nt_out(OUT, *A, *B, True), T * N * K),
    "grouped": (lambda: grouped_matmul_nt(*A, *B_OF_GROUPS, OFFS, torch.float32), T * N * K),
    "grouped, out": (lambda: grouped_matmul_nt_out(OUT, *A, *B_OF_GROUPS, OFFS, 1), T * N * K),
    "masked": (lambda: masked_grouped_matmul_nt(*MASKED, *B_OF_GROUPS, COUNTS, torch.float32), G * T * N * K),
    "masked, named": (
        lambda: masked_grouped_matmul_nt(*MASKED, *B_OF_GROUPS, COUNTS, torch.float32, expected_rows=2),
        G * T * N * K,
    ),
    "masked, out": (
        lambda: masked_grouped_matmul_nt_out(torch.zeros(G, T, N), *MASKED, *B_OF_GROUPS, COUNTS),
        G * T * N * K,
    ),
    "wgrad": (lambda: grouped_wgrad(*DY, *X, OFFS, torch.float32), T * N * K),
    "wgrad, out": (lambda: grouped_wgrad_out(torch.zeros(G, N, K), *DY, *X, OFFS, True), T * N * K),
    "high precision": (
        lambda: high_precision_grouped_nt(torch.ones(T, K), torch.ones(G, N, K), OFFS, torch.float32),
        T * N * K,
    ),
    "high precision, wgrad": (
        lambda: high_precision_grouped_tn(torch.ones(T, N), torch.ones(T, K), OFFS, torch.float32),
        T * N * K,
    ),
    "packed": (lambda: packed_matmul_nt(*packed(T), *packed(N), torch.float32), T * N * K),
    "row-invariant": (
        lambda: row_invariant_matmul_nt(torch.ones(G, T, K), torch.ones(G, N, K), torch.float32),
        G * T * N * K,
    ),
    "row-invariant, out": (
        lambda: row_invariant_matmul_nt_out(torch.zeros(G, T, N), torch.ones(G, T, K), torch.ones(G, N, K)),
        G * T * N * K,
    ),
    "row-invariant, scaled": (lambda: row_invariant_scaled_nt_out(OUT, *A, *B, False), T * N * K),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_gemm_has_two_flops_a_multiplication_of_all_rows(name: str):
    call, multiplications = CALLS[name]
    with FlopCounterMode(display=False) as counter:
        call()
    assert counter.get_total_flops() == 2 * multiplications


@pytest.mark.parametrize(
    "imports",
    [
        "import octile.nn; octile.nn.Linear; from torch.utils.flop_counter import FlopCounterMode",
        "from torch.utils.flop_counter import FlopCounterMode; import octile.nn",
    ],
    ids=["octile first", "torch first"],
)
def test_the_order_of_imports_does_not_matter(imports: str):
    ended = run_python(f"import torch; {imports}\n{COUNT}")
    assert ended.stdout.split() == [str(2 * 6 * 32 * 48)], ended.stderr


def test_octile_does_not_import_torchs_counter_and_removes_its_hook():
    ended = run_python(
        "import sys, octile.nn; octile.nn.Linear\n"
        "before = list(sys.meta_path)\n"
        "print('torch.utils.flop_counter' in sys.modules)\n"
        "import torch.utils.flop_counter\n"
        "print(len(before) - len(sys.meta_path))"
    )
    assert ended.stdout.split() == ["False", "1"], ended.stderr


def test_the_formula_of_an_operator_that_is_defined_again_replaces_the_first():
    def define(flops: int) -> Callable[[Tensor], Tensor]:
        @operator()
        def copied(x: Tensor) -> Tensor:
            return x.clone()

        copied.register_flops(lambda x: flops)
        return copied

    try:
        define(1)
        copied = define(2)
        with FlopCounterMode(display=False) as counter:
            copied(torch.ones(1))
        assert counter.get_total_flops() == 2
    finally:
        del LIBRARIES["copied"]
