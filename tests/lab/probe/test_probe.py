"""Tests of the probe without a GPU: its kernels in the emulator, and the model in place of the hardware."""

import re
import subprocess
from dataclasses import replace

import pytest
import torch

from octile.lab.probe import golden, kernels, tiles
from octile.lab.probe.__main__ import main
from octile.lab.probe.compare import SIDE, InstructionChain, bits, cases, compare, modeled
from octile.lab.tensor_core.operand import decode
from tests.lab.matrices import same_bits
from tests.lab.recorded_results import replay
from tools import emulator
from tools.emulator import build

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
CPU = torch.device("cpu")
SHORT = [case for case in cases() if case.steps == 1]


def pretended(row_of):
    """A simulated tensor core that computes what a model predicts."""
    return lambda name, a, b, c: modeled(a, b, c, row_of(InstructionChain(name, a.dtype, b.dtype, 1).instruction))


TRUE = pretended(lambda row: row)


@pytest.mark.skipif(build.compiler() is None, reason="the emulator needs a C++ compiler")
@pytest.mark.parametrize(
    "case",
    [
        InstructionChain("wgmma", E4, E5, 1),
        InstructionChain("wgmma", E5, E4, 3),
        InstructionChain("wgmma", torch.bfloat16, torch.bfloat16, 4),
    ],
    ids=str,
)
def test_the_wgmma_kernel_equals_the_emulated_tensor_core(case):
    generator = torch.Generator().manual_seed(0)
    a = tiles.operand(case.a, 64, case.k, generator, opposite=False, special=True)
    b = tiles.operand(case.b, 128, case.k, generator, opposite=True, special=True)
    c, d = tiles.accumulator(a, b, generator, special=True), torch.empty(64, 128)
    name, constants, headers = kernels.source_of("wgmma", case.a, case.b, case.steps)
    emulator.run(
        name,
        constants,
        grid=2,
        threads=128,
        shared_bytes=128 * 128,
        arguments=[a, b, c, d, 128],
        headers=headers,
        arithmetic="hopper",
    )
    assert same_bits(d, modeled(a, b, c, case.instruction))


@pytest.mark.one_case
@pytest.mark.parametrize("case", [c for c in cases() if c.steps == 4], ids=str)
def test_the_kernels_compile_for_hopper(case):
    pytest.importorskip("cuda.bindings.nvrtc")
    cubin = kernels.compile(case.name, case.a, case.b, case.steps, case.fp16_accumulator)
    assert cubin.spill_bytes == cubin.stack_bytes == 0


@pytest.mark.parametrize("case", SHORT, ids=str)
def test_operands_distinguish_every_hypothesis_from_the_table(case):
    found = compare(case, 1, TRUE, CPU, side=96)
    assert found.mismatches.pop("as in the table") == 0
    assert found.mismatches
    assert [name for name, count in found.mismatches.items() if not count] == []


def test_the_right_hypothesis_is_found():
    case = InstructionChain("wgmma", E4, E4, 1)
    found = compare(case, 1, pretended(lambda row: replace(row, truncation="down")), CPU, side=96)
    assert found.mismatches["negative terms cut toward −∞"] == 0
    assert found.mismatches["as in the table"] > 0
    assert len(found.examples) == 8


def test_nan_and_inf_are_compared_too():
    case = InstructionChain("wgmma", E5, E5, 1)
    seen = []

    def remember(name, a, b, c):
        seen.append(bool(a.float().isfinite().all()))
        return TRUE(name, a, b, c)

    assert compare(case, 3 * 64**2, remember, CPU, side=64).mismatches["as in the table"] == 0
    assert seen == [True, False, True]


def test_a_run_of_the_default_length_reaches_nan_and_inf_in_every_case():
    assert 1e9 / len(list(cases())) > SIDE**2


@pytest.mark.parametrize("dtype", [E4, E5, torch.float16, torch.bfloat16, torch.float32])
def test_operands_are_finite_unless_asked_for(dtype):
    generator = torch.Generator().manual_seed(0)
    x = tiles.operand(dtype, 60, 64, generator, opposite=False, special=False)
    assert x.float().isfinite().all()
    exponent = decode(x, InstructionChain("wgmma", dtype, dtype, 1).instruction).exponent
    assert exponent[x != 0].max() - exponent[x != 0].min() >= 14


def test_pairs_cancel():
    generator = torch.Generator().manual_seed(0)
    a, b = (tiles.operand(E4, 6, 64, generator, opposite=side, special=False).float()[5] for side in (False, True))
    products = (a * b).unflatten(0, (-1, 2))
    assert (products.sum(1) == 0).float().mean() > 0.5


def test_golden_results_survive_their_file(tmp_path):
    path = tmp_path / "results.safetensors"
    count = golden.record(path, SHORT, TRUE, CPU, {"gpu": "none"}, seed=0)
    read = list(replay(path))
    assert count == len(SHORT) * 768
    assert {case for case, *_ in read} == set(SHORT)
    for case, a, b, c, d in read:
        assert torch.equal(bits(modeled(a, b, c, case.instruction)), bits(d))


def test_most_golden_results_are_finite(tmp_path):
    path = tmp_path / "results.safetensors"
    golden.record(path, SHORT, TRUE, CPU, {"gpu": "none"}, seed=0)
    results = torch.cat([d.flatten() for *_, d in replay(path)])
    assert results.isfinite().float().mean() > 0.6
    assert results.isnan().any()
    assert results.isinf().any()


def test_without_a_hopper_gpu_the_requirement_is_printed(capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main([]) == 2
    assert "needs a Hopper GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_hoppers_mma_sync_has_no_fp8_unit(tmp_path):
    knobs = pytest.importorskip("triton.knobs")
    pytest.importorskip("cuda.bindings.nvrtc")
    file = tmp_path / "probe.cubin"
    file.write_bytes(kernels.compile("mma", E4, E4, 1).image)
    text = subprocess.run([knobs.nvidia.nvdisasm.path, file], capture_output=True, text=True, check=True).stdout
    names = re.findall(r"^\s+(?:/\*\w+\*/)?\s+(\w+)[ .]", text, re.MULTILINE)
    assert "QMMA" not in names
    assert [name for name in names if name in ("HMMA", "FADD")] == ["HMMA"] * 2 + ["FADD"] * 4
    assert re.search(r"HMMA\.16816\.F32 (R\d+), R\d+, R\d+, RZ", text), "the sum does not begin at zero"
    assert "F2FP.F16.E4M3.UNPACK_B" in text
