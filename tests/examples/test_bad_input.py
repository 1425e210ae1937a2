"""Tests of the examples as scripts: bad input ends in one line and the exit code 2."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("example", "arguments", "message"),
    [
        ("train_with_a_loop", ["--text", "nowhere"], "text 'nowhere' is no file"),
        ("train_with_trainer", ["--steps", "0"], "steps must be at least 1, not 0"),
        (
            "torchtitan_converter",
            ["--dim", "33"],
            "dim must be a multiple of 32, the size of an attention head, not 33",
        ),
        ("write_traces", ["nowhere"], "no checkpoint at nowhere"),
        ("fine_tune_on_traces", ["nowhere", "traces"], "no checkpoint at nowhere"),
        ("fine_tune_from_fp8", ["nowhere", "--text", "text"], "folder 'nowhere' has no config.json"),
    ],
)
def test_bad_input_ends_in_one_line(tmp_path, example, arguments, message):
    command = [sys.executable, str(EXAMPLES / f"{example}.py"), *arguments]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"octile: {message}")
    assert ended.stderr.count("\n") == 1
