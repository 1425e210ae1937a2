"""Tests of `HeldOutSpans`: what is left of training documents has no span of held-out ones, and lacks nothing else."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from octile.train.data.spans import SPAN, HeldOutSpans, hash_spans

BEGIN, END = 0, 1


def document(text):
    return np.array([BEGIN, *text, END], np.int64)


def spans_of(documents):
    """Every span of the texts of documents, as tuples."""
    return {
        tuple(text[i : i + SPAN])
        for text in (d[1:-1].tolist() for d in documents)
        for i in range(max(len(text) - SPAN + 1, 0))
    }


@st.composite
def parts(draw):
    """Held-out and training documents of random texts, some of which the training documents copy from the others."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    vocabulary = draw(st.sampled_from([3, 4, 300]))
    texts = [random.integers(2, vocabulary, random.integers(0, 4 * SPAN)).tolist() for _ in range(12)]
    held_out, training = texts[:4], texts[4:]
    for text in training:
        source = held_out[random.integers(4)]
        first, place = random.integers(len(source) + 1), random.integers(len(text) + 1)
        text[place:place] = source[first : first + random.integers(3 * SPAN)]
    return [document(text) for text in held_out], [document(text) for text in training]


def cut(held_out, training):
    spans = HeldOutSpans((BEGIN, END))
    spans.add(held_out)
    return spans.cut(training), spans.cut_tokens


@settings(deadline=None, max_examples=50)
@given(parts())
def test_no_span_is_in_both_parts(parts):
    held_out, training = parts
    assert not spans_of(cut(held_out, training)[0]) & spans_of(held_out)


@settings(deadline=None, max_examples=50)
@given(parts())
def test_the_tokens_that_are_left_and_those_counted_are_all(parts):
    held_out, training = parts
    left, counted = cut(held_out, training)
    assert all(d[0] == BEGIN and d[-1] == END for d in left)
    assert sum(len(d) - 2 for d in left) + counted == sum(len(d) - 2 for d in training)


def test_a_document_is_divided_where_a_span_was():
    shared, before, after = range(100, 100 + SPAN), range(200, 200 + SPAN), range(300, 300 + SPAN)
    left, counted = cut([document(shared)], [document([*before, *shared, *after])])
    assert [d.tolist() for d in left] == [document(before).tolist(), document(after).tolist()]
    assert counted == SPAN


def test_a_part_shorter_than_a_span_is_cut_too():
    shared, before = range(100, 100 + SPAN), range(200, 200 + SPAN - 1)
    left, counted = cut([document(shared)], [document([*before, *shared])])
    assert (list(left), counted) == ([], 2 * SPAN - 1)


def test_one_token_less_than_a_span_is_not_cut():
    training = [document([*range(200, 300), *range(100, 100 + SPAN - 1)])]
    left, counted = cut([document(range(100, 100 + SPAN - 1))], training)
    assert (list(left), counted) == (training, 0)


def test_documents_that_follow_each_other_share_no_span_across_their_border():
    half = range(100, 100 + SPAN // 2), range(100 + SPAN // 2, 100 + SPAN)
    training = [document(half[0]), document(half[1])]
    assert cut([document(range(100, 100 + SPAN))], training)[0] is training


def test_without_training_documents_nothing_is_left():
    assert cut([document(range(100, 200))], []) == ([], 0)


@given(st.integers(0, 40), st.integers(1, 2**16))
def test_the_hash_of_a_span_depends_on_its_tokens_alone(shift, token):
    tokens = np.arange(token, token + SPAN)
    assert hash_spans(np.concatenate([np.arange(shift), tokens]))[-1] == hash_spans(tokens)[0]
    changed = tokens.copy()
    changed[shift] += 1
    assert hash_spans(changed)[0] != hash_spans(tokens)[0]
