"""Tests of the graphs of attention in steps with prompts; on a CPU they compute what a GPU captures."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octile.serve.runner import graphs as graphs_module
from octile.serve.runner.attention_graphs import AttentionGraphs, decode_sizes
from octile.serve.runner.graphs import PrefillGraphs, graph_rows
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.runner.step import Step
from tests.serve.models import CONFIG, Texts, new_model, text

N_LAYERS = CONFIG.num_hidden_layers
Sizes = Sequence[tuple[int, ...]]


class Counting(AttentionGraphs):
    """Counts what the graphs replay of each step, by `attend` and `decompress`."""

    counts: list[tuple[int, int]]

    def for_decode_rows(self, step: Step):
        self.counts.append((0, 0))
        return self._counted(super().for_decode_rows(step), 0)

    def for_positions(self, step: Step):
        return self._counted(super().for_positions(step), 1)

    def _counted(self, replays: Sequence[Callable[[], None]] | None, kind: int):
        def count(replay: Callable[[], None]) -> None:
            found = [*self.counts[-1]]
            found[kind] += 1
            self.counts[-1] = (found[0], found[1])
            replay()

        return replays and [lambda replay=replay: count(replay) for replay in replays]


def logits(sizes: Sizes, has_graphs: bool, monkeypatch: pytest.MonkeyPatch, **settings: object) -> Tensor:
    """The logits of texts of which a runner reads so many tokens in each step."""
    runner = ModelRunner(new_model(False, **settings), 64)
    if has_graphs:
        monkeypatch.setattr(graphs_module, "AttentionGraphs", Counting)
        monkeypatch.setattr(Counting, "counts", [], raising=False)
        runner.prefill_graphs = PrefillGraphs(runner.forward, None, 512, max_decode_rows=3)
    texts = Texts(runner, [text(500, seed=i) for i in range(3)])
    for of_step in sizes:
        texts.run(*of_step)
    return torch.cat(texts.logits)


MIXED = (90, 30, 20), (1, 100, 90)


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("sizes", "counts"),
    [
        ([(90, 30, 20)], [(0, 0)]),  # no row decodes, and all texts begin
        (MIXED, [(0, 0), (N_LAYERS, N_LAYERS)]),
        ([(90, 30, 0), (1, 1, 40)], [(0, 0), (N_LAYERS, 0)]),  # two rows decode, and a text begins
        ([(90, 30, 20), (3, 0, 40)], [(0, 0), (0, N_LAYERS)]),  # no graph has three rows, which a GPU would pad
        ([(90, 30, 20), (4, 0, 40)], [(0, 0), (N_LAYERS, N_LAYERS)]),
        ([(90, 30, 20), (8, 8, 40)], [(0, 0), (0, N_LAYERS)]),  # more rows than graphs have
    ],
    ids=str,
)
def test_steps_with_graphs_of_attention_have_the_logits_of_steps_without(
    sizes: Sizes, counts: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
):
    found = logits(sizes, True, monkeypatch)
    assert Counting.counts == counts
    torch.testing.assert_close(found, logits(sizes, False, monkeypatch), rtol=1e-3, atol=1e-3)


def test_more_positions_than_graphs_have_are_read_without_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(graphs_module, "POSITIONS", 256)
    sizes = (200, 150, 40), (0, 150, 90), (100, 150, 0)  # 430 positions, then 750; graphs have 512, the rows of a step
    found = logits(sizes, True, monkeypatch)
    assert Counting.counts == [(0, 0), (0, N_LAYERS), (0, 0)]
    torch.testing.assert_close(found, logits(sizes, False, monkeypatch), rtol=1e-3, atol=1e-3)


def test_stale_pages_of_longer_texts_are_not_attended_to(monkeypatch: pytest.MonkeyPatch):
    sizes = (400, 9, 0), (1, 0, 30), (0, 1, 30)  # the second decode row has fewer pages than the first had
    found = logits(sizes, True, monkeypatch)
    assert [count[0] for count in Counting.counts] == [0, N_LAYERS, N_LAYERS]
    torch.testing.assert_close(found, logits(sizes, False, monkeypatch), rtol=1e-3, atol=1e-3)


def test_there_is_room_for_the_positions_of_each_graph_whatever_number_of_rows_ranks_share():
    forward = ModelRunner(new_model(False), 64).forward
    for rows in (256, 513, 4096, 8193):  # 513 and 8,193 are multiples of three
        n = len(graphs_module._Buffers.make(forward, rows).kv_LY)
        assert n == max(graph_rows(n)) >= rows


def test_in_batch_invariant_mode_attention_has_no_graphs():
    runner = ModelRunner(new_model(False), 64, batch_invariant=True)
    assert PrefillGraphs(runner.forward, None, 256, max_decode_rows=4).max_positions == 0


def test_a_capture_that_fails_is_a_warning(monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    runner = ModelRunner(new_model(False), 64)
    monkeypatch.setattr(graphs_module, "AttentionGraphs", fail)
    with pytest.warns(
        RuntimeWarning,
        match="cached positions of steps with prompts are computed without CUDA graphs, .*: out of memory",
    ):
        runner.prefill_graphs = PrefillGraphs(runner.forward, None, 512, max_decode_rows=4)
    monkeypatch.undo()
    texts = Texts(runner, [text(500, seed=i) for i in range(3)])
    for sizes in MIXED:
        texts.run(*sizes)
    torch.testing.assert_close(torch.cat(texts.logits), logits(MIXED, False, monkeypatch), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("rows", "sizes"), [(0, []), (1, [1]), (3, [1, 2, 4]), (256, [1, 2, 4, 8, 16, 32, 64, 128, 256])]
)
def test_decode_rows_have_graphs_of_powers_of_two(rows: int, sizes: list[int]):
    assert decode_sizes(rows) == sizes


def test_queries_without_a_compression_are_those_of_the_joined_weight(monkeypatch: pytest.MonkeyPatch):
    """Their rows have other columns after them, so graphs read every few."""
    config = replace(CONFIG, q_lora_rank=None)
    found = logits(MIXED, True, monkeypatch, config=config)
    assert Counting.counts[-1] == (N_LAYERS, N_LAYERS)
    torch.testing.assert_close(found, logits(MIXED, False, monkeypatch, config=config), rtol=1e-3, atol=1e-3)
