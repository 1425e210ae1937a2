import errno
import fcntl
import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from octile.checkpoint import files
from octile.checkpoint.files import (
    RECORD,
    STAGING,
    check_output_file,
    copy,
    finish_interrupted,
    read_json,
    read_record,
    staged,
    verify,
    write_record,
)

OLD = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "config.json")
NEW = ("model.safetensors", "config.json")
WITH_TEMPLATES = (*NEW, "templates/tools.jinja")


RENAMES = 9  # of `put(folder, WITH_TEMPLATES)` over OLD: the commit is the second one


def contents(folder):
    """The text of each file, but not of octile.json and of replacements that have not ended."""
    names = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: path.read_text() for name, path in names.items() if path.name != RECORD and name[0] != "."}


def replacements(folder):
    """What there is of replacements that have not ended."""
    return [path.name for path in folder.glob(".*")]


def put(folder, names=NEW, text="new", failure=None, before_renames=lambda staging: None):
    with staged(folder) as staging:
        assert not list(staging.iterdir())
        for name in names:
            (staging / name).parent.mkdir(exist_ok=True)
            (staging / name).write_text(text)
        if failure is not None:
            raise failure
        before_renames(staging)


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of two shards, and a file of someone else."""
    put(tmp_path / "model", OLD, "old")
    (tmp_path / "model" / "notes.txt").write_text("mine")
    return tmp_path / "model"


@pytest.mark.parametrize("path", ["/dev/null", "/dev/stdout", "/dev/new"])
def test_a_device_is_no_output_file(path):
    with pytest.raises(ValueError, match=f"json '{path}' is a device or a pipe: name a file"):
        check_output_file("json", Path(path))


@pytest.mark.parametrize("path", ["/proc/step.svg", "/proc/new/step.svg"])
def test_a_folder_that_takes_no_file_is_refused(path):
    with pytest.raises(OSError, match=f"^out '{path}' cannot be written: "):
        check_output_file("out", Path(path))


@pytest.mark.parametrize("name", ["config.json", "octile.json", "summary.json"])
def test_a_file_that_is_read_again_is_not_replaced_by_a_result(tmp_path, name):
    check_output_file("json", tmp_path / name)
    (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match=f"^json '.*{name}' is a file of a run, a model or a checkpoint"):
        check_output_file("json", tmp_path / name)


def test_the_check_of_an_output_file_leaves_nothing(tmp_path):
    check_output_file("out", tmp_path / "new" / "step.svg")
    assert not list(tmp_path.iterdir())


def test_a_pipe_is_no_output_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a device or a pipe: name a file"):
        check_output_file("out", tmp_path / "pipe")


def test_json_that_is_cut_off_is_damage(tmp_path):
    (tmp_path / "config.json").write_text('{"a": ')
    with pytest.raises(ValueError, match=r"config\.json is damaged: not JSON"):
        read_json(tmp_path / "config.json")


def test_json_of_another_kind_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"config\.json must hold a JSON object, not \[1\]"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("record", [{}, {"files": []}, {"files": {"a": {"sha256": "0"}}}, {"files": {"a": 1}}])
def test_a_record_without_checksums_is_damage(tmp_path, record):
    (tmp_path / RECORD).write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"octile\.json is damaged"):
        read_record(tmp_path)


def test_one_changed_byte_is_found(folder, flip_byte):
    name = "model-00001-of-00002.safetensors"
    flip_byte(folder / name, 1)
    with pytest.raises(ValueError, match=f"{name} is damaged: its SHA-256 is"):
        verify(folder / name, read_record(folder)[name])


def test_new_files_replace_the_old_checkpoint_and_nothing_else(folder):
    put(folder)
    assert contents(folder) == {"model.safetensors": "new", "config.json": "new", "notes.txt": "mine"}
    assert read_record(folder).keys() == {"config.json", "model.safetensors"}


def test_a_new_folder_replaces_an_old_one_with_its_files(folder, tmp_path):
    for name in ("old", "new"):
        (tmp_path / name / "templates").mkdir(parents=True)
        (tmp_path / name / "templates" / f"{name}.jinja").touch()
        put(
            folder, before_renames=lambda staging, name=name: copy(tmp_path / name / "templates", staging / "templates")
        )
    assert [file.name for file in (folder / "templates").iterdir()] == ["new.jinja"]


def test_a_failure_leaves_the_old_checkpoint(folder):
    before = contents(folder)
    with pytest.raises(RuntimeError, match="no"):
        put(folder, failure=RuntimeError("no"))
    assert contents(folder) == before


def test_a_failure_leaves_no_folder_where_there_was_none(tmp_path):
    with pytest.raises(RuntimeError, match="no"):
        put(tmp_path / "model", failure=RuntimeError("no"))
    assert not (tmp_path / "model").exists()


def before_rename(monkeypatch, number, action):
    """Call `action` before the rename of a number, from 0, that this process makes next."""
    replace = os.replace
    count = 0

    def replace_after_action(source, target):
        nonlocal count
        count += 1
        if count == number + 1:
            action()
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_after_action)


@pytest.fixture
def no_waiting(monkeypatch):
    """A process that finds another one among the moves does not wait for it, as if there were no locks."""
    monkeypatch.setattr(files, "LOCK_SECONDS", 0.0)


class Crash(BaseException):
    """The end of a process."""


def crash():
    raise Crash


def crash_before_rename(monkeypatch, number, folder, names, text="new"):
    """Write a checkpoint, and end before the rename of a number."""
    with monkeypatch.context() as patch:
        before_rename(patch, number, crash)
        with pytest.raises(Crash):
            put(folder, names, text)


def whole(names, text):
    return {"notes.txt": "mine", **dict.fromkeys(names, text)}


@pytest.fixture
def interrupted(folder, monkeypatch):
    """A checkpoint whose writer has ended just after its commit: no file is in place yet."""
    put(folder, (*OLD, "templates/old.jinja"), "old")
    crash_before_rename(monkeypatch, 2, folder, WITH_TEMPLATES)
    return folder


@pytest.mark.parametrize("number", range(RENAMES))
def test_a_crash_before_any_rename_leaves_one_whole_checkpoint(folder, monkeypatch, number):
    crash_before_rename(monkeypatch, number, folder, WITH_TEMPLATES)
    finish_interrupted(folder)
    assert contents(folder) == (whole(OLD, "old") if number < 2 else whole(WITH_TEMPLATES, "new"))


def test_all_renames_of_a_replacement_are_tried(folder, monkeypatch):
    crash_before_rename(monkeypatch, RENAMES - 1, folder, WITH_TEMPLATES)
    before_rename(monkeypatch, 1, crash)
    finish_interrupted(folder)


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("number", range(RENAMES))
def test_a_reader_between_two_renames_of_a_writer_disturbs_nothing(folder, monkeypatch, number):
    before_rename(monkeypatch, number, lambda: finish_interrupted(folder))
    put(folder, WITH_TEMPLATES)
    assert contents(folder) == whole(WITH_TEMPLATES, "new")
    assert not replacements(folder)


def test_a_reader_leaves_what_a_writer_has_not_committed(folder):
    def read(staging):
        write_record(staging, ["model.safetensors"])
        finish_interrupted(folder)
        assert (staging / RECORD).exists()

    put(folder, before_renames=read)
    assert contents(folder) == whole(NEW, "new")


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("number", range(RENAMES - 1))
def test_two_readers_complete_an_interrupted_replacement(interrupted, monkeypatch, number):
    before_rename(monkeypatch, number, lambda: finish_interrupted(interrupted))
    finish_interrupted(interrupted)
    assert contents(interrupted) == whole(WITH_TEMPLATES, "new")
    assert not replacements(interrupted)


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("number", range(RENAMES - 1))
def test_a_reader_that_falls_behind_leaves_the_next_replacement_alone(interrupted, monkeypatch, number):
    newest = (*OLD, "templates/newest.jinja")
    before_rename(monkeypatch, number, lambda: put(interrupted, newest, "newest"))
    finish_interrupted(interrupted)
    assert contents(interrupted) == whole(newest, "newest")
    assert not replacements(interrupted)


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("number", range(RENAMES - 1))
def test_a_reader_that_falls_behind_leaves_the_next_interrupted_replacement_alone(interrupted, monkeypatch, number):
    newest = (*OLD, "templates/newest.jinja")

    def interrupt():
        finish_interrupted(interrupted)
        crash_before_rename(monkeypatch, 2, interrupted, newest, "newest")

    before_rename(monkeypatch, number, interrupt)
    finish_interrupted(interrupted)
    finish_interrupted(interrupted)
    assert contents(interrupted) == whole(newest, "newest")


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("number", range(RENAMES - 1))
def test_a_reader_that_falls_behind_leaves_the_next_writer_alone(interrupted, monkeypatch, number):
    with ExitStack() as writer:

        def begin():
            staging = writer.enter_context(staged(interrupted))
            (staging / "config.json").write_text("newest")
            (staging / "model.safetensors").write_text("newest")

        before_rename(monkeypatch, number, begin)
        finish_interrupted(interrupted)
        assert (interrupted / STAGING / files.NEW / "config.json").exists()
        assert contents(interrupted) == whole(WITH_TEMPLATES, "new")
    assert contents(interrupted).items() >= whole(NEW, "newest").items()


def lock(replacement):
    descriptor = os.open(replacement, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


@pytest.mark.parametrize("number", range(RENAMES - 1))
def test_one_process_at_a_time_makes_the_moves(interrupted, monkeypatch, number):
    (replacement,) = interrupted.glob(f"{files.COMPLETE}*")

    def lock_again():
        with pytest.raises(BlockingIOError):
            lock(replacement)

    before_rename(monkeypatch, number, lock_again)
    finish_interrupted(interrupted)
    assert contents(interrupted) == whole(WITH_TEMPLATES, "new")


def test_a_process_waits_until_another_one_has_made_the_moves(interrupted, monkeypatch):
    (replacement,) = interrupted.glob(f"{files.COMPLETE}*")
    descriptor = lock(replacement)

    def finish_the_other(_):
        files._finish(replacement, interrupted)
        shutil.rmtree(replacement)
        os.close(descriptor)

    monkeypatch.setattr(files.time, "sleep", finish_the_other)
    before_rename(monkeypatch, RENAMES - 1, crash)
    finish_interrupted(interrupted)
    assert contents(interrupted) == whole(WITH_TEMPLATES, "new")


def test_a_file_system_without_locks_has_checkpoints(folder, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    put(folder, WITH_TEMPLATES)
    assert contents(folder) == whole(WITH_TEMPLATES, "new")


def test_a_rename_that_found_the_folder_of_old_files_before_it_was_moved_is_none(interrupted, monkeypatch):
    """The system looks a folder up and then renames; in between another process makes all moves."""
    replace = os.replace

    def replace_late(source, target):
        if target.parts[-2:] != (files.OLD, "templates"):
            return replace(source, target)
        monkeypatch.setattr(os, "replace", replace)
        files._finish(target.parents[1], interrupted)
        return replace(source, target.parents[1] / files.REPLACED / "templates")

    monkeypatch.setattr(os, "replace", replace_late)
    finish_interrupted(interrupted)
    assert contents(interrupted) == whole(WITH_TEMPLATES, "new")


def test_a_folder_in_the_way_of_a_move_is_an_error(interrupted):
    (replacement,) = interrupted.glob(f"{files.COMPLETE}*")
    (replacement / files.OLD / "templates").mkdir()
    (replacement / files.OLD / "templates" / "more.jinja").touch()
    with pytest.raises(OSError, match="Directory not empty"):
        finish_interrupted(interrupted)


def test_a_folder_that_nobody_may_write_to_says_what_completes_its_save(interrupted, monkeypatch):
    def refuse(source, target):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), source)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(
        PermissionError, match=r"holds a save that was interrupted.*: load it once with write permission"
    ):
        finish_interrupted(interrupted)


def test_a_completed_replacement_is_read_where_its_rest_cannot_be_removed(interrupted, monkeypatch):
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    finish_interrupted(interrupted)
    before_rename(monkeypatch, 0, crash)
    finish_interrupted(interrupted)
    assert contents(interrupted) == whole(WITH_TEMPLATES, "new")


def test_what_a_killed_writer_left_is_not_taken_for_a_checkpoint(folder):
    (folder / STAGING).mkdir()
    (folder / STAGING / "model.safetensors").write_text("half")
    finish_interrupted(folder)
    assert not (folder / "model.safetensors").exists()


def test_what_a_killed_writer_left_is_gone_after_the_next_one(folder):
    (folder / STAGING).mkdir()
    (folder / STAGING / "half").write_text("half")
    put(folder)
    assert contents(folder).keys() == {"model.safetensors", "config.json", "notes.txt"}


def test_each_state_of_a_replacement_is_forced_to_disk_before_the_next(tmp_path, disk):
    put(tmp_path / "model", before_renames=lambda _: disk.clear())
    commit = next(line.removeprefix("rename ") for line in disk if line.startswith("rename .octile"))
    assert disk[:6] == [
        f"rename {RECORD}",
        "sync new",
        f"rename {commit}",
        "sync model",
        "rename replaced",
        f"sync {commit}",
    ]
    assert sorted(disk[6:8]) == ["rename config.json", "rename model.safetensors"]
    assert disk[8:] == [f"rename {RECORD}", "sync model"]
