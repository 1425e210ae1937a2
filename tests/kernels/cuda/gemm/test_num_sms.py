"""Tests of set_num_sms: GEMMs use all SMs, or at most the number that is set."""

from types import SimpleNamespace

import pytest
import torch

from octile.kernels.cuda.gemm import num_sms
from octile.kernels.cuda.gemm.cost_model import Chip


@pytest.fixture(autouse=True)
def a_gpu_of_132(monkeypatch):
    gpu = SimpleNamespace(multi_processor_count=132, name="NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    num_sms._multiprocessors.cache_clear()
    yield
    num_sms.set_num_sms(None)
    num_sms._multiprocessors.cache_clear()


def test_all_sms_are_used_by_default():
    assert num_sms.num_sms() == 132


@pytest.mark.parametrize(("limit", "used"), [(1, 1), (78, 78), (132, 132), (200, 132)])
def test_num_sms_is_bounded_by_the_setting_and_the_gpu(limit, used):
    num_sms.set_num_sms(limit)
    assert num_sms.num_sms() == used


def test_gemms_know_the_gpu_and_all_of_its_sms(monkeypatch):
    driver = pytest.importorskip("octile.kernels.cuda.jit.driver", reason="octile[cuda] is not installed")
    monkeypatch.setattr(driver, "memory_bandwidth", lambda device: 3.35e12)
    num_sms.set_num_sms(78)
    assert num_sms.chip() == Chip(78, 132, 3.35e12, "NVIDIA H100 80GB HBM3")


def test_none_lifts_the_bound():
    num_sms.set_num_sms(20)
    num_sms.set_num_sms(None)
    assert num_sms.num_sms() == 132


def test_gemms_leave_as_many_sms_free_as_the_most_of_several_kernels_need():
    ends = [num_sms.leave_free(count, 1e12) for count in (16, 32, 32, 8)]
    assert num_sms.num_sms() == 100
    left = []
    for end in ends:
        end()
        left.append(num_sms.num_sms())
    assert left == [100, 100, 124, 132]


def test_sms_are_left_free_until_so_many_flops_are_launched_for_one_kernel_after_the_other():
    ends = [num_sms.leave_free(count, flops) for count, flops in ((8, 10), (16, 20), (32, 0), (4, 5))]
    left = []
    for flops in (9, 2, 18, 1, 4, 100):
        num_sms.count_launched(flops)
        left.append(num_sms.num_sms())
    assert left == [100, 100, 100, 100, 128, 132]
    for end in ends:
        end()
    assert num_sms.num_sms() == 132


@pytest.mark.parametrize(("limit", "used"), [(78, 78), (120, 100)])
def test_the_setting_and_what_is_left_free_bound_gemms_together(limit: int, used: int):
    num_sms.set_num_sms(limit)
    end = num_sms.leave_free(32, 1)
    assert num_sms.num_sms() == used
    end()
    assert num_sms.num_sms() == limit


def test_a_gemm_keeps_one_sm():
    end = num_sms.leave_free(140, 1)
    assert num_sms.num_sms() == 1
    end()


@pytest.mark.parametrize(("count", "error"), [(0, ValueError), (-1, ValueError), (1.0, TypeError), (True, TypeError)])
def test_an_invalid_number_of_sms_is_refused_and_changes_nothing(count, error):
    num_sms.set_num_sms(20)
    with pytest.raises(error, match="count"):
        num_sms.set_num_sms(count)
    assert num_sms.num_sms() == 20
