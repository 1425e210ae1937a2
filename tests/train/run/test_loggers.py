"""Tests of the loggers of a run: they get its metrics, a resumed run continues there, and a failure ends no run."""

import logging
import sqlite3
import struct
from collections.abc import Iterator
from dataclasses import replace
from threading import Event

import pytest

from octile.extras import require
from octile.train.loop import train
from octile.train.run import loggers
from octile.train.run.folder import RunFolder
from octile.train.run.metrics import open_metrics, read_lines
from tests.test_cli import refused
from tests.train.conftest import micro, silent_console
from tests.train.run.test_folder import new_run


class Sink:
    """Stores what it gets."""

    def __init__(self):
        self.lines, self.failed = [], None

    def write(self, lines):
        self.lines += lines

    def close(self, failed):
        self.failed = failed


@pytest.fixture
def sink(monkeypatch):
    """What `--log tensorboard` opens."""
    sink = Sink()
    monkeypatch.setattr(loggers, "TensorBoard", lambda run, steps_done: sink)
    return sink


def test_numbers_go_to_loggers_in_their_order_and_other_values_do_not(tmp_path, sink):
    with open_metrics(new_run(tmp_path), ["tensorboard"], {}, 0) as metrics:
        metrics.write({"step": 1, "loss": 2.5, "expert_load": {"a": [1]}, "skipped_for": "NaN"})
        metrics.write({"step": 2, "texts": []})
        metrics.draw({"telemetry/a": 1.0}, 2)
    assert sink.lines == [(1, {"loss": 2.5}), (2, {"telemetry/a": 1.0})]
    assert sink.failed is False


def test_loggers_end_as_failed_with_a_run_that_failed(tmp_path, sink):
    with pytest.raises(MemoryError), open_metrics(new_run(tmp_path), ["tensorboard"], {}, 0):
        raise MemoryError
    assert sink.failed is True


def broken(*_):
    raise OSError("no\nserver")


@pytest.mark.parametrize("method", ["open", "write", "close"])
def test_a_logger_that_fails_is_warned_of_once_and_ends_no_run(tmp_path, sink, monkeypatch, caplog, method):
    if method == "open":
        monkeypatch.setattr(loggers, "TensorBoard", broken)
    else:
        monkeypatch.setattr(sink, method, broken)
    run = new_run(tmp_path)
    with caplog.at_level(logging.WARNING), open_metrics(run, ["tensorboard"], {}, 0) as metrics:
        for step in (1, 2, 3):
            metrics.write({"step": step, "loss": 2.5})
    warning = "tensorboard gets no further metrics of this run; metrics.jsonl has all of them. OSError: no server"
    assert [record.getMessage() for record in caplog.records] == [warning]
    assert [line["step"] for line in read_lines(run.metrics_file)] == [1, 2, 3]


def test_a_logger_that_does_not_answer_holds_up_no_run(tmp_path, sink, monkeypatch, caplog):
    answer = Event()
    monkeypatch.setattr(sink, "write", lambda lines: answer.wait())
    monkeypatch.setattr(loggers, "CLOSE_SECONDS", 0.01)
    with open_metrics(new_run(tmp_path), ["tensorboard"], {}, 0) as metrics:
        metrics.write({"step": 1, "loss": 2.5})
    answer.set()
    assert [record.getMessage().partition("Error: ")[2] for record in caplog.records] == [
        "it did not take the last ones in 0 seconds"
    ]


@pytest.mark.parametrize("command", [("train",), ("rl", "missing")])
def test_a_logger_that_is_not_installed_is_refused_before_any_work(capsys, tmp_path, monkeypatch, command):
    def require_none(*names, extra):
        if extra in ("wandb", "mlflow"):
            require(*(f"no_{name}" for name in names), extra=extra)

    monkeypatch.setattr(loggers, "require", require_none)
    out = tmp_path / "run"
    message = refused(capsys, *command, "--out", str(out), "--log", "tensorboard", "mlflow")
    assert message.strip() == 'octile: --log mlflow needs no_mlflow: pip install "octile[mlflow]"'
    assert not out.exists()


def test_an_unknown_logger_is_refused(capsys, tmp_path):
    message = refused(capsys, "train", "--out", str(tmp_path / "run"), "--log", "comet")
    assert "--log must be one of tensorboard, wandb, mlflow, not 'comet'" in message


def wandb_losses(run: RunFolder) -> dict[str, list[tuple[int, float]]]:
    """The (step, loss) pairs in the files of each id that Weights & Biases has written without a network."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(run.wandb.glob("offline-run-*/run-*.wandb")):
        losses = found.setdefault(file.stem.removeprefix("run-"), [])
        for data in log_records(file.read_bytes()):
            items = {(i.key or i.nested_key[0]): i.value_json for i in Record.FromString(data).history.item}
            if "loss" in items:
                losses.append((int(items["step"]), float(items["loss"])))
    return found


def log_records(content: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format after 7 bytes of its own, as W&B writes it."""
    place, data = 7, b""
    while place < len(content):
        if (left := -place % 32768) < 7:  # of a block, too little for a header
            place += left
        _, length, kind = struct.unpack_from("<IHB", content, place)
        data += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield data
            data = b""


@pytest.fixture
def resumed(text, tmp_path, monkeypatch, request) -> RunFolder:
    """A run of 4 steps with a logger, and of 2 more after it was resumed."""
    pytest.importorskip(request.param, reason=f"octile[{request.param}] is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    config = micro(data=str(text), out=tmp_path / "run", steps=4, log=(request.param,))
    train(config, False, silent_console())
    train(replace(RunFolder(config.out).read_config(), out=config.out, steps=6), True, silent_console())
    return RunFolder(config.out)


def losses(run: RunFolder) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in read_lines(run.metrics_file) if "loss" in line]


@pytest.mark.exhaustive  # because the package is large
@pytest.mark.parametrize("resumed", ["wandb"], indirect=True)
def test_weights_and_biases_gets_both_parts_of_a_resumed_run_as_one(resumed):
    (of_run,) = wandb_losses(resumed).values()
    assert of_run == losses(resumed)


@pytest.mark.exhaustive
@pytest.mark.parametrize("resumed", ["mlflow"], indirect=True)
def test_mlflow_gets_both_parts_of_a_resumed_run_as_one(resumed, tmp_path):
    with sqlite3.connect(tmp_path / "mlflow.db") as base:
        (status,) = base.execute("select status from runs").fetchall()
        of_run = base.execute("select step, value from metrics where key = 'loss' order by step").fetchall()
        params = dict(base.execute("select key, value from params").fetchall())
    assert status == ("FINISHED",)
    assert of_run == losses(resumed)
    assert (params["steps"], params["optim.lr"]) == ("4", "0.003")
