"""`octile rl` on the command line: its result, and errors in one line before any work."""

import json

import pytest

from tests.test_cli import call, refused

FEW = ("--steps", "1", "--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "4", "--device", "cpu")


@pytest.mark.slow
def test_a_run_prints_its_result_and_is_resumed(capsys, exact_folder, reward_file, tmp_path):
    out = tmp_path / "run"
    code, text, err = call(capsys, "rl", str(exact_folder), "--reward", str(reward_file), "--out", str(out), *FEW)
    assert (code, err) == (0, "")
    assert "step 1/1: reward " in text
    assert "engine: exact, on cpu" in text
    assert "equal rewards" not in text
    assert "tokens have other bits in sampling than in training, by up to 0 nats" in text
    assert f"model:  {out / 'model'}" in text
    code, text, err = call(capsys, "rl", "--resume", "--out", str(out), "--steps", "2")
    assert (code, err) == (0, "")
    assert "resumed at step 1 from step_00000001" in text
    assert json.loads((out / "config.json").read_text())["steps"] == 2


def test_several_processes_are_refused(capsys, exact_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    message = refused(capsys, "rl", str(exact_folder), "--out", str(tmp_path / "run"))
    assert message.startswith("octile: octile rl runs in one process, but torchrun has started 2 (WORLD_SIZE): ")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_the_folder_of_a_run_is_chosen_by_the_name_of_its_model(
    capsys, exact_folder, reward_file, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    code, text, _ = call(capsys, "rl", str(exact_folder), "--reward", str(reward_file), *FEW)
    assert code == 0
    assert (tmp_path / "runs" / "exact-rl" / "model" / "config.json").exists()
    code, text, err = call(capsys, "rl", "--reward", str(reward_file), *FEW)
    assert code == 0
    assert "exact-rl, the newest run" in err
    assert "run folder: runs/exact-rl-rl" in text


@pytest.mark.slow
def test_a_run_says_where_no_reward_can_train(capsys, exact_folder, tmp_path):
    file = tmp_path / "reward.py"
    file.write_text("def reward(prompt, completion, answer):\n    return 1\n")
    options = ("--reward", str(file), "--out", str(tmp_path / "run"), *FEW)
    code, text, _ = call(capsys, "rl", str(exact_folder), *options)
    assert code == 0
    assert " · equal rewards in each group · " in text
    assert "groups: in each step all completions of a prompt had equal rewards, so no reward has trained" in text


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("prompt", "words"),
    [("it's [b] $HOME", """--prompt 'it'"'"'s [b] $HOME'"""), ("1 " * 50, "--prompt TEXT"), ("-1", "--prompt=-1")],
)
def test_the_printed_command_has_a_prompt_that_a_shell_reads_as_it_is(
    capsys, exact_folder, reward_file, tmp_path, prompt, words
):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": prompt, "answer": ""}))
    options = ("--reward", str(reward_file), "--prompts", str(file), "--out", str(tmp_path / "run"), *FEW)
    code, text, _ = call(capsys, "rl", str(exact_folder), *options)
    assert code == 0
    assert f"{words} --temperature 1" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["none"], "no checkpoint at none"),
        (["{model}", "--prompts", "none"], "--prompts 'none' does not exist"),
        (["{model}", "--reward", "none"], "--reward 'none' does not exist"),
        (["{model}", "--group-size", "1"], "--group-size must be at least 2, not 1"),
        (["{model}", "--updates", "3"], "--prompts-per-step must be divisible by the 3 updates of a step, but is 16"),
        (["{model}", "--micro-batches", "257"], "--micro-batches must be at most the 256 completions of an optimizer"),
        (["{model}", "--clip", "1"], "--clip must be below 1, not 1.0"),
        (["{model}", "--max-new-tokens", "600"], "--max-new-tokens must be at most 505"),
        (["{model}", "--out", "{model}"], "holds a run already"),
        (["--resume"], "--resume needs --out RUN"),
        (["--resume", "--out", "none"], "'none' holds no run"),
        (["--resume", "--out", "{model}"], "holds no run of octile rl"),
    ],
)
def test_bad_input_is_refused_in_one_line(capsys, exact_folder, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    err = refused(capsys, "rl", *(word.format(model=exact_folder) for word in words))
    assert message in err
    assert not list(tmp_path.iterdir())


def test_other_commands_say_how_a_run_without_a_model_goes_on(capsys, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").touch()
    (run / "config.json").write_text('{"command": "octile rl"}')
    assert f"octile rl --resume --out {run} finishes it" in refused(capsys, "generate", str(run))
    assert "holds a run of octile rl" in refused(capsys, "train", "--resume", "--out", str(run))
