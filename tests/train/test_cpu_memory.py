"""Tests of the memory that a run on a CPU needs, and of what a process can have."""

from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from octile.models.counts import count_parameters
from octile.train import cpu_memory, memory
from octile.train.cpu_memory import available_memory, estimate_need
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


def test_a_run_that_exceeds_the_memory_is_refused_with_what_to_reduce(monkeypatch):
    config = micro(batch_size=256)
    monkeypatch.setattr(cpu_memory, "RESERVE", 0)
    need = estimate_need(config)
    monkeypatch.setattr(memory, "available_memory", lambda: need.fixed + 100 * need.sequence)
    with pytest.raises(
        ValueError, match=r"the run needs about .* are available here: .* use --micro-batches 4 \(now 1\)"
    ):
        check_memory(config, CPU)
    check_memory(replace(config, micro_batches=4), CPU)


def test_a_batch_whose_tokens_exceed_the_memory_is_refused(monkeypatch):
    config = micro(batch_size=10**7)
    monkeypatch.setattr(memory, "available_memory", lambda: estimate_need(config).data)
    with pytest.raises(ValueError, match=r"token ids of a step take .*: use a smaller --batch-size"):
        check_memory(config, CPU)


def test_the_machine_s_memory_is_what_is_left_of_it(monkeypatch):
    monkeypatch.setattr(cpu_memory, "CGROUPS", Path("/nowhere"))
    assert 0 < available_memory() <= psutil.virtual_memory().total


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    """Write the files of a memory cgroup, and make it that of this process."""

    def write(line: str, folder: str, **files: str) -> None:
        (tmp_path / "cgroup").write_text(line + "\n")
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (tmp_path / folder / name.replace("__", ".")).write_text(text)

    monkeypatch.setattr(cpu_memory, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(cpu_memory, "CGROUP_FILES", tmp_path)
    return write


def test_the_limit_of_a_container_counts(cgroup):
    stat = "anon 5000\ninactive_file 1000"
    cgroup("0::/", "", memory__max="9000\n", memory__current="6000\n", memory__stat=stat)
    assert available_memory() == 4000


def test_the_limit_of_a_cgroup_above_counts(cgroup):
    limits = {"memory__current": "6000\n", "memory__stat": "inactive_file 0"}
    cgroup("0::/job/step", "job", memory__max="7000\n", **limits)
    cgroup("0::/job/step", "job/step", memory__max="max\n", **limits)
    assert available_memory() == 1000


def test_the_limit_of_a_cgroup_of_version_1_counts(cgroup):
    files = {
        "memory__limit_in_bytes": "9000",
        "memory__usage_in_bytes": "6000",
        "memory__stat": "total_inactive_file 0",
    }
    cgroup("4:memory:/job", "memory/job", **files)
    assert available_memory() == 3000


def test_without_a_limit_the_machine_s_memory_counts(cgroup):
    cgroup("0::/", "", memory__max="max\n", memory__current="6000\n", memory__stat="inactive_file 0")
    assert available_memory() > 10**6
