"""`octile bench tune`: measures the kernels that might be fastest for a shape, and keeps what it finds.

`kernels.cuda.choose` picks by arithmetic. Here its most promising candidates are compiled on all cores, each result is
compared with the product of plain numbers before it is timed, and the fastest is stored for this user
(`kernels.cuda.tuned`). A shape that has been measured is not measured again, so a search may be done in pieces;
deleting the file starts anew.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as NotInTime
from dataclasses import dataclass, fields
from multiprocessing import get_context

import torch
from torch import Tensor

from octile.bench import shapes
from octile.bench.gemm_case import MAX_DIFFERENCE, PreparedCase, prepare_case
from octile.bench.kernel_time import wait_for_gpu, work_seconds
from octile.bench.shapes import Case
from octile.bench.subprocess_call import call_in_subprocess
from octile.kernels.cuda.gemm import num_sms, tuned
from octile.kernels.cuda.gemm.candidates import candidates, other_rasterization
from octile.kernels.cuda.gemm.config import GemmConfig, Scales, Schedule
from octile.kernels.cuda.gemm.cost_model import cycles
from octile.kernels.cuda.gemm.launch_cache import PreparedGemm, launch_key
from octile.kernels.cuda.gemm.launch_plan import make_tma_readable, plan_launch
from octile.kernels.cuda.gemm.problem import Chip, Problem, rounded
from octile.kernels.cuda.gemm.request import GemmRequest, Operand
from octile.kernels.cuda.jit import specialize

ORDER = [
    *shapes.LARGE,
    *shapes.ACCUMULATED,
    *shapes.WGRAD,
    *shapes.GROUPED,
    *shapes.FEW_ROWS,
    *shapes.MASKED,
    *shapes.BOTH_TILES,
]
MOST, ALIKE = 64, 3  # candidates of a shape, and of those with the same tile
WITHIN = 1.6  # times the best estimate
SCHEDULES = {
    "dense": Schedule.DENSE,
    "grouped": Schedule.GROUPED,
    "masked": Schedule.MASKED,
    "wgrad": Schedule.ALONG_K,
}
SHAPE_SECONDS = 90.0
RESTARTS = 4  # candidates that may break a process, before the shape is given up
GAIN = 0.99  # of the chosen kernel's time: less than that is noise


@dataclass(frozen=True)
class Found:
    """What was measured of a shape.

    Attributes:
        seconds: of the candidates that are right, by their place.
        failed: why the others are not there.
        broke: the last of `failed` took the process with it, and nothing was timed.
    """

    seconds: dict[int, float]
    failed: dict[int, str]
    broke: bool = False


def run(shape: tuple[int, int, int] | None, minutes: float) -> None:
    """Tunes the shapes of `octile bench gemm`, or one dense product, and prints what changed.

    Args:
        shape: M, N, K; None: all of the benchmark's that have not been measured.
        minutes: after which no other shape is begun.

    Raises:
        ValueError: there is no Hopper GPU; shape or minutes are not positive.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise ValueError("tune measures Hopper's kernels: it needs a GPU of sm_90")
    if minutes <= 0 or (shape and min(shape) < 1):
        raise ValueError(f"shape and minutes must be positive, not {shape} and {minutes:g}")
    end, chip = time.monotonic() + 60 * minutes, Chip(num_sms.num_sms())
    cases = [Case("dense", *shape)] if shape else _unknown(ORDER, chip)
    print(f"{len(cases)} shapes, kept in {tuned.path()}", flush=True)
    pool = ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), mp_context=get_context("spawn"))
    try:
        lists = {case: shortlist(problem(case), chip) for case in cases}
        compiling = {case: [pool.submit(compiles, config) for config in lists[case]] for case in cases}
        for number, case in enumerate(cases):
            if time.monotonic() > end:
                print(f"the time is over; {len(cases) - number} shapes are left")
                break
            print(_tune(case, lists[case], compiling[case], chip, end), flush=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def shortlist(p: Problem, chip: Chip) -> list[GemmConfig]:
    """The candidates worth measuring, of various tiles, the best of each with bands both ways; the first is what
    arithmetic chooses."""
    p = rounded(p)
    estimates = {config: cycles(p, config, chip) for config in candidates(p, chip)}
    best, alike, kept = min(estimates.values()), Counter[tuple[object, ...]](), []
    for config in sorted(estimates, key=estimates.__getitem__):
        tile = (config.tile_m, config.tile_n, config.warpgroups, config.ping_pong, config.transposed)
        alike[tile] += 1
        if alike[tile] <= ALIKE and estimates[config] <= WITHIN * best:
            kept.append(config)
            if alike[tile] == 1 and (other := other_rasterization(p, config, chip)):
                kept.append(other)
    return kept[:MOST]


def problem(case: Case) -> Problem:
    """What decides on a case's kernel, without its operands."""
    total, kind = sum(case.sizes), case.kind
    return Problem(
        m={"dense": case.m, "grouped": total, "masked": case.expected_rows, "wgrad": case.m}[kind],
        n=case.n,
        k=total if kind == "wgrad" else case.k,
        groups=case.groups,
        schedule=SCHEDULES[kind],
        b_scales=Scales.PER_ROW if case.tiles else Scales.PER_BLOCK,
        out_float=case.accumulate,
        accumulate=case.accumulate,
        transposable=kind == "dense" and not case.tiles,
    )


def request(s: PreparedCase) -> GemmRequest:
    """Return the request that a case's operators make."""
    a, b = (Operand(x.data, x.scale, x.block) for x in (s.a, s.b))
    return GemmRequest(
        SCHEDULES[s.case.kind],
        a.mT if s.case.kind == "wgrad" else a,
        b.mT if s.case.kind == "wgrad" else b,
        s.out.dtype,
        s.out,
        s.sizes,
        s.case.accumulate,
        expected_rows=s.case.expected_rows if s.case.kind == "masked" else 0,
    )


def compiles(config: GemmConfig) -> str | None:
    """Compiles a kernel for later; returns why it is not worth running, or None."""
    try:
        cubin = specialize.compile("gemm", config.constants(), "sm_90a", config.headers())
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return f"{cubin.spill_bytes} bytes of spills" if cubin.spill_bytes else None


def measure(case: Case, configs: Sequence[GemmConfig], left_out: dict[int, str]) -> Found:
    """Runs the candidates on the GPU: each once, compared, then the right ones by turns, and the best of them again."""
    setup = prepare_case(case, "cuda")
    expected, failed, calls = setup.high_precision(), dict(left_out), {}
    for i, config in enumerate(configs):
        if i in failed:
            continue
        try:
            call = launcher(setup, config)
            call()
            wait_for_gpu()
            setup.check(call, expected, setup.out, MAX_DIFFERENCE)
            calls[str(i)] = call
        except ArithmeticError as error:
            failed[i] = str(error)
        except Exception as error:  # it hangs, or has written where it may not: this process is lost
            return Found({}, failed | {i: f"{type(error).__name__}: {error}"}, broke=True)
    if not calls:
        return Found({}, failed)
    times = work_seconds(calls, rounds=10)
    best = {*sorted(times, key=times.__getitem__)[:4], *(["0"] if "0" in calls else [])}
    times |= work_seconds({name: calls[name] for name in best}, rounds=40)
    return Found({int(name): times[name] for name in best}, failed)


def launcher(setup: PreparedCase, config: GemmConfig) -> Callable[[], Tensor]:
    """A call of one kernel."""

    gemm, device = make_tma_readable(request(setup)), setup.out.device
    kernel = specialize.load("gemm", config.constants(), device, config.headers())
    prepared = PreparedGemm(plan_launch(gemm, Chip(num_sms.num_sms(device)), config), kernel)
    pointers = (*launch_key(gemm)[1], setup.out.data_ptr())

    def call() -> Tensor:
        prepared.launch_at(pointers, device)()
        return setup.out

    return call


def _tune(
    case: Case, configs: list[GemmConfig], compiling: Sequence[Future[str | None]], chip: Chip, end: float
) -> str:
    name, failed = f"{case.name} {case.what}", {}
    for i, future in enumerate(compiling):
        try:
            reason = future.result(max(0.0, end - time.monotonic()))
        except NotInTime:
            return f"{name}: not compiled in time"
        if reason:
            failed[i] = reason
    for _ in range(RESTARTS):
        try:
            found = call_in_subprocess(measure, case, configs, failed, seconds=SHAPE_SECONDS)
        except (TimeoutError, RuntimeError) as error:
            return f"{name}: {error}"
        failed = found.failed
        if not found.broke:
            break
    reasons = "".join(f"\n    {_differs(configs[i], configs[0])}: {why}" for i, why in failed.items())
    if not found.seconds:
        return f"{name}: no kernel is right{reasons}"
    return f"{name}: {_keep(case, configs, found.seconds, chip)}{reasons}"


def _keep(case: Case, configs: Sequence[GemmConfig], seconds: dict[int, float], chip: Chip) -> str:
    """Stores the fastest; the chosen one where nothing is clearly faster."""
    best = min(seconds, key=seconds.__getitem__)
    if 0 in seconds and seconds[best] > GAIN * seconds[0]:
        best = 0
    tuned.store(rounded(problem(case)), chip, configs[best], 1e6 * seconds[best])
    speed = f"{1e6 * seconds[best]:.1f} µs, {case.flops / seconds[best] / 1e12:.0f} TFLOP/s"
    if best == 0:
        return f"{speed}, the chosen kernel"
    before = f" instead of {1e6 * seconds[0]:.1f} µs" if 0 in seconds else ""
    return f"{speed}{before}, with {_differs(configs[best], configs[0])}"


def _differs(config: GemmConfig, chosen: GemmConfig) -> str:
    """What a kernel has that the chosen one has not."""
    pairs = ((f.name, getattr(config, f.name), getattr(chosen, f.name)) for f in fields(GemmConfig))
    return " ".join(f"{name}={int(ours)}" for name, ours, theirs in pairs if ours != theirs) or "the chosen kernel"


def _unknown(cases: Sequence[Case], chip: Chip) -> list[Case]:
    once = {rounded(problem(case)): case for case in reversed(cases)}  # of several that share a kernel the first
    return [case for p, case in reversed(once.items()) if tuned.lookup(p, chip) is None]
