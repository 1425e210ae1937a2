"""The kernel that racecheck is given differs from the GEMM kernel only in who arrives at a stage's barriers."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from octile.kernels.cuda.gemm.config import GemmConfig, Scales
from octile.kernels.cuda.jit import specialize
from octile.kernels.cuda.jit.compiler import Cubin
from tests.kernels.cuda.emulated import config, emulate, operand, poisoned
from tools import racecheck_all_lanes
from tools.emulator import build


def test_every_lane_arrives():
    _, kernel = racecheck_all_lanes.find("pipeline.cuh", {})
    shown, changed = racecheck_all_lanes.changed("pipeline.cuh", {})
    assert shown.endswith("pipeline.cuh")
    assert "ptx::lane_id() == 0) empty[which].arrive" in kernel
    assert "ptx::lane_id() == 0) empty[which].arrive" not in changed
    assert "init(32 * 4 * warpgroups_per_tile" in changed
    assert "full[stage].init(has_block_scales ? 32 : 1)" in changed


def test_every_lane_of_the_producer_arrives_after_it_wrote_block_scales():
    _, kernel = racecheck_all_lanes.find("producer.cuh", {})
    _, changed = racecheck_all_lanes.changed("producer.cuh", {})
    assert "arrive_unless" not in kernel
    assert changed.count("full[pipeline.stage].arrive_unless(elected)") == 2


def test_other_files_stay_as_they_are():
    assert racecheck_all_lanes.changed("split_k.cuh", {}) == racecheck_all_lanes.find("split_k.cuh", {})


CODE = ["LDS", "IADD3", "QGMMA.64x128x32.F32.E4M3.E4M3", "FFMA", "NOP", "SYNCS.ARRIVE.TRANS64", "LDG.E", "EXIT"]


def cubin(registers=168, spill_bytes=0):
    return Cubin(b"", registers, 0, spill_bytes, 0, 1.0, "nvrtc", "")


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (CODE, ""),
        (
            ["LDS", "QGMMA.64x128x32.F32.E4M3.E4M3", "FFMA", *2 * ["SYNCS.ARRIVE.TRANS64"], "LDG.E", "UIADD3", "EXIT"],
            "",
        ),
        ([CODE[2], CODE[0], *CODE[3:]], "accesses of shared memory, TMA copies or MMAs, or their order"),
        ([*CODE, "STS"], "accesses of shared memory, TMA copies or MMAs, or their order; {} → {'STS': 1}"),
        ([*CODE[:3], *CODE[4:]], "{'FFMA': 1} → {}"),
    ],
)
def test_what_may_differ_in_the_variant(code: list[str], found: str):
    assert racecheck_all_lanes.difference((cubin(), CODE), (cubin(), code)) == found


def test_the_variant_takes_no_more_registers():
    assert racecheck_all_lanes.difference((cubin(168), CODE), (cubin(169), CODE)) == "registers 168 → 169"
    assert racecheck_all_lanes.difference((cubin(168), CODE), (cubin(167), CODE)) == ""
    assert racecheck_all_lanes.difference((cubin(), CODE), (cubin(spill_bytes=8), CODE)) == "spill_bytes 0 → 8"


@pytest.mark.slow
def test_the_machine_code_of_a_kernel_and_of_its_variant(monkeypatch, tmp_path):
    monkeypatch.setenv("OCTILE_CACHE_DIR", str(tmp_path))
    pytest.importorskip("triton")
    pytest.importorskip("cuda.bindings.nvrtc")
    config = GemmConfig(64, 16, 4, warpgroups=1, staged_boxes=1)
    kernel = racecheck_all_lanes.instructions(config)
    monkeypatch.setattr(specialize, "_find", racecheck_all_lanes.changed)
    variant = racecheck_all_lanes.instructions(config)
    assert kernel[1] != variant[1]
    assert {"QGMMA", "UTMALDG", "LDS", "STS"} <= {mnemonic.split(".")[0] for mnemonic in kernel[1]}
    assert racecheck_all_lanes.difference(kernel, variant) == ""


@pytest.mark.slow
@pytest.mark.skipif(build.compiler() is None, reason="the emulator needs a C++ compiler")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cluster_m": 2},
        {"accumulators": 2},  # the producer passes tiles
        pytest.param({"ping_pong": True}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_the_variant_computes_what_the_kernel_does(monkeypatch, options: dict[str, Any]):
    a, b = operand((150, 128 * 37), Scales.PER_ROW), operand((70, 128 * 37), Scales.PER_BLOCK, 1)
    kernel = config(128, 32, 4, **options)
    outs = [poisoned(150, 70, dtype=torch.bfloat16, gap=2) for _ in range(2)]
    emulate(kernel, outs[0], a, b, num_sms=2)

    def changed(name: str, headers: Mapping[str, str]) -> tuple[str, str]:
        if name == "ptx.cuh":  # the emulator has its own
            return racecheck_all_lanes.find(name, headers)
        shown, text = racecheck_all_lanes.changed(name, headers)
        return shown, text.replace(
            "pipeline.full[pipeline.stage].arrive_unless(elected);",
            "if (!elected) pipeline.full[pipeline.stage].arrive();",
        )

    monkeypatch.setattr(specialize, "_find", changed)
    emulate(kernel, outs[1], a, b, num_sms=2)
    assert torch.equal(*outs)
