"""Tests of the examples as scripts: bad input ends in one line and the exit code 2."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.fresh_python import run_python

EXAMPLES = Path(__file__).parents[2] / "examples"


def check_one_line(printed: tuple[str, str], message: str) -> None:
    out, err = printed
    assert out == ""
    assert err.startswith(f"octile: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("example", "arguments", "message"),
    [
        ("train_with_a_loop", ["--text", "nowhere"], "text 'nowhere' is no file"),
        ("train_with_trainer", ["--steps", "0"], "steps must be at least 1, not 0"),
        ("write_traces", ["nowhere"], "no checkpoint at nowhere"),
        ("fine_tune_on_traces", ["nowhere", "traces"], "no checkpoint at nowhere"),
        ("fine_tune_on_traces", ["nowhere", "traces", "--lr", "nan"], "lr must be above 0 and finite, not nan"),
        ("fine_tune_from_fp8", ["nowhere", "--text", "text"], "folder 'nowhere' has no config.json"),
        ("fine_tune_from_fp8", ["nowhere", "--text", "text", "--lr", "-1"], "lr must be above 0 and finite, not -1.0"),
    ],
)
def test_bad_input_ends_in_one_line(tmp_path, monkeypatch, capsys, example, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{example}.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / f"{example}.py"), run_name="__main__")
    assert ended.value.code == 2
    check_one_line(capsys.readouterr(), message)


def test_a_text_that_is_not_utf_8_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "prompts").write_bytes(b"def f\xff")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["write_traces.py", "nowhere", "--prompts", "prompts"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "write_traces.py"), run_name="__main__")
    assert ended.value.code == 2
    check_one_line(capsys.readouterr(), "prompts is damaged: byte 5 is not UTF-8")


@pytest.mark.slow
def test_so_does_the_process_of_a_script(tmp_path):
    program = f"import runpy; runpy.run_path({str(EXAMPLES / 'write_traces.py')!r}, run_name='__main__')"
    ended = run_python(program, "nowhere", folder=tmp_path)
    assert ended.returncode == 2
    check_one_line((ended.stdout, ended.stderr), "no checkpoint at nowhere")
