"""Tests that DeepGEMM's settings take effect."""

from types import SimpleNamespace

import pytest
import torch

import octile.compat.deep_gemm as deep_gemm
from octile.kernels.cuda.gemm import num_sms


@pytest.fixture
def a_gpu_of_132(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(multi_processor_count=132)
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    num_sms._multiprocessors.cache_clear()
    yield
    num_sms.set_num_sms(None)
    num_sms._multiprocessors.cache_clear()


@pytest.mark.usefixtures("a_gpu_of_132")
def test_sms_that_are_set_are_those_that_kernels_may_use():
    deep_gemm.set_num_sms(78)
    assert deep_gemm.get_num_sms() == num_sms.num_sms() == 78


@pytest.mark.usefixtures("a_gpu_of_132")
def test_zero_sms_mean_all():
    deep_gemm.set_num_sms(78)
    deep_gemm.set_num_sms(0)
    assert deep_gemm.get_num_sms() == 132


@pytest.mark.usefixtures("a_gpu_of_132")
@pytest.mark.parametrize(("count", "error"), [(-1, ValueError), (133, ValueError), (1.5, TypeError)])
def test_other_numbers_of_sms_are_refused(count, error):
    with pytest.raises(error):
        deep_gemm.set_num_sms(count)
    assert deep_gemm.get_num_sms() == 132


def test_without_a_gpu_the_number_of_sms_is_one_and_is_not_set(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert deep_gemm.get_num_sms() == 1
    with pytest.raises(RuntimeError, match="there is no GPU"):
        deep_gemm.set_num_sms(1)


def test_the_alignment_is_what_was_set_under_every_name():
    deep_gemm.set_mk_alignment_for_contiguous_layout(96)
    assert deep_gemm.get_mk_alignment_for_contiguous_layout() == 96
    assert deep_gemm.get_m_alignment_for_contiguous_layout() == deep_gemm.utils.get_k_alignment_for_contiguous_layout()


def test_an_alignment_of_zero_is_refused():
    with pytest.raises(ValueError, match="new_value must be at least 1, not 0"):
        deep_gemm.set_mk_alignment_for_contiguous_layout(0)


@pytest.fixture
def settings_as_they_are():
    yield
    deep_gemm.set_pdl(False)
    deep_gemm.set_tc_util(0)


@pytest.mark.usefixtures("settings_as_they_are")
@pytest.mark.parametrize(
    ("name", "first", "values"),
    [("pdl", False, {True: True, False: False}), ("tc_util", 100, {70: 70, 0: 100})],
    ids=["pdl", "tc_util"],
)
def test_settings_without_effect_are_remembered(name, first, values):
    set_value, get_value = (getattr(deep_gemm, f"{verb}_{name}") for verb in ("set", "get"))
    assert get_value() == first
    for value, expected in values.items():
        set_value(value)
        assert get_value() == expected


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: deep_gemm.set_pdl(1), TypeError, "new_enable_pdl must be True or False, not 1"),
        (lambda: deep_gemm.set_tc_util(0.5), TypeError, "new_tc_util must be an integer, not 0.5"),
        (lambda: deep_gemm.set_tc_util(101), ValueError, "new_tc_util must be from 0 to 100, not 101"),
    ],
)
def test_settings_without_effect_refuse_other_values(call, error, message):
    with pytest.raises(error, match=message):
        call()
