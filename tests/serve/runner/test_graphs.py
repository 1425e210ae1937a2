"""Tests of the capture of CUDA graphs, with a stand-in for CUDA."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.jit.launch import overlaps
from octile.nn.interleave import run_interleaved
from octile.serve.model.forward import Forward
from octile.serve.runner.graphs import GraphMemory, PrefillGraphs, graph_rows, padded_rows
from octile.serve.runner.model_runner import ModelRunner
from octile.serve.runner.step import Step
from tests.serve.models import Texts, new_model, text


class Stream:
    def __init__(self, name: object, events: list[Any]):
        self.name, self.events = str(name), events

    def wait_stream(self, other: "Stream"):
        self.events.append((self.name, other.name))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    class Graph:
        def capture_begin(self, pool: object, capture_error_mode: str):
            found.append(("begin", pool, capture_error_mode))

        def capture_end(self):
            found.append("end")

        def replay(self):
            found.append("replay")

    cuda = torch.cuda
    monkeypatch.setattr(cuda, "Stream", lambda device, priority: Stream("own", found))
    monkeypatch.setattr(cuda, "current_stream", lambda device=None: Stream(device, found))
    pools = iter(("pool", "new pool"))
    monkeypatch.setattr(cuda, "graph_pool_handle", lambda: next(pools))
    for name in ("stream", "device"):
        monkeypatch.setattr(cuda, name, lambda _: nullcontext())
    monkeypatch.setattr(cuda, "CUDAGraph", Graph)
    return found


BEGIN = "begin", "pool", "thread_local"


def test_a_graph_is_captured_between_the_streams_of_the_models_device(events):
    replay, result = GraphMemory(torch.device("cuda:1")).capture(lambda: events.append("compute") or 5)
    assert result == 5
    assert events == [("own", "cuda:1"), "compute", BEGIN, "compute", "end", ("cuda:1", "own")]
    replay()
    assert events[-1] == "replay"


def test_kernels_of_a_graph_may_start_before_the_previous_one_has_ended_also_those_of_two_micro_batches(events):
    found = []

    def look():
        found.append(overlaps())

    GraphMemory(torch.device("cuda:0")).capture(lambda: run_interleaved(look, look))
    look()
    assert found == [True] * 4 + [False]


@pytest.mark.parametrize("calls", [0, 1], ids=["before", "in"])
def test_streams_wait_for_each_other_after_a_capture_that_fails(events, calls):
    def fail():
        if events.count("compute") == calls:
            raise RuntimeError("out of memory")
        events.append("compute")

    with pytest.raises(RuntimeError, match="out of memory"):
        GraphMemory(torch.device("cuda:1")).capture(fail)
    assert events[-1] == ("cuda:1", "own")
    assert events.count(BEGIN) == events.count("end") == calls


def test_the_largest_size_is_captured_first_and_all_share_a_pool(events):
    captured = GraphMemory(torch.device("cuda:0")).capture_sizes([1, 2, 3], lambda size: 10 * size)
    assert [(size, result) for size, (_, result) in captured.items()] == [(3, 30), (2, 20), (1, 10)]
    assert events.count(BEGIN) == 3


def test_a_capture_after_one_that_failed_has_another_pool(events):
    """torch refuses captures in the pool of a failed one."""
    memory = GraphMemory(torch.device("cuda:0"))
    calls = iter((None, RuntimeError("out of memory")))

    def fail():
        if (error := next(calls)) is not None:
            raise error

    with pytest.raises(RuntimeError, match="out of memory"):
        memory.capture(fail)
    memory.capture(lambda: 5)
    assert [event[1] for event in events if event[0] == "begin"] == ["pool", "new pool"]


@pytest.mark.parametrize(("n", "rows"), [(1, 256), (256, 256), (257, 512), (2048, 2048), (2049, 3072), (8192, 8192)])
def test_rows_are_padded(n, rows):
    assert padded_rows(n) == rows


@pytest.mark.parametrize(
    ("max_rows", "rows"), [(1, [256]), (300, [256, 512]), (2048, [*range(256, 2049, 256)])], ids=str
)
def test_all_numbers_of_padded_rows_have_graphs(max_rows, rows):
    assert graph_rows(max_rows) == rows
    assert graph_rows(8192) == [*range(256, 2049, 256), *range(3072, 8193, 1024)]
    assert graph_rows(max_rows) == sorted({padded_rows(n) for n in range(1, max_rows + 1)})


@pytest.mark.one_case
@pytest.mark.parametrize("fp8", [False, True])
def test_logits_are_those_of_the_forward_pass(fp8):
    found = []
    for captured in (False, True):
        runner = ModelRunner(new_model(fp8), 32)
        if captured:
            runner.prefill_graphs = PrefillGraphs(runner.forward, None, 2048)
        texts = Texts(runner, [text(200, seed=i) for i in range(3)])
        for sizes in ((90, 30, 0), (1, 100, 90), (40, 1, 40)):  # prompts alone, and next to a token that is decoded
            texts.run(*sizes)
        found.append(torch.cat(texts.logits))
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-3)


@pytest.mark.one_case
@pytest.mark.parametrize("fp8", [False, True])
def test_in_batch_invariant_mode_graphs_have_the_bits_of_the_forward_pass(fp8):
    found = []
    for captured in (False, True):
        runner = ModelRunner(new_model(fp8), 32, batch_invariant=True)
        if captured:
            runner.prefill_graphs = PrefillGraphs(runner.forward, None, 2048)
        texts = Texts(runner, [text(200, seed=i) for i in range(3)])
        for sizes in ((90, 30, 0), (1, 100, 90), (40, 1, 40)):
            texts.run(*sizes)
        found.append(torch.cat(texts.logits))
    assert torch.equal(found[1], found[0])


def logits(*sizes: tuple[int, ...], graphs: type[PrefillGraphs] | None) -> tuple[Tensor, ModelRunner]:
    runner = ModelRunner(new_model(False), 64)
    if graphs is not None:
        runner.prefill_graphs = graphs(runner.forward, None, 768)
    texts = Texts(runner, [text(500, seed=i) for i in range(3)])
    for step in sizes:
        texts.run(*step)
    return torch.cat(texts.logits), runner


class WarmedUp(PrefillGraphs):
    """Computes what it captures once, as on a GPU."""

    def _record(self, compute: Callable[[], None]) -> Callable[[], None]:
        compute()
        return compute


SIZES = (90, 30, 20), (300, 0, 90), (40, 1, 40), (30, 400, 200)  # 256, 512, 256 and 768 rows


def test_graphs_of_all_numbers_of_rows_share_buffers_and_write_nothing_when_captured():
    found, runner = logits(*SIZES, graphs=WarmedUp)
    torch.testing.assert_close(found, logits(*SIZES, graphs=None)[0], rtol=1e-3, atol=1e-3)
    graphs = runner.prefill_graphs._graphs
    assert [*graphs] == [768, 512, 256]  # the largest is captured first
    assert len({of_size._buffers.q.data_ptr() for of_size in graphs.values()}) == 1


def test_a_step_that_no_graph_has_room_for_is_computed_without_one():
    found, runner = logits((500, 450, 0), graphs=WarmedUp)
    assert 1024 not in runner.prefill_graphs._graphs
    assert torch.equal(found, logits((500, 450, 0), graphs=None)[0])


def test_steps_that_only_decode_have_graphs_of_prompts_if_decoding_has_none():
    decoded = []

    class Counting(WarmedUp):
        def hidden(self, step: Step, at_least: int = 0) -> Tensor:
            decoded.append(len(step.lengths))
            return super().hidden(step, at_least)

    steps = (90, 30, 0), (1, 5, 3)
    found, _ = logits(*steps, graphs=Counting)
    assert decoded == [0, 9]
    torch.testing.assert_close(found, logits(*steps, graphs=None)[0], rtol=1e-3, atol=1e-3)


def test_steps_of_more_decode_rows_than_decoding_has_graphs_for_have_those_of_prompts():
    runner = ModelRunner(new_model(False), 64)
    runner.prefill_graphs = WarmedUp(runner.forward, None, 768)
    runner.graphs, runner._max_rows = SimpleNamespace(run=None), 8  # which nine rows would not call
    texts = Texts(runner, [text(500, seed=i) for i in range(3)])
    texts.run(90, 30, 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Forward, "hidden", lambda *_: pytest.fail("computed without a graph"))
        texts.run(1, 5, 3)
    torch.testing.assert_close(
        torch.cat(texts.logits), logits((90, 30, 0), (1, 5, 3), graphs=None)[0], rtol=1e-3, atol=1e-3
    )


def failing(tried: list[Callable[[], None]]) -> type[PrefillGraphs]:
    """Graphs that have no memory; what was to be captured is appended."""

    class Failing(PrefillGraphs):
        def _record(self, compute: Callable[[], None]) -> Callable[[], None]:
            tried.append(compute)
            raise torch.OutOfMemoryError("CUDA out of memory")

    return Failing


def test_a_failed_capture_is_said_once_and_not_tried_again():
    tried = []
    with pytest.warns(RuntimeWarning, match="rows are computed without .* captured: CUDA out of memory") as said:
        found, runner = logits(*SIZES[:1], graphs=failing(tried))
    assert len(said) == len(tried) == 3  # of 768, 512 and 256 rows
    assert torch.equal(found, logits(*SIZES[:1], graphs=None)[0])
    with warnings.catch_warnings(action="error"):
        Texts(runner, [text(200)]).run(90)
    assert len(tried) == 3


def test_a_failed_capture_ends_the_start_of_a_rank_that_exchanges_rows():
    forward, tried = ModelRunner(new_model(False), 64).forward, []
    exchanging = forward.with_feed_forward(dispatcher=SimpleNamespace(exchanges=True))
    with pytest.raises(RuntimeError, match=r"of 768 rows could not be .* on this rank.*: CUDA out of memory"):
        failing(tried)(exchanging, None, 768)
    assert len(tried) == 1
