"""`octile bench gemm`: octile's GEMMs vs. other libraries', on the same operands, interleaved.

On a GPU, every case runs once in a process of its own first, several at a time. That compiles all kernels; a case whose
kernel hangs, fails or computes a wrong result is reported and left out. On a CPU, the reference is compared with
torch's FP32 GEMM, the fastest exact one there. Operands are quantized beforehand, x in 1×128 tiles.
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
from octile.bench.drawn import default_seed, drawn_cases
from octile.bench.gemm_case import MAX_DIFFERENCE, prepare_case
from octile.bench.gemm_peers import peer_calls
from octile.bench.gemm_table import (
    CLEAN,
    COMPILED,
    DIFFERENCE,
    GRAPH,
    HOST,
    REGISTERS,
    SHARED,
    gemm_table,
    legend,
)
from octile.bench.kernel_time import Calls, graph_seconds, host_seconds, kernel_seconds, wait_for_gpu, work_seconds
from octile.bench.rows import Row, compare
from octile.bench.shapes import Case
from octile.bench.subprocess_call import call_in_subprocess
from octile.bench.tune import problem
from octile.kernels.cuda.compile_all import compile_gemm
from octile.kernels.cuda.gemm import num_sms, request
from octile.kernels.cuda.gemm.candidates import choose
from octile.kernels.cuda.gemm.config import GemmConfig
from octile.kernels.cuda.gemm.cost_model import rounded

MAX_PROCESSES = 12  # cases that are tried at the same time
TRIAL_BYTES = 14e9  # of the GPU's memory, for the largest of them
TRIAL_SECONDS = 150.0  # for one case: start, compile its kernel and its peers', run them
ALL_SECONDS = 280.0  # after which no further case is tried
ROUNDS = 20
FEW_ROWS = 256  # up to which a dense GEMM is also measured with a clean L2 cache


def rows(chosen: str | None = None, seed: int | None = None) -> Iterator[Row]:
    """Measure every shape, with random normal values, and yield its rows.

    Args:
        chosen: on a GPU "list", the shapes of `octile.bench.shapes`, or "drawn", those of `octile.bench.drawn`; None:
            both.
        seed: draws the shapes; None: the date.

    Raises:
        ValueError: they are to be drawn, and there is no GPU.
    """
    if not torch.cuda.is_available():
        if chosen == "drawn" or seed is not None:
            named = "shapes drawn is" if chosen == "drawn" else f"seed {seed} draws shapes, which are"
            raise ValueError(f"{named} measured on a GPU, and torch finds none here")
        for case in shapes.CPU:
            yield from _rows(case, "cpu")
        return
    cases = [] if chosen == "drawn" else list(shapes.GPU)
    if chosen != "list":
        seed = default_seed() if seed is None else seed
        print(f"shapes drawn by --seed {seed}", flush=True)
        cases += drawn_cases(seed)
    for case in tried(cases):
        try:
            yield from _rows(case, "cuda")
        except (ArithmeticError, RuntimeError) as error:
            _leave_out(case, error)
        torch.cuda.empty_cache()


def show(rows: Sequence[Row]) -> str:
    """Format the table, the meaning of its columns, and on a GPU the verdicts on the goals."""
    return "\n\n".join(filter(None, (gemm_table(rows), legend(rows), goals.gemm_verdicts(rows))))


def draw(json: Path) -> str:
    """Draw a roofline of the rows in a file, next to it. Return a line that says where, or why there is none."""
    from octile.report.roofline import save_roofline

    try:
        return f"roofline: {save_roofline(json, json.with_suffix('.svg'))}"
    except (ValueError, ImportError) as error:
        return f"no roofline: {error}"


def tried(cases: Sequence[Case]) -> list[Case]:
    """Return the cases whose GEMM ends and is right."""
    end = time.monotonic() + ALL_SECONDS
    with ThreadPoolExecutor(n_trials(torch.cuda.get_device_properties(0).total_memory)) as pool:
        reasons = pool.map(lambda case: why_not(case, end), cases)
        good = []
        for case, reason in zip(cases, reasons, strict=True):
            if reason is None:
                good.append(case)
            else:
                _leave_out(case, reason)
    return good


def n_trials(memory: float) -> int:
    """How many cases are tried at the same time on a GPU with so many bytes."""
    return min(MAX_PROCESSES, os.cpu_count() or 1, max(1, int(memory // TRIAL_BYTES)))


def _leave_out(case: Case, reason: object) -> None:
    print(f"left out: {case.name} {case.what}: {reason}", file=sys.stderr, flush=True)


def why_not(case: Case, end: float = math.inf) -> str | None:
    """Try a case in a process of its own, unless `end` is over. Return why it cannot be measured, or None."""
    if time.monotonic() > end:
        return "no time was left to try it"
    try:
        call_in_subprocess(rehearse, case, seconds=TRIAL_SECONDS)
    except (TimeoutError, RuntimeError) as error:
        return " ".join(str(error).split())[:300]
    return None


def rehearse(case: Case) -> None:
    """Run a case and its peers once on the GPU.

    Raises:
        TimeoutError: octile's GEMM does not end.
        ArithmeticError: its result is wrong.
    """
    setup = prepare_case(case, "cuda")
    setup.call()
    wait_for_gpu()
    expected = setup.high_precision()
    setup.check(setup.call, expected, setup.out, MAX_DIFFERENCE)
    peer_calls(setup, expected)
    wait_for_gpu()


def _rows(case: Case, device: str) -> Iterator[Row]:
    setup = prepare_case(case, device)
    expected = setup.high_precision()
    measured = setup.check(setup.call, expected, setup.out, MAX_DIFFERENCE)
    others = peer_calls(setup, expected)
    calls = {"octile": setup.call, **others}
    times = work_seconds(calls, ROUNDS)
    name, what, goal, ours = case.name, case.what, case.drawn or None, times.pop("octile")
    speed = case.flops / ours / 1e12
    for peer, taken in times.items():
        yield compare(name, what, speed, "TFLOP/s", peer, case.flops / taken / 1e12, goal)
    if not times:
        yield Row(name, what, speed, "TFLOP/s", goal=goal)
    if goals.DEEP_GEMM in others and case.kind == "dense" and case.m <= FEW_ROWS and not case.tiles:
        yield from _clean_rows(case, {"octile": setup.call, goals.DEEP_GEMM: others[goals.DEEP_GEMM]})
    yield Row(name, what, setup.bytes / ours / 1e9, "GB/s")
    yield Row(name, what, ours * 1e6, "µs")
    yield Row(name, what, measured, DIFFERENCE)
    if device == "cuda":
        yield Row(name, what, host_seconds(setup.call) * 1e6, HOST)
        yield Row(name, what, graph_seconds(setup.call) * 1e6, GRAPH)
        if config := kernel_of(case):
            kernel = compile_gemm(name, config)
            yield Row(name, what, kernel.registers, REGISTERS)
            yield Row(name, what, kernel.shared_bytes / 2**10, SHARED)
            yield Row(name, what, kernel.seconds, COMPILED)


def _clean_rows(case: Case, calls: Calls) -> Iterator[Row]:
    try:
        times = kernel_seconds(calls, ROUNDS, clean=True)
    except RuntimeError as error:
        return _leave_out(case, f"clean L2: {error}")
    ours, theirs = (case.flops / taken / 1e12 for taken in times.values())
    yield compare(case.name, case.what, ours, CLEAN, goals.DEEP_GEMM_CLEAN, theirs, case.drawn or None)


def kernel_of(case: Case) -> GemmConfig | None:
    """Return the configuration of Hopper's kernel for a case; None on another GPU."""
    if request.why_not_on(torch.device("cuda", torch.cuda.current_device())):
        return None
    return choose(rounded(problem(case)), num_sms.chip())
