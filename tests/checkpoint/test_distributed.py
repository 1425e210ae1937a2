"""Checkpoints of 4, 2 and 8 gloo ranks (distributed_cases.py) and of one process, which needs no process group."""

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from filelock import FileLock
from torch import Tensor

import octile
from octile.checkpoint import (
    Chunk,
    DistributedCheckpoints,
    ShardedCheckpoint,
    export_hugging_face,
    latest_checkpoint,
    load_checkpoint,
    load_tensors,
    save_checkpoint,
)
from octile.checkpoint import store as store_module
from octile.checkpoint.distributed import share_out
from octile.checkpoint.recipe_entry import ENTRY
from octile.checkpoint.tensor_file import TensorSpec
from octile.models.names import to_hf
from octile.recipe import Recipe
from tests.checkpoint import distributed_cases, kill_cases
from tests.checkpoint.distributed_cases import CASES, STEPS, whole
from tests.checkpoint.micro_model import MICRO, micro_model
from tests.serve.models import exact_model
from tests.worlds import start_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of all ranks. They run once, also for several workers of pytest."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = base / "distributed-checkpoints"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            folder.mkdir()
            start_ranks(distributed_cases.run_worlds, (str(folder),), 1)
    return folder


@pytest.mark.parametrize(("world", "case"), [(world, c.__name__) for world, cases in CASES.items() for c in cases])
def test_ranks(ranks: Path, world: int, case: str):
    results = [json.loads((ranks / f"{world}-{rank}.json").read_text()) for rank in range(world)]
    failed = [
        f"rank {rank}: {found.get(case, 'not run')}" for rank, found in enumerate(results) if found.get(case) != ""
    ]
    assert not failed, "\n".join(failed)


def test_one_process_reads_what_eight_ranks_wrote(ranks: Path, same):
    tensors, state = load_checkpoint(latest_checkpoint(ranks / "run"))
    assert state == distributed_cases.state(STEPS[8])
    assert tensors.keys() == whole().keys()
    assert all(same(tensors[name], tensor) for name, tensor in whole().items())


def test_a_rank_killed_in_a_save_leaves_the_checkpoint_before(ranks: Path, same):
    assert json.loads((ranks / "killed.json").read_text()) != "no error"  # on the other rank
    assert names(ranks / "killed") == ["step_00000001", "step_00000002"]
    tensors, state = load_checkpoint(latest_checkpoint(ranks / "killed"))
    assert state == distributed_cases.state(1)
    assert all(same(tensors[name], tensor) for name, tensor in whole().items())


@pytest.mark.parametrize("weights", ["fp8", "bf16"])
def test_the_export_from_shards_has_the_bytes_that_save_writes(ranks: Path, tmp_path, weights):
    export_hugging_face(ranks / "model" / "step_00000001", tmp_path / "exported", MICRO, weights)
    octile.save(micro_model(), tmp_path / "saved", weights)
    assert names(tmp_path / "exported") == names(tmp_path / "saved")
    for name in names(tmp_path / "saved"):
        assert (tmp_path / "exported" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes(), name


def test_the_export_reads_a_weight_at_a_time(ranks: Path, tmp_path, monkeypatch):
    read, fill = [], ShardedCheckpoint.fill

    def count(self, targets):
        read.append(sum(chunk.local.numel() for chunk in targets.values()))
        fill(self, targets)

    monkeypatch.setattr(ShardedCheckpoint, "fill", count)
    export_hugging_face(ranks / "model" / "step_00000001", tmp_path / "exported", MICRO)
    weights = to_hf(micro_model().state_dict(), MICRO).values()
    assert max(read) == max(weight.numel() for weight in weights)


# --- one process ------------------------------------------------------------------------------------------------------


def save(folder, step: int, tensors: dict[str, Tensor] | None = None, keep: int = 2) -> str:
    checkpoints = DistributedCheckpoints(folder, keep)
    checkpoints.save(step, {"w": torch.full((4, 3), float(step))} if tensors is None else tensors, {"step": step})
    checkpoints.close()
    return f"{folder}/step_{step:08d}"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_process_killed_at_any_operation_leaves_the_last_checkpoint_or_the_new_one(tmp_path):
    start_ranks(kill_cases.run, (str(tmp_path),), 1)


def test_save_returns_before_anything_is_written(tmp_path, monkeypatch):
    written, write = threading.Event(), store_module.atomic_write

    def wait(path: Path):
        assert written.wait(60)
        return write(path)

    monkeypatch.setattr(store_module, "atomic_write", wait)
    w = torch.ones(3)
    checkpoints = DistributedCheckpoints(tmp_path)
    checkpoints.save(1, {"w": w}, {})
    w.zero_()
    assert latest_checkpoint(tmp_path) is None
    written.set()
    checkpoints.close()
    assert load_checkpoint(latest_checkpoint(tmp_path))[0]["w"].equal(torch.ones(3))


def test_tensors_may_come_and_go(tmp_path):
    checkpoints = DistributedCheckpoints(tmp_path, keep=3)
    w, v = torch.ones(3), torch.ones(2)
    for step, tensors in enumerate(({"w": w}, {"w": w, "v": v}, {"v": v}), 1):
        checkpoints.save(step, tensors, {})
    checkpoints.close()
    assert [sorted(ShardedCheckpoint(path).specs) for path in sorted(tmp_path.iterdir())] == [["w"], ["v", "w"], ["v"]]


def test_an_object_store_holds_checkpoints(same):
    folder = "memory://bucket/run/checkpoints"
    save(folder, 1)
    path = save(folder, 2, whole())
    save(folder, 3, whole())
    checkpoints = DistributedCheckpoints(folder)
    assert checkpoints.latest(up_to=2) == path
    assert checkpoints.store.names() == ["step_00000002", "step_00000003"]
    found = {name: torch.zeros_like(tensor) for name, tensor in whole().items()}
    load_tensors(path, found)
    assert all(same(found[name], tensor) for name, tensor in whole().items())


def test_damage_in_an_object_store_is_found():
    fs = fsspec.filesystem("memory")
    folder = "memory://bucket/damaged"
    save(folder, 1)
    path = save(folder, 2)
    file = f"{path}/tensors-00000-of-00001.safetensors"
    fs.pipe_file(file, fs.cat_file(file)[:-1] + b"\x01")
    with pytest.raises(ValueError, match=r"step_00000002/tensors-00000-of-00001\.safetensors is damaged: its SHA-256"):
        load_tensors(path, {"w": torch.zeros(4, 3)})
    with pytest.warns(UserWarning, match="step_00000002 cannot be used, trying the one before"):
        assert DistributedCheckpoints(folder).latest() == f"{folder}/step_00000001"


@pytest.mark.parametrize("file", ["tensors-00000-of-00001.safetensors", "index.json", "state.json", "octile.json"])
def test_a_flipped_bit_in_any_file_is_found(tmp_path, file):
    for index in range(3):
        path = Path(save(tmp_path / str(index), 1)) / file
        data = bytearray(path.read_bytes())
        data[len(data) * (2 * index + 1) // 6] ^= 1
        path.write_bytes(data)
        with pytest.raises(ValueError, match=f"{file} is damaged"):
            load_checkpoint(path.parent)


@pytest.mark.parametrize("file", ["tensors-00000-of-00001.safetensors", "index.json", "state.json"])
def test_a_missing_file_is_named(tmp_path, file):
    path = Path(save(tmp_path, 1)) / file
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"{file} is missing"):
        load_checkpoint(path.parent)


def test_a_folder_without_its_record_counts_as_not_finished(tmp_path):
    save(tmp_path, 1)
    (Path(save(tmp_path, 2)) / "octile.json").unlink()
    assert latest_checkpoint(tmp_path) == tmp_path / "step_00000001"


@pytest.fixture
def without_records(tmp_path) -> Path:
    for step in (1, 2):
        (Path(save(tmp_path, step, keep=2)) / "octile.json").unlink()
    return tmp_path


@pytest.mark.parametrize("find", [latest_checkpoint, lambda folder: DistributedCheckpoints(folder).latest()])
def test_checkpoints_that_lack_only_their_records_are_not_taken_for_none(without_records, find):
    with pytest.raises(
        ValueError, match=r"no checkpoint in .* has its octile\.json, .* but step_00000002 has all other"
    ):
        find(without_records)


@pytest.mark.parametrize("file", ["state.json", "index.json", "tensors-00000-of-00001.safetensors"])
def test_what_a_killed_first_save_left_is_taken_for_none(tmp_path, file):
    path = Path(save(tmp_path, 1))
    (path / "octile.json").unlink()
    (path / file).unlink()
    assert latest_checkpoint(tmp_path) is None


def test_rows_are_read_from_one_process(tmp_path):
    w = torch.randn(6, 2, 3)
    found = ShardedCheckpoint(save(tmp_path, 1, {"w": w})).rows("w", 2, 5)
    assert found.equal(w[2:5])


def test_a_chunk_of_several_dimensions_is_filled(tmp_path):
    w = torch.randn(6, 5, 3)
    local = torch.zeros(2, 3, 3)
    ShardedCheckpoint(save(tmp_path, 1, {"w": w})).fill({"w": Chunk(local, (6, 5, 3), (1, 2, 0))})
    assert local.equal(w[1:3, 2:5])


def test_a_step_can_be_written_again(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 1, {"w": torch.zeros(2)})
    assert names(tmp_path) == ["step_00000001.1"]
    assert load_checkpoint(latest_checkpoint(tmp_path))[0]["w"].equal(torch.zeros(2))


def test_one_process_writes_a_step_of_ranks_again(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 1)
    save_checkpoint(tmp_path, 1, {"w": torch.zeros(2)}, {})
    assert names(tmp_path) == ["step_00000001"]


def test_steps_after_the_one_written_are_removed(tmp_path):
    for step in (1, 20, 2):
        save(tmp_path, step)
    assert names(tmp_path) == ["step_00000001", "step_00000002"]


def test_the_safetensors_package_reads_a_shard(tmp_path):
    from safetensors.torch import load_file

    w = torch.randn(3, 2)
    assert load_file(f"{save(tmp_path, 1, {'w': w})}/tensors-00000-of-00001.safetensors")["w"].equal(w)


def test_nothing_is_pickled(tmp_path):
    path = Path(save(tmp_path, 1))
    assert names(path) == ["index.json", "octile.json", "state.json", "tensors-00000-of-00001.safetensors"]


def test_the_first_prefix_with_a_tensor_is_exported(tmp_path):
    model, average = micro_model(), micro_model()
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.mul_(0.5)
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    tensors |= {f"ema.{name}": parameter.detach() for name, parameter in average.named_parameters()}
    path = save(tmp_path, 1, tensors)
    export_hugging_face(path, tmp_path / "exported", MICRO, "float32", prefixes=("ema.", "model."))
    found = octile.load(tmp_path / "exported").state_dict()
    assert all(found[name].equal(tensor) for name, tensor in average.state_dict().items())


@pytest.mark.parametrize("weights", ["fp8", "bf16"])
def test_the_export_names_the_recipe_as_save_does(tmp_path, weights):
    model = exact_model()
    path = save(tmp_path, 1, {f"model.{name}": tensor for name, tensor in model.state_dict().items()})
    export_hugging_face(path, tmp_path / "exported", model.config, weights, recipe=Recipe.exact())
    octile.save(model, tmp_path / "saved", weights)
    exported, saved = ((tmp_path / name / "config.json").read_bytes() for name in ("exported", "saved"))
    assert exported == saved
    assert (ENTRY.encode() in exported) == (weights == "fp8")


def test_the_export_of_another_model_is_refused(tmp_path):
    path = save(tmp_path, 1, {f"model.{name}": tensor for name, tensor in micro_model().state_dict().items()})
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is \[64, 96\] in the checkpoint .*, but \[65, 96\] by"):
        export_hugging_face(path, tmp_path / "exported", replace(MICRO, vocab_size=65))
    assert not (tmp_path / "exported").exists()


def test_the_export_names_what_the_checkpoint_lacks(tmp_path):
    with pytest.raises(ValueError, match=r"lacks model\."):
        export_hugging_face(save(tmp_path, 1), tmp_path / "exported", MICRO)


@pytest.mark.parametrize("name", ["a::b", "~", "with space"])
def test_a_path_is_taken_as_it_is(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    save(name, 1)
    assert names(tmp_path / name) == ["step_00000001"]
    assert DistributedCheckpoints(name).latest() == f"{name}/step_00000001"


def test_an_unknown_protocol_is_refused():
    with pytest.raises(ValueError, match="Protocol not known: nowhere"):
        DistributedCheckpoints("nowhere://bucket")


def test_keep_is_at_least_one(tmp_path):
    with pytest.raises(ValueError, match="keep must be at least 1, not 0"):
        DistributedCheckpoints(tmp_path, keep=0)


def test_a_chunk_lies_in_its_tensor():
    with pytest.raises(ValueError, match=r"a chunk \[2, 3\] at \[5, 0\] is not part of a tensor \[6, 3\]"):
        Chunk.rows(torch.zeros(2, 3), 5, 6)


def test_what_all_ranks_hold_is_shared_out_by_bytes():
    def piece(name: str, nbytes: int):
        from octile.checkpoint.distributed import _Piece

        return _Piece(name, TensorSpec.of(torch.uint8, (nbytes,)), (0,), nbytes, nbytes)

    held = [piece("a", 100), piece("b", 60), piece("c", 50), piece("d", 5)]
    assert share_out([held, held]) == [["a", "d"], ["b", "c"]]
