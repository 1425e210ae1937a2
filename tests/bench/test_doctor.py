"""What `octile doctor` says of a machine."""

import os

import pytest
import torch

import octile.ops.grouped
import octile.ops.matmul
import octile.ops.quantize  # noqa: F401  (they register the operators)
from octile.bench import doctor
from octile.bench.doctor import OPERATORS, examine, show


def test_every_operator_is_listed():
    names = [n.removeprefix("octile::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("octile::")]
    registered = {name.partition(".")[0] for name in names}
    assert registered == set(OPERATORS)


@pytest.fixture
def pretend(monkeypatch):
    """pretend(capability, triton): a GPU of that compute capability, or none, and whether Triton is installed."""

    def set_up(capability, triton=True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(doctor, "find_spec", lambda _: triton or None)

    return set_up


def kernels():
    """operator → its kernel."""
    return {row["operator"].removeprefix("octile::"): row["kernel"] for row in examine()["operators"]}


def test_without_a_gpu_every_operator_is_the_reference(pretend):
    pretend(None)
    assert kernels() == dict.fromkeys(OPERATORS, "reference (torch, CPU)")


@pytest.mark.parametrize(("capability", "triton"), [((7, 5), True), ((9, 0), False)], ids=["old GPU", "no Triton"])
def test_where_no_kernel_can_run_it_says_so(pretend, capability, triton):
    pretend(capability, triton)
    assert kernels() == dict.fromkeys(OPERATORS, "none")


def test_on_a_gpu_what_has_no_triton_kernel_is_told(pretend):
    pretend((9, 0))
    found = kernels()
    slow = {"quantize_with_scale", "quantize, to E5M6", "dequantize, of E5M6"}
    assert {name for name, kernel in found.items() if kernel == "reference (torch, GPU)"} == slow
    assert {name for name, kernel in found.items() if kernel == "Triton"} == set(OPERATORS) - slow


def test_gpus_without_fp8_products_are_told_apart(pretend):
    pretend((8, 0))
    assert "sm_80 has no FP8 product" in examine()["operators"][0]["why"]


def test_more_threads_than_cores_is_advised_against(monkeypatch):
    monkeypatch.setattr(doctor, "_cores", lambda: 0)
    assert "set OMP_NUM_THREADS" in examine()["advice"][-1]


def test_cores_are_counted_where_there_is_no_affinity(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert examine()["machine"]["cores"] == os.cpu_count()


def test_a_person_can_read_it(capsys):
    show(examine(), as_json=False)
    assert "octile::matmul_nt" in capsys.readouterr().out
