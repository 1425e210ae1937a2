"""Tests of whole runs: the files they write, and that nothing is lost when one is killed, stopped or out of space."""

import dataclasses
import html
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

import octile
from octile.checkpoint.hugging_face import load, load_weights, read_model_config
from octile.checkpoint.training import latest_checkpoint, load_checkpoint
from octile.cli import main
from octile.models.deepseek_v3 import DeepseekV3
from octile.parallel.ranks import RanksError
from octile.signals import Stopped, Terminated
from octile.train import loop
from octile.train.config import TrainConfig
from octile.train.evaluation.evaluator import Evaluator
from octile.train.loop import build, train
from octile.train.run.checkpoints import RunCheckpoints
from octile.train.run.folder import RunFolder
from octile.train.run.tokens import prepare_tokens, print_passes
from octile.train.strategy.single import Strategy
from octile.train.trainer import Trainer
from tests.report.conftest import draw_no_figures
from tests.train.conftest import MICRO, micro, micro_bf16, silent_console, write_no_report
from tests.train.run import own_process
from tests.worlds import begin_ranks


def metrics(run: Path, key: str) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[key] for line in lines if key in line}


def final_state(run: Path) -> dict[str, torch.Tensor]:
    return load_checkpoint(latest_checkpoint(run / "checkpoints"))[0]


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    screen = silent_console()
    with pytest.MonkeyPatch.context() as patch:
        draw_no_figures(patch)
        train(micro(data=str(text), out=out), False, screen)
    return out, screen


FILES = "config.json model/config.json model/tokenizer.json metrics.jsonl report.html sample.txt summary.json"


@pytest.mark.slow
def test_the_report_names_the_data_the_date_the_code_and_the_command(finished, text):
    summary = json.loads((finished[0] / "summary.json").read_text())
    command, date = RunFolder(finished[0]).read_config().full_command, summary["measured_on"]["date"]
    assert command.startswith("octile train --data ")
    report = html.unescape((finished[0] / "report.html").read_text())
    assert f"Data: {text}. Ended on {date} by octile {octile.__version__}" in report
    assert f"Command: {command}</p>" in report


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES.split())
def test_a_run_writes(finished, name):
    assert (finished[0] / name).exists()


def test_the_last_step_is_saved_when_it_is_no_multiple_of_the_interval(text, tmp_path):
    out = tmp_path / "run"
    train(micro_bf16(data=str(text), out=out, steps=3, checkpoint_every=2), False, silent_console())
    assert latest_checkpoint(out / "checkpoints").name == "step_00000003"


class KernelsOfTheStep:
    """Kernels that are compiled ahead of a run's first step, one of two so far."""

    def __init__(self):
        self.is_planned = self.is_closed = False

    def wait_for_plan(self):
        self.is_planned = True

    def report_to(self, report):
        assert self.is_planned
        report(1, 2)

    def close(self):
        self.is_closed = True


@pytest.mark.parametrize("fails", [False, True])
def test_kernels_are_compiled_ahead_until_the_run_ends(text, tmp_path, monkeypatch, fails):
    begun, kernels, screen = [], KernelsOfTheStep(), silent_console()
    monkeypatch.setattr(loop, "compile_ahead", lambda *arguments: begun.append(arguments) or kernels)
    if fails:
        monkeypatch.setattr(loop, "build", lambda *arguments: 1 / 0)
    config = micro_bf16(data=str(text), out=tmp_path / "run", steps=1)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        train(config, False, screen)
    [(config_of_run, device, steps_done)] = begun
    assert (config_of_run.model.hidden_size, device.type, steps_done) == (config.model.hidden_size, "cpu", 0)
    assert kernels.is_closed
    assert ("compiling kernels: 1 of 2\n" in screen.console.file.getvalue()) == (not fails)


@pytest.mark.parametrize(("steps", "is_said"), [(100, False), (5000, True)])
def test_a_run_that_reads_its_text_often_says_so_before_it_starts(text, tmp_path, steps, is_said):
    screen = silent_console()
    config = micro_bf16(data=str(text), steps=steps)
    store = prepare_tokens(config, tmp_path, silent_console())
    print_passes(config, store, screen)
    said = re.findall(r"tokens of text ([\d.]+) times.* \((--tokens \d+)\)", screen.console.file.getvalue())
    tokens = len(store.train)
    assert said == ([(f"{4 * steps * 31 / tokens:.1f}", f"--tokens {4 * tokens}")] if is_said else [])


def test_every_step_is_in_the_metrics(finished):
    assert list(metrics(finished[0], "loss")) == [1, 2, 3, 4, 5, 6]


def test_the_held_out_loss_is_measured_regularly_and_at_the_end(finished):
    assert list(metrics(finished[0], "val_loss")) == [3, 6]


def test_the_scales_of_tiles_are_counted_with_each_held_out_loss(finished):
    assert list(metrics(finished[0], "tile_scales")) == [3, 6]


def test_quantized_weights_are_saved_in_fp8(finished):
    from safetensors import safe_open

    with safe_open(finished[0] / "model" / "model.safetensors", "pt") as tensors:
        weight = tensors.get_tensor("model.layers.0.mlp.up_proj.weight")
    assert weight.dtype == torch.float8_e4m3fn


def test_the_loaded_model_has_the_held_out_loss_of_the_run(finished, store):
    out, _ = finished
    model = load(out)
    trained = metrics(out, "val_loss")[6]
    from octile.train.data.batches import validation_windows
    from octile.train.data.token_store import TokenStore

    held_out = validation_windows(TokenStore.open(out / "data").val, 31, 4)
    with torch.no_grad():
        assert float(model(held_out, held_out)) == pytest.approx(trained, rel=2e-3)


def test_transformers_computes_the_logits_of_a_runs_model(finished):
    out, _ = finished
    dequantize = FineGrainedFP8Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32, quantization_config=dequantize)
    ours = DeepseekV3(read_model_config(out)).eval()
    load_weights(ours, out)  # dequantized, too; `load` would compute in FP8
    tokens = torch.randint(MICRO.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs.float().eval()(tokens).logits  # what is not FP8 was left in BF16
        found = ours(tokens)
    assert (found - expected).abs().amax() <= 1e-5 * expected.abs().amax()


def test_the_screen_shows_loss_speed_time_left_and_the_sample(finished):
    shown = finished[1].console.file.getvalue()
    assert "tokens/s" in shown
    assert "s left" in shown
    assert "held-out loss" in shown
    assert "a sample of generated text" in shown


def test_a_resumed_run_keeps_its_configuration(finished):
    config = micro(data="elsewhere", out=finished[0])
    with pytest.raises(ValueError, match="keeps its configuration: data is elsewhere instead of "):
        train(config, True, silent_console())


def test_a_resumed_run_cannot_have_fewer_steps_than_it_has_done(finished):
    before = RunFolder.open(finished[0]).read_config()
    screen = silent_console()
    message = r"^the run has done 6 steps \(768 tokens\) already, and is to do only 1 in all: give more --steps or --to"
    with pytest.raises(ValueError, match=message):
        train(dataclasses.replace(before, steps=1), True, screen)
    assert screen.console.file.getvalue() == ""  # refused before the run is announced
    assert RunFolder.open(finished[0]).read_config() == before


@pytest.fixture(scope="module")
def run_of_two_steps(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("two") / "run"
    with pytest.MonkeyPatch.context() as patch:
        write_no_report(patch)
        train(micro_bf16(data=str(text), out=out, steps=2), False, silent_console())
    return out


@pytest.fixture
def half(run_of_two_steps, tmp_path):
    """A run with a checkpoint after its second step, which only one test uses."""
    return shutil.copytree(run_of_two_steps, tmp_path / "half")


def resume(run: Path, **changes) -> str:
    """Resume a run from the configuration in its folder, and return what it prints."""
    screen = silent_console()
    train(dataclasses.replace(RunFolder.open(run).read_config(), out=run, **changes), True, screen)
    return screen.console.file.getvalue()


@pytest.mark.slow
def test_a_resumed_run_prints_the_settings_that_it_takes_from_its_folder(half):
    line = " ".join(resume(half).partition("settings from ")[2].split())
    assert line.startswith(f"{half / 'config.json'}: preset tiny, recipe bf16, seed 0, data ")
    assert "steps 2, checkpoint_every 2" in line
    assert "optim.lr 0.003" in line


@pytest.mark.usefixtures("short_report")
def test_a_resumed_run_whose_steps_are_done_says_so(half):
    assert "all its steps are done: only the model, the sample and the report are written" in resume(half)
    assert (half / "report.html").exists()
    assert (half / "sample.txt").read_text()


def test_a_resumed_run_with_steps_to_do_does_not_say_that_all_are_done(half):
    assert "all its steps are done" not in resume(half, steps=4)


def test_a_finished_run_without_its_checkpoints_is_refused(half):
    shutil.rmtree(half / "checkpoints")
    weights = (half / "model" / "model.safetensors").read_bytes()
    with pytest.raises(
        FileNotFoundError, match=r"holds a finished run.*/checkpoints holds none of its checkpoints: bring them back"
    ):
        resume(half, steps=4)
    assert (half / "model" / "model.safetensors").read_bytes() == weights


@pytest.fixture(scope="module")
def killed_runs(text, tmp_path_factory):
    @cache
    def run_until(step):
        out, launch = tmp_path_factory.mktemp("killed") / "run", Trainer.launch
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Trainer, "launch", lambda self: launch(self) if self.steps_done < step else 1 / 0)
            write_no_report(patch)
            with pytest.raises(ZeroDivisionError):
                train(micro_bf16(data=str(text), out=out, steps=4), False, silent_console())
        return out

    return run_until


@pytest.fixture
def killed(killed_runs, tmp_path):
    """killed(step): a run with checkpoints after the steps 2 and 4 that was killed after this step."""
    return lambda step: shutil.copytree(killed_runs(step), tmp_path / "run")


def test_an_interrupted_run_whose_checkpoints_are_gone_is_refused(killed, tmp_path):
    run = killed(3)
    (run / "checkpoints").rename(tmp_path / "elsewhere")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    message = r"/checkpoints holds no checkpoint of this run, which has done 3 steps and saved .* every 2 .* --checkpoi"
    with pytest.raises(FileNotFoundError, match=message):
        resume(run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert "resumed at step 2" in resume(run, checkpoints=str(tmp_path / "elsewhere"))


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_run_that_was_killed_before_its_first_checkpoint_starts_from_the_beginning(killed, step):
    run = killed(step)
    shutil.rmtree(run / "checkpoints", ignore_errors=True)  # it may be killed while it writes one
    assert "no checkpoint was written yet: starting from the beginning" in resume(run)


@pytest.mark.parametrize(("old", "new"), [('"lr": 0.003', '"lr": 0.03'), ('"data": "', '"data": "stdlib')])
def test_an_edited_configuration_is_refused_before_the_first_checkpoint_too(killed, old, new):
    run = killed(1)
    file = run / "config.json"
    file.write_text(file.read_text().replace(old, new))
    with pytest.raises(
        ValueError, match=r"config\.json was changed after the run began, and no checkpoint was written"
    ):
        resume(run)


@pytest.mark.slow
def test_a_run_starts_from_the_beginning_when_its_configuration_is_changed_back(killed):
    run = killed(1)
    file = run / "config.json"
    before = file.read_text()
    file.write_text(before.replace('"lr": 0.003', '"lr": 0.03'))
    with pytest.raises(ValueError, match="was changed after the run began"):
        resume(run)
    file.write_text(before)
    assert "starting from the beginning" in resume(run)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"lr": 0.003', '"lr": 0.03', "optim.lr is 0.03 instead of 0.003 in step_00000002"),
        ('"batch_size": 4', '"batch_size": 2', "batch_size is 2 instead of 4 in step_00000002"),
        ('"rope_theta": 10000.0', '"rope_theta": 100.0', "model.rope_theta is 100.0 instead of 10000.0 in step_"),
    ],
)
def test_an_edited_configuration_is_refused(half, old, new, message):
    file = half / "config.json"
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))
    before = {path: path.read_bytes() for path in half.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=f"config.json was changed after the run began: {message}"):
        resume(half)
    assert {path: path.read_bytes() for path in half.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "model", "data", "checkpoints"])
def test_a_file_where_a_run_needs_a_folder_is_refused_before_any_work(text, tmp_path, name):
    out, screen = tmp_path / "run", silent_console()
    out.mkdir()
    (out / name).write_text("mine")
    message = (
        f"^out {str(out)!r} has a file {name!r}, where the run needs a folder: move it away, or choose another --out"
    )
    with pytest.raises(NotADirectoryError, match=message):
        train(micro_bf16(data=str(text), out=out), False, screen)
    assert screen.console.file.getvalue() == ""
    assert [path.name for path in out.iterdir()] == [name]


@pytest.mark.slow
def test_an_edited_number_of_steps_is_printed(half):
    file = half / "config.json"
    file.write_text(file.read_text().replace('"steps": 2', '"steps": 3'))
    assert "steps: 2 before, 3 now" in resume(half)


@pytest.mark.slow
def test_another_number_of_threads_is_warned_of(half, monkeypatch):
    threads = torch.get_num_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 1)
    message = f"step_00000002 was computed with threads {threads}, this machine has {threads + 1}: steps that it com"
    with pytest.warns(UserWarning, match=message):
        resume(half, steps=3)


@pytest.mark.slow
def test_the_same_machine_is_not_warned_of(half, recwarn):
    resume(half, steps=3)
    assert not [warning for warning in recwarn if "computed with" in str(warning.message)]


@pytest.mark.one_case
@pytest.mark.each_value
@pytest.mark.parametrize("name", ["metrics.jsonl", "telemetry.jsonl"])
@pytest.mark.parametrize("damage", [b'{"step": 2, "lo', b"\xff\xfe\n", b"\0" * 100, b"[1]\n"], ids=repr)
def test_a_damaged_end_of_the_measurements_is_cut_and_reported(half, name, damage):
    file = half / name
    row = b'{"step": 1, "layer": "a", "product": "fprop"}\n'
    whole = row if name.startswith("telemetry") else file.read_bytes()
    file.write_bytes(whole + damage)
    n = whole.count(b"\n")
    assert f"{name} was damaged after line {n}: it is cut there" in " ".join(resume(half, steps=3).split())
    assert file.read_bytes().startswith(whole)
    assert all(json.loads(line) for line in file.read_bytes().splitlines())


@pytest.mark.slow
def test_a_damaged_line_among_the_measurements_is_left_out_and_reported(half):
    file = half / "metrics.jsonl"
    first, second, *others = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + second.replace(b'"step"', b'"\xfftep"') + b"".join(others))
    assert "line 2 was damaged in metrics.jsonl: left out" in resume(half, steps=3)
    assert file.read_bytes().startswith(first + b"".join(others))


def test_missing_measurements_of_the_last_steps_are_reported(half):
    (half / "metrics.jsonl").write_bytes(b"")
    assert "metrics.jsonl has no measurements of the steps 1 to" in resume(half, steps=3)


@pytest.mark.slow
def test_measurements_that_are_gone_are_reported(half):
    (half / "metrics.jsonl").unlink()
    assert "metrics.jsonl: the measurements of the steps 1 to 2 are missing" in resume(half, steps=3)


@pytest.mark.slow
def test_undamaged_measurements_are_not_reported(half):
    said = resume(half, steps=3)
    assert "was damaged" not in said
    assert "has no measurements" not in said
    assert "are missing" not in said


@pytest.mark.slow
def test_resuming_with_other_tokens_is_refused(text, tmp_path):
    source, out = tmp_path / "text", tmp_path / "run"
    shutil.copytree(text, source)
    config = micro_bf16(data=str(source), out=out, steps=2)
    train(config, False, silent_console())
    (source / "argparse.txt").write_text((source / "argparse.txt").read_text() * 2)
    shutil.rmtree(out / "data")
    with pytest.raises(ValueError, match=r"tokens in .*data are not those that the checkpoint was trained on"):
        train(dataclasses.replace(config, steps=3), True, silent_console())


@pytest.mark.slow
def test_too_little_held_out_text_is_reported(text, tmp_path):
    screen = silent_console()
    train(micro_bf16(data=str(text), out=tmp_path / "run", steps=1, val_sequences=100_000), False, screen)
    shown = " ".join(screen.console.file.getvalue().split())
    assert "val_sequences is 100,000, but so little text is held out" in shown


def test_a_single_held_out_document_is_in_the_singular(text, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    whole = (text / "argparse.txt").read_text()
    (source / "most.txt").write_text(whole[9000:])
    (source / "part.txt").write_text(whole[:9000])
    run = RunFolder(train(micro_bf16(data=str(source), out=tmp_path / "run", steps=1), False, silent_console()))
    held_out = json.loads(run.summary_file.read_text())["held_out_text"]
    assert re.fullmatch(r"[\d,]+ tokens in 1 document", held_out)


@pytest.mark.slow
def test_an_observer_is_entered_around_training_steps_only(text, tmp_path):
    validated, observed = [], []

    def observer(trainer, run, _):
        assert (run.path, trainer.steps_done) == (tmp_path / "run", 0)

        @contextmanager
        def observe_step(step):
            before = trainer.steps_done
            yield
            observed.append((step, before, trainer.steps_done))
            validated.append(step in metrics(run.path, "val_loss"))

        return observe_step

    config = micro_bf16(data=str(text), out=tmp_path / "run", validate_every=1, steps=3)
    train(config, False, silent_console(), observer)
    assert observed == [(1, 0, 1), (2, 1, 2), (3, 2, 3)]
    assert validated == [False, False, False]  # a step's validation comes after it


def test_resuming_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="holds no run"):
        train(micro_bf16(out=tmp_path / "nothing"), True, silent_console())


def test_a_vocabulary_larger_than_the_models_is_refused(text, tmp_path, monkeypatch):
    config = micro_bf16(data=str(text), out=tmp_path / "run")
    store = prepare_tokens(config, tmp_path / "data", silent_console())
    small = dataclasses.replace(config, model=dataclasses.replace(MICRO, vocab_size=300))
    with pytest.raises(ValueError, match="the data has 320 tokens, the model's vocab_size is 300"):
        build(small, store, torch.device("cpu"))


@pytest.fixture
def train_until_the_disk_is_full(text, monkeypatch, full_disk):
    """Train in a folder until the disk is full once so many steps are done, and return the error's notes."""

    def train_until_full(out: Path, full_after: int) -> list[str]:
        launch = Trainer.launch

        def fill(self):
            if self.steps_done == full_after:
                full_disk(1000)
            return launch(self)

        monkeypatch.setattr(Trainer, "launch", fill)
        with pytest.raises(OSError, match="No space left") as full:
            train(micro_bf16(data=str(text), out=out), False, silent_console())
        return full.value.__notes__

    return train_until_full


def test_a_full_disk_leaves_the_last_checkpoint_and_names_the_command_that_continues(
    tmp_path, train_until_the_disk_is_full
):
    out = tmp_path / "run"
    notes = train_until_the_disk_is_full(out, full_after=3)
    assert latest_checkpoint(out / "checkpoints").name == "step_00000002"
    assert notes == [f"to continue from the last checkpoint: octile train --resume --out {out}"]


def test_a_failed_gpu_names_the_command_that_continues(text, tmp_path, monkeypatch):
    launch = Trainer.launch

    def fail(self):
        if self.steps_done == 3:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        return launch(self)

    monkeypatch.setattr(Trainer, "launch", fail)
    out = tmp_path / "run"
    with pytest.raises(torch.AcceleratorError) as failed:
        train(micro_bf16(data=str(text), out=out), False, silent_console())
    assert failed.value.__notes__ == [f"to continue from the last checkpoint: octile train --resume --out {out}"]


def test_a_disk_that_is_full_before_the_first_checkpoint_names_the_command_that_starts_again(
    tmp_path, train_until_the_disk_is_full
):
    out = tmp_path / "run"
    begins = f"nothing is saved before the first checkpoint; to start again: octile train --resume --out {out}"
    assert train_until_the_disk_is_full(out, full_after=1) == [begins]


def test_a_prompt_that_does_not_fit_the_context_is_refused_before_training(text, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(ValueError, match="fill the model's context of 128"):
        train(micro_bf16(data=str(text), out=out, prompt="def " * 200), False, silent_console())
    assert not (out / "config.json").exists()


@pytest.mark.slow
def test_a_changed_number_of_steps_is_printed(half):
    assert "steps: 2 before, 3 now" in resume(half, steps=3)


def test_a_first_step_that_fails_does_not_block_the_run_folder(text, tmp_path, monkeypatch):
    out, launch = tmp_path / "run", Trainer.launch

    def fail(self):
        raise ValueError("this model cannot be computed")

    monkeypatch.setattr(Trainer, "launch", fail)
    with pytest.raises(ValueError, match="cannot be computed"):
        train(micro_bf16(data=str(text), out=out), False, silent_console())
    assert {path.name for path in out.iterdir()} <= {".lock", "data"}
    monkeypatch.setattr(Trainer, "launch", launch)
    train(micro_bf16(data=str(text), out=out, steps=1), False, silent_console())
    assert list(metrics(out, "loss")) == [1]


@pytest.mark.slow
def test_a_later_step_that_fails_leaves_the_run(text, tmp_path, monkeypatch):
    out, launch = tmp_path / "run", Trainer.launch
    monkeypatch.setattr(Trainer, "launch", lambda self: launch(self) if self.steps_done < 2 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(micro_bf16(data=str(text), out=out), False, silent_console())
    assert list(metrics(out, "loss")) == [1, 2]
    assert RunFolder.open(out).read_config().steps == 6


@pytest.fixture(scope="module")
def stopped(text, tmp_path_factory):
    """A run that a NaN has stopped in its fourth step, with its report."""
    out, launch = tmp_path_factory.mktemp("stopped") / "run", Trainer.launch

    def break_after_3(self):
        if self.steps_done == 3:
            with torch.no_grad():
                self.model.model.norm.weight.fill_(float("nan"))
        return launch(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "launch", break_after_3)
        draw_no_figures(patch)
        with pytest.raises(FloatingPointError, match=r"loss is nan at step 4.*model\.norm\.weight"):
            train(micro_bf16(data=str(text), out=out), False, silent_console())
    return out


def test_a_nan_loss_leaves_the_last_checkpoint(stopped):
    assert latest_checkpoint(stopped / "checkpoints").name == "step_00000002"


def test_the_report_of_a_run_that_a_nan_stopped_says_so(stopped):
    notice = (
        "Training stopped: the loss is nan at step 4; the first non-finite value is in parameter model.norm.weight."
    )
    assert notice in (stopped / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.usefixtures("short_report")
def test_the_report_of_a_run_that_went_on_after_a_nan_does_not_say_that_it_stopped(stopped, tmp_path):
    run = shutil.copytree(stopped, tmp_path / "run")
    resume(run)
    assert "Training stopped" not in (run / "report.html").read_text()


def options(text: Path, out: Path, **changes) -> list[str]:
    """The options with which `octile train` trains the micro model with `changes`."""
    config, given = micro_bf16(data=str(text), **changes), ["--out", str(out)]
    for path, value in _differences(config, TrainConfig()):
        given += [f"--{path.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else (value,))]
    return given


def _differences(config, default, path=""):
    for field in dataclasses.fields(config):
        value, default_value = getattr(config, field.name), getattr(default, field.name)
        if dataclasses.is_dataclass(value):
            yield from _differences(value, default_value, f"{path}{field.name}.")
        elif value != default_value:
            yield path + field.name, value


def begin(text: Path, out: Path, hangs_after: int = -1, **changes) -> BaseProcess:
    """Begin a run of slow steps in another process; what it prints is next to its folder."""
    (process,) = begin_ranks(own_process.train_slowly, (str(out.parent), options(text, out, **changes), hangs_after), 1)
    return process


def wait_for_step(run: Path, step: int, process: BaseProcess) -> None:
    lines = run / "metrics.jsonl"
    wait_for(f"step {step}", lambda: lines.exists() and f'"step": {step}, "loss"' in lines.read_text(), run, process)


def wait_for(what: str, is_there: Callable[[], bool], run: Path, process: BaseProcess) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.is_alive():
        if is_there():
            return
        time.sleep(0.01)
    raise AssertionError(f"{what} was not reached: {(run.parent / 'octile.err').read_text()}")


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT)])
def test_a_second_signal_of_another_kind_ends_a_run_within_a_step(text, tmp_path, numbers):
    out = tmp_path / "run"
    process = begin(text, out, hangs_after=1)
    try:
        wait_for("a step that hangs", (tmp_path / "hangs").exists, out, process)
        os.kill(process.pid, numbers[0])
        printed = tmp_path / "octile.out"
        wait_for("a stop", lambda: "stopping after the steps" in printed.read_text(), out, process)
        os.kill(process.pid, numbers[1])
        process.join(60)
        assert process.exitcode in (130, 143)
    finally:
        process.kill()
    assert (
        "octile: stopped at once; nothing is saved before the first checkpoint" in (tmp_path / "octile.err").read_text()
    )


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_losses_and_weights(finished, text, tmp_path):
    straight, killed = finished[0], tmp_path / "killed"
    process = begin(text, killed, recipe="deepseek_v3")
    wait_for_step(killed, 3, process)
    process.kill()
    process.join()

    main(["train", "--resume", "--out", str(killed)])
    assert metrics(killed, "loss") == metrics(straight, "loss")
    assert metrics(killed, "val_loss") == metrics(straight, "val_loss")
    ours, theirs = final_state(killed), final_state(straight)
    assert all(torch.equal(ours[name].view(torch.uint8), t.view(torch.uint8)) for name, t in theirs.items() if t.dim())


RULES = '[[rule]]\nwhen = "flushed >= 0%"\nthen = "bf16"\nproduct = "wgrad"\nlayers = "*.down_proj"\nfor_steps = 2\n'


@pytest.mark.slow
def test_the_printed_command_continues_a_run_with_guards_to_the_same_weights(text, tmp_path):
    straight, stopped, rules = tmp_path / "straight", tmp_path / "it's stopped", tmp_path / "rules.toml"
    rules.write_text(RULES, encoding="utf-8")
    guarded = {"telemetry_every": 2, "telemetry_layers": "*.down_proj", "guards": rules, "recipe": "deepseek_v3"}
    process = begin(text, stopped, **guarded)
    wait_for_step(stopped, 2, process)
    os.kill(process.pid, signal.SIGTERM)
    main(["train", *options(text, straight, **guarded)])
    guards = [line for line in (straight / "metrics.jsonl").read_text().splitlines() if '"guard"' in line]
    assert guards
    process.join(120)
    assert process.exitcode == 143

    program, *command = shlex.split((tmp_path / "octile.err").read_text().partition("to continue: ")[2])
    assert program == "octile"
    main(command)
    assert [line for line in (stopped / "metrics.jsonl").read_text().splitlines() if '"guard"' in line] == guards
    ours, theirs = final_state(stopped), final_state(straight)
    assert all(torch.equal(ours[name].view(torch.uint8), t.view(torch.uint8)) for name, t in theirs.items() if t.dim())


@pytest.mark.parametrize(("interrupt", "code"), [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_a_signal_before_the_first_step_says_to_start_again(text, tmp_path, monkeypatch, interrupt, code):
    def interrupted(*arguments, **options):
        raise interrupt

    monkeypatch.setattr("octile.train.run.tokens.prepare", interrupted)
    with pytest.raises(Stopped, match=r"without --resume; it prepares the data anew$") as stopped:
        train(micro_bf16(data=str(text), out=tmp_path / "run"), False, silent_console())
    assert stopped.value.exit_code == code
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_that_is_stopped_after_its_data_is_prepared_begins_with_it(text, tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise Terminated

    config = micro_bf16(data=str(text), out=tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr("octile.train.loop.build", interrupted)
        with pytest.raises(Stopped, match=r"start the same command again, without --resume$"):
            train(config, False, silent_console())
    monkeypatch.setattr("octile.train.data.prepare._build", interrupted)  # it is in the cache
    train(config, False, silent_console())


def test_a_second_signal_during_a_step_says_how_to_continue(text, tmp_path, monkeypatch):
    def interrupted(self):
        raise Terminated

    monkeypatch.setattr(Trainer, "launch", interrupted)
    out = tmp_path / "run"
    with pytest.raises(
        Stopped, match=f"before the first checkpoint; to start again: octile train --resume --out {out}"
    ):
        train(micro_bf16(data=str(text), out=out), False, silent_console())


def test_a_second_signal_while_the_store_does_not_answer_says_that_it_is_unknown_what_is_saved(
    text, tmp_path, monkeypatch
):
    def interrupted(self):
        def fail(store):
            raise OSError("no answer")

        monkeypatch.setattr("octile.train.run.checkpoints.finished_steps", fail)
        raise Terminated

    monkeypatch.setattr(Trainer, "launch", interrupted)
    out = tmp_path / "run"
    with pytest.raises(
        Stopped,
        match=f"{out}/checkpoints cannot be read now, so that it is unknown whether there is a checkpoint; to continue "
        f"from the last one, or to start again: octile train --resume --out {out}",
    ):
        train(micro_bf16(data=str(text), out=out), False, silent_console())


def test_a_lost_rank_while_the_store_does_not_answer_says_that_it_is_unknown_what_is_saved(text, tmp_path, monkeypatch):
    def lose(self):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(Trainer, "launch", lose)
    lost = RanksError("rank 0 lost the connection to another rank")
    monkeypatch.setattr(loop, "explain", lambda error: error if isinstance(error, RanksError) else lost)
    monkeypatch.setattr(RunCheckpoints, "can_continue", lambda self: None)
    with pytest.raises(
        RanksError, match=r"^rank 0 lost the connection to another rank; .* cannot be read now, so that"
    ):
        train(micro_bf16(data=str(text), out=tmp_path / "run"), False, silent_console())


def test_a_signal_after_another_rank_is_lost_does_not_hide_how_to_continue(half, monkeypatch):
    def lose(self):
        try:
            raise RuntimeError("Connection closed by peer")
        finally:
            raise Terminated  # as torchrun does to all ranks when one has ended

    monkeypatch.setattr(Trainer, "launch", lose)
    monkeypatch.setattr(loop, "failure_before", lambda interrupt: interrupt.__context__)
    lost = RanksError("rank 1 lost the connection to another rank")
    monkeypatch.setattr(loop, "explain", lambda error: error if isinstance(error, RanksError) else lost)
    with pytest.raises(RanksError, match=r"^rank 1 lost the connection to another rank; to continue: octile train"):
        resume(half, steps=4)


def test_a_second_signal_after_a_checkpoint_says_where_the_run_continues(half, monkeypatch):
    def interrupted(self):
        raise Terminated

    monkeypatch.setattr(Trainer, "launch", interrupted)
    with pytest.raises(Stopped, match="to continue from the last checkpoint: octile train --resume"):
        resume(half, steps=4)


@pytest.mark.slow
def test_a_stop_after_a_checkpoint_does_not_write_it_again(text, tmp_path, monkeypatch):
    saved, save = [], RunCheckpoints.save

    def recorded(self, trainer, best, config):
        saved.append(trainer.steps_done)
        save(self, trainer, best, config)

    monkeypatch.setattr(RunCheckpoints, "save", recorded)
    asked = itertools.count()  # before each step
    monkeypatch.setattr(Strategy, "must_stop", lambda self, own: next(asked) == 2)
    with pytest.raises(Stopped, match="stopped after step 2"):
        train(micro_bf16(data=str(text), out=tmp_path / "run", checkpoint_every=2), False, silent_console())
    assert saved == [2]


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("during", ["launch", "validate"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_in_the_last_step_or_validation_stops_before_the_model_is_written(
    finished, text, tmp_path, monkeypatch, during, number
):
    owner, last = {"launch": (Trainer, 5), "validate": (Evaluator, 6)}[during]
    out, original = tmp_path / "run", getattr(owner, during)

    def interrupted(self):
        if self.progress.steps_done == last:
            os.kill(os.getpid(), number)
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(owner, during, interrupted)
        command = f"octile train --resume --out {out}"
        message = f"^stopped after the last step; to write the model and the report: {command}$"
        with pytest.raises(Stopped, match=message) as stopped:
            train(micro(data=str(text), out=out), False, silent_console())
    assert stopped.value.exit_code == 128 + number
    assert not (out / "model").exists()
    assert latest_checkpoint(out / "checkpoints").name == "step_00000006"
    assert "all its steps are done" in resume(out)
    for key in ("loss", "val_loss"):
        assert metrics(out, key) == metrics(finished[0], key)
    ours, theirs = ((run / "model" / "model.safetensors").read_bytes() for run in (out, finished[0]))
    assert ours == theirs


@pytest.mark.slow
def test_a_signal_in_the_last_step_stops_a_run_whose_patience_runs_out(text, tmp_path, monkeypatch):
    def validate_last(self):
        if self.progress.steps_done == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"val_loss": float(self.progress.steps_done)}

    monkeypatch.setattr(Evaluator, "validate", validate_last)
    config = micro_bf16(data=str(text), out=tmp_path / "run", steps=9, patience=1)
    with pytest.raises(Stopped, match="stopped after the last step; to write the model"):
        train(config, False, silent_console())
    assert latest_checkpoint(tmp_path / "run" / "checkpoints").name == "step_00000006"


@pytest.mark.slow
def test_ctrl_c_saves_the_current_step_and_prints_how_to_continue(text, tmp_path):
    out = tmp_path / "run"
    process = begin(text, out)
    wait_for_step(out, 1, process)
    os.kill(process.pid, signal.SIGINT)
    process.join(120)
    stdout, stderr = ((tmp_path / f"octile.{name}").read_text() for name in ("out", "err"))
    done = max(metrics(out, "loss"))
    assert latest_checkpoint(out / "checkpoints").name == f"step_{done:08d}"
    assert process.exitcode == 130
    acknowledged = "Ctrl-C: stopping after the steps that have begun, and saving the last; a second signal stops at"
    assert acknowledged in " ".join(stdout.split())
    assert stderr == f"octile: stopped after step {done}; to continue: octile train --resume --out {out}\n"
