"""A run whose recipe is a file needs the file no more once it has begun."""

import io
import json
import shutil
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from octile.checkpoint.training import latest_checkpoint, load_checkpoint
from octile.lab.capture import load
from octile.lab.run import capture_run
from octile.recipe import Recipe
from octile.train.compare import compare
from octile.train.config import TrainConfig
from octile.train.console import RunConsole
from octile.train.loop import train
from octile.train.run_folder import RunFolder
from tests.train.conftest import micro

LAYER = "model.layers.0.mlp.down_proj"
TEXT = f'recipe = "deepseek_v3"  # ε\n[[keep]]\nlayers = "{LAYER}"\nproducts = ["wgrad"]\n'
RECIPE = replace(Recipe.deepseek_v3(), exceptions=((LAYER, frozenset({"wgrad"})),))


def screen():
    return RunConsole(Console(file=io.StringIO(), width=200))


def final(run):
    return load_checkpoint(latest_checkpoint(run / "checkpoints"))[0]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def config(text, file, tmp_path):
    return micro(data=str(text), recipe=str(file), out=tmp_path / "run", steps=2)


@pytest.fixture
def begun(config):
    """The folder of a run of two steps."""
    return train(config, False, screen())


def longer(run, **changes):
    """The run's configuration as `octile train --resume --steps 4` asks for it."""
    return replace(RunFolder.open(run).read_config(), steps=4, **changes)


def test_the_configuration_holds_what_the_file_said(begun, file):
    saved = RunFolder.open(begun).read_config()
    assert (saved.recipe, saved.recipe_text) == (str(file), TEXT)
    assert TrainConfig.from_json(saved.to_json()) == saved
    file.unlink()
    assert saved.load_recipe() == RECIPE


def test_a_run_goes_on_to_the_bit_when_its_file_is_gone(file, config, tmp_path):
    straight = train(replace(config, steps=4, checkpoint_every=2), False, screen())
    killed = shutil.copytree(straight, tmp_path / "killed")
    shutil.rmtree(killed / "checkpoints" / "step_00000004")
    file.unlink()
    train(replace(RunFolder.open(killed).read_config(), out=killed), True, screen())
    ours, theirs = final(killed), final(straight)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_keeps_its_recipe_when_the_file_changes_and_says_so(begun, file):
    file.write_text('recipe = "bf16"\n')
    shown = screen()
    train(longer(begun, recipe_text=None), True, shown)  # as a script asks that knows the file's name only
    assert f"{file} has changed since the run began: the run keeps" in shown.console.file.getvalue()
    assert RunFolder.open(begun).read_config().recipe_text == TEXT


def test_a_file_that_has_not_changed_is_not_spoken_of(begun):
    shown = screen()
    train(longer(begun), True, shown)
    assert "changed" not in shown.console.file.getvalue()


def test_another_file_is_another_recipe(begun, tmp_path):
    (tmp_path / "other.toml").write_text(TEXT, encoding="utf-8")
    with pytest.raises(ValueError, match="keeps its configuration, but recipe would differ"):
        train(longer(begun, recipe=str(tmp_path / "other.toml")), True, screen())


def test_a_step_is_captured_when_the_file_is_gone(begun, file):
    file.unlink()
    path = capture_run(begun, 2, LAYER, say=lambda line: None)
    assert {captured.gemm for captured in load(path).gemms} == {"fprop", "dgrad", "wgrad"}


def as_an_earlier_version_left_it(run):
    path = RunFolder.open(run).config_file
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "recipe_text"}))


def test_a_run_of_an_earlier_version_is_read_and_from_then_on_stands_alone(begun, file):
    as_an_earlier_version_left_it(begun)
    assert RunFolder.open(begun).read_config().load_recipe() == RECIPE
    train(longer(begun), True, screen())
    assert RunFolder.open(begun).read_config().recipe_text == TEXT


def test_a_run_of_an_earlier_version_needs_its_file(begun, file):
    as_an_earlier_version_left_it(begun)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"mine\.toml"):
        train(longer(begun), True, screen())


@pytest.mark.parametrize("recipe", ["deepseek_v3", "bf16"])
def test_a_recipe_with_a_name_has_no_text(recipe):
    config = micro(recipe=recipe)
    assert config.with_recipe_text() == config
    assert config.load_recipe() == Recipe.named(recipe)


def test_a_file_that_is_no_recipe_is_refused_before_anything_is_written(config, file):
    file.write_text("recipe = 3")
    with pytest.raises(ValueError, match="must say recipe"):
        train(config, False, screen())
    assert not config.out.exists()


def test_a_comparison_reads_a_file_once(text, file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    class Deleting(RunConsole):
        def print(self, line):
            file.unlink(missing_ok=True)

    shown = Deleting(Console(file=io.StringIO(), width=200))
    config = micro(data=str(text), steps=1, validate_every=1)
    result = compare(config, ("mine.toml",), tmp_path / "out", shown, seeds=(0, 1), gradient_steps="none")
    assert [curve.recipe for curve in result.recipes] == ["mine.toml"] * 2
    assert torch.isfinite(torch.tensor([curve.val_loss[-1] for curve in result.recipes])).all()
