"""Tests of the GEMM comparison without a GPU: the kernels in the emulator, and the model in place of the hardware."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from octile.kernels.cuda.gemm.candidates import candidates
from octile.kernels.cuda.gemm.config import Scales, Schedule
from octile.kernels.cuda.gemm.cost_model import Chip, rounded
from octile.kernels.cuda.gemm.launch_plan import make_tma_readable, plan_launch, problem
from octile.kernels.cuda.gemm.request import GemmRequest, Operand
from octile.lab.probe.products import CASES, ROW, ProbeGemm, _on, compare, main, make, modeled
from tests.kernels.cuda.emulated import emulate
from tools.emulator import build

CPU = torch.device("cpu")
MOST = 10_000_000  # multiplications that the emulator is asked for
SMALL = [case for case in CASES if case.m * case.n * case.k <= MOST]
H200 = Chip(132)
NUM_SMS = 32  # enough that some GEMMs use split-K


def _on_cpu(x: Operand) -> Operand:
    return replace(x, data=_on(CPU, x.data))


def emulated(p: GemmRequest) -> int:
    config = plan_launch(p, Chip(NUM_SMS)).config
    operands = [(x.data, x.scale, kind) for x, kind in zip(p.nt_operands(), p.scale_kinds(), strict=True)]
    emulate(config, p.out, *operands, p.sizes, num_sms=NUM_SMS)
    return config.split_k


@pytest.mark.one_case
@pytest.mark.skipif(build.compiler() is None, reason="the emulator needs a C++ compiler")
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_the_kernel_equals_the_model(case):
    found = compare(case, emulated, CPU)
    assert found.outputs > 0
    assert found.differ == 0


def test_the_emulator_runs_gemms_of_every_kind():
    assert {case.schedule for case in SMALL} == set(Schedule)
    assert {case.b_scales for case in SMALL} == set(Scales)
    assert {plan_launch(make(case), Chip(NUM_SMS)).config.split_k > 1 for case in SMALL} == {True, False}


def test_cases_have_their_intended_properties():
    promoted = [case for case in CASES if case.promote]
    assert len(CASES) >= 24
    assert Counter(case.b_scales is ROW for case in promoted).keys() == {True, False}
    assert {case.data for case in CASES} == {"random", "one sign", "ugly"}
    assert {case.schedule for case in CASES} == set(Schedule)
    assert {case.b_scales for case in CASES} == set(Scales)
    assert len({str(case) for case in CASES}) == len(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [Schedule.DENSE, Schedule.GROUPED])
def test_a_case_is_large_enough_for_several_strips_along_n(schedule):
    products = [make(case) for case in CASES if case.schedule is schedule and case.n > 2000]
    configs = {p.b.data.shape[-2]: candidates(rounded(problem(p)), H200)[0] for p in products}
    assert any(
        config.raster_along_n and n > config.raster_width * config.cluster_tile_n for n, config in configs.items()
    )


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_operands_have_a_layout_that_tma_reads(case):
    p = make(case)
    for request in (p, replace(p, a=_on_cpu(p.a), b=_on_cpu(p.b))):
        assert make_tma_readable(request) is request


@pytest.mark.parametrize("case", [case for case in CASES if case.data == "ugly"], ids=str)
def test_extreme_operands_contain_extreme_values(case):
    p = make(case)
    a, b = (x.data.float() for x in p.nt_operands())
    assert a.isnan().any()
    assert b.isfinite().all()
    assert bool(a.isinf().any()) == (case.a == torch.float8_e5m2 and case.m > 5)
    for x in (a, b):
        zeros = x[x == 0]
        assert {math.copysign(1, z) for z in zeros.tolist()} == {1, -1}
    subnormal = (b[..., 3, :] != 0) & (b[..., 3, :].abs() < torch.finfo(p.b.data.dtype).smallest_normal)
    assert subnormal.any()


@pytest.mark.parametrize("wrong", ["a bit", "a NaN", "a promotion", "the order of parts"])
def test_a_kernel_that_computes_something_else_is_found(wrong):
    case = ProbeGemm(5, 7, 1000, data="one sign")

    def run(p: GemmRequest) -> int:
        right = modeled(replace(p, promote=wrong != "a promotion"), 3 if wrong == "the order of parts" else 1)
        p.out.copy_(right)
        if wrong == "a bit":
            p.out.view(torch.int32)[2, 3] += 1
        if wrong == "a NaN":
            p.out[4, 6] = math.nan
        return 1

    found = compare(case, run, CPU)
    assert found.outputs == 35
    assert found.differ == 1 if wrong in ("a bit", "a NaN") else found.differ > 1


def test_rows_that_no_group_uses_are_not_compared_when_masked():
    case = ProbeGemm(6, 7, 128, schedule=Schedule.MASKED, sizes=(2, 0, 6))

    def run(p: GemmRequest) -> int:
        p.out.copy_(modeled(p, 1))
        p.out[0, 2:] = p.out[1] = 7.0
        return 1

    found = compare(case, run, CPU)
    assert (found.outputs, found.differ) == (8 * 7, 0)


def test_without_a_hopper_gpu_the_requirement_is_printed(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main([]) == 2
    assert "Hopper" in capsys.readouterr().err
