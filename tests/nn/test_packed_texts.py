"""Tests of packed texts: borders, positions, and which labels count."""

import torch
from torch import Tensor

from octile.nn.packed_texts import PackedTexts, TextStatistics
from octile.ops.cross_entropy import IGNORED

FIRST = torch.tensor([[1, 0, 0, 1, 0, 1], [0, 0, 0, 0, 1, 0]]).bool()  # the first of a sequence counts in any case


def borders(is_first: Tensor, max_texts: int) -> list[int]:
    return PackedTexts(is_first, TextStatistics(max_texts, 2)).borders().cu_seqlens.tolist()


def test_positions_begin_anew_in_each_text():
    assert PackedTexts(FIRST).positions().tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 1]]


def test_borders_are_filled_up_with_empty_texts():
    assert borders(FIRST, 4) == [0, 3, 5, 6, 10, 12, 12, 12, 12]


def test_borders_have_room_for_as_many_texts_as_are_announced():
    assert borders(FIRST[:1], 3) == [0, 3, 5, 6]


def test_borders_have_the_mean_length_of_all_texts_or_none_if_it_is_unknown():
    texts = PackedTexts(FIRST, TextStatistics(4, 300))
    assert texts.borders().mean_seqlen == texts.without_last().borders().mean_seqlen == 300
    assert PackedTexts(FIRST).borders().mean_seqlen is None


def test_no_label_is_predicted_from_another_text():
    labels = torch.arange(12).view(2, 6)
    texts = PackedTexts(FIRST)
    assert texts.next_labels(labels).tolist() == [[1, 2, IGNORED, 4, IGNORED], [7, 8, 9, IGNORED, 11]]
    assert texts.second_labels(labels).tolist() == [[2, IGNORED, IGNORED, IGNORED], [8, 9, IGNORED, IGNORED]]
    assert texts.count_labels(labels).tolist() == [7, 3]
