"""`octile bench gemm`: octile's products beside those of other libraries, on the same operands, by turns.

On a GPU every case first runs once in a process of its own, several at a time: that compiles all kernels, and a
kernel that hangs, fails or computes something else is told of and left out. On a CPU it measures the reference beside
torch's FP32 product, its fastest exact one. Operands are cast beforehand; x in tiles of 1×128.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from octile.bench import goals, shapes
from octile.bench.gemm_case import MAX_DIFFERENCE, prepare_case
from octile.bench.gemm_peers import peer_calls
from octile.bench.gemm_table import gemm_table, legend
from octile.bench.kernel_time import finish, graph_seconds, host_seconds, work_seconds
from octile.bench.rows import Row, compare
from octile.bench.shapes import Case
from octile.bench.subprocess_call import call_in_subprocess
from octile.bench.tune import problem
from octile.kernels.cuda.compile_all import compile_gemm
from octile.kernels.cuda.gemm import num_sms, request
from octile.kernels.cuda.gemm.candidates import choose
from octile.kernels.cuda.gemm.config import GemmConfig
from octile.kernels.cuda.gemm.problem import Chip, rounded

AT_ONCE = 12  # cases that are tried at the same time; the largest take 9 GB of the GPU's memory each
TRIAL_SECONDS = 150.0  # for one: start, compile its kernel and its peers', run them
ALL_SECONDS = 280.0  # after which no other is begun
HOST, GRAPH, DIFFERENCE = "µs of host", "µs in a graph", "difference"  # units
REGISTERS, SHARED, COMPILED = "registers", "KiB of shared memory", "s to compile"


def rows() -> Iterator[Row]:
    """Measures every shape, row by row; data are random normal numbers."""
    if not torch.cuda.is_available():
        for case in shapes.CPU:
            yield from _rows(case, "cpu")
        return
    for case in tried(shapes.GPU):
        try:
            yield from _rows(case, "cuda")
        except (ArithmeticError, RuntimeError) as error:
            _leave_out(case, error)
        torch.cuda.empty_cache()


def show(rows: Sequence[Row]) -> str:
    """The table, what its columns mean, and on a GPU how the goals are met."""
    return "\n\n".join(filter(None, (gemm_table(rows), legend(rows), goals.in_words(rows))))


def draw(json: Path) -> str:
    """Draws recorded rows beside their file; says where, or why not."""
    from octile.report.roofline import save_roofline

    try:
        return f"roofline: {save_roofline(json, json.with_suffix('.svg'))}"
    except (ValueError, ImportError) as error:
        return f"no roofline: {error}"


def tried(cases: Sequence[Case]) -> list[Case]:
    """The cases whose product ends and is right."""
    end = time.monotonic() + ALL_SECONDS
    with ThreadPoolExecutor(min(AT_ONCE, os.cpu_count() or 1)) as pool:
        reasons = pool.map(lambda case: why_not(case, end), cases)
        good = []
        for case, reason in zip(cases, reasons, strict=True):
            if reason is None:
                good.append(case)
            else:
                _leave_out(case, reason)
    return good


def _leave_out(case: Case, reason: object) -> None:
    print(f"left out: {case.name} {case.what}: {reason}", file=sys.stderr, flush=True)


def why_not(case: Case, end: float = math.inf) -> str | None:
    """What keeps a case from being measured, tried in a process of its own unless it is too late; None: nothing."""
    if time.monotonic() > end:
        return "no time was left to try it"
    try:
        call_in_subprocess(rehearse, case, seconds=TRIAL_SECONDS)
    except (TimeoutError, RuntimeError) as error:
        return " ".join(str(error).split())[:300]
    return None


def rehearse(case: Case) -> None:
    """Runs a case's product and its peers once on the GPU.

    Raises:
        TimeoutError: octile's product does not end.
        ArithmeticError: it is wrong.
    """
    setup = prepare_case(case, "cuda")
    setup.call()
    finish()
    expected = setup.high_precision()
    setup.check(setup.call, expected, setup.out, MAX_DIFFERENCE)
    peer_calls(setup, expected)
    finish()


def _rows(case: Case, device: str) -> Iterator[Row]:
    setup = prepare_case(case, device)
    expected = setup.high_precision()
    far = setup.check(setup.call, expected, setup.out, MAX_DIFFERENCE)
    others = peer_calls(setup, expected)
    calls = {"octile": setup.call, **others}
    times = work_seconds(calls, rounds=20)
    name, what, ours = case.name, case.what, times.pop("octile")
    speed = case.flops / ours / 1e12
    for peer, taken in times.items():
        yield compare(name, what, speed, "TFLOP/s", peer, case.flops / taken / 1e12)
    if not times:
        yield Row(name, what, speed, "TFLOP/s")
    yield Row(name, what, setup.bytes / ours / 1e9, "GB/s")
    yield Row(name, what, ours * 1e6, "µs")
    yield Row(name, what, far, DIFFERENCE)
    if device == "cuda":
        yield Row(name, what, host_seconds(setup.call) * 1e6, HOST)
        yield Row(name, what, graph_seconds(setup.call) * 1e6, GRAPH)
        if config := kernel_of(case):
            kernel = compile_gemm(name, config)
            yield Row(name, what, kernel.registers, REGISTERS)
            yield Row(name, what, kernel.shared_bytes / 2**10, SHARED)
            yield Row(name, what, kernel.seconds, COMPILED)


def kernel_of(case: Case) -> GemmConfig | None:
    """Hopper's kernel for a case, None on another GPU."""
    if request.why_not_on(torch.device("cuda", torch.cuda.current_device())):
        return None
    return choose(rounded(problem(case)), Chip(num_sms.num_sms()))
