"""Tests of the model with the lowest held-out loss: which one a run writes, and that a resumed run writes the same."""

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from octile.checkpoint.hugging_face import load
from octile.checkpoint.sharded import ShardedCheckpoint
from octile.checkpoint.training import latest_checkpoint, load_checkpoint
from octile.nn.delayed_scaling import AmaxHistory
from octile.train.evaluation.evaluator import Evaluator
from octile.train.loop import train
from octile.train.run.best_model import Best, BestModel
from octile.train.run.folder import RunFolder
from octile.train.trainer import Trainer
from tests.train.conftest import micro, silent_console


def with_weight(value: float) -> nn.Module:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def measured(model: nn.Module, losses: list[float]) -> BestModel:
    """The best model after validations with these losses, the n-th with a weight of n."""
    best = BestModel(model)
    for step, loss in enumerate(losses, start=1):
        nn.init.constant_(model.weight, step)
        best.update(step, loss)
    return best


@pytest.mark.parametrize(
    ("losses", "step", "validations"),
    [([3.0], 1, 0), ([3.0, 2.0], 2, 0), ([3.0, 2.0, 2.0, 4.0], 2, 2), ([math.nan, 3.0, math.nan, math.inf], 2, 2)],
)
def test_the_weights_of_the_lowest_loss_are_kept(losses, step, validations):
    model = with_weight(0.0)
    best = measured(model, losses)
    assert best.best == Best(step, losses[step - 1], validations)
    best.restore()
    assert model.weight.item() == step


def with_history() -> nn.Module:
    return nn.Sequential(AmaxHistory(2), with_weight(0.0))


def measured_with_amax(model: nn.Module, losses: list[float]) -> BestModel:
    """The best model after validations with these losses, the n-th with amax histories of n."""
    best = BestModel(model)
    for step, loss in enumerate(losses, start=1):
        model[0].amax_OH.fill_(step)
        best.update(step, loss)
    return best


def test_the_amax_histories_of_the_lowest_loss_are_kept():
    model = with_history()
    measured_with_amax(model, [3.0, 2.0, 4.0]).restore()
    assert model[0].amax_OH.equal(torch.full((3, 3), 2.0))


@pytest.mark.parametrize("losses", [[3.0, 2.0, 2.5], [3.0, 2.5, 2.0]])
def test_a_checkpoint_restores_its_amax_histories(losses):
    before = measured_with_amax(with_history(), losses)
    tensors, state = before.state(len(losses))
    model = with_history()
    model[0].amax_OH.fill_(len(losses))  # the checkpoint's own
    after = BestModel(model)
    after.load(tensors, state, len(losses))
    model[0].amax_OH.zero_()
    after.restore()
    assert model[0].amax_OH.equal(torch.full((3, 3), float(before.best.step)))


def test_a_checkpoint_of_an_earlier_version_has_no_amax_histories_of_the_best_model():
    tensors, state = measured_with_amax(with_history(), [3.0, 2.0, 2.5]).state(3)
    weights = {name: t for name, t in tensors.items() if "history" not in name}
    assert len(weights) < len(tensors)
    model = with_history()
    model[0].amax_OH.fill_(3)  # the checkpoint's own
    model[1].weight.data.fill_(3)
    after = BestModel(model)
    after.load(weights, state, 3)
    after.restore()
    assert model[1].weight.item() == 0.0
    assert model[0].amax_OH.equal(torch.full((3, 3), 3.0))


def test_without_a_finite_loss_the_weights_stay():
    model = with_weight(0.0)
    best = measured(model, [math.nan, math.inf])
    best.restore()
    assert (best.best, model.weight.item()) == (None, 2.0)


@pytest.mark.parametrize(("patience", "has_run_out"), [(0, False), (1, True), (2, True), (3, False)])
def test_patience_counts_validations_without_a_lower_loss(patience, has_run_out):
    assert measured(with_weight(0.0), [3.0, 2.0, 2.5, 2.1]).has_run_out(patience) is has_run_out


def begun(initial: float, losses: list[float]) -> BestModel:
    """The same, of a run whose weights had the loss `initial` before the first step."""
    best = BestModel(with_weight(0.0))
    best.begin(initial)
    for step, loss in enumerate(losses, start=1):
        best.update(step, loss)
    return best


@pytest.mark.parametrize(
    ("losses", "best", "is_above_start"),
    [
        ([4.0, 3.0], Best(2, 3.0, 2), True),  # each lower than the one before, none than the beginning
        ([4.0, 3.0, math.nan], Best(2, 3.0, 3), True),
        ([2.0], Best(1, 2.0, 1), True),
        ([4.0, 1.9], Best(2, 1.9, 0), False),
        ([1.9, 1.95], Best(1, 1.9, 1), False),
    ],
)
def test_patience_counts_from_the_loss_before_the_first_step(losses, best, is_above_start):
    run = begun(2.0, losses)
    assert (run.best, run.is_above_start) == (best, is_above_start)


def test_a_loss_before_the_first_step_that_is_not_finite_is_none():
    assert begun(math.nan, [4.0]).best == Best(1, 4.0, 0)


@pytest.mark.parametrize("losses", [[], [3.0], [1.0]])
def test_a_checkpoint_restores_the_loss_before_the_first_step(losses):
    before = begun(2.0, losses)
    tensors, state = before.state(len(losses))
    after = BestModel(with_weight(0.0))
    after.load(tensors, json.loads(json.dumps(state)), len(losses))
    assert (after.initial_val_loss, after.best) == (2.0, before.best)


def test_a_damaged_loss_before_the_first_step_is_refused():
    with pytest.raises(ValueError, match=r"state\.initial\.val_loss must be a number"):
        BestModel(with_weight(0.0)).load({}, {"initial": {"val_loss": "low"}}, 2)


@pytest.mark.parametrize("losses", [[3.0, 2.0, 2.5], [3.0, 2.5, 2.0], [math.nan]])
def test_a_checkpoint_restores_it(losses):
    before = measured(with_weight(0.0), losses)
    tensors, state = before.state(len(losses))
    model = with_weight(float(len(losses)))  # the checkpoint's own
    after = BestModel(model)
    after.load(tensors, json.loads(json.dumps(state)), len(losses))
    after.restore()
    before.restore()
    assert after.best == before.best
    assert model.weight.item() == before._model.weight.item()


def test_a_checkpoint_holds_weights_once_if_they_are_its_own():
    assert measured(with_weight(0.0), [3.0, 2.0]).state(2)[0] == {}
    assert list(measured(with_weight(0.0), [2.0, 3.0]).state(2)[0]) == ["best.weight"]


@pytest.mark.parametrize(
    ("tensors", "state", "message"),
    [
        ({}, {"step": -1, "val_loss": 2.0, "validations": 0}, "state.best.step must be at least 0, not -1"),
        ({}, {"step": 1, "val_loss": "low", "validations": 0}, "state.best.val_loss must be a number"),
        ({"best.other": torch.zeros(1)}, {"step": 1, "val_loss": 2.0, "validations": 0}, "has other tensors than"),
        ({}, {"step": 1, "val_loss": 2.0, "validations": 0}, "has other tensors than"),
    ],
)
def test_a_damaged_state_is_refused(tensors, state, message):
    with pytest.raises(ValueError, match=message):
        BestModel(with_weight(0.0)).load(tensors, {"best": state}, 2)


@pytest.fixture
def losses(monkeypatch):
    """losses(step → held-out loss): what validations find; returns the weights of the head at each of them."""
    weights: dict[int, torch.Tensor] = {}

    def use(by_step: dict[int, float]) -> dict[int, torch.Tensor]:
        def validate(self):
            step = self.progress.steps_done
            weights[step] = self.strategy.model.lm_head.weight.detach().bfloat16()
            return {"val_loss": by_step[step], "val_tokens": 1}

        monkeypatch.setattr(Evaluator, "validate", validate)
        return weights

    return use


def head_of(out):
    return load(out).lm_head.weight.detach().bfloat16()


RISING = {1: 4.0, 2: 3.0, 3: 3.5, 4: 3.2, 5: 3.6, 6: 3.9}


@pytest.mark.slow
def test_the_model_of_a_run_is_its_best_and_the_last_one_is_a_checkpoint(text, tmp_path, losses):
    weights = losses(RISING)
    screen = silent_console()
    train(micro(data=str(text), out=tmp_path / "run", validate_every=1), False, screen)
    assert head_of(tmp_path / "run").equal(weights[2])
    tensors, _ = load_checkpoint(latest_checkpoint(tmp_path / "run" / "checkpoints"))
    assert tensors["model.lm_head.weight"].bfloat16().equal(weights[6])
    assert "after step 2: the lowest held-out loss, 3.0000" in screen.console.file.getvalue()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["model_step"], summary["model_val_loss"]) == (2, 3.0)


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_best_model(text, tmp_path, losses, monkeypatch):
    weights, out = losses(RISING), tmp_path / "run"
    advance = Trainer.advance

    def killed(self):
        if self.steps_done == 5:
            raise RuntimeError("killed")
        return advance(self)

    monkeypatch.setattr(Trainer, "advance", killed)
    with pytest.raises(RuntimeError, match="killed"):
        train(micro(data=str(text), out=out, validate_every=1), False, silent_console())
    monkeypatch.setattr(Trainer, "advance", advance)
    assert not (out / "model").exists()
    best = weights[2].clone()
    read, read_parts = [], ShardedCheckpoint.read_parts

    def recorded(self, rows):
        read.append({name.startswith("best.") for name in rows})
        return read_parts(self, rows)

    monkeypatch.setattr(ShardedCheckpoint, "read_parts", recorded)
    train(RunFolder.open(out).read_config(), True, silent_console())
    assert head_of(out).equal(best)
    assert read == [{False}, {True}]  # the best model's tensors need no memory while the others are loaded


@pytest.mark.slow
@pytest.mark.usefixtures("short_report")
def test_a_run_stops_when_its_patience_runs_out(text, tmp_path, losses):
    losses(RISING)
    out = tmp_path / "run"
    train(micro(data=str(text), out=out, validate_every=1, checkpoint_every=0, patience=2), False, silent_console())
    assert latest_checkpoint(out / "checkpoints").name == "step_00000004"
    assert "The run was stopped early: 2 validations in a row found no lower" in (out / "report.html").read_text()


@pytest.mark.slow
def test_a_run_that_stopped_early_continues_with_more_patience(text, tmp_path, losses):
    losses(RISING)
    out = tmp_path / "run"
    train(micro(data=str(text), out=out, validate_every=1, patience=2), False, silent_console())
    train(RunFolder.open(out).read_config(), True, silent_console())  # writes the same model and report again
    assert latest_checkpoint(out / "checkpoints").name == "step_00000004"
    train(replace(RunFolder.open(out).read_config(), patience=0), True, silent_console())
    assert latest_checkpoint(out / "checkpoints").name == "step_00000006"
