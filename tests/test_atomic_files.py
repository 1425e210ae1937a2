"""Tests that a file is there as a whole or not at all."""

from contextlib import suppress

import pytest

from octile.atomic_files import atomic_write, write_json
from octile.models.config import ModelConfig
from octile.recipe import Recipe
from octile.tokenizer import Tokenizer
from octile.validation import read_json


def test_a_full_disk_leaves_the_old_file_and_no_part_of_the_new(tmp_path, full_disk):
    write_json(tmp_path / "a", {"old": 1})
    full_disk(10)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'a'}'"):
        write_json(tmp_path / "a", {"new": 1})
    assert read_json(tmp_path / "a") == {"old": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_written_file_is_renamed_and_then_its_folder_is_forced_to_disk(tmp_path, disk):
    write_json(tmp_path / "a", {})
    assert disk == ["rename a", f"sync {tmp_path.name}"]


def test_of_two_writers_of_a_file_each_writes_it_whole(tmp_path):
    """As when every rank of a script saves the same recipe."""
    path = tmp_path / "a"
    with atomic_write(path) as outer:
        outer.write(b"outer, ")
        with atomic_write(path) as inner:
            inner.write(b"inner")
        assert path.read_bytes() == b"inner"
        outer.write(b"whole")
    assert path.read_bytes() == b"outer, whole"
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_failed_writer_leaves_the_file_of_another_one(tmp_path):
    path = tmp_path / "a"
    with suppress(KeyboardInterrupt), atomic_write(path):
        write_json(path, {})
        raise KeyboardInterrupt
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_a_written_file_has_the_permissions_of_any_new_file(tmp_path):
    (tmp_path / "plain").touch()
    write_json(tmp_path / "a", {})
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_folder_that_cannot_be_written_is_not_named_by_a_temporary_file(tmp_path):
    path = tmp_path / "missing" / "page.html"
    with pytest.raises(FileNotFoundError) as caught, atomic_write(path):
        pass
    assert caught.value.filename == str(path)


def test_a_recipe_is_written_as_a_whole(tmp_path, full_disk):
    """A part of one could be another one, without the layers that it keeps in high precision."""
    path = Recipe.deepseek_v3().write(tmp_path / "recipe.toml")
    before = path.read_text()
    full_disk(10)
    with pytest.raises(OSError, match="No space left on device"):
        Recipe.exact().write(path)
    assert path.read_text() == before


def test_the_configuration_of_a_model_is_written_as_a_whole(tmp_path, full_disk):
    ModelConfig.tiny().write(tmp_path / "config.json")
    before = ModelConfig.read(tmp_path)
    full_disk(10)
    with pytest.raises(OSError, match="No space left on device"):
        ModelConfig.small().write(tmp_path / "config.json")
    assert ModelConfig.read(tmp_path) == before


def test_a_tokenizer_is_written_as_a_whole(tmp_path, full_disk):
    Tokenizer.train(["def f(x): return x\n"] * 50, 300).save(tmp_path)
    before = Tokenizer.load(tmp_path).fingerprint
    full_disk(10)
    with pytest.raises(OSError, match="No space left on device"):
        Tokenizer.train(["the other text\n"] * 50, 300).save(tmp_path)
    assert Tokenizer.load(tmp_path).fingerprint == before
