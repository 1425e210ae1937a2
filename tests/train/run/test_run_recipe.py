"""Tests that a run stores the text of its recipe file and no with_4_steps needs the file."""

import io
import json
import re
import shutil
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from octile.checkpoint.files import checksum
from octile.checkpoint.hugging_face import has_fp8_weights
from octile.checkpoint.training import latest_checkpoint, load_checkpoint
from octile.lab.capture import load
from octile.lab.run import capture_run
from octile.recipe import Recipe
from octile.train.compare.compare import compare
from octile.train.config import TrainConfig
from octile.train.loop import train
from octile.train.run.console import RunConsole
from octile.train.run.folder import RunFolder
from octile.train.run.resume import open_run
from tests.train.conftest import micro, silent_console, write_no_report

LAYER = "model.layers.0.mlp.down_proj"
TEXT = f'recipe = "deepseek_v3"  # ε\n[[keep]]\nlayers = "{LAYER}"\nproducts = ["wgrad"]\n'
CACHED = {"transposed_weights": "cached"}  # for the micro-batches of a step
RECIPE = replace(Recipe.deepseek_v3(), exceptions=((LAYER, frozenset({"wgrad"})),), **CACHED)


def final_state(run):
    return load_checkpoint(latest_checkpoint(run / "checkpoints"))[0]


@pytest.fixture(scope="module")
def run_of_two_steps(text, tmp_path_factory):
    """A recipe file and the folder of a run with it."""
    folder = tmp_path_factory.mktemp("two")
    file, out = folder / "mine.toml", folder / "run"
    file.write_text(TEXT, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        write_no_report(patch)
        train(micro(data=str(text), recipe=str(file), out=out, steps=2), False, silent_console())
    return file, out


@pytest.fixture
def file(run_of_two_steps):
    """A recipe file, which a test may change."""
    path, _ = run_of_two_steps
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture
def config(text, file, tmp_path):
    return micro(data=str(text), recipe=str(file), out=tmp_path / "run", steps=2)


@pytest.fixture
def finished(run_of_two_steps, file, tmp_path):
    """The folder of a run of two steps, which only one test uses."""
    return shutil.copytree(run_of_two_steps[1], tmp_path / "run")


def with_4_steps(run, **changes):
    """Return the run's configuration as `octile train --resume --steps 4` requests it."""
    return replace(RunFolder.open(run).read_config(), out=run, steps=4, **changes)


def test_the_configuration_stores_the_text_of_the_file(finished, file):
    saved = RunFolder.open(finished).read_config()
    assert (saved.recipe, saved.recipe_text) == (str(file), TEXT)
    assert TrainConfig.from_json(saved.to_json()) == saved
    file.unlink()
    assert saved.load_recipe() == RECIPE


@pytest.mark.slow
@pytest.mark.parametrize(("gemm", "stored"), [("wgrad", True), ("fprop", False)])
def test_a_model_whose_recipe_leaves_forward_gemms_in_bf16_is_stored_in_bf16(text, tmp_path, gemm, stored):
    """A folder with FP8 weights has one recipe, and no exceptions."""
    file, out = tmp_path / "mine.toml", tmp_path / "run"
    file.write_text(f'recipe = "deepseek_v3"\n[[keep]]\nlayers = "{LAYER}"\nproducts = ["{gemm}"]\n')
    train(micro(data=str(text), recipe=str(file), out=out, steps=1), False, silent_console())
    assert has_fp8_weights(out) == stored


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_without_its_file(file, config, tmp_path):
    straight = train(replace(config, steps=4, checkpoint_every=2), False, silent_console())
    killed = shutil.copytree(straight, tmp_path / "killed")
    shutil.rmtree(killed / "checkpoints" / "step_00000004")
    file.unlink()
    train(replace(RunFolder.open(killed).read_config(), out=killed), True, silent_console())
    ours, theirs = final_state(killed), final_state(straight)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_a_changed_file_does_not_change_the_recipe_and_is_reported(finished, file):
    file.write_text('recipe = "bf16"\n')
    shown = silent_console()
    train(with_4_steps(finished, recipe_text=None), True, shown)  # as a script that gives only the name of the file
    assert f"{file} has changed since the run began: the run keeps" in shown.console.file.getvalue()
    assert RunFolder.open(finished).read_config().recipe_text == TEXT


@pytest.mark.slow
def test_the_same_file_is_not_reported(finished):
    shown = silent_console()
    train(with_4_steps(finished), True, shown)
    assert "changed" not in shown.console.file.getvalue()


def test_resuming_with_another_file_is_refused(finished, tmp_path):
    (tmp_path / "other.toml").write_text(TEXT, encoding="utf-8")
    message = r"keeps its configuration: recipe is .*other\.toml instead of .*mine\.toml in "
    with pytest.raises(ValueError, match=message):
        train(with_4_steps(finished, recipe=str(tmp_path / "other.toml")), True, silent_console())


def test_a_step_can_be_captured_without_the_file(finished, file):
    file.unlink()
    path = capture_run(finished, 2, LAYER, say=lambda line: None)
    assert {captured.gemm for captured in load(path).gemms} == {"fprop", "dgrad", "wgrad"}


def remove_recipe_text(run):
    path = RunFolder.open(run).config_file
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "recipe_text"}))


@pytest.mark.slow
def test_a_run_of_an_earlier_version_gets_the_recipe_text_when_resumed(finished, file):
    remove_recipe_text(finished)
    assert RunFolder.open(finished).read_config().load_recipe() == RECIPE
    train(with_4_steps(finished), True, silent_console())
    assert RunFolder.open(finished).read_config().recipe_text == TEXT


def test_a_run_of_an_earlier_version_needs_its_file(finished, file):
    remove_recipe_text(finished)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"mine\.toml"):
        train(with_4_steps(finished), True, silent_console())


WRONG_TEXTS = [
    (3, "recipe_text must be text or null, not 3"),
    ("recipe =", "recipe_text: Invalid value"),
    ('recipe = "fp4"', "recipe_text: unknown recipe 'fp4'"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG_TEXTS)
def test_a_wrong_text_is_named_with_its_file(finished, wrong, message):
    path = RunFolder.open(finished).config_file
    path.write_text(json.dumps(json.loads(path.read_text()) | {"recipe_text": wrong}))
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} is damaged: {message}"):
        open_run(finished, None)


@pytest.mark.parametrize(("wrong", "message"), WRONG_TEXTS)
def test_a_wrong_text_in_a_checkpoint_is_named_with_its_file(finished, tmp_path, wrong, message):
    path = latest_checkpoint(finished / "checkpoints") / "state.json"
    state = json.loads(path.read_text())
    state["config"]["recipe_text"] = wrong
    path.write_text(json.dumps(state))
    record = path.with_name("octile.json")
    entries = json.loads(record.read_text())
    entries["files"][path.name] = checksum(path)
    record.write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=f"{re.escape(str(path))} is damaged: config: {message}"):
        open_run(tmp_path / "lost", str(finished / "checkpoints"))


@pytest.mark.parametrize("recipe", ["deepseek_v3", "bf16"])
def test_a_named_recipe_has_no_text(recipe):
    config = micro(recipe=recipe)
    assert config.with_file_texts() == config
    assert config.load_recipe() == replace(Recipe.named(recipe), **CACHED)


def test_a_file_has_transposed_weights_recomputed():
    text = 'recipe = "deepseek_v3"\ntransposed_weights = "recomputed"'
    assert micro(recipe="mine.toml", recipe_text=text).load_recipe().transposed_weights == "recomputed"


def test_a_malformed_recipe_file_is_refused_before_anything_is_written(config, file):
    file.write_text("recipe = 3")
    with pytest.raises(ValueError, match="must say recipe"):
        train(config, False, silent_console())
    assert not config.out.exists()


@pytest.mark.slow
def test_a_comparison_reads_a_file_once(text, file, tmp_path, monkeypatch):
    monkeypatch.chdir(file.parent)

    class DeletingConsole(RunConsole):
        def print(self, line):
            file.unlink(missing_ok=True)

    console = DeletingConsole(Console(file=io.StringIO(), width=200))
    config = micro(data=str(text), steps=1, validate_every=1)
    result = compare(config, ("mine.toml",), tmp_path / "out", console, seeds=(0, 1), gradient_steps="none")
    assert [curve.recipe for curve in result.recipes] == ["mine.toml"] * 2
    assert torch.isfinite(torch.tensor([curve.val_loss[-1] for curve in result.recipes])).all()
