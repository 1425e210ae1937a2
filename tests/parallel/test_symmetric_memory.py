"""Which streams an exchange on symmetric memory waits for, with streams that only record it."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from octile.parallel import symmetric_memory
from octile.parallel.symmetric_memory import PeerMemory


class Stream:
    """A stream that records what it waits for."""

    def __init__(self, name: str = "exchange", is_capturing: bool = False):
        self.name, self.is_capturing, self.waits = name, is_capturing, []

    def wait_stream(self, other: "Stream") -> None:
        self.waits.append(other.name)


@pytest.fixture
def exchange_on(monkeypatch: pytest.MonkeyPatch):
    """Launch an exchange from a stream, and return which streams it waits for."""
    now = SimpleNamespace(stream=None)

    class On(nullcontext):
        def __init__(self, stream: Stream):
            self.stream = stream

        def __enter__(self) -> None:
            self.before, now.stream = now.stream, self.stream

        def __exit__(self, *of: object) -> None:
            now.stream = self.before

    memory = PeerMemory(None)
    monkeypatch.setattr(memory, "reserve", lambda n_bytes, device: None)
    own_stream = Stream()
    monkeypatch.setattr(symmetric_memory, "_stream", lambda device: own_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now.stream)
    monkeypatch.setattr(torch.cuda, "stream", On)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now.stream.is_capturing)

    def run(stream: Stream) -> list[str]:
        with On(stream), memory.exchange(8, torch.device("cuda", 0)):
            own = now.stream
        waits, own.waits = own.waits, []
        return waits

    return run


def test_an_exchange_waits_for_the_stream_that_reads_the_results_of_the_one_before(exchange_on):
    one, two = Stream("one"), Stream("two")
    assert exchange_on(one) == ["one"]
    assert exchange_on(one) == ["one"]
    assert exchange_on(two) == ["two", "one"]
    assert exchange_on(one) == ["one", "two"]


def test_an_exchange_that_is_captured_waits_only_for_streams_of_the_capture(exchange_on):
    eager, one, two = Stream("eager"), Stream("one", is_capturing=True), Stream("two", is_capturing=True)
    assert exchange_on(eager) == ["eager"]
    assert exchange_on(one) == ["one"]
    assert exchange_on(two) == ["two", "one"]
    assert exchange_on(eager) == ["eager"]
