"""Tests of packed sequences: every text lies in one of them, and little is padding."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octile.ops.cross_entropy import IGNORED
from octile.train.data.batches import Batches, validation_windows
from octile.train.data.packed_tokens import FIRST, LOSS, PackedTokens, best_fit, count_labels, tokens_of, unpacked

TOKENS = np.arange(12, dtype=np.uint16)
MARKS = np.array([FIRST, LOSS, LOSS, FIRST, LOSS, 0, FIRST, 0, LOSS, LOSS, LOSS, LOSS], np.uint8)
PACKED = PackedTokens(TOKENS, MARKS, 6)


@given(st.lists(st.integers(1, 16), max_size=40))
def test_each_text_is_in_one_sequence_that_has_room_for_it(lengths):
    sequences = best_fit(lengths, 16)
    assert sorted(text for sequence in sequences for text in sequence) == list(range(len(lengths)))
    assert all(sum(lengths[text] for text in sequence) <= 16 for sequence in sequences)


@given(st.lists(st.integers(1, 16), min_size=1, max_size=40))
def test_no_two_sequences_would_fit_into_one(lengths):
    filled = sorted(sum(lengths[text] for text in sequence) for sequence in best_fit(lengths, 16))
    assert len(filled) == 1 or filled[0] + filled[1] > 16


def test_a_batch_has_tokens_labels_and_borders():
    tokens, labels, texts = unpacked(PACKED.sequences(np.array([0])))
    assert tokens.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert labels.tolist() == [[IGNORED, 1, 2, IGNORED, 4, IGNORED]]
    assert texts.is_first_BS.tolist() == [[True, False, False, True, False, False]]


def test_labels_are_counted_for_both_predictions():
    assert count_labels(PACKED.sequences(np.array([0, 1]))).tolist() == [7, 5]


def test_each_sequence_is_a_window():
    batches = Batches(PACKED, 2, 5, seed=0)
    batch = batches.batch(3)
    assert batch.shape == (2, 6, 2)
    assert sorted(tokens_of(batch)[:, 0].tolist()) == [0, 6]
    assert torch.equal(validation_windows(PACKED, 5, 8), PACKED.sequences(np.array([0, 1])))


def test_marks_of_another_size_are_refused():
    with pytest.raises(ValueError, match=r"tokens \[12\] and marks \[11\] must be whole sequences of 6 tokens"):
        PackedTokens(TOKENS, MARKS[1:], 6)
