"""Tests of packed texts: borders, positions, and which labels count."""

import torch

from octile.nn.packed_texts import PackedTexts
from octile.ops.cross_entropy import IGNORED

FIRST = torch.tensor([[1, 0, 0, 1, 0, 1], [0, 0, 0, 0, 1, 0]]).bool()  # the first of a sequence counts in any case


def test_positions_begin_anew_in_each_text():
    assert PackedTexts(FIRST).positions().tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 1]]


def test_borders_are_filled_up_with_empty_texts():
    assert PackedTexts(FIRST, max_texts=4).borders().tolist() == [0, 3, 5, 6, 10, 12, 12, 12, 12]


def test_borders_have_room_for_as_many_texts_as_are_announced():
    assert PackedTexts(FIRST[:1], max_texts=3).borders().tolist() == [0, 3, 5, 6]


def test_no_label_is_predicted_from_another_text():
    labels = torch.arange(12).view(2, 6)
    texts = PackedTexts(FIRST)
    assert texts.next_labels(labels).tolist() == [[1, 2, IGNORED, 4, IGNORED], [7, 8, 9, IGNORED, 11]]
    assert texts.second_labels(labels).tolist() == [[2, IGNORED, IGNORED, IGNORED], [8, 9, IGNORED, IGNORED]]
    assert texts.count_labels(labels).tolist() == [7, 3]
