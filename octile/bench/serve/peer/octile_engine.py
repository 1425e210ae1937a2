"""octile's engine, as `engine_speed` drives it."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Hashable, Iterator
from itertools import count
from pathlib import Path

import torch

from octile.bench.serve.peer.engine_speed import EngineCase, Work, measure
from octile.serve.engine.config import CacheConfig, EngineConfig
from octile.serve.engine.engine import Engine
from octile.serve.engine.request import Sampling
from octile.serve.weights.load import Folder


class OctileEngine:
    """An engine of octile in this process.

    Args:
        engine: the engine.
    """

    def __init__(self, engine: Engine):
        self._engine, self._seeds = engine, count()

    def add(self, prompt: list[int], new_tokens: int) -> None:
        """Add a request."""
        sampling = Sampling(max_new_tokens=new_tokens, temperature=1.0, seed=next(self._seeds), ignore_eos=True)
        self._engine.add(prompt, sampling)

    @property
    def has_work(self) -> bool:
        """Whether a request is not finished."""
        return self._engine.has_work

    def step(self) -> dict[Hashable, int]:
        """Run a step.

        Raises:
            RuntimeError: a request failed.
        """
        tokens = Counter[Hashable]()
        for output in self._engine.step():
            if output.error is not None:
                raise RuntimeError(f"a request failed: {output.error}")
            tokens[output.request_id] += len(output.tokens)
        return dict(+tokens)


def engine_speeds(
    folder: Path,
    work: Work,
    device: torch.device,
    cache: CacheConfig = CacheConfig(),  # noqa: B008 - it is immutable
) -> Iterator[tuple[EngineCase, float]]:
    """Yield the cases and their tokens per second, of the engine that `octile serve` runs.

    Raises:
        FileNotFoundError, ValueError, MemoryError: as `octile.serve.weights.load.Folder`.
    """
    config = EngineConfig(max_batch=work.max_batch, max_step_tokens=work.step_tokens)
    engine, runner = Folder.open(folder).load(device, config, cache)
    try:
        yield from measure(OctileEngine(engine), work)
    finally:
        engine.close()
        del engine, runner
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # for the peer
