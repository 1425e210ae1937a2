"""The plan's durations by kind against recorded profiles."""

import pytest

from tools.compare_plan_kernels import KINDS, kind_of, milliseconds_by_kind, tables

TABLES = {name: (found, planned) for name, found, planned in tables()}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gemm", "FP8 GEMMs"),
        ("gate_backward_gemms", "BF16 GEMMs"),
        ("gate_backward", "routing"),
        ("void at::native::vectorized_gather_kernel<16, int>(char*, char*, int*)", "routing"),
        ("void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*)", "elementwise"),
        ("rms_norm_backward", "quantization and norms"),
        ("Memset (Unknown)", "others"),
    ],
)
def test_a_kernel_counts_under_the_kind_of_the_plan(name, kind):
    assert kind_of(name) == kind


def test_kernels_that_wait_for_other_ranks_do_not_count():
    assert milliseconds_by_kind([("peer_barrier", 1e3), ("gemm", 2e3)]) == {"FP8 GEMMs": 2}


@pytest.mark.parametrize("name", TABLES)
def test_operators_bound_by_memory_take_as_long_as_planned_within_5_percent(name):
    found, planned = TABLES[name]
    assert planned["quantization and norms"] == pytest.approx(found["quantization and norms"], rel=0.05)


@pytest.mark.parametrize("name", TABLES)
def test_the_plan_leaves_out_less_than_1_percent_of_the_kernels(name):
    found, planned = TABLES[name]
    assert sum(found[kind] for kind in (*KINDS, "others") if not planned[kind]) < 0.01 * found.total()
