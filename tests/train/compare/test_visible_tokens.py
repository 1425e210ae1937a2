"""Tests of how tokens are shown to a reader."""

import pytest

from octile.train.compare.visible_tokens import visible_token


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        *((" the", "␣the"), ("\n", "↵"), ("a", "a"), ("\t", "⇥"), ("     x", "␣×5 x"), ("    ", "␣×4"), ("  ", "␣␣")),
        *(("\n" + 16 * " ", "↵␣×16"), (5 * "\n" + "\t", "↵×5 ⇥"), ("a ", "a␣"), ("\xa0" * 4, "\xa0×4")),
    ],
)
def test_white_space_is_made_visible(text, shown):
    class OneToken:
        def decode(self, tokens):
            return text

    assert visible_token(OneToken(), 0) == shown


def test_a_token_that_is_part_of_a_character_is_shown_as_bytes(store):
    first, second = store.tokenizer.encode("é")
    assert (visible_token(store.tokenizer, first), visible_token(store.tokenizer, second)) == ("bytes C3", "bytes A9")


def test_the_end_token_is_shown_by_name(store):
    assert visible_token(store.tokenizer, store.tokenizer.end) == "<|end|>"
