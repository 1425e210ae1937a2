"""Tests of the time that a run takes at least on a CPU: what is said of it before it begins."""

from dataclasses import replace

import pytest
import torch

from octile.models.flops import train_flops_per_token
from octile.train.config import preset
from octile.train.duration import FAST_SIZE, describe_duration
from octile.train.loop import train
from tests.train.conftest import micro, silent_console

CPU = torch.device("cpu")


@pytest.fixture
def gflops(monkeypatch):
    """gflops(n, m): the CPU computes FP32 GEMMs at n GFLOP/s, and BF16 GEMMs at m, or has no instruction for them."""

    def set_speed(fp32: float, bf16: float | None = None) -> None:
        def seconds(device: torch.device, size: int, dtype: torch.dtype) -> list[float]:
            number = fp32 if dtype == torch.float32 else bf16
            return [2 * FAST_SIZE**3 / number / 1e9] * 5

        monkeypatch.setattr("octile.train.duration.gemm_seconds", seconds)
        monkeypatch.setattr("octile.train.duration.cpu.can_multiply", lambda: bf16 is not None)

    return set_speed


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("small", "takes at least 3 d 12 h: 2,000 steps of 3.05·10¹⁶ FLOPs together, at the 100.0 GFLOP/s of its"),
        ("medium", "takes at least 54 d 4 h: 800 steps of 4.68·10¹⁷ FLOPs together, at the 100.0 GFLOP/s of its"),
    ],
)
def test_a_preset_for_a_gpu_takes_days_on_a_cpu(gflops, name, words):
    gflops(100)
    assert words in describe_duration(preset(name), CPU, 0)


def test_where_bf16_is_faster_the_run_takes_at_least_as_long_as_in_bf16(gflops):
    gflops(100, 200)
    assert "at least 1 d 18 h: 2,000 steps" in describe_duration(preset("small"), CPU, 0)
    gflops(100, 50)
    assert "at least 3 d 12 h: 2,000 steps" in describe_duration(preset("small"), CPU, 0)


def test_only_the_steps_that_are_left_count(gflops):
    gflops(100)
    assert "takes at least 1 d 18 h" not in describe_duration(preset("small"), CPU, 0)
    assert "takes at least 1 d 18 h: 1,000 steps" in describe_duration(preset("small"), CPU, 1000)


def test_a_growing_batch_counts_as_it_is(gflops):
    gflops(100)
    config = replace(preset("small"), initial_batch_size=16, batch_ramp=1.0)
    tokens = (32 + 16) / 2 * 2000 * 1024
    days = tokens * train_flops_per_token(config.model, 1024) / 100e9 / 86400
    assert f"takes at least {int(days)} d" in describe_duration(config, CPU, 0)


def test_nothing_is_said_of_a_short_run(gflops):
    gflops(100)
    assert describe_duration(preset("tiny"), CPU, 0) is None


def test_no_gemm_is_timed_for_a_run_that_is_short_on_any_cpu(monkeypatch):
    monkeypatch.setattr("octile.train.duration.gemm_seconds", lambda *_: pytest.fail("a GEMM was timed"))
    assert describe_duration(replace(preset("tiny"), steps=100), CPU, 0) is None


def test_nothing_is_said_on_a_gpu():
    assert describe_duration(preset("medium"), torch.device("cuda"), 0) is None


def test_a_run_says_it_before_its_data_is_prepared(gflops, text, tmp_path, monkeypatch):
    def prepare(*arguments, **options):
        raise KeyError("data is prepared")

    gflops(1e-6)
    monkeypatch.setattr("octile.train.loop.prepare", prepare)
    screen = silent_console()
    with pytest.raises(KeyError, match="data is prepared"):
        train(micro(data=str(text), out=tmp_path / "run", steps=10**9), False, screen)
    assert "on this CPU the run takes at least" in screen.console.file.getvalue()
