"""Tests of trainers in processes of their own."""

import os
import time

import pytest

from octile.bench.train import worker as worker_module
from octile.bench.train.worker import Requests, Steps, Worker

SECONDS = 100.0
pytestmark = pytest.mark.usefixtures("forked")


def sleeper(requests: Requests, seconds: float) -> None:
    requests.setting = "asleep"
    while True:
        requests.before_step()
        time.sleep(seconds)


def counter(requests: Requests, file: str) -> None:
    while True:
        requests.before_step()
        with open(file, "a") as steps:
            steps.write("x")


def built(requests: Requests, file: str) -> None:
    with open(file, "w") as steps:
        steps.write("built")


def broken(requests: Requests) -> None:
    requests.before_step()
    raise ArithmeticError("the loss is NaN")


def dying(requests: Requests) -> None:
    os._exit(3)


def test_a_request_runs_its_steps_and_no_more(tmp_path):
    file = tmp_path / "steps"
    with Worker(counter, str(file)) as worker:
        for count in (1, 3):
            worker.request(Steps(count))
            worker.answer(SECONDS)
    assert file.read_text() == "xxxx"


def test_the_time_of_the_steps_comes_back():
    with Worker(sleeper, 0.05) as worker:
        worker.request(Steps(4))
        measured = worker.answer(SECONDS)
    assert measured.seconds >= 0.2
    assert (measured.idle, measured.setting) == (None, "asleep")


def test_the_message_of_an_exception_comes_back():
    with Worker(broken) as worker:
        worker.request(Steps(2))
        with pytest.raises(RuntimeError, match="ArithmeticError: the loss is NaN"):
            worker.answer(SECONDS)


def test_a_process_that_dies_is_reported():
    with Worker(dying) as worker:
        worker.request(Steps(1))
        with pytest.raises(RuntimeError, match="died with exit code 3"):
            worker.answer(SECONDS)


def test_a_request_of_a_dead_process_is_reported_by_its_answer():
    with Worker(dying) as worker:
        worker.request(Steps(1))
        worker._process.join(SECONDS)
        worker.request(Steps(1))
        with pytest.raises(RuntimeError, match="died with exit code 3"):
            worker.answer(SECONDS)


def test_a_step_that_never_ends_is_killed(monkeypatch):
    monkeypatch.setattr(worker_module, "STOP_SECONDS", 0.2)
    with Worker(sleeper, 600.0) as worker:
        worker.request(Steps(1))
        with pytest.raises(TimeoutError, match="no answer within 1 s"):
            worker.answer(0.6)
    assert not worker._process.is_alive()


def test_a_trainer_is_not_built_before_the_first_request(tmp_path):
    file = tmp_path / "built"
    worker = Worker(built, str(file))
    worker._connection.close()
    worker._process.join(SECONDS)
    assert worker._process.exitcode == 0
    assert not file.exists()
