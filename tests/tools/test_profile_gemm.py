"""Tests of parsing the output of Nsight Compute."""

import pytest

STALLED = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
NAMES = [
    *("ID", "Process ID", "Kernel Name", "gpu__time_duration.sum"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    *(STALLED.format("wait"), STALLED.format("long_scoreboard"), "launch__registers_per_thread", "dram__x.sum"),
]
RAW = f"""==PROF== Connected to process 17
{",".join(f'"{name}"' for name in NAMES)}
"","","","us","%","inst","inst","register/thread","n/a"
"0","17","product","1,234.5","81.25","0.10","0.75","168","n/a"
"1","17","sm90_fp8_gemm_1d2d_impl<1, 2>","1,300","79.0","0.2","0.1","168","n/a"
"""


@pytest.fixture
def profile(script):
    return script("profile_gemm")


def test_a_kernel_is_its_metrics_and_stalls(profile):
    first, second = profile.parse(RAW)
    assert first == {
        "kernel": "product",
        "metrics": {
            "gpu__time_duration.sum": {"value": 1234.5, "unit": "us"},
            "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active": {"value": 81.25, "unit": "%"},
            "launch__registers_per_thread": {"value": 168.0, "unit": "register/thread"},
        },
        "stalls": {"long_scoreboard": 0.75, "wait": 0.10},
    }
    assert second["kernel"] == "sm90_fp8_gemm_1d2d_impl<1, 2>"


def test_the_largest_stall_comes_first(profile):
    first, second = (list(kernel["stalls"]) for kernel in profile.parse(RAW))
    assert first == second[::-1] == ["long_scoreboard", "wait"]


def test_a_table_has_a_line_a_kernel(profile):
    kernels = profile.parse(RAW)
    kernels[0]["case"] = "octile 1×2×3 FP8"
    lines = profile.show(kernels).splitlines()
    assert lines[1].startswith("octile 1×2×3 FP8  product")
    assert "81.2" in lines[1]
    assert lines[1].endswith("long_scoreboard 0.75, wait 0.10")
    assert "sm90_fp8_gemm_1d2d_impl " in lines[2]


def test_what_is_no_table_is_refused_with_what_it_says(profile):
    with pytest.raises(ValueError, match="ERR_NVGPUCTRPERM"):
        profile.parse("==ERROR== ERR_NVGPUCTRPERM - no permission\n")


def test_metrics_that_this_profiler_does_not_know_are_not_asked_for(profile):
    listed = "Device NVIDIA GH100\n---\nsm__pipe_tensor_cycles_active  Counter  cycle\nlts__t_bytes  Counter  byte"
    assert profile.known(listed) == [
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "lts__t_bytes.sum.per_second",
        "launch__registers_per_thread",
        "launch__shared_mem_per_block_dynamic",
    ]
