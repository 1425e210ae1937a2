"""Tests of parts of commands, as messages print them."""

import shlex
from pathlib import Path

import pytest

from octile.command_text import generate_command, how_to_download, quoted_path, train_command


@pytest.mark.parametrize("path", ["run", "a run's", "-dash", "-a run", "--out"])
def test_a_printed_path_is_the_same_path_and_no_option(path):
    (argument,) = shlex.split(quoted_path(Path(path)))
    assert Path(argument) == Path(path)
    assert not argument.startswith("-")


@pytest.mark.parametrize("prompt", ["a", "it's [b] $HOME", "- a list", "--prompt", "é ｜"])
def test_a_printed_command_has_the_prompt(prompt):
    *_, folder, option = shlex.split(generate_command(Path("run"), prompt).replace("--prompt ", "--prompt="))
    assert (folder, option) == ("run", f"--prompt={prompt}")


@pytest.mark.parametrize("prompt", ["a\tb", "a\nb", "\x1b[31m", "1 " * 50])
def test_a_prompt_that_a_line_does_not_show_is_left_to_the_reader(prompt):
    assert generate_command(Path("a run"), prompt) == "octile generate 'a run' --prompt TEXT"


@pytest.mark.parametrize("path", ["model", "a/b/c", "../model", "-dash/model", "owner/a b", "runs/tiny", "here/model"])
def test_what_cannot_be_a_name_of_the_hub_is_not_downloaded(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    assert how_to_download(Path(path)) == ""


@pytest.mark.parametrize(
    ("ranks", "here", "command"),
    [
        (1, None, "octile train"),
        (8, None, "torchrun --nproc-per-node 8 -m octile train"),
        (8, "8", "torchrun --nproc-per-node 8 -m octile train"),
        (16, "8", "torchrun --nnodes 2 --nproc-per-node 8 … -m octile train"),
        (12, "8", "torchrun --nproc-per-node 12 -m octile train"),
    ],
)
def test_a_run_on_several_hosts_names_their_number(monkeypatch, ranks, here, command):
    if here is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    assert train_command(ranks) == command
