"""`octile bench tune`: a search for the fastest GEMM kernel of each shape by measurement, whose results are stored.

`kernels.cuda.gemm.candidates` chooses a kernel by a cost model. Here the best candidates of that model are compiled on
all cores, each one's result is compared with the high-precision GEMM before it is timed, and the fastest is stored for
this user (`kernels.cuda.gemm.tuned`). Shapes that are stored are not measured again, so a search can be interrupted;
deleting the file starts over.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, fields
from multiprocessing import get_context

import torch
from torch import Tensor

from octile.bench import shapes
from octile.bench.gemm_case import MAX_DIFFERENCE, PreparedCase, prepare_case
from octile.bench.kernel_time import wait_for_gpu, work_seconds
from octile.bench.shapes import ALIGNMENT, Case
from octile.bench.subprocess_call import call_in_subprocess
from octile.kernels.cuda.gemm import num_sms, tuned
from octile.kernels.cuda.gemm.candidates import candidates, other_rasterization
from octile.kernels.cuda.gemm.config import GemmConfig, Scales, Schedule
from octile.kernels.cuda.gemm.cost_model import Chip, Problem, cycles, rounded
from octile.kernels.cuda.gemm.launch_cache import PreparedGemm, launch_key
from octile.kernels.cuda.gemm.launch_plan import make_tma_readable, plan_launch
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
MAX_CANDIDATES, MAX_SAME_TILE = 64, 3  # of a shape, and among them with the same tile
MAX_ESTIMATE = 1.6  # times the best estimate
SCHEDULES = {
    "dense": Schedule.DENSE,
    "grouped": Schedule.GROUPED,
    "masked": Schedule.MASKED,
    "wgrad": Schedule.ALONG_K,
}
SHAPE_SECONDS = 90.0
MAX_RESTARTS = 4  # candidates that may crash a process before the shape is given up
MIN_GAIN = 0.99  # times the chosen kernel's time; a smaller gain is noise


@dataclass(frozen=True)
class Found:
    """The measurements of a shape.

    Attributes:
        seconds: index → time of the best candidates whose results are right.
        failed: index → why a candidate was left out.
        broke: whether the last of `failed` crashed or hung the process, so that nothing was timed.
    """

    seconds: dict[int, float]
    failed: dict[int, str]
    broke: bool = False


def run(shape: tuple[int, int, int] | None, minutes: float) -> None:
    """Tune the shapes of `octile bench gemm`, or one dense GEMM, and print what changed.

    Args:
        shape: M, N, K; None: all shapes of the benchmark that are not stored.
        minutes: the time after which no further shape is begun.

    Raises:
        ValueError: there is no Hopper GPU; shape or minutes are not positive.
    """
    if not minutes > 0:  # as NaN
        raise ValueError(f"minutes must be above 0, not {minutes:g}")
    if shape and min(shape) < 1:
        raise ValueError(f"shape must be three numbers of at least 1, not {','.join(map(str, shape))}")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise ValueError("tune measures Hopper's kernels: it needs a GPU of sm_90")
    end, chip = time.monotonic() + 60 * minutes, num_sms.chip()
    cases = [Case("dense", *shape)] if shape else _unknown(ORDER, chip)
    print(f"{len(cases)} shapes, stored in {tuned.path()}", flush=True)
    pool = ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 1), mp_context=get_context("spawn"))
    try:
        lists = {case: shortlist(problem(case), chip) for case in cases}
        compiling = {case: [pool.submit(why_not_usable, config) for config in lists[case]] for case in cases}
        for number, case in enumerate(cases):
            if time.monotonic() > end:
                print(f"the time is over; {len(cases) - number} shapes are left")
                break
            print(_tune(case, lists[case], compiling[case], chip, end), flush=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def shortlist(p: Problem, chip: Chip) -> list[GemmConfig]:
    """Select the candidates to be measured: various tiles, the best of each with both rasterization orders.

    The first one is the choice of the cost model.
    """
    p = rounded(p)
    estimates = {config: cycles(p, config, chip) for config in candidates(p, chip)}
    best, same_tile, selected = min(estimates.values()), Counter[tuple[object, ...]](), []
    for config in sorted(estimates, key=estimates.__getitem__):
        tile = (config.tile_m, config.tile_n, config.warpgroups, config.ping_pong, config.transposed, config.load_c)
        same_tile[tile] += 1
        if same_tile[tile] <= MAX_SAME_TILE and estimates[config] <= MAX_ESTIMATE * best:
            selected.append(config)
            if same_tile[tile] == 1 and (other := other_rasterization(p, config)):
                selected.append(other)
    return selected[:MAX_CANDIDATES]


def problem(case: Case) -> Problem:
    """Return the problem by which a case's kernel is chosen, without its operands."""
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
        zero_rest=kind != "grouped",
        alignment=ALIGNMENT if kind == "grouped" else 1,
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
        zero_rest=s.case.kind != "grouped",
        alignment=ALIGNMENT if s.case.kind == "grouped" else 1,
    )


def why_not_usable(config: GemmConfig) -> str | None:
    """Compile a kernel into the cache. Return why it should not be run, or None."""
    try:
        cubin = specialize.compile("gemm", config.constants(), "sm_90a", config.headers())
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return f"{cubin.spill_bytes} bytes of spills" if cubin.spill_bytes else None


def measure(case: Case, configs: Sequence[GemmConfig], left_out: dict[int, str]) -> Found:
    """Measure candidates on the GPU.

    Each runs once and its result is checked. Those that are right are timed, interleaved, and the best of them again.

    Args:
        case: the GEMM.
        configs: the candidates, of which the first is the choice of the cost model.
        left_out: index → why a candidate is not run.
    """
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
        except Exception as error:  # it hangs or corrupted memory: this process cannot go on
            return Found({}, failed | {i: f"{type(error).__name__}: {error}"}, broke=True)
    if not calls:
        return Found({}, failed)
    times = work_seconds(calls, rounds=10)
    best = {*sorted(times, key=times.__getitem__)[:4], *(["0"] if "0" in calls else [])}
    times |= work_seconds({name: calls[name] for name in best}, rounds=40)
    return Found({int(name): times[name] for name in best}, failed)


def launcher(setup: PreparedCase, config: GemmConfig) -> Callable[[], Tensor]:
    """Return a call of a case with one kernel."""
    gemm, device = make_tma_readable(request(setup)), setup.out.device
    kernel = specialize.load("gemm", config.constants(), device, config.headers())
    prepared = PreparedGemm(plan_launch(gemm, num_sms.chip(device), config), kernel)
    _, pointers = launch_key(gemm)

    def call() -> Tensor:
        prepared.launch_at(prepared.with_workspace(pointers, setup.out))()
        return setup.out

    return call


def _tune(
    case: Case, configs: list[GemmConfig], compiling: Sequence[Future[str | None]], chip: Chip, end: float
) -> str:
    name, failed = f"{case.name} {case.what}", {}
    for i, future in enumerate(compiling):
        try:
            reason = future.result(max(0.0, end - time.monotonic()))
        except FutureTimeoutError:
            return f"{name}: not compiled in time"
        if reason:
            failed[i] = reason
    for _ in range(MAX_RESTARTS):
        try:
            found = call_in_subprocess(measure, case, configs, failed, seconds=SHAPE_SECONDS)
        except (TimeoutError, RuntimeError) as error:
            return f"{name}: {error}"
        failed = found.failed
        if not found.broke:
            break
    reasons = "".join(f"\n    {_describe_difference(configs[i], configs[0])}: {why}" for i, why in failed.items())
    if not found.seconds:
        return f"{name}: no kernel is right{reasons}"
    return f"{name}: {_store(case, configs, found.seconds, chip)}{reasons}"


def _store(case: Case, configs: Sequence[GemmConfig], seconds: dict[int, float], chip: Chip) -> str:
    """Store the fastest kernel, or the chosen one where no other is clearly faster. Return a line about it."""
    best = min(seconds, key=seconds.__getitem__)
    if 0 in seconds and seconds[best] > MIN_GAIN * seconds[0]:
        best = 0
    tuned.store(rounded(problem(case)), chip, configs[best], 1e6 * seconds[best])
    speed = f"{1e6 * seconds[best]:.1f} µs, {case.flops / seconds[best] / 1e12:.0f} TFLOP/s"
    if best == 0:
        return f"{speed}, the chosen kernel"
    before = f" instead of {1e6 * seconds[0]:.1f} µs" if 0 in seconds else ""
    return f"{speed}{before}, with {_describe_difference(configs[best], configs[0])}"


def _describe_difference(config: GemmConfig, chosen: GemmConfig) -> str:
    """List the settings in which a kernel differs from the chosen one."""
    pairs = ((f.name, getattr(config, f.name), getattr(chosen, f.name)) for f in fields(GemmConfig))
    return " ".join(f"{name}={int(ours)}" for name, ours, theirs in pairs if ours != theirs) or "the chosen kernel"


def _unknown(cases: Sequence[Case], chip: Chip) -> list[Case]:
    """Return the cases without a stored kernel, one for each kernel that would be stored."""
    once = {rounded(problem(case)): case for case in reversed(cases)}
    return [case for p, case in reversed(once.items()) if tuned.lookup(p, chip) is None]
