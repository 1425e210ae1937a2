"""Tests of the memory check before training: a model that cannot fit is refused, one that may fit is not."""

import re
from dataclasses import replace

import pytest
import torch

from octile.train.config import ParallelConfig, preset
from octile.train.memory import check as memory
from octile.train.memory.check import check_memory, min_memory
from octile.train.memory.cpu import estimate_need

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_a_model_larger_than_the_machine_is_refused_with_both_sizes(monkeypatch):
    monkeypatch.setattr(memory, "device_memory", lambda device: 64 * 10**9)
    message = re.escape("the model needs at least 8,192 GB for weights, gradients and optimizer, but the cpu has 64 GB")
    with pytest.raises(ValueError, match=message):
        check_memory(preset("v3_671b"), CPU)


def test_a_model_that_may_fit_is_accepted():
    check_memory(preset("tiny"), CPU)


@pytest.mark.slow
def test_the_medium_preset_fits_one_h200_with_room():
    assert estimate_need(preset("medium")).total < 0.6 * 139 * 2**30  # in FP32, which is more than a GPU's BF16


def test_ranks_share_moments_and_spread_experts(monkeypatch):
    monkeypatch.setattr(memory, "device_memory", lambda device: 100 * 10**9)
    config = replace(preset("v2_lite_16b"), batch_size=64)
    for parallel in (ParallelConfig(), ParallelConfig(dp=8)):  # FP32 weights and gradients take 128 GB
        with pytest.raises(ValueError, match="needs at least"):
            check_memory(replace(config, parallel=parallel), GPU)
    check_memory(replace(config, parallel=ParallelConfig(dp=8, ep=4)), GPU)


def test_muons_state_needs_less(monkeypatch):
    monkeypatch.setattr(memory, "device_memory", lambda device: 160 * 10**9)
    config = preset("v2_lite_16b")
    with pytest.raises(ValueError, match="needs at least"):  # 12 bytes for each of 15.7B parameters
        check_memory(config, GPU)
    check_memory(replace(config, optim=replace(config.optim, name="muon")), GPU)  # 10 for nearly all


def test_an_update_by_muon_needs_16_bytes_of_an_element_of_the_largest_matrix(monkeypatch):
    config = preset("v2_lite_16b")
    config = replace(config, optim=replace(config.optim, name="muon"))
    with_update = min_memory(config)
    monkeypatch.setattr(memory, "count_update", lambda config: 0)
    assert with_update - min_memory(config) == 16 * 10944 * 2048


def test_fp8_optimizer_states_need_less(monkeypatch):
    monkeypatch.setattr(memory, "device_memory", lambda device: 100 * 10**9)
    config = preset("v2_lite_16b")
    check_memory(replace(config, recipe="fp8_lm"), GPU)
    with pytest.raises(ValueError, match="needs at least"):
        check_memory(config, GPU)
