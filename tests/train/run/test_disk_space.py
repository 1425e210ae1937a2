"""Tests of the check that the disk has room for a run: what is counted, and that a full disk is named before a step."""

import shutil
from dataclasses import replace

import pytest

from octile.checkpoint.store import Store
from octile.exit_codes import USER_ERROR, explain
from octile.train.loop import train
from octile.train.run.disk_space import check_disk_space, count_bytes
from octile.train.run.folder import RunFolder
from tests.train.conftest import every_recipe, micro, silent_console


@pytest.fixture
def free(monkeypatch):
    """Return free(n): let the disk have n free bytes."""

    def set_free(n: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**12, 10**12, n))

    return set_free


@pytest.mark.slow
@every_recipe()
def test_no_more_is_counted_than_is_written_and_nearly_all(text, tmp_path, recipe):
    config = micro(data=str(text), out=tmp_path / "run", steps=2, recipe=recipe)
    config = replace(config, optim=replace(config.optim, ema_decay=0.9))
    train(config, False, silent_console())
    (step,) = (tmp_path / "run" / "checkpoints").glob("*")
    written = (step / "tensors.safetensors").stat().st_size
    models = sum((tmp_path / "run" / name / "model.safetensors").stat().st_size for name in ("model", "model_ema"))
    checkpoint, model = count_bytes(config)
    assert 0.7 * written < checkpoint < written
    assert model < models


@pytest.mark.parametrize(
    ("steps", "every", "done", "stored", "checkpoints", "models"),
    [
        (10, 0, 0, 0, 1, 1),
        (10, 5, 0, 0, 2, 1),
        (11, 5, 0, 0, 3, 0),
        (100, 5, 0, 0, 3, 0),
        (100, 5, 50, 2, 1, 0),
        (100, 50, 50, 2, 1, 0),
        (100, 50, 50, 1, 1, 1),
        (100, 50, 100, 2, 0, 1),
    ],
)
def test_the_checkpoints_that_are_there_at_a_time_and_the_model_must_fit(
    tmp_path, free, steps, every, done, stored, checkpoints, models
):
    config, run = micro(steps=steps, checkpoint_every=every), RunFolder(tmp_path)
    for number in range(stored):
        folder = run.checkpoints / f"step_{done - number:08d}"
        folder.mkdir(parents=True)
        (folder / "octile.json").write_text("{}")
    checkpoint, model = count_bytes(config)
    needed = checkpoints * checkpoint + models * model
    free(needed)
    check_disk_space(config, run, Store(run.checkpoints), done)
    free(needed - 1)
    with pytest.raises(
        OSError, match=r"too little room: \d+ MB are needed, \d+ MB are free; make room, or name another"
    ):
        check_disk_space(config, run, Store(run.checkpoints), done)


@pytest.mark.parametrize("address", ["elsewhere", "memory://checkpoints"])
def test_checkpoints_elsewhere_are_not_counted_in_the_run_folder(tmp_path, free, monkeypatch, address):
    where = address if "://" in address else str(tmp_path / address)
    config = micro(steps=100, checkpoints=where)
    checked = {}
    monkeypatch.setattr(
        "octile.train.run.disk_space.check_space", lambda folder, needed, instead: checked.update({folder: needed})
    )
    check_disk_space(config, RunFolder(tmp_path / "run"), Store(where), 0)
    assert checked.pop(tmp_path / "run") == count_bytes(config)[1]
    assert list(checked) == ([] if "://" in address else [tmp_path])


def test_a_run_that_does_not_fit_is_refused_before_its_text_is_read(text, tmp_path, free):
    free(1000)
    with pytest.raises(OSError, match=r"has too little room: .* free; make room, or name another --out") as refused:
        train(micro(data=str(text), out=tmp_path / "run"), False, silent_console())
    assert explain(refused.value) == (str(refused.value), USER_ERROR)  # nothing of a run that could be continued
    assert not (tmp_path / "run" / "data").exists()
