"""Tests of the device of a run, with faked GPUs."""

import pytest
import torch

from octile.parallel.device import pick_device, pick_own_device


@pytest.fixture
def gpus(monkeypatch):
    """gpus(n): torch finds n GPUs; returns the list of those that are set as the current one."""

    def fake(n: int) -> list[int]:
        chosen: list[int] = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: n > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: n)
        monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
        return chosen

    return fake


@pytest.fixture
def rank_3_of_4(monkeypatch):
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("n", "name", "expected"), [(0, "auto", "cpu"), (1, "auto", "cuda"), (1, "cpu", "cpu")])
def test_auto_is_a_gpu_where_there_is_one(gpus, n, name, expected):
    gpus(n)
    assert pick_device(name) == torch.device(expected)


@pytest.mark.parametrize("pick", [pick_device, pick_own_device])
def test_a_gpu_that_is_not_there_is_refused(gpus, pick):
    gpus(0)
    with pytest.raises(ValueError, match="device is 'cuda', but torch finds no GPU here: use --device cpu or auto"):
        pick("cuda")


def test_a_run_without_torchrun_has_the_current_gpu(gpus):
    chosen = gpus(2)
    assert (pick_own_device("auto"), chosen) == (torch.device("cuda"), [])


def test_a_rank_has_the_gpu_of_its_number(gpus, rank_3_of_4):
    chosen = gpus(4)
    assert (pick_own_device("auto"), chosen) == (torch.device("cuda", 3), [3])


def test_ranks_on_a_cpu_share_it(gpus, rank_3_of_4):
    gpus(0)
    assert pick_own_device("auto") == torch.device("cpu")


def test_more_ranks_than_gpus_are_refused(gpus, rank_3_of_4):
    gpus(3)
    with pytest.raises(ValueError, match="torchrun has started 4 processes on a machine with 3: start fewer, or use"):
        pick_own_device("cuda")
