"""Tests of what a text has so far."""

from collections import Counter

from hypothesis import given
from hypothesis.strategies import integers, lists

from octile.serve.engine.history import History, TokenCounts


def counts_of(history: History) -> dict[int, int]:
    tokens, counts = history.generated_counts()
    return dict(zip(tokens.tolist(), counts.tolist(), strict=True))


def test_tokens_are_counted_once_however_often_a_text_is_read():
    counts = TokenCounts([5, 5, 2])
    for end in (3, 4, 4, 7):
        counts.read([5, 5, 2, 7, 7, 1, 7][:end])
    assert sorted(counts.seen.tolist()) == [1, 2, 5, 7]
    assert counts_of(History(counts, [7, 7, 1, 7])) == {7: 3, 1: 1}


def test_drafts_are_counted_for_their_row_alone():
    counts = TokenCounts([1])
    counts.read([1, 4])
    with_drafts, without = History(counts, [4], [4, 6, 1, 6]), History(counts, [4])
    assert counts_of(with_drafts) == {4: 2, 6: 2, 1: 1}
    assert sorted(with_drafts.seen().tolist()) == [1, 4, 6]
    assert counts_of(without) == {4: 1}
    assert sorted(without.seen().tolist()) == [1, 4]


@given(lists(integers(0, 9)), lists(integers(0, 9), max_size=300), lists(integers(0, 12), max_size=5), integers(1, 50))
def test_tokens_and_drafts_are_counted_as_a_counter_does(prompt, text, drafts, n_together):
    counts = TokenCounts(prompt)
    for end in range(0, len(text) + n_together, n_together):
        generated = text[:end]
        counts.read([*prompt, *generated])
        history = History(counts, generated, drafts)
        assert counts_of(history) == Counter([*generated, *drafts])
        assert sorted(history.seen().tolist()) == sorted({*prompt, *generated, *drafts})


def test_a_text_ends_with_generated_tokens_and_drafts_and_not_with_its_prompt():
    counts = TokenCounts([1, 2])
    text = History(counts, [3, 4], [5])
    assert [text.ends_with(tokens) for tokens in ([], [5], [4, 5], [3, 4, 5])] == [True] * 4
    assert [text.ends_with(tokens) for tokens in ([4], [3, 5], [2, 3, 4, 5])] == [False] * 3
