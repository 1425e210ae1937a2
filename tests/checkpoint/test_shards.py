import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octile.checkpoint import shards as shards_module
from octile.checkpoint.files import write_record
from octile.checkpoint.shards import INDEX, SINGLE, Shards, plan_shards, write_index


@pytest.fixture
def folder(tmp_path, hf_folder):
    return hf_folder(tmp_path, {}, [{"a": torch.ones(2, 3)}, {"b": torch.zeros(4), "c": torch.arange(3)}])


def test_shards_read_as_one(folder):
    shards = Shards(folder)
    assert shards.specs.keys() == {"a", "b", "c"}
    assert shards.read("c").equal(torch.arange(3))
    assert shards.nbytes == 6 * 4 + 4 * 4 + 3 * 8


def test_a_single_file_needs_no_index(tmp_path, hf_folder):
    assert Shards(hf_folder(tmp_path, {}, [{"a": torch.ones(2)}])).read("a").equal(torch.ones(2))


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no checkpoint folder at {tmp_path / 'x'}"):
        Shards(tmp_path / "x")


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} holds neither {SINGLE} nor {INDEX}"):
        Shards(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pytorch_model.bin", ", and pytorch_model.bin is not read: load the model in transformers"),
        ("model-00001-of-00002.safetensors", f": download {INDEX}, too"),
    ],
)
def test_weights_that_cannot_be_read_are_named_with_the_remedy(tmp_path, name, message):
    (tmp_path / name).touch()
    with pytest.raises(FileNotFoundError, match=f"{tmp_path} holds neither {SINGLE} nor {INDEX}{message}"):
        Shards(tmp_path)


def test_a_file_without_tensors_is_refused(tmp_path, hf_folder):
    with pytest.raises(ValueError, match=f"{tmp_path} holds no tensors in {SINGLE}"):
        Shards(hf_folder(tmp_path, {}, [{}]))


def test_a_missing_shard_is_named(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002\.safetensors is missing"):
        Shards(folder)


def test_a_truncated_shard_is_named_before_anything_is_read(folder):
    path = folder / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        ValueError, match=r"model-00002-of-00002\.safetensors is damaged: \d+ bytes found, \d+ expected"
    ):
        Shards(folder)


def test_the_index_is_read_once(folder, monkeypatch):
    read, opened = shards_module.read_json, []
    monkeypatch.setattr(shards_module, "read_json", lambda path: opened.append(path.name) or read(path))
    Shards(folder)
    assert opened == [INDEX]


def test_an_index_of_other_tensors_is_refused(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["d"] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=f"{INDEX} expects d in it"):
        Shards(folder)


@pytest.mark.parametrize("file", ["../a.safetensors", "", ".", "below"])
def test_an_index_that_names_no_file_of_its_folder_is_refused(folder, file):
    (folder / "below").mkdir()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ValueError, match=f"{INDEX} is damaged: {file!r} is not a file in its folder"):
        Shards(folder)


def test_one_tensor_in_two_files_is_refused(tmp_path, hf_folder):
    with pytest.raises(ValueError, match="a is in two files"):
        Shards(hf_folder(tmp_path, {}, [{"a": torch.ones(2), "b": torch.ones(1)}, {"a": torch.ones(2)}]))


def test_a_flipped_bit_is_found_when_its_file_is_read(folder, flip_byte):
    write_record(folder, ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"])
    flip_byte(folder / "model-00002-of-00002.safetensors", -1)
    shards = Shards(folder)
    assert shards.read("a").equal(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is damaged: its SHA-256"):
        shards.read("b")


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 60))
def test_every_tensor_is_in_one_shard_of_bounded_size(sizes, limit):
    named = {f"t{i}": size for i, size in enumerate(sizes)}
    shards = plan_shards(named, limit)
    assert [tensor for names in shards.values() for tensor in names] == list(named)
    assert all(len(names) == 1 or sum(named[n] for n in names) <= limit for names in shards.values() if names)


def test_shards_are_named_as_other_engines_expect():
    assert list(plan_shards({"a": 5, "b": 5}, 10)) == ["model.safetensors"]
    assert list(plan_shards({"a": 5, "b": 6}, 10)) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_a_single_file_gets_no_index(tmp_path):
    write_index(tmp_path, {SINGLE: ["a"]}, 4)
    assert not list(tmp_path.iterdir())
