"""How many drafts of multi-token prediction a decoder would keep."""

from dataclasses import replace

import pytest
import torch

from octile.train.draft_acceptance import draft_acceptance
from tests.train.conftest import MICRO


class Fixed:
    """A model whose two heads say what they are told."""

    def __init__(self, main, draft):
        self.main, self.draft = main, draft

    def with_drafts(self, tokens):
        return self.main, self.draft


def logits(*tokens):
    """So sure of each token that its probability is 1."""
    return torch.nn.functional.one_hot(torch.tensor([tokens]), 4).float() * 1e4


def accepted(new_trainer, monkeypatch, main, draft):
    trainer = new_trainer()
    monkeypatch.setattr(trainer.model, "with_drafts", Fixed(main, draft).with_drafts)
    return draft_acceptance(trainer, torch.zeros(1, main.shape[1], dtype=torch.int64))


def test_a_draft_is_held_against_what_the_main_head_says_one_place_further(new_trainer, monkeypatch):
    found = accepted(new_trainer, monkeypatch, logits(3, 0, 1, 2), logits(0, 1, 3))
    assert (found.greedy, found.drawn) == (pytest.approx(2 / 3), pytest.approx(2 / 3))


def test_a_draw_is_kept_as_far_as_the_distributions_overlap(new_trainer, monkeypatch):
    even, sure = torch.zeros(1, 3, 4), logits(0, 0, 0)
    assert accepted(new_trainer, monkeypatch, even, sure[:, 1:]).drawn == pytest.approx(1 / 4)


def test_a_trained_model_gives_shares(new_trainer):
    trainer = new_trainer()
    trainer.step()
    found = draft_acceptance(trainer)
    assert 0 <= found.greedy <= 1
    assert 0 < found.drawn <= 1


def test_a_model_without_multi_token_prediction_drafts_nothing(new_trainer):
    trainer = new_trainer(model=replace(MICRO, num_nextn_predict_layers=0))
    with pytest.raises(ValueError, match="no multi-token prediction"):
        draft_acceptance(trainer)
