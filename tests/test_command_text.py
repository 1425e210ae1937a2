"""Tests of parts of commands, as messages print them."""

import shlex
from pathlib import Path

import pytest

from octile.command_text import quoted_path


@pytest.mark.parametrize("path", ["run", "a run's", "-dash", "-a run", "--out"])
def test_a_printed_path_is_the_same_path_and_no_option(path):
    (argument,) = shlex.split(quoted_path(Path(path)))
    assert Path(argument) == Path(path)
    assert not argument.startswith("-")
