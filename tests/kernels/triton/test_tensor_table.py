"""Tests of the table of tensors: its words, its groups, and the pinned memory from which CUDA graphs copy it."""

import pytest
import torch

from octile.kernels.triton import tensor_table
from octile.kernels.triton.tensor_table import tables


def test_the_words_of_a_table():
    weights, gradients = ([torch.empty(size) for size in (5, 0, 4)] for _ in range(2))
    (table,) = tables([weights, [], gradients], elements=4)
    starts, rows = table.words[:2], table.words[2:].view(2, 4)
    assert starts.tolist() == [0, 2]
    assert rows.tolist() == [
        [t.numel(), i, t.data_ptr(), gradients[i].data_ptr()] for i, t in enumerate(weights) if i != 1
    ]
    assert (table.tensors, table.programs, table.steps) == (2, 3, 1)
    assert table.dtypes == (torch.float32, None, torch.float32)


def test_tensors_of_other_dtypes_and_alignments_have_their_own_tables():
    tensors = [torch.empty(8), torch.empty(8).bfloat16(), torch.empty(9)[1:], torch.empty(8)]
    found = [(table.dtypes[0], table.is_aligned, table.tensors) for table in tables([tensors], elements=4)]
    assert found == [(torch.float32, True, 2), (torch.bfloat16, True, 1), (torch.float32, False, 1)]


def test_no_elements_need_no_table():
    assert list(tables([[torch.empty(0, 3)]], elements=4)) == []


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> tensor_table._PinnedForGraphs:
    """Ordinary memory in place of pinned memory, which needs a GPU."""
    monkeypatch.setattr(tensor_table, "PINNED_WORDS", 8)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory, **kwargs: empty(*args, **kwargs))
    return tensor_table._PinnedForGraphs()


def test_every_table_of_a_graph_keeps_its_memory(pinned: tensor_table._PinnedForGraphs):
    carved = []
    for i in range(20):
        pinned.reserve(3)
        carved.append(pinned.carve((i, i, i)))
    assert torch.stack(carved).tolist() == [[i] * 3 for i in range(20)]


def test_a_capture_without_a_step_before_it_is_refused(pinned: tensor_table._PinnedForGraphs):
    with pytest.raises(RuntimeError, match="run the step at least once before its capture"):
        pinned.carve((1, 2))
