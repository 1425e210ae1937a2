"""The loss of every held-out token, and tokens as a person reads them."""

import pytest
import torch

from octile.train.token_losses import token_losses, visible_token


@pytest.mark.parametrize("recipe", ["bf16", "deepseek_v3"])
def test_their_mean_is_the_held_out_loss(new_trainer, recipe):
    trainer = new_trainer(recipe=recipe)
    trainer.step()
    assert token_losses(trainer).mean().item() == pytest.approx(trainer.validate()["val_loss"], rel=1e-6)


@torch.no_grad()
def test_each_is_minus_the_logarithm_of_the_tokens_probability(new_trainer):
    trainer = new_trainer(recipe="float32")
    losses = token_losses(trainer)
    for window, place in [(0, 0), (2, 5), (3, losses.shape[1] - 1)]:
        tokens = trainer.held_out[window]
        probability = torch.softmax(trainer.model.eval()(tokens[None, : place + 1])[0, -1].double(), dim=-1)
        assert losses[window, place].item() == pytest.approx(-probability[tokens[place + 1]].log().item(), rel=1e-4)


@pytest.mark.parametrize(
    ("text", "shown"),
    [(" the", "␣the"), ("\n", "↵"), ("a", "a"), ("\t", "⇥"), ("     x", "␣×5 x"), ("    ", "␣×4"), ("  ", "␣␣")],
)
def test_white_space_is_made_visible(text, shown):
    class OneToken:
        def decode(self, tokens):
            return text

    assert visible_token(OneToken(), 0) == shown


def test_a_part_of_a_character_is_shown_as_its_bytes(store):
    first, second = store.tokenizer.encode("é")
    assert (visible_token(store.tokenizer, first), visible_token(store.tokenizer, second)) == ("bytes C3", "bytes A9")


def test_the_ends_of_texts_have_their_names(store):
    assert visible_token(store.tokenizer, store.tokenizer.end) == "<|end|>"
