"""Tests of how many drafts of multi-token prediction speculative decoding would accept."""

from dataclasses import replace

import pytest
import torch

from experiments.loss.draft_acceptance import draft_acceptance
from tests.train.conftest import MICRO


class FixedLogits:
    """A model whose two heads return given logits."""

    def __init__(self, main, draft):
        self.main, self.draft = main, draft

    def with_drafts(self, tokens):
        return self.main, self.draft


def logits(*tokens):
    """Make logits [1, S, 4] in which each token has probability 1."""
    return torch.nn.functional.one_hot(torch.tensor([tokens]), 4).float() * 1e4


def measure_acceptance(new_trainer, monkeypatch, main, draft):
    trainer = new_trainer()
    monkeypatch.setattr(trainer.model, "with_drafts", FixedLogits(main, draft).with_drafts)
    return draft_acceptance(trainer, torch.zeros(1, main.shape[1], dtype=torch.int64))


def test_a_draft_is_compared_with_the_main_head_one_position_later(new_trainer, monkeypatch):
    found = measure_acceptance(new_trainer, monkeypatch, logits(3, 0, 1, 2), logits(0, 1, 3))
    assert (found.greedy, found.drawn) == (pytest.approx(2 / 3), pytest.approx(2 / 3))


def test_the_share_of_accepted_draws_is_the_overlap_of_the_distributions(new_trainer, monkeypatch):
    uniform, certain = torch.zeros(1, 3, 4), logits(0, 0, 0)
    assert measure_acceptance(new_trainer, monkeypatch, uniform, certain[:, 1:]).drawn == pytest.approx(1 / 4)


def test_acceptance_of_a_trained_model_is_between_0_and_1(new_trainer):
    trainer = new_trainer()
    trainer.step()
    found = draft_acceptance(trainer)
    assert 0 <= found.greedy <= 1
    assert 0 < found.drawn <= 1


def test_a_model_without_multi_token_prediction_is_refused(new_trainer):
    trainer = new_trainer(model=replace(MICRO, num_nextn_predict_layers=0))
    with pytest.raises(ValueError, match="no multi-token prediction"):
        draft_acceptance(trainer)
