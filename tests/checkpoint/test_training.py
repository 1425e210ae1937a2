import json
import math
import os
from pathlib import Path

import pytest
import torch

from octile.checkpoint import files, training
from octile.checkpoint.sharded import ShardedCheckpoint
from octile.checkpoint.store import Store
from octile.checkpoint.training import latest_checkpoint, load_checkpoint, save_checkpoint


def steps(folder):
    return sorted(p.name for p in folder.iterdir())


def save(folder, step, keep=2):
    return save_checkpoint(folder, step, {"w": torch.full((3,), float(step))}, {"step": step}, keep)


def test_tensors_of_every_kind_come_back_bit_for_bit(tmp_path, same):
    torch.manual_seed(0)
    tensors = {
        "model.w": torch.randn(4, 5),
        "exp_avg": torch.randn(4, 5).bfloat16(),
        "fp8": torch.randn(7).to(torch.float8_e4m3fn),
        "step": torch.tensor(12),
        "generator": torch.get_rng_state(),
        "nan": torch.tensor([math.nan, math.inf, -0.0]),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
    }
    found, _ = load_checkpoint(save_checkpoint(tmp_path, 1, tensors, {}))
    assert found.keys() == tensors.keys()
    assert all(same(found[name], tensors[name]) for name in tensors)


def test_many_tensors_are_read_from_a_file_that_is_opened_once(tmp_path, monkeypatch):
    tensors = {f"w{number}": torch.full((3, 2), float(number)) for number in range(20)}
    checkpoint, opened, open_file = ShardedCheckpoint(save_checkpoint(tmp_path, 1, tensors, {})), [], Store.open
    monkeypatch.setattr(Store, "open", lambda store, name: (opened.append(name), open_file(store, name))[1])
    found = checkpoint.read_parts({name: slice(1, 3) if name == "w7" else None for name in tensors})
    assert opened == ["tensors.safetensors"]
    assert all(found[name].equal(t[1:] if name == "w7" else t) for name, t in tensors.items())


def test_state_comes_back_bit_for_bit(tmp_path):
    state = {"lr": 0.1 + 0.2, "tokens": 2**60, "inf": math.inf, "nested": {"text": "é", "list": [1, None, True]}}
    assert load_checkpoint(save_checkpoint(tmp_path, 1, {}, state))[1] == state


def test_the_folder_carries_the_step(tmp_path):
    assert save(tmp_path / "checkpoints", 100) == tmp_path / "checkpoints" / "step_00000100"


def test_only_the_newest_are_kept(tmp_path):
    for step in (8, 9, 10):
        save(tmp_path, step)
    assert steps(tmp_path) == ["step_00000009", "step_00000010"]


def test_steps_after_the_one_written_are_removed(tmp_path):
    """A run resumed at 1 past a damaged 20; what it writes must not fall victim to that future."""
    for step in (1, 20, 2):
        save(tmp_path, step)
    assert steps(tmp_path) == ["step_00000001", "step_00000002"]


def test_the_one_just_written_stays(tmp_path):
    save(tmp_path, 10)
    assert save(tmp_path, 5, keep=1).is_dir()


def test_folders_of_other_names_stay(tmp_path):
    (tmp_path / "step_by_step").mkdir()
    save(tmp_path, 1)
    assert steps(tmp_path) == ["step_00000001", "step_by_step"]


def test_the_newest_is_found(tmp_path):
    for step in (9, 10):
        save(tmp_path, step)
    assert latest_checkpoint(tmp_path).name == "step_00000010"


def test_no_checkpoint_is_none(tmp_path):
    assert latest_checkpoint(tmp_path / "checkpoints") is None


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json", "octile.json"])
def test_a_damaged_newest_is_reported_and_the_one_before_used(tmp_path, flip_byte, file):
    save(tmp_path, 1)
    flip_byte(save(tmp_path, 2) / file, -4)
    with pytest.warns(UserWarning, match=f"step_00000002 cannot be used, trying the one before: .*{file} is damaged"):
        assert latest_checkpoint(tmp_path).name == "step_00000001"


@pytest.mark.parametrize("file", ["tensors.safetensors", "state.json", "octile.json"])
def test_an_incomplete_newest_is_reported_and_the_one_before_used(tmp_path, file):
    save(tmp_path, 1)
    (save(tmp_path, 2) / file).unlink()
    with pytest.warns(UserWarning, match=f"step_00000002 cannot be used.*{file}"):
        assert latest_checkpoint(tmp_path).name == "step_00000001"


@pytest.mark.filterwarnings("ignore:checkpoint step")
def test_it_is_an_error_when_all_are_damaged(tmp_path, flip_byte):
    flip_byte(save(tmp_path, 1) / "tensors.safetensors", -1)
    with pytest.raises(ValueError, match="all 1 checkpoints in"):
        latest_checkpoint(tmp_path)


def test_loading_a_damaged_one_is_refused(tmp_path, flip_byte):
    path = save(tmp_path, 1)
    flip_byte(path / "tensors.safetensors", -1)
    with pytest.raises(ValueError, match=r"tensors\.safetensors is damaged: its SHA-256"):
        load_checkpoint(path)


def test_loading_something_else_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a complete checkpoint"):
        load_checkpoint(tmp_path)


def test_what_a_killed_writer_left_is_ignored_and_then_removed(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "step_00000002.partial").mkdir()
    assert latest_checkpoint(tmp_path).name == "step_00000001"
    save(tmp_path, 3)
    assert steps(tmp_path) == ["step_00000001", "step_00000003"]


def test_a_step_can_be_written_again(tmp_path):
    save(tmp_path, 1)
    save_checkpoint(tmp_path, 1, {"w": torch.zeros(2)}, {})
    assert steps(tmp_path) == ["step_00000001"]
    assert load_checkpoint(tmp_path / "step_00000001")[0]["w"].equal(torch.zeros(2))


@pytest.fixture
def crashed(tmp_path, monkeypatch):
    """A folder whose only step was being written again when the process ended between the two renames."""

    def dying(source, target, replace=os.replace):
        if Path(target).name == "step_00000001":
            raise KeyboardInterrupt
        replace(source, target)

    save(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, 1, {"w": torch.zeros(3)}, {})
    assert steps(tmp_path) == ["step_00000001.replaced"]
    return tmp_path


def test_after_a_crash_between_the_renames_the_one_that_moved_aside_is_read(crashed):
    assert load_checkpoint(latest_checkpoint(crashed))[0]["w"].equal(torch.ones(3))


def test_one_that_moved_aside_stays_until_another_takes_its_place(crashed):
    save(crashed, 2)
    assert latest_checkpoint(crashed).name == "step_00000002"
    assert steps(crashed) == ["step_00000001.replaced", "step_00000002"]
    save(crashed, 1)
    assert steps(crashed) == ["step_00000001"]


def test_what_was_found_whole_need_not_be_read_twice(tmp_path, monkeypatch):
    save(tmp_path, 1)
    path = latest_checkpoint(tmp_path)
    monkeypatch.setattr(files, "checksum", lambda _: pytest.fail("the checksum was computed again"))
    assert load_checkpoint(path, check=False)[1] == {"step": 1}


def test_a_full_disk_loses_nothing(tmp_path, full_disk):
    save(tmp_path, 1, keep=1)
    full_disk(150)
    with pytest.raises(OSError, match=r"No space left on device: .*step_00000002"):
        save(tmp_path, 2, keep=1)
    assert steps(tmp_path) == ["step_00000001"]
    assert load_checkpoint(tmp_path / "step_00000001")[0]["w"].equal(torch.ones(3))


def test_a_state_that_json_cannot_hold_is_refused(tmp_path):
    with pytest.raises(TypeError, match="not JSON serializable"):
        save_checkpoint(tmp_path, 1, {}, {"x": torch.ones(1)})
    assert not steps(tmp_path)


@pytest.mark.parametrize(("step", "keep"), [(-1, 1), (1, 0)])
def test_impossible_numbers_are_refused(tmp_path, step, keep):
    with pytest.raises(ValueError, match=f"not {step} and {keep}"):
        save(tmp_path, step, keep)


def test_nothing_is_pickled(tmp_path):
    path = save(tmp_path, 1)
    assert steps(path) == ["octile.json", "state.json", "tensors.safetensors"]
    assert json.loads((path / "state.json").read_text()) == {"step": 1}


@pytest.mark.parametrize(("up_to", "found"), [(None, 30), (30, 30), (29, 20), (20, 20), (9, None)])
def test_the_newest_up_to_a_step_is_found(tmp_path, up_to, found):
    for step in (10, 20, 30):
        save_checkpoint(tmp_path, step, {}, {}, keep=3)
    path = latest_checkpoint(tmp_path, up_to)
    assert (path and path.name) == (found and f"step_{found:08d}")


def test_the_rename_of_a_checkpoint_is_forced_to_disk(tmp_path, monkeypatch):
    synced = []

    def sync(folder):
        synced.append((folder, sorted(path.name for path in folder.iterdir())))

    monkeypatch.setattr(training, "sync_folder", sync)
    save_checkpoint(tmp_path, 1, {}, {})
    assert synced == [(tmp_path, ["step_00000001"])]
