"""Tests of the time that a run takes at least on a CPU: what is said of it before it begins."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from octile.models.flops import train_flops_per_token
from octile.parallel.ranks import FOREVER, Ranks
from octile.train.compare.compare import compare
from octile.train.config import ParallelConfig, TrainConfig, preset
from octile.train.loop import train
from octile.train.run.duration import FAST_SIZE, check_duration
from tests.train.conftest import micro, silent_console

CPU = torch.device("cpu")


@pytest.fixture
def gflops(monkeypatch):
    """gflops(n, m): the CPU computes FP32 GEMMs at n GFLOP/s, and BF16 GEMMs at m, or has no instruction for them."""

    def set_speed(fp32: float, bf16: float | None = None) -> None:
        def seconds(device: torch.device, size: int, dtype: torch.dtype, min_seconds: float) -> list[float]:
            number = fp32 if dtype == torch.float32 else bf16
            return [2 * FAST_SIZE**3 / number / 1e9] * 5

        monkeypatch.setattr("octile.train.run.duration.gemm_seconds", seconds)
        monkeypatch.setattr("octile.train.run.duration.cpu.can_multiply", lambda: bf16 is not None)

    return set_speed


def slow(name: str) -> TrainConfig:
    """A preset that may take any time."""
    return replace(preset(name), allow_slow=True)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("small", "takes at least 3 d 12 h: 2,000 steps of 3.05·10¹⁶ FLOPs together, at the 100.0 GFLOP/s of its"),
        ("medium", "takes at least 54 d 4 h: 800 steps of 4.68·10¹⁷ FLOPs together, at the 100.0 GFLOP/s of its"),
    ],
)
def test_a_preset_for_a_gpu_takes_days_on_a_cpu(gflops, name, words):
    gflops(100)
    assert words in check_duration(slow(name), CPU, 0)


def test_where_bf16_is_faster_the_run_takes_at_least_as_long_as_in_bf16(gflops):
    gflops(100, 200)
    assert "at least 1 d 18 h: 2,000 steps" in check_duration(slow("small"), CPU, 0)
    gflops(100, 50)
    assert "at least 3 d 12 h: 2,000 steps" in check_duration(slow("small"), CPU, 0)


def test_only_the_steps_that_are_left_count(gflops):
    gflops(100)
    assert "takes at least 1 d 18 h" not in check_duration(slow("small"), CPU, 0)
    assert "takes at least 1 d 18 h: 1,000 steps" in check_duration(slow("small"), CPU, 1000)


def test_a_growing_batch_counts_as_it_is(gflops):
    gflops(100)
    config = replace(slow("small"), initial_batch_size=16, batch_ramp=1.0)
    tokens = (32 + 16) / 2 * 2000 * 1024
    days = tokens * train_flops_per_token(config.model, 1024) / 100e9 / 86400
    assert f"takes at least {int(days)} d" in check_duration(config, CPU, 0)


def test_nothing_is_said_of_a_short_run(gflops):
    gflops(100)
    assert check_duration(preset("tiny"), CPU, 0) is None


def test_no_gemm_is_timed_for_a_run_that_is_short_on_any_cpu(monkeypatch):
    monkeypatch.setattr("octile.train.run.duration.gemm_seconds", lambda *_: pytest.fail("a GEMM was timed"))
    assert check_duration(replace(preset("tiny"), steps=100), CPU, 0) is None


def test_nothing_is_said_on_a_gpu():
    assert check_duration(preset("medium"), torch.device("cuda"), 0) is None


@pytest.mark.parametrize("name", ["small", "medium"])
def test_a_preset_for_a_gpu_is_refused_on_a_cpu(gflops, name):
    gflops(100)
    with pytest.raises(ValueError, match=r"^allow_slow must be given for more than 4 h 0 min: on this CPU the run"):
        check_duration(preset(name), CPU)


@pytest.mark.parametrize("runs", [1, 3])
def test_the_default_run_and_comparison_are_not_refused_on_the_slowest_cpu(gflops, runs):
    gflops(5)
    assert f"at least {['', '24 min 2 s', '', '1 h 12 min'][runs]}: " in check_duration(preset("tiny"), CPU, runs=runs)


def test_the_last_steps_of_a_long_run_are_not_refused(gflops):
    gflops(100)
    assert "the run takes at least 3 h 15 min: 2 steps" in check_duration(preset("medium"), CPU, 798)


def test_all_runs_of_a_comparison_count(gflops):
    gflops(100)
    one = check_duration(slow("small"), CPU)
    assert "takes at least 3 d 12 h: 2,000 steps" in one
    assert "on this CPU the 3 runs take at least 10 d 14 h: 6,000 steps" in check_duration(slow("small"), CPU, runs=3)


def on_ranks(monkeypatch, ranks: int, here: int, cores: int, threads: int) -> str | None:
    """What is said of a run on ranks, so many of them on a host with these cores, each with these threads."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    monkeypatch.setattr("octile.train.run.duration.cpu.count_cores", lambda: cores)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    return check_duration(replace(slow("small"), parallel=ParallelConfig(dp=ranks)), CPU)


def test_ranks_on_cores_of_their_own_share_the_work(gflops, monkeypatch):
    gflops(100)
    said = on_ranks(monkeypatch, ranks=2, here=2, cores=2, threads=1)
    assert "on this CPU the run takes at least 1 d 18 h: 2,000 steps" in said
    assert "at the 200.0 GFLOP/s of its largest GEMMs" in said


def test_ranks_without_cores_of_their_own_are_no_faster(gflops, monkeypatch):
    gflops(100)
    assert "takes at least 1 d 18 h: 2,000 steps" in on_ranks(monkeypatch, ranks=8, here=8, cores=2, threads=1)
    assert "takes at least 3 d 12 h: 2,000 steps" in on_ranks(monkeypatch, ranks=8, here=8, cores=2, threads=2)


def test_threads_without_cores_do_not_slow_the_estimate(gflops, monkeypatch):
    gflops(100)
    assert "takes at least 3 d 12 h: 2,000 steps" in on_ranks(monkeypatch, ranks=2, here=2, cores=2, threads=16)


def test_hosts_share_the_work(gflops, monkeypatch):
    gflops(100)
    said = on_ranks(monkeypatch, ranks=8, here=4, cores=2, threads=2)
    assert "on 2 hosts with this CPU the run takes at least 1 d 18 h: 2,000 steps" in said


def test_a_comparison_is_refused_before_its_data_is_prepared(gflops, text, tmp_path):
    gflops(1e-6)
    config = micro(data=str(text), steps=10**6)
    with pytest.raises(ValueError, match="allow_slow must be given for more than"):
        compare(config, ("per_tensor",), tmp_path / "comparison", silent_console())
    assert not (tmp_path / "comparison").exists()


def test_a_run_is_refused_before_its_data_is_prepared(gflops, text, tmp_path):
    gflops(1e-6)
    with pytest.raises(ValueError, match="allow_slow must be given for more than"):
        train(micro(data=str(text), out=tmp_path / "run", steps=10**9), False, silent_console())
    assert not (tmp_path / "run").exists()


def test_a_run_that_needs_more_memory_as_well_is_told_its_duration(gflops, text, tmp_path, monkeypatch):
    gflops(1e-6)
    monkeypatch.setattr("octile.train.loop.check_memory", lambda *_: pytest.fail("it was checked first"))
    with pytest.raises(ValueError, match="allow_slow must be given for more than"):
        train(micro(data=str(text), out=tmp_path / "run", steps=10**9), False, silent_console())


def test_the_ranks_of_a_run_get_the_sentence_of_the_first(gflops, text, tmp_path, monkeypatch):
    def prepare(*arguments, **options):
        raise KeyError("data is prepared")

    gflops(1e-6)
    ranks, screen = Ranks(0, 1, dist.HashStore(), FOREVER), silent_console()
    monkeypatch.setattr("octile.train.run.tokens.prepare", prepare)
    monkeypatch.setattr("octile.train.loop.join", lambda *_: ranks)
    monkeypatch.setattr(Ranks, "gather", lambda self, own, kind: [own])
    monkeypatch.setattr("octile.train.loop.check_agreement", lambda *_: None)
    with pytest.raises(KeyError, match="data is prepared"):
        train(micro(data=str(text), out=tmp_path / "run", steps=10**9, allow_slow=True), False, screen)
    assert "on this CPU the run takes at least" in screen.console.file.getvalue()


def test_a_run_says_it_before_its_data_is_prepared(gflops, text, tmp_path, monkeypatch):
    def prepare(*arguments, **options):
        raise KeyError("data is prepared")

    gflops(1e-6)
    monkeypatch.setattr("octile.train.run.tokens.prepare", prepare)
    screen = silent_console()
    with pytest.raises(KeyError, match="data is prepared"):
        train(micro(data=str(text), out=tmp_path / "run", steps=10**9, allow_slow=True), False, screen)
    assert "on this CPU the run takes at least" in screen.console.file.getvalue()
