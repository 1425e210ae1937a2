"""Tests of the training benchmark: its trainers on a CPU, who is left out, and its rows."""

import json
import time
from dataclasses import replace

import pytest
import torch

from octile.bench import goals, train
from octile.bench.train import Candidate, Case, Results, octile_trainer, torchtitan_trainer
from octile.bench.train.worker import Measured
from octile.train.config import TrainConfig
from octile.train.data.prepare import prepare
from octile.train.run.folder import DATA
from tests.bench.train.test_worker import broken, sleeper
from tests.train.conftest import micro

CASE = Case("small", 1, 2, True, 100.0)
SHAPE = goals.WITHOUT_MTP


@pytest.fixture
def run(text, tmp_path) -> TrainConfig:
    """A configuration whose tokens are prepared."""
    config = micro(data=str(text), out=tmp_path / "run", steps=50)
    prepare(text, config.model.vocab_size, config.out / DATA, config.sequence_length - 1, held_out_windows=4)
    return config


def seconds_from_now(seconds: float) -> float:
    return time.monotonic() + seconds


def sleepers(**naps: float) -> list[Candidate]:
    return [Candidate(name, "", sleeper, (seconds,)) for name, seconds in naps.items()]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_octile_trains_with_its_own_loop(run, monkeypatch):
    monkeypatch.setattr(train, "ROUNDS", 3)
    trainer = Candidate(goals.FP8_TRAINER, "", octile_trainer.run, (run,))
    results = train.measure(CASE, [[trainer]], seconds_from_now(250))
    assert results.left_out == {}
    assert len(results.times[goals.FP8_TRAINER]) == 3
    [metrics] = run.out.glob("*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = CASE.warm_up + 3 * CASE.steps + train.PROFILED
    assert [line["step"] for line in lines if "main_loss" in line] == list(range(1, steps + 1))


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_a_trainer_that_is_measured_alone_is_measured_twice(run, monkeypatch):
    monkeypatch.setattr(train, "ROUNDS_ALONE", 1)
    trainer = Candidate(goals.FP8_TRAINER, "", octile_trainer.run, (run,))
    results = train.measure(replace(CASE, is_interleaved=False), [[trainer]], seconds_from_now(250))
    assert results.left_out == {}
    assert len(results.times[goals.FP8_TRAINER]) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("is_interleaved", [True, False])
def test_a_trainer_that_fails_is_left_out(monkeypatch, is_interleaved):
    monkeypatch.setattr(train, "PASSES", 1)
    trainers = [*sleepers(FP8=0.0), Candidate("BF16", "", broken, ())]
    results = train.measure(replace(CASE, is_interleaved=is_interleaved), [trainers], seconds_from_now(100))
    assert set(results.times) == {"FP8"}
    assert results.left_out == {"BF16": "ArithmeticError: the loss is NaN"}


def test_what_the_time_does_not_suffice_for_is_left_out():
    results = train.measure(CASE, [sleepers(FP8=0.0)], seconds_from_now(-1))
    assert results.left_out == {"FP8": "100 s are over"}


def test_torchtitan_that_is_not_installed_is_left_out(monkeypatch):
    monkeypatch.setattr(torchtitan_trainer, "find_spec", lambda name: None if name == "torchtitan" else object())
    assert torchtitan_trainer.why_not(()) == "torchtitan is not installed"


def test_the_float8_converters_need_torchao(monkeypatch):
    monkeypatch.setattr(torchtitan_trainer, "find_spec", lambda name: None if name == "torchao" else object())
    assert torchtitan_trainer.why_not(torchtitan_trainer.FLOAT8) == "torchao is not installed"
    assert torchtitan_trainer.why_not(()) is None
    assert torchtitan_trainer.why_not(torchtitan_trainer.OCTILE) is None


def test_a_row_says_who_is_left_out(monkeypatch, run):
    monkeypatch.setattr(
        train, "measure", lambda *_: Results(left_out={"torchtitan BF16": "torchtitan is not installed"})
    )
    monkeypatch.setattr(train, "prepare_tokens", lambda config, folder, console: folder.mkdir())
    (row,) = train.measure_case(CASE, run)
    assert row.what == "torchtitan BF16 is left out: torchtitan is not installed"


def test_torchtitan_gets_the_batches_of_octile(run):
    micro_batches = replace(run, batch_size=4, micro_batches=2)
    batches = iter(torchtitan_trainer.Loader(micro_batches))
    parts = [next(batches) for _ in range(2)]
    ours = torch.cat([inputs["input"] for inputs, _ in parts])
    labels = torch.cat([labels for _, labels in parts])
    assert ours.shape == (4, run.sequence_length)
    assert torch.equal(labels[:, :-1], ours[:, 1:])
    assert (labels[:, -1] == torchtitan_trainer.IGNORED).all()


def test_the_shape_without_mtp_has_a_valid_schedule():
    config = micro(optim=replace(micro().optim, mtp_change=0.5))
    assert train.without_mtp(config).model.num_nextn_predict_layers == 0


def measured(seconds: float, peak: int = 2**30) -> Measured:
    return Measured(seconds, peak, None, "")


def rows_of(**seconds: float):
    times = {name.replace("_", " ") + SHAPE: [measured(s)] for name, s in seconds.items()}
    config = micro(batch_size=2, sequence_length=32)
    return list(train.result_rows(CASE, config, SHAPE, Results(times=times)))


def test_speeds_count_the_tokens_of_all_steps():
    (row,) = (row for row in rows_of(FP8=0.5, BF16=1.0) if row.unit == "tokens/s")
    assert (row.value, row.against.value, row.against.ratio) == (256, 128, 2)


def test_each_trainer_of_octile_is_compared_with_each_peer():
    rows = rows_of(FP8=1.0, BF16=1.0, torchtitan_BF16=1.0, torchtitan_FP8=1.0, torchtitan_octile=1.0)
    found = [(row.what, row.against.peer) for row in rows if row.unit == "tokens/s"]
    names = ["FP8", "BF16", goals.TITAN_OCTILE, goals.TITAN_BF16, goals.TITAN_FP8]
    expected = [(names[i], peer) for i in range(3) for peer in names[i + 1 :]]
    assert found == [(f"train {name}{SHAPE}", peer) for name, peer in expected]


def test_the_goals_are_judged_by_these_rows():
    verdicts = goals.train_verdicts(rows_of(FP8=0.5, BF16=1.0, torchtitan_BF16=1.0, torchtitan_FP8=0.6)).splitlines()
    assert verdicts == [
        "small, BF16 vs. torchtitan: 1.000: floor ≥ 1 met",
        "small, FP8 vs. torchtitan's FP8: 1.200: floor ≥ 1.3 MISSED",
    ]


def test_without_a_gpu_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="bench train measures a GPU, and torch finds none here"):
        next(train.rows())
