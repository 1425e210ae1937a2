"""Runs: what they leave, and that a run that is killed and resumed ends with the bits of one that was not."""

import json
import os
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from octile.checkpoint.hugging_face import has_fp8_weights, load, save
from octile.checkpoint.training import load_checkpoint
from octile.models.deepseek_v3 import DeepseekV3
from octile.rl import loop
from octile.rl.config import RLConfig
from octile.rl.run import read_config, write_start
from octile.serve.engine.request import Sampling
from octile.serve.generate import generate_from
from octile.signals import Stopped
from octile.train.run.console import RunConsole
from octile.train.run.folder import RunFolder
from octile.train.run.metrics import read_lines
from tests.forked_command import ForkedCommand
from tests.rl.test_trainer import bits, without_times
from tests.serve.models import EXACT
from tests.train.conftest import silent_console

OPTIONS = {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 8, "lr": 1e-3, "steps": 6, "checkpoint_every": 2}


@pytest.fixture(scope="module")
def config(exact_folder, reward_file) -> RLConfig:
    return RLConfig(model=exact_folder, reward=reward_file, device="cpu", **OPTIONS)


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory) -> Path:
    """A run that was not interrupted; it is not to be changed."""
    return loop.train(replace(config, out=tmp_path_factory.mktemp("rl") / "whole"), False, silent_console())


def lines_of(run: Path):
    return [without_times(line) for line in read_lines(run / "metrics.jsonl")]


def assert_same_run(first: Path, second: Path) -> None:
    """Metrics, the last checkpoint's tensors, and the model have the same bits."""
    assert lines_of(first) == lines_of(second)
    last = "checkpoints/step_00000006"
    (own, _), (other, _) = load_checkpoint(first / last), load_checkpoint(second / last)
    assert {name: bits(tensor) for name, tensor in own.items()} == {n: bits(t) for n, t in other.items()}
    weights = "model/model.safetensors"
    assert (first / weights).read_bytes() == (second / weights).read_bytes()


@pytest.mark.slow
def test_a_run_leaves_metrics_a_model_and_a_summary(whole, exact_folder):
    lines = read_lines(whole / "metrics.jsonl")
    steps = [line for line in lines if "reward" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert all(line["delta_equal"] == line["delta_tokens"] for line in steps)
    (texts,) = [line for line in lines if "texts" in line]
    assert (texts["step"], len(texts["texts"])) == (1, 2)
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["first_reward"] == steps[0]["reward"]
    assert (summary["different_log_probs"], summary["tokens"]) == (0, steps[-1]["tokens"])
    assert sorted(path.name for path in (whole / "checkpoints").iterdir()) == ["step_00000004", "step_00000006"]
    start, model = load(whole / "start").state_dict(), load(whole).state_dict()
    assert all(torch.equal(tensor, start[name]) for name, tensor in load(exact_folder).state_dict().items())
    assert not all(torch.equal(tensor, start[name]) for name, tensor in model.items())


def test_the_model_of_a_run_is_generated_from_as_that_of_a_training_run(whole):
    assert "".join(generate_from(whole, "1 2 +", Sampling(4, 1.0, ignore_eos=True), "cpu"))


@pytest.mark.slow
def test_the_same_run_has_the_same_bits(config, whole, tmp_path):
    assert_same_run(whole, loop.train(replace(config, out=tmp_path / "run"), False, silent_console()))


@pytest.mark.slow
@pytest.mark.parametrize("after", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_a_killed_run_ends_with_the_bits_of_one_that_was_not(config, whole, tmp_path, after):
    out = tmp_path / "run"
    words = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    command = ForkedCommand(
        ["rl", str(config.model), f"--reward={config.reward}", f"--out={out}", "--device=cpu", *words]
    )
    file, deadline = out / "metrics.jsonl", time.monotonic() + 120
    while not file.exists() or max((line["step"] for line in read_lines(file)), default=0) < after:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(command.pid, signal.SIGKILL)
    command.wait(60)
    assert not (out / "summary.json").exists()
    resumed = replace(read_config(out), out=out)
    assert_same_run(whole, loop.train(resumed, True, silent_console()))


def test_a_run_that_was_killed_after_its_last_step_gets_its_model_by_being_resumed(whole, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    shutil.rmtree(out / "model")
    for name in ("summary.json", "report.html"):
        (out / name).unlink()
    assert_same_run(whole, loop.train(replace(read_config(out), out=out), True, silent_console()))
    assert (out / "summary.json").read_bytes() == (whole / "summary.json").read_bytes()
    assert (out / "report.html").exists()


@pytest.mark.slow
def test_texts_are_stored_now_and_then(config, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "TEXTS_EVERY", 2)
    loop.train(replace(config, out=tmp_path / "run", steps=5), False, silent_console())
    assert [line["step"] for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "texts" in line] == [1, 2, 4]


def test_a_run_without_its_metrics_gets_its_model_but_no_report(whole, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(whole, out, ignore=shutil.ignore_patterns("model", "metrics.jsonl", "summary.json", "report.html"))
    loop.train(replace(read_config(out), out=out), True, silent_console())
    weights = "model/model.safetensors"
    assert (out / weights).read_bytes() == (whole / weights).read_bytes()
    assert not (out / "report.html").exists()


def stop_after(monkeypatch, step: int) -> None:
    """Have SIGTERM come while a step is computed."""
    take_step = loop.RLTrainer.step

    def step_then_signal(self):
        if self.steps_done + 1 == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return take_step(self)

    monkeypatch.setattr(loop.RLTrainer, "step", step_then_signal)


@pytest.mark.slow
def test_a_signal_ends_a_run_after_its_step_and_it_can_be_continued(config, whole, tmp_path, monkeypatch):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(Stopped, match=r"stopped after step 3; to continue: octile rl --resume --out"):
            loop.train(replace(config, out=out), False, silent_console())
    assert (out / "checkpoints" / "step_00000003").exists()
    assert_same_run(whole, loop.train(read_config(out), True, silent_console()))


@pytest.mark.slow
def test_a_full_disk_names_the_command_that_continues(config, tmp_path, monkeypatch, full_disk):
    out, take_step = tmp_path / "run", loop.RLTrainer.step

    def step_then_fill(self):
        line = take_step(self)
        full_disk(1000)
        return line

    monkeypatch.setattr(loop.RLTrainer, "step", step_then_fill)
    with pytest.raises(OSError, match="No space left") as full:
        loop.train(replace(config, out=out, checkpoint_every=1), False, silent_console())
    assert full.value.__notes__ == [f"to continue: octile rl --resume --out {out}"]


@pytest.mark.slow
def test_a_finished_run_goes_on_with_more_steps_as_one_that_had_them_from_the_beginning(config, whole, tmp_path):
    out = tmp_path / "run"
    loop.train(replace(config, out=out, steps=3), False, silent_console())
    assert_same_run(whole, loop.train(replace(read_config(out), steps=6), True, silent_console()))


@pytest.mark.slow
def test_a_failure_in_the_first_step_leaves_no_run_behind(config, tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("def reward(prompt, completion, answer):\n    return 1 / 0\n")
    broken = replace(config, reward=file, out=tmp_path / "run")
    with pytest.raises(RuntimeError, match="raised ZeroDivisionError"):
        loop.train(broken, False, silent_console())
    assert not RunFolder(tmp_path / "run").config_file.exists()
    file.write_text("def reward(prompt, completion, answer):\n    return 1\n")
    loop.train(replace(broken, steps=1), False, silent_console())


def test_a_folder_that_is_used_again_has_no_tokenizer_file_of_another_model(config, exact_folder, tmp_path):
    other = shutil.copytree(exact_folder, tmp_path / "other")
    names = {"generation_config.json", "chat_template.jinja", "additional_chat_templates"}
    (other / "additional_chat_templates").mkdir()
    for name in ("generation_config.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        (other / name).write_text("{}")
    for model, found in ((other, names), (exact_folder, set())):
        write_start(replace(config, model=model), RunFolder(tmp_path / "run"))
        start = {path.name for path in (tmp_path / "run" / "start").iterdir()}
        assert "tokenizer.json" in start
        assert start & names == found


def fail_in_step(monkeypatch, step: int, name: str, error: Exception) -> None:
    """Have a function that the trainer calls raise an exception in a step."""
    take_step = loop.RLTrainer.step

    def fail(*_, **__):
        raise error

    def step_with_failure(self):
        if self.steps_done + 1 == step:
            monkeypatch.setattr(f"octile.rl.trainer.{name}", fail)
        return take_step(self)

    monkeypatch.setattr(loop.RLTrainer, "step", step_with_failure)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "sample_groups",
        pytest.param("group_advantages", marks=pytest.mark.exhaustive),  # nothing but samples is there, as before
        pytest.param("token_losses", marks=pytest.mark.exhaustive),  # a lack of memory fails there, too
        "gradient_norm",
    ],
)
def test_a_failure_in_a_later_step_loses_none_before_it(config, whole, tmp_path, monkeypatch, name):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        fail_in_step(patch, 4, name, RuntimeError("failed"))
        with pytest.raises(RuntimeError, match="failed"):
            loop.train(replace(config, out=out), False, silent_console())
    assert (out / "checkpoints" / "step_00000003").exists()
    assert_same_run(whole, loop.train(read_config(out), True, silent_console()))


@pytest.mark.slow
def test_weights_of_a_part_of_a_step_are_not_saved(config, tmp_path, monkeypatch):
    fail_in_step(monkeypatch, 4, "compare_log_probs", RuntimeError("failed"))
    with pytest.raises(RuntimeError, match="failed"):
        loop.train(replace(config, out=tmp_path / "run"), False, silent_console())
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000002"]


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 4])
def test_a_lack_of_memory_names_what_continues_the_run_with_less(config, whole, tmp_path, monkeypatch, step):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        fail_in_step(patch, step, "token_losses", torch.OutOfMemoryError("CUDA out of memory"))
        with pytest.raises(
            MemoryError, match=rf"at step {step} on the cpu: octile rl --resume --out .* --micro-batches 2"
        ):
            loop.train(replace(config, out=out), False, silent_console())
    assert_same_run(whole, loop.train(read_config(out), True, silent_console()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seed": 1}, "a resumed run keeps its configuration: seed is 1 instead of 0"),
        ({"lr": 0.1, "clip": 0.3}, r"lr is 0\.1 instead of 0\.001, clip is 0\.3 instead of 0\.2"),
        ({"steps": 1}, "steps must be at least 6, which the run has done, not 1"),
    ],
)
def test_a_resumed_run_keeps_its_settings(whole, changes, message):
    with pytest.raises(ValueError, match=message):
        loop.train(replace(read_config(whole), **changes), True, silent_console())


@pytest.mark.slow
def test_a_resumed_run_needs_the_same_files(config, tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(config.reward.read_text())
    loop.train(replace(config, reward=file, out=tmp_path / "run", steps=1), False, silent_console())
    file.write_text("def reward(prompt, completion, answer):\n    return 1\n")
    with pytest.raises(ValueError, match="the file of reward has other contents"):
        loop.train(read_config(tmp_path / "run"), True, silent_console())
    with pytest.raises(ValueError, match="the file of reward has other contents"):
        loop.train(replace(read_config(tmp_path / "run"), reward=None), True, silent_console())


@pytest.mark.slow
def test_files_of_a_resumed_run_may_have_moved(config, tmp_path):
    file, out = tmp_path / "reward.py", tmp_path / "run"
    file.write_text(config.reward.read_text())
    loop.train(replace(config, reward=file, out=out, steps=1), False, silent_console())
    file.rename(tmp_path / "moved.py")
    with pytest.raises(FileNotFoundError, match=r"reward '.*reward\.py' does not exist"):
        loop.train(read_config(out), True, silent_console())
    loop.train(replace(read_config(out), reward=tmp_path / "moved.py", steps=2), True, silent_console())
    assert read_config(out).reward == tmp_path / "moved.py"


@pytest.mark.slow
def test_a_model_in_bf16_stays_in_bf16_and_begins_with_the_folders_weights(config, tokenizer, tmp_path):
    folder = tmp_path / "bf16"
    torch.manual_seed(0)
    save(DeepseekV3(replace(EXACT, vocab_size=tokenizer.vocab_size, num_nextn_predict_layers=0)), folder, "bf16")
    tokenizer.save(folder)
    run = loop.train(replace(config, model=folder, steps=1, out=tmp_path / "run"), False, silent_console())
    assert not has_fp8_weights(run)
    before, start = load(folder).state_dict(), load(run / "start").state_dict()
    assert all(torch.equal(tensor, start[name]) for name, tensor in before.items())


def test_prompts_of_a_file_are_sampled(config, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "1 +", "answer": "2"}\n{"prompt": "3 4", "answer": ""}\n')
    run = loop.train(replace(config, prompts=file, steps=1, out=tmp_path / "run"), False, silent_console())
    texts = next(line["texts"] for line in read_lines(run / "metrics.jsonl") if "texts" in line)
    assert sorted(text["prompt"] for text in texts) == ["1 +", "3 4"]


def test_conversations_of_a_file_are_written_by_the_models_chat_template(config, tmp_path, capsys):
    model, file = tmp_path / "model", tmp_path / "prompts.jsonl"
    shutil.copytree(config.model, model)
    (model / "chat_template.jinja").write_text("<|begin|>{{ messages[0].content }} =")
    file.write_text('{"messages": [{"role": "user", "content": "1 + 1"}], "answer": "2"}\n')
    config = replace(config, model=model, prompts=file, prompts_per_step=1, steps=1, out=tmp_path / "run")
    run = loop.train(config, False, RunConsole())
    (text,) = next(line["texts"] for line in read_lines(run / "metrics.jsonl") if "texts" in line)
    assert text["prompt"] == "<|begin|>1 + 1 ="
    assert (run / "model" / "chat_template.jinja").exists()
    assert f"chat:   octile serve {run}" in capsys.readouterr().out
