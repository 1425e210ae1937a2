"""Tests of which documents are held out: enough, not too many, and the same ones when others are added."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octile.train.data.corpus_index import BYTES_PER_TOKEN, CorpusIndex


def index_of(documents: int, size: int = 4000) -> CorpusIndex:
    return CorpusIndex({hashlib.sha256(b"%d" % n).digest()[:16]: size for n in range(documents)}, ())


def test_about_two_percent_of_the_documents_are_held_out():
    assert 0.015 < len(index_of(10_000).hold_out(sequence_length=128, windows=64)) / 10_000 < 0.025


@given(more=st.integers(0, 500))
def test_added_documents_do_not_move_others(more):
    held_out = index_of(1000).hold_out(sequence_length=16, windows=64)
    after = index_of(1000 + more).hold_out(sequence_length=16, windows=64)
    assert held_out == after & index_of(1000).sizes.keys()


def test_more_is_held_out_where_the_windows_need_it():
    held_out = index_of(100).hold_out(sequence_length=99, windows=32)
    assert len(held_out) * 4000 >= 32 * 100 * BYTES_PER_TOKEN


def test_many_windows_hold_out_a_tenth_at_most():
    assert len(index_of(100).hold_out(sequence_length=99, windows=10_000)) == 10


SIZES = st.lists(st.integers(1, 100_000), min_size=1, max_size=100)


@given(sizes=SIZES, sequence_length=st.integers(1, 10_000), windows=st.integers(1, 1000))
def test_at_most_a_tenth_of_the_text_is_held_out(sizes, sequence_length, windows):
    index = CorpusIndex({hashlib.sha256(b"%d" % n).digest()[:16]: size for n, size in enumerate(sizes)}, ())
    held_out = index.hold_out(sequence_length, windows)
    assert 10 * sum(index.sizes[digest] for digest in held_out) <= sum(sizes)


@pytest.mark.parametrize(("documents", "whole"), [(1, False), (9, False), (10, True), (1000, True)])
def test_documents_that_are_too_few_are_cut_into_spans(documents, whole):
    assert (index_of(documents).span(sequence_length=400, windows=64) is None) == whole


@given(documents=st.integers(1, 20), sequence_length=st.integers(1, 10_000), windows=st.integers(1, 1000))
def test_at_least_one_document_is_left_to_train_on(documents, sequence_length, windows):
    assert len(index_of(documents).hold_out(sequence_length, windows)) < documents


def test_the_sample_contains_no_held_out_document():
    held_out = index_of(100).hold_out(sequence_length=99, windows=32)
    assert not index_of(100).sample(held_out, at_least=10**9) & held_out


def test_the_sample_stops_when_it_is_large_enough():
    assert len(index_of(100).sample(set(), at_least=39_000)) == 10


def test_the_fingerprint_depends_on_the_order():
    forwards = index_of(3)
    backwards = CorpusIndex(dict(reversed(forwards.sizes.items())), ())
    assert forwards.fingerprint != backwards.fingerprint
