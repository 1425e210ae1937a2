"""Tests of the losses of single held-out tokens."""

import weakref

import pytest
import torch

from octile.nn.fused.cross_entropy import cross_entropies


@pytest.mark.parametrize("recipe", ["bf16", "deepseek_v3"])
def test_the_mean_token_loss_is_the_held_out_loss(new_trainer, recipe):
    trainer = new_trainer(recipe=recipe)
    trainer.step()
    assert trainer.evaluator.token_losses().mean().item() == pytest.approx(
        trainer.evaluator.validate()["val_loss"], rel=1e-6
    )


def test_the_first_token_of_a_window_is_not_counted_as_predicted(new_trainer):
    evaluator = new_trainer().evaluator
    assert evaluator.validate()["val_tokens"] == evaluator.token_losses().numel()


def test_no_tensor_of_a_batch_outlives_it(new_trainer, monkeypatch):
    storages = []

    def recorded(*arguments):
        assert [storage for storage in storages[:-1] if storage() is not None] == []
        losses_BS = cross_entropies(*arguments)
        storages.append(weakref.ref(losses_BS.untyped_storage()))
        return losses_BS

    monkeypatch.setattr("octile.train.step.passes.cross_entropies", recorded)
    new_trainer(batch_size=1).evaluator.token_losses()
    assert len(storages) == 4


@torch.no_grad()
def test_a_token_loss_is_minus_the_log_probability_of_the_token(new_trainer):
    trainer = new_trainer(recipe="float32")
    losses = trainer.evaluator.token_losses()
    for window, position in [(0, 0), (2, 5), (3, losses.shape[1] - 1)]:
        tokens = trainer.evaluator.held_out[window]
        probability = torch.softmax(trainer.model.eval()(tokens[None, : position + 1])[0, -1].double(), dim=-1)
        assert losses[window, position].item() == pytest.approx(
            -probability[tokens[position + 1]].log().item(), rel=1e-4
        )
