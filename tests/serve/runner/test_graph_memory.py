"""Tests of the capture of CUDA graphs, with a stand-in for CUDA."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from octile.serve.runner.graph_memory import GraphMemory


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
