"""Tests of a run's folder: nothing is overwritten, and damage is named."""

import json
import re
from pathlib import Path

import pytest

from octile.train.compare.comparison import Comparison
from octile.train.run.folder import RunFolder, lock_folder
from tests.train.conftest import micro


def new_run(tmp_path) -> RunFolder:
    config = micro(out=tmp_path / "run")
    run = RunFolder.create(config)
    run.write_config(config)
    return run


def test_a_run_is_not_overwritten(tmp_path):
    config = micro(out=tmp_path / "run")
    RunFolder.create(config).write_config(config)
    with pytest.raises(FileExistsError, match="holds a run already: add --resume"):
        RunFolder.create(config)


def test_a_file_as_run_folder_is_refused(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(FileExistsError, match="is a file: name a folder"):
        RunFolder.create(micro(out=tmp_path / "run"))


def test_a_comparison_is_not_overwritten_by_a_run(tmp_path):
    (tmp_path / "compare.json").write_text("{}")
    with pytest.raises(FileExistsError, match="holds a comparison already: choose another --out"):
        RunFolder.create(micro(out=tmp_path))


def test_runs_without_a_name_get_different_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = []
    for _ in range(3):
        run = RunFolder.create(micro())
        run.write_config(micro())
        names.append(run.path.name)
    assert names == ["tiny-deepseek_v3", "tiny-deepseek_v3-2", "tiny-deepseek_v3-3"]


KILLED_AT = {  # what a run leaves that was killed before its first step
    "reading the text": [".lock"],
    "preparing the data": [".lock", "data/.building-x/train.npy"],
    "building the model": [".lock", "data/train.npy"],
    "building the model that octile rl begins with": [".lock", "start/config.json"],
}


def leave(folder: Path, files: list[str]) -> None:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


@pytest.mark.parametrize("files", KILLED_AT.values(), ids=KILLED_AT)
def test_a_run_without_a_name_uses_the_folder_of_one_that_was_killed_before_its_first_step(
    tmp_path, monkeypatch, files
):
    monkeypatch.chdir(tmp_path)
    first = RunFolder.create(micro()).path
    leave(first, files)
    assert RunFolder.create(micro()).path == first
    with lock_folder(first):
        assert RunFolder.create(micro()).path.name == "tiny-deepseek_v3-2"


@pytest.mark.parametrize("files", KILLED_AT.values(), ids=KILLED_AT)
def test_a_run_that_was_killed_before_its_first_step_is_to_be_started_again(tmp_path, files):
    leave(tmp_path, files)
    with pytest.raises(FileNotFoundError, match="it ended before its first step: start it again, without --resume"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize("files", KILLED_AT.values(), ids=KILLED_AT)
def test_a_comparison_that_was_killed_before_its_first_step_is_to_be_started_again(tmp_path, files):
    leave(tmp_path, files)
    with pytest.raises(FileNotFoundError, match="it ended before its first step: start it again, without --resume"):
        Comparison.read(tmp_path)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no run: there is no .*config\.json$"):
        RunFolder.open(tmp_path)


def test_the_configuration_is_read_back(tmp_path):
    config = micro(out=tmp_path / "run")
    run = RunFolder.create(config)
    run.write_config(config)
    assert run.read_config() == config


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{ ", "is damaged: not JSON at byte 2: "),
        (b'{"data": "\xbd"}', "is damaged: byte 10 is not UTF-8$"),
        (b"[]", r"must hold a JSON object, not \[\]$"),
        (b"{}", "is damaged: not a run's configuration: it lacks model$"),
    ],
    ids=["cut", "not-utf-8", "list", "empty"],
)
def test_a_damaged_configuration_is_called_so_once_with_the_byte(tmp_path, content, message):
    run = new_run(tmp_path)
    run.config_file.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(run.config_file))} {message}"):
        run.read_config()


def test_an_unknown_recipe_is_named_with_its_file(tmp_path):
    run = new_run(tmp_path)
    run.config_file.write_text(json.dumps(json.loads(run.config_file.read_text()) | {"recipe": "nope"}))
    with pytest.raises(ValueError, match=rf"^{re.escape(str(run.config_file))} is damaged: unknown recipe 'nope'"):
        run.read_config()
