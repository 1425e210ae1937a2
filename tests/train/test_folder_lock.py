"""A folder is written by one process at a time."""

import subprocess
import sys

import pytest

from octile.train.run_folder import lock_folder

HOLD = """
import sys, time
from pathlib import Path
from octile.train.run_folder import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("holds", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other(tmp_path):
    """Another process that holds tmp_path / "run"."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "holds\n"
    yield process
    process.kill()
    process.wait()


def test_a_folder_that_another_process_holds_is_refused(other, tmp_path):
    with pytest.raises(FileExistsError, match="is in use by another octile process"), lock_folder(tmp_path / "run"):
        pass


def test_a_process_that_is_killed_holds_nothing(other, tmp_path):
    other.kill()
    other.wait()
    with lock_folder(tmp_path / "run"):
        pass


def test_a_folder_in_which_nothing_was_written_is_removed(tmp_path):
    with lock_folder(tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()


def test_a_folder_in_which_only_empty_folders_were_made_is_removed(tmp_path):
    with lock_folder(tmp_path / "run"):
        (tmp_path / "run" / "data").mkdir()
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"^out '.*file/run' cannot be made: Not a directory$"):
        lock_folder(tmp_path / "file" / "run").__enter__()


def test_what_was_written_stays(tmp_path):
    with lock_folder(tmp_path / "run"):
        (tmp_path / "run" / "config.json").write_text("{}")
    assert (tmp_path / "run" / "config.json").exists()


def test_it_is_let_go_when_the_work_fails(tmp_path):
    for _ in range(2):
        with pytest.raises(RuntimeError), lock_folder(tmp_path / "run"):
            raise RuntimeError
