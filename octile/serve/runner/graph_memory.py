"""The memory in which the CUDA graphs of a model runner are captured."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch

T = TypeVar("T")


class GraphMemory:
    """A memory pool and a stream that all graphs of a runner share.

    Graphs run one after the other, so what one computes on its way lies where another's does. A result that is held
    after the capture has memory of its own among the results, but a later replay of another graph may overwrite it:
    it is read, or copied, before.

    Args:
        device: the model's GPU.
        priority: of the stream, lower numbers first: where graphs have branches, and some must not wait for others.
    """

    def __init__(self, device: torch.device, priority: int = 0):
        gc.collect()  # a graph of another runner that ended while one is captured would end the capture
        torch.cuda.empty_cache()
        self.device = device
        self._stream, self._pool = torch.cuda.Stream(device, priority), torch.cuda.graph_pool_handle()

    def capture(self, compute: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """Compute once, to compile and choose kernels, then capture it; return what replays it, and its result.

        A graph runs on the current stream. Other threads may use the GPU meanwhile.

        Raises:
            RuntimeError: it cannot be captured, or there is no memory for it.
        """
        with torch.no_grad(), torch.cuda.device(self.device), self._on_stream():
            compute()
            graph = torch.cuda.CUDAGraph()
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = compute()
                finally:
                    graph.capture_end()
            except BaseException:
                # torch refuses further captures in the pool of one that has failed
                self._pool = torch.cuda.graph_pool_handle()
                raise
        return graph.replay, result

    def capture_sizes(self, sizes: Sequence[int], step: Callable[[int], T]) -> dict[int, tuple[Callable[[], None], T]]:
        """Capture a step of each size, the largest first, whose memory the others use, too."""
        return {size: self.capture(partial(step, size)) for size in sorted(sizes, reverse=True)}

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Make the stream current; it and the stream that was wait for each other, also after an error."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)
