"""Training on a GPU: every recipe takes steps, and everything around a step reads and writes CUDA tensors."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from octile.checkpoint.hugging_face import load, save
from octile.checkpoint.training import latest_checkpoint, load_checkpoint, save_checkpoint
from octile.recipe import Recipe
from octile.serve.engine.request import Sampling
from octile.serve.generate import generate_from
from octile.train.data.token_store import TokenStore
from octile.train.loop import train
from octile.train.run.best_model import BestModel
from octile.train.run.deterministic import deterministic
from octile.train.run.profile import PROFILED, WARM_UP, profiling
from octile.train.run.recorder import no_hook
from octile.train.trainer import Trainer
from tests.train.conftest import MICRO, micro, silent_console

every_recipe = pytest.mark.parametrize("recipe", Recipe.names())


@pytest.fixture
def trainer_of(store: TokenStore) -> Callable[..., Trainer]:
    def new(recipe: str = "deepseek_v3", device: str = "cuda", **optim) -> Trainer:
        config = micro(recipe=recipe)
        return Trainer(replace(config, optim=replace(config.optim, **optim)), store, torch.device(device))

    return new


@every_recipe
def test_two_steps_have_the_losses_of_the_cpu(trainer_of, recipe: str):
    gpu, cpu = trainer_of(recipe), trainer_of(recipe, "cpu")
    for _ in range(2):
        assert gpu.step()["loss"] == pytest.approx(cpu.step()["loss"], rel=0.01)


@every_recipe
def test_the_residual_is_in_the_dtype_in_which_the_recipe_computes(trainer_of, recipe: str):
    trainer, seen = trainer_of(recipe), []
    trainer.model.model.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    trainer.step()
    assert set(seen) == {Recipe.named(recipe).compute}


@every_recipe
def test_a_step_changes_every_weight(trainer_of, recipe: str):
    trainer = trainer_of(recipe)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    for _ in range(2):
        trainer.step()
    unchanged = [name for name, p in trainer.model.named_parameters() if torch.equal(p, before[name])]
    assert unchanged == []


@every_recipe
def test_a_run_continues_from_its_checkpoint(trainer_of, recipe: str, tmp_path):
    straight, resumed = trainer_of(recipe), trainer_of(recipe)
    straight.step()
    path = save_checkpoint(tmp_path, 1, *straight.state())
    resumed.load(*load_checkpoint(path))
    for (name, ours), theirs in zip(
        straight.model.state_dict().items(), resumed.model.state_dict().values(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert resumed.step()["loss"] == pytest.approx(straight.step()["loss"], rel=1e-3)


def test_a_resumed_run_keeps_activations_as_it_began_whatever_is_free_then(trainer_of, monkeypatch):
    straight = trainer_of()
    straight.step()
    monkeypatch.setattr("octile.train.strategy.single.available_memory", lambda device: 0)
    resumed = trainer_of()
    assert (straight.strategy.saves_activations, resumed.strategy.saves_activations) == (True, False)
    resumed.load(*straight.state())
    assert resumed.strategy.recipe == straight.strategy.recipe
    for _ in range(5):  # the last of them are captured
        assert resumed.step()["loss"] == pytest.approx(straight.step()["loss"], rel=1e-3)


@every_recipe
def test_two_deterministic_trainers_have_the_same_bits(trainer_of, recipe: str):
    first, second = (trainer_of(recipe) for _ in range(2))
    with deterministic(True):
        for trainer in (first, second):
            for _ in range(6):  # the last of them are captured
                trainer.step()
    ours, theirs = first.state()[0], second.state()[0]
    assert [name for name, t in ours.items() if not torch.equal(t, theirs[name])] == []


def test_two_deterministic_runs_have_the_same_bits(text: Path, tmp_path: Path):
    config = micro(data=str(text), deterministic=True, device="cuda")
    for name in "ab":
        train(replace(config, out=tmp_path / name), False, silent_console())
    first, second = (load_checkpoint(latest_checkpoint(tmp_path / name / "checkpoints"))[0] for name in "ab")
    assert [name for name, t in first.items() if not torch.equal(t, second[name])] == []


def test_checkpoints_that_are_uploaded_while_the_run_trains_on_have_the_bits_of_their_step(text: Path, tmp_path: Path):
    config, place = micro(data=str(text), deterministic=True, device="cuda"), "memory://octile/uploaded"
    train(replace(config, out=tmp_path / "local"), False, silent_console())
    train(replace(config, out=tmp_path / "uploaded", checkpoints=place), False, silent_console())
    for step in ("step_00000004", "step_00000006"):
        local, uploaded = (load_checkpoint(f"{folder}/{step}")[0] for folder in (tmp_path / "local/checkpoints", place))
        assert local.keys() == uploaded.keys()
        assert [name for name, t in local.items() if not torch.equal(t, uploaded[name])] == []


@pytest.mark.parametrize("recipe", ["deepseek_v3", "delayed"])
def test_evaluating_held_out_text_gives_a_loss_and_scales(trainer_of, recipe: str):
    trainer = trainer_of(recipe)
    trainer.step()
    assert trainer.evaluator.validate()["val_loss"] == pytest.approx(math.log(MICRO.vocab_size), rel=0.05)
    assert set(trainer.evaluator.tile_scales()) == {"x", "w", "dy"}


@pytest.mark.parametrize("recipe", ["deepseek_v3", "bf16", "fp8_lm"])
def test_the_best_model_is_kept_while_captured_steps_change_the_weights(trainer_of, recipe: str):
    trainer = trainer_of(recipe)
    best = BestModel(trainer.model)
    for step in (1, 2, 3):
        list(trainer.advance())
        list(trainer.collect())
        best.update(step, 3.0 if step == 2 else 4.0)
        if step == 2:
            weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    best.restore()
    for name, tensor in trainer.model.state_dict().items():
        assert tensor.equal(weights[name]), name


def test_the_moving_average_is_that_of_the_weights(trainer_of):
    trainer = trainer_of(ema_decay=0.9)
    expected = {name: p.detach().cpu().clone() for name, p in trainer.model.named_parameters()}
    for _ in range(3):
        trainer.step()
        for name, p in trainer.model.named_parameters():
            expected[name] = 0.9 * expected[name] + 0.1 * p.detach().cpu()
    trainer.ema.synchronize()
    for name, average in trainer.ema.average.items():
        torch.testing.assert_close(average, expected[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("weights", ["fp8", "bf16", "float32"])
def test_a_model_on_the_gpu_is_saved_as_one_on_the_cpu(trainer_of, weights: str, tmp_path):
    trainer = trainer_of()
    trainer.step()
    save(trainer.model, tmp_path / "gpu", weights)
    save(trainer.model.cpu(), tmp_path / "cpu", weights)
    ours, theirs = (load(tmp_path / place).state_dict() for place in ("gpu", "cpu"))
    assert all(torch.equal(t, theirs[name]) for name, t in ours.items())


@pytest.mark.parametrize("weights", ["fp8", "bf16"])
def test_a_saved_model_generates_text(trainer_of, store: TokenStore, weights: str, tmp_path):
    save(trainer_of().model, tmp_path, weights)
    store.tokenizer.save(tmp_path)
    assert "".join(generate_from(tmp_path, "def ", Sampling(20, ignore_eos=True)))


def test_a_profile_lists_kernels_and_the_share_in_which_the_gpu_idles(text: Path, tmp_path: Path):
    config = micro(data=str(text), out=tmp_path / "run", device="cuda", steps=WARM_UP + PROFILED, validate_every=100)
    config, console = replace(config, checkpoint_every=0), silent_console()
    train(config, False, console, profiling(config, no_hook, console))
    first, _, _, *rows = (tmp_path / "run" / "profile.txt").read_text().splitlines()
    assert re.search(r"the GPU idled [0-9.]+% of the time", first)
    assert len(rows) == 10
    assert not any("aten::" in row or "Optimizer" in row for row in rows)  # kernels, not operators or annotations
    assert (tmp_path / "run" / "trace.json.gz").stat().st_size > 0
