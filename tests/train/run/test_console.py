"""Tests of what a run prints about its data: the held-out share, and the names of what is left out."""

import io
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from torch import nn

from octile.report.console import Console as OctileConsole
from octile.signals import Stopped
from octile.train.compare.compare import compare
from octile.train.data.prepare import prepare
from octile.train.loop import train
from octile.train.run.best_model import Best, BestModel
from octile.train.run.console import RunConsole
from octile.train.run.folder import RunFolder
from tests.train.conftest import MICRO, micro, silent_console


@pytest.fixture
def source(tmp_path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    for name, size in (("short", 100), ("long", 600)):
        text = "".join(f"line {n} of the {name} file, {n * n}\n" for n in range(size))
        (folder / f"{name}.txt").write_text(text)
    for n in range(5):
        (folder / f"photo{n}.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    return folder


def shown(source: Path, folder: Path) -> list[str]:
    console = silent_console()
    console.print_data(prepare(source, 300, folder, 16))
    return console.console.file.getvalue().splitlines()


def test_the_stages_of_preparing_the_data_are_printed_without_a_terminal(source, tmp_path, monkeypatch):
    monkeypatch.setenv("OCTILE_CACHE_DIR", str(tmp_path / "cache"))  # other tests prepare the same text
    console = silent_console()
    with console.stages() as progress:
        prepare(source, 300, tmp_path / "data", 16, progress=progress)
    stages = ("reading", "training the tokenizer", "encoding")
    assert console.console.file.getvalue() == "".join(f"preparing the data: {stage}\n" for stage in stages)


def test_each_quarter_of_a_stage_is_printed_once_without_a_terminal():
    console = silent_console()
    with console.stages() as progress:
        for share in range(0, 100, 5):
            progress("encoding", share / 100)
    lines = console.console.file.getvalue().splitlines()
    assert [line.partition("encoding")[2] for line in lines] == ["", ", 25% done", ", 50% done", ", 75% done"]


def test_the_held_out_share_is_printed(source, tmp_path):
    (line,) = (line for line in shown(source, tmp_path / "data") if line.startswith("data: "))
    assert "of 57 spans to train on, " in line
    assert " held out (9." in line


@pytest.mark.parametrize(("span", "unit"), [(None, "document"), (1000, "span")])
@pytest.mark.parametrize(("documents", "count"), [(1, "1 {}"), (1200, "1,200 {}s")])
def test_a_single_document_is_in_the_singular(source, tmp_path, span, unit, documents, count):
    store, console = prepare(source, 300, tmp_path / "data", 16), silent_console()
    manifest = replace(store.manifest, documents={"train": documents, "val": 3}, span=span)
    console.print_data(replace(store, manifest=manifest))
    assert f" tokens of {count.format(unit)} to train on, " in console.console.file.getvalue()


def test_what_is_cut_out_because_it_is_held_out_is_counted(source, tmp_path):
    for file in source.glob("*.txt"):
        repeated = "".join(f"line {n} of a license that every part of the text has\n" for n in range(8))
        file.write_text("".join(line + repeated * (n % 20 == 0) for n, line in enumerate(file.open().readlines())))
    cut = [line for line in shown(source, tmp_path / "data") if line.startswith("cut out of the training text: ")]
    assert len(cut) == 1
    assert re.fullmatch(r".*: [\d,]+ tokens \(\d+\.\d%\), in spans of 50 or more that are held out, too", cut[0])


def test_the_bytes_per_token_are_those_of_the_held_out_text(source, tmp_path):
    store = prepare(source, 300, tmp_path / "data", 16)
    text = [token for token in store.val.tolist() if token not in (store.tokenizer.begin, store.tokenizer.end)]
    per_token = len(store.tokenizer.decode(text).encode()) / len(store.val)
    assert store.manifest.bytes_per_token == pytest.approx(per_token)
    assert f" of the text, {per_token:.2f} bytes per token)" in "".join(shown(source, tmp_path / "data"))


def test_the_first_files_that_are_left_out_are_named_with_the_number_of_the_others(source, tmp_path):
    lines = shown(source, tmp_path / "data")
    assert "left out: 5 not text: photo0.jpg, photo1.jpg, photo2.jpg and 2 more" in lines
    assert lines[-1] == f"all that is left out is named in {tmp_path / 'data' / 'left_out.txt'}"


def test_nothing_is_said_of_what_is_left_out_if_nothing_is(source, tmp_path):
    for photo in source.glob("*.jpg"):
        photo.unlink()
    assert not any("left out" in line for line in shown(source, tmp_path / "data"))


def line(**more) -> dict:
    return {"step": 11_234, "main_loss": 2.345, "tokens_per_s": 12_345.0, "flops_per_s": 279.96e12, **more}


def shown_at(width: int, steps: int, line: dict) -> str:
    """Return what a terminal shows of a step: the lines of the progress, without their styles."""
    console = RunConsole(Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None))
    with console.steps(steps, 0) as progress:
        progress.step(line)
    plain = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", console.console.file.getvalue())
    return "step" + plain.split("step")[-1].replace("\r", "\n").rstrip()


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("speed", [12_345.0, 1_234_567.0])
def test_numbers_of_the_progress_are_whole(width, speed):
    shown = shown_at(width, 12_000, line(mfu=0.283, tokens_per_s=speed))
    assert all(number in shown for number in ("11234/12000", "2.345", f"{speed:,.0f}", "28.3%"))
    assert ("280.0" in shown) == (width > 80)


@pytest.mark.parametrize("width", [80, 100, 116, 120, 132, 140])
@pytest.mark.parametrize("speed", [12_345.0, 1_234_567.0])
@pytest.mark.parametrize("mfu", [{}, {"mfu": 0.283}], ids=["CPU", "GPU"])
def test_metrics_of_a_step_stay_on_one_line(width, speed, mfu):
    steps = 200_000 if mfu else 2_000
    flops = 279.96e12 if mfu else 77.4e9
    shown = shown_at(width, steps, line(**mfu, step=steps - 1_000, tokens_per_s=speed, flops_per_s=flops))
    assert shown.startswith(f"step {steps - 1_000}/{steps} loss 2.345 · {speed:,.0f} tokens/s · ")
    assert shown.endswith("left")
    assert "\n" not in shown


def test_a_narrow_terminal_shows_the_mfu_for_the_flops_that_it_follows_from():
    assert "12,345 tokens/s · 28.3% MFU" in shown_at(80, 12_000, line(mfu=0.283))
    assert "12,345 tokens/s · 280.0 TFLOP/s" in shown_at(80, 12_000, line())
    assert "12,345 tokens/s · 280.0 TFLOP/s · 28.3% MFU" in shown_at(100, 12_000, line(mfu=0.283))


def test_a_file_gets_lines_that_are_not_wrapped():
    console = silent_console()
    console.print("word " * 100)
    assert console.console.file.getvalue().count("\n") == 1


@pytest.mark.parametrize(("flops", "text"), [(1.5e12, "1.5 TFLOP/s"), (23.4e9, "23.4 GFLOP/s")])
def test_without_a_known_peak_there_is_a_speed_but_no_mfu(flops, text):
    console = silent_console()
    with console.steps(11_234, 0) as progress:
        progress.every = 1
        progress.step({**line(), "flops_per_s": flops, "seconds": 1.0})
    assert f"12,345 tokens/s · {text}, 0.0 s left" in console.console.file.getvalue()


@pytest.mark.parametrize("stage", ["warm_up", "sparse"])
def test_a_stage_of_training_indexers_and_their_loss_are_shown(stage):
    console = silent_console()
    with console.steps(11_234, 0, stage) as progress:
        progress.every = 1
        progress.step({**line(), "indexer_loss": 0.5123, "seconds": 1.0})
    assert f"step 11234/11234: {stage} · indexer loss 0.5123 · loss 2.345 · " in console.console.file.getvalue()


@pytest.mark.parametrize(
    ("best", "text"),
    [(None, "after step 1,200: the last\n"), (Best(800, 2.5), "after step 800: the lowest held-out loss, 2.5000\n")],
)
def test_the_results_say_of_which_step_the_model_is(tmp_path, best, text):
    console, found = silent_console(), BestModel(nn.Linear(1, 1))
    found.best = best
    console.print_results(RunFolder(tmp_path), "sample", tmp_path / "report.html", found, 1_200, "octile serve x")
    printed = console.console.file.getvalue()
    assert f"model:  {tmp_path / 'model'}, {text}" in printed
    assert printed.endswith("more:   octile serve x\n")


@pytest.mark.parametrize(
    ("initial", "text", "warns"),
    [(3.0, "the lowest held-out loss, 2.5000", False), (2.5, "the lowest held-out loss of its steps, 2.5000", True)],
)
def test_a_run_that_has_not_lowered_the_held_out_loss_warns_in_its_last_line(tmp_path, initial, text, warns):
    console, best = silent_console(), BestModel(nn.Linear(1, 1))
    best.begin(initial)
    best.update(800, 2.5)
    console.print_results(RunFolder(tmp_path), "sample", tmp_path / "report.html", best, 1_200, "octile serve x")
    printed = console.console.file.getvalue()
    assert f"after step 800: {text}; before the first step it was {initial:.4f}\n" in printed
    last = printed.splitlines()[-1]
    assert last.startswith("warning: training has not lowered the held-out loss: ") == warns


def test_the_held_out_loss_of_averaged_weights_and_their_folder_are_printed(tmp_path):
    console = silent_console()
    with console.steps(1_200, 0) as progress:
        progress.validation({"step": 1_200, "val_loss": 2.5, "ema_val_loss": 2.25})
    report, best = tmp_path / "report.html", BestModel(nn.Linear(1, 1))
    console.print_results(RunFolder(tmp_path), "sample", report, best, 1_200, "octile serve x", 2.25)
    printed = console.console.file.getvalue()
    assert "step 1200: held-out loss 2.5000 nats per token, 2.2500 with the averaged weights\n" in printed
    ema = f"ema:    {tmp_path / 'model_ema'}, the weights averaged up to step 1,200: held-out loss 2.2500\n"
    assert f"{ema}report: {report}\n" in printed


def test_the_time_left_of_a_long_run_is_in_days():
    console = silent_console()
    with console.steps(12_000, 0) as progress:
        progress.every = 1
        progress.step({**line(), "step": 1, "seconds": 30.0})
    assert ", 4 d 3 h left" in console.console.file.getvalue()


def left(lines: list[str]) -> list[str]:
    return [line.rpartition(", ")[2] for line in lines if line.endswith(" left")]


def test_the_time_left_does_not_count_the_compilation_of_kernels_again():
    console = silent_console()
    with console.steps(200, 0) as progress:
        for step in range(1, 11):
            progress.step({**line(), "step": step, "seconds": 60.0 + 2 * (step - 1)})
    assert left(console.console.file.getvalue().splitlines()) == ["6 min 20 s left"]


def test_the_time_left_counts_validations_between_two_lines(monkeypatch):
    console, now = silent_console(), [1000.0]
    monkeypatch.setattr("octile.train.run.console.time.perf_counter", lambda: now[0])
    with console.steps(200, 0) as progress:
        for step in range(1, 21):
            now[0] = 1000.0 if step <= 10 else 1050.0
            progress.step({**line(), "step": step, "seconds": 2.0 * step})
    assert left(console.console.file.getvalue().splitlines()) == ["6 min 20 s left", "15 min 0 s left"]


def test_the_time_left_of_steps_that_are_printed_at_once_is_that_of_their_own_time(monkeypatch):
    console = silent_console()
    monkeypatch.setattr("octile.train.run.console.time.perf_counter", lambda: 1000.0)
    with console.steps(24, 0) as progress:
        progress.every = 1
        for step, seconds in ((1, 90.0), (2, 91.0), (3, 92.0)):
            progress.step({**line(), "step": step, "seconds": seconds})
    assert left(console.console.file.getvalue().splitlines())[1:] == ["22.0 s left", "21.0 s left"]


def printed_steps(steps: int, done: int, times: list[float], monkeypatch) -> list[int]:
    """The steps of which a log has a line; `times` is when each ends."""
    console, now = silent_console(), [0.0]
    monkeypatch.setattr("octile.train.run.console.time.perf_counter", lambda: now[0])
    with console.steps(steps, done) as progress:
        for step, now[0] in enumerate(times, done + 1):
            progress.step({**line(), "step": step, "seconds": now[0]})
    return [int(text.split()[1].split("/")[0]) for text in console.console.file.getvalue().splitlines()]


def test_the_first_line_of_a_long_run_comes_after_ten_steps(monkeypatch):
    assert printed_steps(100_000, 7, [float(i) for i in range(100)], monkeypatch) == [17]


def test_a_line_comes_at_least_every_ten_minutes(monkeypatch):
    assert printed_steps(100_000, 0, [400.0 * i for i in range(1, 10)], monkeypatch) == [2, 4, 6, 8]


@pytest.mark.parametrize("terminal", [True, False])
def test_control_characters_are_escaped_also_for_a_pipe_to_a_terminal(terminal):
    console = RunConsole(Console(file=io.StringIO(), width=80, force_terminal=terminal, color_system=None))
    console.print("sample \x1b[31m\x07")
    assert console.console.file.getvalue() == "sample \\x1b[31m\\x07\n"


def test_a_reader_that_leaves_stops_the_run():
    read, write = os.pipe()
    os.close(read)
    stop: list[int] = []
    with os.fdopen(write, "w") as file:
        console = RunConsole(OctileConsole(file=file))
        with console.stopped_by_its_reader(stop):
            console.print("a")
            console.print("b")
    assert stop == [13]


def _train(config, console):
    train(config, False, console)


def _compare(config, console):
    compare(replace(config, out=None), ("deepseek_v3",), config.out, console)


@pytest.mark.parametrize(
    ("command", "what"), [(_train, "the first step"), (_compare, "training")], ids=["train", "compare"]
)
def test_a_command_whose_reader_leaves_before_it_trains_is_no_success(text, tmp_path, command, what):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as file:
        console = RunConsole(OctileConsole(file=file))
        with pytest.raises(Stopped, match=f"before {what}: the reader of the output has ended") as stopped:
            command(micro(data=str(text), out=tmp_path / "run"), console)
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)  # what is still buffered has no reader
    assert stopped.value.exit_code == 128 + 13


@pytest.mark.parametrize("depth", [0, 1])
def test_parameters_of_multi_token_prediction_are_named_if_there_are_some(new_trainer, depth):
    console = silent_console()
    console.print_model(new_trainer(model=replace(MICRO, num_nextn_predict_layers=depth)))
    line = console.console.file.getvalue().splitlines()[0]
    assert (" for multi-token prediction" in line) == (depth == 1)
    assert "M active per token with the embedding, " in line
    assert line.endswith(", on cpu")


def test_a_file_says_once_that_kernels_are_compiled():
    console = silent_console()
    with console.steps(200, 0) as progress:
        for done in range(12, 42):
            progress.compiling(done, 41)
    assert console.console.file.getvalue() == "compiling kernels: 12 of 41\n"


@pytest.mark.parametrize("total", [0, 41])
def test_a_file_says_nothing_of_kernels_that_are_compiled(total):
    console = silent_console()
    with console.steps(200, 0) as progress:
        progress.compiling(total, total)
    assert console.console.file.getvalue() == ""


def test_a_terminal_shows_the_kernels_until_the_first_step():
    console = RunConsole(Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None))
    with console.steps(12_000, 0) as progress:
        progress.compiling(12, 41)
        progress.bar.refresh()
        assert "step 0/12000 compiling kernels: 12 of 41" in console.console.file.getvalue()
        progress.step(line())
        progress.compiling(13, 41)
        progress.bar.refresh()
    assert "13 of 41" not in console.console.file.getvalue()
