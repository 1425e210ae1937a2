"""Tests of what a text has so far."""

from octile.serve.engine.history import History, TokenCounts


def counts_of(history: History) -> dict[int, int]:
    tokens, counts = history.generated_counts()
    return dict(zip(tokens.tolist(), counts.tolist(), strict=True))


def test_tokens_are_counted_once_however_often_a_text_is_read():
    counts = TokenCounts([5, 5, 2])
    for end in (3, 4, 4, 7):
        counts.read([5, 5, 2, 7, 7, 1, 7][:end])
    assert counts.prompt.tolist() == [2, 5]
    assert dict(counts.generated) == {7: 3, 1: 1}


def test_drafts_are_counted_for_their_row_alone():
    counts = TokenCounts([1])
    counts.read([1, 4])
    assert counts_of(History(counts, [4], [4, 6])) == {4: 2, 6: 1}
    assert counts_of(History(counts, [4])) == {4: 1}


def test_a_text_ends_with_generated_tokens_and_drafts_and_not_with_its_prompt():
    counts = TokenCounts([1, 2])
    text = History(counts, [3, 4], [5])
    assert [text.ends_with(tokens) for tokens in ([], [5], [4, 5], [3, 4, 5])] == [True] * 4
    assert [text.ends_with(tokens) for tokens in ([4], [3, 5], [2, 3, 4, 5])] == [False] * 3
