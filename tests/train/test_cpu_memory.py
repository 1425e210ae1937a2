"""Tests of the memory that a run on a CPU needs."""

from dataclasses import replace

import pytest
import torch

from octile.models.counts import count_parameters
from octile.train import cpu_memory, memory
from octile.train.cpu_memory import estimate_need
from octile.train.memory import check_memory
from tests.train.conftest import MICRO, micro

CPU = torch.device("cpu")


def parameters() -> int:
    counts = count_parameters(MICRO)
    return counts.total + sum(counts.mtp.values())


def test_weights_and_their_best_copy_take_four_bytes_each_and_moments_two_each():
    need = estimate_need(micro())
    assert (need.weights, need.optimizer) == (8 * parameters(), 4 * parameters())


def test_gradients_and_cached_weights_stay():
    assert estimate_need(micro(recipe="float32")).gradients >= 4 * parameters()
    assert estimate_need(micro()).gradients > estimate_need(micro(recipe="float32")).gradients  # weights in FP8


def test_a_moving_average_is_a_copy_of_the_weights():
    config = micro()
    averaged = replace(config, optim=replace(config.optim, ema_decay=0.9))
    assert estimate_need(averaged).weights == estimate_need(config).weights + 4 * parameters()


def test_micro_batches_divide_the_activations():
    whole, divided = estimate_need(micro(batch_size=64)), estimate_need(micro(batch_size=64, micro_batches=4))
    assert divided.at_once * divided.sequence < 0.3 * whole.at_once * whole.sequence


def test_twice_the_sequences_take_twice_the_activations():
    one, two = (n.at_once * n.sequence for n in (estimate_need(micro(batch_size=b)) for b in (64, 128)))
    assert two == pytest.approx(2 * one, rel=0.05)


def test_fp8_saves_less_than_fp32():
    fp8, fp32 = (estimate_need(micro(batch_size=64, recipe=name)).sequence for name in ("deepseek_v3", "float32"))
    assert fp8 < 0.8 * fp32


def test_a_batch_of_any_size_is_estimated_from_a_smaller_one(monkeypatch):
    whole = estimate_need(micro(batch_size=256))
    monkeypatch.setattr(cpu_memory, "MAX_TOKENS", 64 * 32)
    assert estimate_need(micro(batch_size=256)).total == pytest.approx(whole.total, rel=0.02)


def test_the_ranks_of_a_machine_share_its_memory(monkeypatch):
    config = micro()
    monkeypatch.setattr(memory, "available_memory", lambda device: 2 * estimate_need(config).total)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check_memory(config, CPU)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(ValueError, match=r"each rank needs about .* are available to each of 4 ranks here"):
        check_memory(config, CPU)


def test_a_run_that_exceeds_the_memory_is_refused_with_what_to_reduce(monkeypatch):
    config = micro(batch_size=256)
    monkeypatch.setattr(cpu_memory, "RESERVE", 0)
    need = estimate_need(config)
    monkeypatch.setattr(memory, "available_memory", lambda device: need.fixed + 100 * need.sequence)
    with pytest.raises(
        ValueError, match=r"the run needs about .* are available here: .* use --micro-batches 4 \(now 1\)"
    ):
        check_memory(config, CPU)
    check_memory(replace(config, micro_batches=4), CPU)


def test_a_batch_whose_tokens_exceed_the_memory_is_refused(monkeypatch):
    config = micro(batch_size=10**7)
    monkeypatch.setattr(memory, "available_memory", lambda device: estimate_need(config).data)
    with pytest.raises(ValueError, match=r"token ids of a step take .*: use a smaller --batch-size"):
        check_memory(config, CPU)
