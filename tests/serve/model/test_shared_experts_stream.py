"""The stream on which shared experts are computed: which streams wait for which, and who leaves SMs free."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from octile.kernels.cuda.gemm import num_sms
from octile.serve.model import shared_experts_stream

GPU = torch.device("cuda", 0)


class Stream:
    """A CUDA stream that records what it waits for."""

    def __init__(self, name: str, events: list[str]):
        self.name, self.events = name, events

    def wait_stream(self, other: "Stream") -> None:
        self.events.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the streams of a GPU with 132 SMs wait for, and where something is computed."""
    happened: list[str] = []
    now: Any = SimpleNamespace(stream=Stream("main", happened))

    class On(nullcontext[None]):
        def __init__(self, stream: Stream):
            self.stream = stream

        def __enter__(self) -> None:
            self.before, now.stream = now.stream, self.stream
            happened.append(f"on {now.stream.name}")

        def __exit__(self, *of: object) -> None:
            now.stream = self.before
            happened.append(f"on {now.stream.name}")

    side = Stream("side", happened)
    monkeypatch.setattr(shared_experts_stream, "_stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now.stream)
    monkeypatch.setattr(torch.cuda, "stream", On)
    monkeypatch.setattr(num_sms, "multiprocessors", lambda device: 132)
    return happened


def test_a_result_is_computed_after_the_current_streams_work_and_waited_for_by_it(events: list[str]):
    left: list[int] = []

    def compute() -> Tensor:
        left.append(num_sms.left_free)
        events.append("computed")
        return torch.ones(2)

    result = shared_experts_stream.begin(compute, GPU)
    assert events == ["side waits for main", "on side", "computed", "on main"]
    assert torch.equal(result.wait(), torch.ones(2))
    assert events[4:] == ["main waits for side"]
    assert (left, num_sms.left_free) == ([66], 0)


def test_gemms_get_their_sms_back_after_an_error(events: list[str]):
    def fail() -> Tensor:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        shared_experts_stream.begin(fail, GPU)
    assert num_sms.left_free == 0
    assert events[-1] == "on main"


def test_a_cpu_has_no_stream(events: list[str]):
    result = shared_experts_stream.begin(lambda: torch.ones(2), torch.device("cpu"))
    assert torch.equal(result.wait(), torch.ones(2))
    assert events == []
