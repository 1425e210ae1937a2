"""A training step that is captured in CUDA graphs does what the eager step does."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from octile.nn.observer import Observer, observe
from octile.recipe import Recipe
from octile.train import trainer as module
from octile.train.captured_step import WARM_UP_STEPS
from octile.train.config import OptimConfig
from octile.train.token_store import TokenStore
from octile.train.trainer import Trainer
from tests.train.conftest import micro

STEPS = WARM_UP_STEPS + 5
CAPTURED = [name for name in Recipe.names() if name not in ("global_scale", "fp16_loss_scaling", "fp8_lm", "float32")]


@pytest.fixture
def trainer_of(store: TokenStore) -> Callable[..., Trainer]:
    def new(recipe: str = "deepseek_v3", **changes) -> Trainer:
        return Trainer(micro(recipe=recipe, **changes), store, torch.device("cuda"))

    return new


def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "why_eager", lambda *_: "the test compares with it")


def is_captured(trainer: Trainer) -> bool:
    return trainer.captured is not None and trainer.captured.is_captured


@pytest.mark.parametrize("recipe", CAPTURED)
def test_captured_steps_have_the_losses_of_eager_steps(trainer_of, recipe: str, monkeypatch):
    captured = trainer_of(recipe)
    ours = [captured.step() for _ in range(STEPS)]
    assert is_captured(captured)
    eager(monkeypatch)
    uncaptured = trainer_of(recipe)
    for line in ours:
        theirs = uncaptured.step()
        for key in ("loss", "grad_norm"):
            assert line[key] == pytest.approx(theirs[key], rel=2e-3), (key, line["step"])


@pytest.mark.parametrize("recipe", ["bf16", "deepseek_v3"])
def test_captured_steps_of_micro_batches_have_the_losses_of_eager_steps(trainer_of, recipe: str, monkeypatch):
    captured = trainer_of(recipe, micro_batches=2)
    ours = [captured.step() for _ in range(STEPS)]
    assert is_captured(captured)
    eager(monkeypatch)
    uncaptured = trainer_of(recipe, micro_batches=2)
    for line in ours:
        theirs = uncaptured.step()
        for key in ("loss", "grad_norm"):
            assert line[key] == pytest.approx(theirs[key], rel=2e-3), (key, line["step"])


def test_the_weights_follow_the_learning_rate_of_each_step(trainer_of):
    trainer = trainer_of()
    for _ in range(STEPS):
        trainer.step()
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.schedule = lambda step: 0.0
    trainer.step()
    assert [name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])] == []


def test_the_gate_is_balanced_by_the_load_of_the_step(trainer_of):
    trainer = trainer_of()
    for _ in range(STEPS):
        trainer.step()
    (name, moe), *_ = trainer.moes.items()
    before = moe.gate.e_score_correction_bias.clone()
    trainer.step()
    load_E = trainer.last_load[name].float()
    speed = trainer.config.optim.balance_speed
    torch.testing.assert_close(
        moe.gate.e_score_correction_bias, before + speed * torch.sign(load_E.mean() - load_E), rtol=0, atol=1e-6
    )


def test_a_captured_step_without_finite_gradients_is_skipped(trainer_of):
    trainer = trainer_of()
    for _ in range(STEPS):
        trainer.step()
    weight = trainer.model.model.norm.weight
    weight.data[0] = 3e38
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    try:
        line = trainer.step()
    except FloatingPointError:  # the loss itself was not finite: nothing was updated either
        line = {"skipped": 1}
    assert line["skipped"] == 1
    assert [name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])] == []


def test_an_observed_step_runs_eagerly_between_captured_ones(trainer_of):
    trainer = trainer_of()
    for _ in range(STEPS):
        trainer.step()
    seen: list[str] = []
    with observe(Observer(quantization=lambda name, values: seen.append(name))):
        observed = trainer.step()
    assert {"x", "w", "dy"} <= set(seen)
    assert trainer.step()["loss"] == pytest.approx(observed["loss"], rel=0.05)


def test_a_validation_between_captured_steps_reads_the_new_weights(trainer_of, monkeypatch):
    captured = trainer_of()
    for _ in range(STEPS):
        captured.step()
    captured.validate()
    captured.step()
    found = captured.validate()["val_loss"]
    eager(monkeypatch)
    uncaptured = trainer_of()
    for _ in range(STEPS + 1):
        uncaptured.step()
    assert found == pytest.approx(uncaptured.validate()["val_loss"], rel=2e-3)


def test_another_recipe_of_a_layer_is_captured_again(trainer_of):
    trainer = trainer_of()
    for _ in range(STEPS):
        trainer.step()
    layer = trainer.model.model.layers[0].mlp.down_proj
    layer.use_recipe(replace(Recipe.deepseek_v3().without("wgrad")))
    trainer.step()
    assert not is_captured(trainer)
    for _ in range(WARM_UP_STEPS):
        trainer.step()
    assert is_captured(trainer)


@pytest.mark.parametrize("changes", [{"mtp_change": 0.5}, {"balance_end": 0.5}], ids=str)
def test_a_value_that_changes_during_the_run_is_captured_again(trainer_of, changes, monkeypatch):
    steps = 2 * STEPS
    config = {"steps": steps, "optim": OptimConfig(lr=3e-3, **changes)}
    captured = trainer_of(**config)
    ours = [captured.step() for _ in range(steps)]
    assert is_captured(captured)
    eager(monkeypatch)
    uncaptured = trainer_of(**config)
    for line in ours:
        assert line["loss"] == pytest.approx(uncaptured.step()["loss"], rel=2e-3), line["step"]
    for name, moe in captured.moes.items():
        before = moe.gate.e_score_correction_bias.clone()
        captured.step()
        assert torch.equal(before, moe.gate.e_score_correction_bias) == ("balance_end" in changes), name


def test_a_growing_batch_is_trained_eagerly_until_it_has_its_size(trainer_of):
    trainer = trainer_of(steps=2 * STEPS, initial_batch_size=1, batch_ramp=0.5)
    sizes = [trainer.step()["batch_size"] for _ in range(2 * STEPS)]
    assert (sizes[0], sizes[-1]) == (1, trainer.config.batch_size)
    assert is_captured(trainer)
