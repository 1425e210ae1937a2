"""Tests of comparing a recipe's gradients with BF16's at the same weights, without a change to the run."""

import math

import pytest
import torch

from octile.train.compare.gradient_check import check_gradients, parse_steps
from octile.train.memory.cpu import LiveTensors
from tests.train.conftest import STATELESS_RECIPES, every_recipe


def test_bf16_compared_with_itself_is_equal(new_trainer):
    check = check_gradients(new_trainer(recipe="bf16"))
    assert all(w.cosine == pytest.approx(1.0) and w.norm == w.bf16_norm for w in check.weights if w.norm)


@pytest.mark.slow
def test_the_check_equals_two_trainers_with_the_same_weights(new_trainer):
    fp8, bf16 = new_trainer(recipe="deepseek_v3"), new_trainer(recipe="bf16")
    fp8.step()
    bf16.model.load_state_dict(fp8.model.state_dict())
    check = check_gradients(fp8)
    gradients = []
    for trainer in (fp8, bf16):
        trainer.model.train()
        trainer.optimizer.zero_grad()
        trainer.passes.backward(fp8.batches.batch(1), 1.0)
        gradients.append({name: p.grad.double().flatten() for name, p in trainer.model.named_parameters()})
    assert check.step == 2
    assert len(check.weights) == len(gradients[0])
    for weight in check.weights:
        ours, theirs = (each[weight.name] for each in gradients)
        assert (weight.norm, weight.bf16_norm) == pytest.approx((ours.norm().item(), theirs.norm().item()))
        assert weight.cosine == pytest.approx(torch.cosine_similarity(ours, theirs, dim=0).item(), abs=1e-9)


def test_fp8_changes_the_direction_of_the_gradient_a_little(new_trainer):
    assert 0.5 < check_gradients(new_trainer(recipe="deepseek_v3")).whole().degrees < 30


@pytest.mark.one_case
@every_recipe(further=STATELESS_RECIPES)
def test_the_check_does_not_change_the_run(new_trainer, recipe):
    unchecked, checked = new_trainer(recipe=recipe), new_trainer(recipe=recipe)
    for trainer in (unchecked, checked):
        trainer.step()
    check_gradients(checked)
    assert unchecked.step()["loss"] == checked.step()["loss"]
    ours, theirs = unchecked.state()[0], checked.state()[0]
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)


def test_gradients_are_divided_by_the_loss_scale(new_trainer):
    check = check_gradients(new_trainer(recipe="fp16_loss_scaling"))
    assert check.whole().norm < 100
    assert check.whole().norm_ratio == pytest.approx(1.0, abs=0.05)


@pytest.mark.slow
def test_micro_batches_are_summed(new_trainer):
    one, two = (check_gradients(new_trainer(recipe="bf16", micro_batches=n)) for n in (1, 2))
    assert one.whole().norm == pytest.approx(two.whole().norm, rel=0.02)


def test_two_sets_of_gradients_live_at_a_time(new_trainer):
    trainer = new_trainer(recipe="float32", batch_size=1)  # few activations
    with LiveTensors(trainer.model.state_dict().values()) as live:
        check_gradients(trainer)
    assert live.peak < 2.75 * sum(p.nbytes for p in trainer.model.parameters())


def test_gradients_that_overflow_have_no_angle(new_trainer):
    trainer = new_trainer(recipe="deepseek_v3")
    with torch.no_grad():
        trainer.model.lm_head.weight[0, 0] = math.inf
    assert math.isnan(check_gradients(trainer).whole().degrees)


@pytest.mark.parametrize(
    ("text", "steps", "chosen"),
    [
        ("start,middle,end", 500, (1, 250, 500)),
        ("start,middle,end", 1, (1,)),
        ("7, 3,end", 9, (3, 7, 9)),
        ("none", 9, ()),
    ],
)
def test_steps_are_chosen_by_name_or_number(text, steps, chosen):
    assert parse_steps(text, steps) == chosen


@pytest.mark.parametrize("text", ["0", "10", "first", "", "1,,2", "-1"])
def test_steps_out_of_range_are_refused(text):
    with pytest.raises(ValueError, match="gradient_steps must be from 1 to 9, or start, middle, end, or none"):
        parse_steps(text, 9)
