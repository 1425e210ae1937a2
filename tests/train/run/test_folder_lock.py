"""Tests that a run folder is locked: one process at a time writes to it."""

import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from octile.train.run.folder import lock_folder, new_folder
from tests.worlds import forked_context


def hold(folder: Path, started: Connection) -> None:
    with lock_folder(folder):
        started.send("holds")
        time.sleep(60)


@pytest.fixture
def other_process(tmp_path):
    """Start another process that holds the lock of tmp_path / "run"."""
    context = forked_context()
    here, there = context.Pipe()
    process = context.Process(target=hold, args=(tmp_path / "run", there))
    process.start()
    there.close()  # so that the end of the other process is seen
    assert here.recv() == "holds"
    yield process
    process.kill()
    process.join()


def test_a_folder_that_another_process_has_locked_is_refused(other_process, tmp_path):
    with pytest.raises(FileExistsError, match="is in use by another octile process"), lock_folder(tmp_path / "run"):
        pass


def test_a_killed_process_holds_no_lock(other_process, tmp_path):
    other_process.kill()
    other_process.join()
    with lock_folder(tmp_path / "run"):
        pass


def test_an_empty_folder_is_removed(tmp_path):
    with lock_folder(tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()


def test_a_folder_of_empty_folders_is_removed(tmp_path):
    with lock_folder(tmp_path / "run"):
        (tmp_path / "run" / "data").mkdir()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("names", [[], ["notes.txt"], ["empty/"], ["notes.txt", "data/"], ["data/a.txt"]], ids=str)
def test_a_folder_of_somebody_else_is_left_as_it_was(tmp_path, names):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).mkdir() if name.endswith("/") else (folder / name).touch()
    before = sorted(folder.rglob("*"))
    with lock_folder(folder):
        (folder / "data" / "text").mkdir(parents=True, exist_ok=True)
    assert folder.exists()
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("had_data", [False, True], ids=["no data before", "an empty data before"])
def test_data_that_were_prepared_in_a_folder_of_somebody_else_stay_with_the_lock(tmp_path, had_data):
    (tmp_path / "notes.txt").touch()
    if had_data:
        (tmp_path / "data").mkdir()
    with lock_folder(tmp_path):
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / "train.npy").touch()
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "data", "notes.txt"}


def test_a_folder_with_a_lock_and_other_content_is_left_as_it_was(tmp_path):
    (tmp_path / "run" / "notes").mkdir(parents=True)
    (tmp_path / "run" / ".lock").touch()
    with lock_folder(tmp_path / "run"):
        (tmp_path / "run" / "data").mkdir()
    assert {path.name for path in (tmp_path / "run").iterdir()} == {".lock", "notes"}


def test_a_folder_that_was_made_under_a_free_name_is_removed(tmp_path):
    folder = new_folder(tmp_path, "run")
    with lock_folder(folder, is_new=True):
        pass
    assert not folder.exists()


def test_what_a_killed_process_left_is_removed(tmp_path):
    (tmp_path / "run" / "data").mkdir(parents=True)
    (tmp_path / "run" / ".lock").touch()
    with lock_folder(tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_created_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"^out '.*file/run' cannot be made: Not a directory$"):
        lock_folder(tmp_path / "file" / "run").__enter__()


def test_a_folder_with_files_is_not_removed(tmp_path):
    with lock_folder(tmp_path / "run"):
        (tmp_path / "run" / "config.json").write_text("{}")
    assert (tmp_path / "run" / "config.json").exists()


def test_an_exception_releases_the_lock(tmp_path):
    for _ in range(2):
        with pytest.raises(RuntimeError), lock_folder(tmp_path / "run"):
            raise RuntimeError
