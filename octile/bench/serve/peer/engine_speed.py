"""How fast an engine decodes and prefills, by the wall-clock time of its steps: the same measure for octile and vLLM.

decode     requests with prompts of one length decode together. A step counts if each of them gets one token in it and
           in the step before; its time is that between the ends of the two. The speed is that of the median of the
           first 32 of these steps.
prefill    prompts of one length, of each of which one token is chosen: from the beginning of the first step to the end
           of the last one, the median of 5 rounds.

Both include the scheduler, the model and the sampling, at temperature 1; requests are added before the time begins.
Prompts are random tokens, so that no cache of prefixes holds them.

As a script this file measures vLLM in an interpreter that has it, and that may lack octile: it imports nothing of it.

    python engine_speed.py '{"model": FOLDER, "work": {…}, "arguments": {…}}'

prints `{"started": true}` when the engine is there, and then a line for each result,
`{"case": [256, 1024, true], "speed": 23813.0}`. What vLLM prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import count, pairwise
from statistics import median
from typing import Any, NamedTuple, Protocol

STEPS = 32  # decode steps that are timed
ROUNDS, WARM_UP_ROUNDS = 5, 2  # of prefill
SPARE_STEPS = 8  # decode steps beyond those that are needed


class EngineCase(NamedTuple):
    """So many requests with prompts of so many tokens, which decode or are prefilled alone."""

    requests: int
    prompt: int
    decodes: bool


@dataclass(frozen=True)
class Work:
    """What an engine is measured with.

    Attributes:
        cases: the cases, in order.
        vocab_size: number of tokens of which prompts are made.
        max_batch: requests that run at once at most.
        step_tokens: tokens of a step at most.
    """

    cases: Sequence[EngineCase]
    vocab_size: int
    max_batch: int = 256
    step_tokens: int = 8192

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Work:
        """Make it of what JSON has."""
        return cls(**{**fields, "cases": [EngineCase(*case) for case in fields["cases"]]})

    @property
    def batches(self) -> list[int]:
        """The numbers of requests that decode."""
        return [case.requests for case in self.cases if case.decodes]

    @property
    def max_length(self) -> int:
        """Tokens of the longest request."""
        return max(case.prompt + self.new_tokens(case) for case in self.cases)

    def new_tokens(self, case: EngineCase) -> int:
        """The tokens of a request, which still decodes when the last prompts are prefilled and the steps are timed."""
        if not case.decodes:
            return 1
        # the tokens of those that decode are at most half of a step's, so that this many steps prefill all prompts
        return STEPS + SPARE_STEPS + 2 * -(-case.requests * case.prompt // self.step_tokens)


class SteppedEngine(Protocol):
    """An engine that is driven step by step."""

    def add(self, prompt: list[int], new_tokens: int) -> None:
        """Add a request for so many tokens, sampled at temperature 1, which no end-of-text token ends."""

    @property
    def has_work(self) -> bool:
        """Whether a request is not finished."""

    def step(self) -> Mapping[Hashable, int]:
        """Run a step, and return how many tokens each request has got."""


class Step(NamedTuple):
    """When a step ended, in seconds, and how many tokens each request got in it."""

    ended: float
    tokens: Mapping[Hashable, int]


def measure(engine: SteppedEngine, work: Work) -> Iterator[tuple[EngineCase, float]]:
    """Yield each case and its tokens per second.

    Raises:
        RuntimeError: the requests of a case did not decode together long enough.
    """
    for case in work.cases:
        chosen = random.Random(str(case))
        yield case, (_decode_speed if case.decodes else _prefill_speed)(engine, work, case, chosen)


def full_step_seconds(steps: Sequence[Step], requests: int) -> list[float]:
    """The times of the steps in which so many requests got one token each, as in the step before."""
    is_full = [len(step.tokens) == requests and set(step.tokens.values()) == {1} for step in steps]
    return [b.ended - a.ended for i, (a, b) in enumerate(pairwise(steps)) if is_full[i] and is_full[i + 1]]


def _decode_speed(engine: SteppedEngine, work: Work, case: EngineCase, chosen: random.Random) -> float:
    _add(engine, work, case.requests, min(64, case.prompt), 4, chosen)  # the kernels of this batch are compiled
    _run(engine)
    _add(engine, work, case.requests, case.prompt, work.new_tokens(case), chosen)
    _, steps = _run(engine)
    seconds = full_step_seconds(steps, case.requests)[:STEPS]
    if len(seconds) < STEPS:
        raise RuntimeError(f"a batch of {case.requests} decoded together in {len(seconds)} of {len(steps)} steps only")
    return case.requests / median(seconds)


def _prefill_speed(engine: SteppedEngine, work: Work, case: EngineCase, chosen: random.Random) -> float:
    seconds = []
    for _ in range(WARM_UP_ROUNDS + ROUNDS):
        _add(engine, work, case.requests, case.prompt, work.new_tokens(case), chosen)
        begin, steps = _run(engine)
        seconds.append(steps[-1].ended - begin)
    return case.requests * case.prompt / median(seconds[WARM_UP_ROUNDS:])


def _add(engine: SteppedEngine, work: Work, requests: int, prompt: int, new_tokens: int, chosen: random.Random) -> None:
    for _ in range(requests):
        engine.add(chosen.choices(range(work.vocab_size), k=prompt), new_tokens)


def _run(engine: SteppedEngine) -> tuple[float, list[Step]]:
    """Run all steps, and return when the first began, and those that returned tokens."""
    steps, begin = list[Step](), time.perf_counter()
    while engine.has_work:
        if tokens := engine.step():
            steps.append(Step(time.perf_counter(), tokens))
    return begin, steps


class VllmEngine:
    """vLLM's engine in this process, written for vLLM 0.26.

    Args:
        model: Hugging Face folder.
        work: what it will be measured with; CUDA graphs are captured for its batches.
        arguments: further arguments of `vllm.LLM`.
    """

    def __init__(self, model: str, work: Work, arguments: Mapping[str, Any]):
        vllm = import_module("vllm")
        self._sampling = vllm.SamplingParams
        self._delta = import_module("vllm.sampling_params").RequestOutputKind.DELTA
        self._engine = vllm.LLM(
            model=model,
            skip_tokenizer_init=True,
            max_model_len=work.max_length,
            max_num_seqs=work.max_batch,
            max_num_batched_tokens=work.step_tokens,
            enable_prefix_caching=False,
            compilation_config={"cudagraph_capture_sizes": sorted(work.batches)},
            **arguments,
        ).llm_engine
        self._ids = count()

    def add(self, prompt: list[int], new_tokens: int) -> None:
        """Add a request."""
        sampling = self._sampling(
            temperature=1.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False, output_kind=self._delta
        )
        self._engine.add_request(str(next(self._ids)), {"prompt_token_ids": prompt}, sampling)

    @property
    def has_work(self) -> bool:
        """Whether a request is not finished."""
        return bool(self._engine.has_unfinished_requests())

    def step(self) -> dict[Hashable, int]:
        """Run a step."""
        counts = {output.request_id: len(output.outputs[0].token_ids) for output in self._engine.step()}
        return {request: tokens for request, tokens in counts.items() if tokens}


def request_line(model: str, work: Work, arguments: Mapping[str, Any]) -> str:
    """Return the argument of this script."""
    return json.dumps({"model": model, "work": asdict(work), "arguments": dict(arguments)})


def main(request: str) -> None:
    """Measure vLLM, and print a line for each result."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    asked = json.loads(request)
    work = Work.of(asked["work"])
    with os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8") as results:  # each line is written at once
        os.dup2(2, 1)
        engine = VllmEngine(asked["model"], work, asked["arguments"])
        print(json.dumps({"started": True}), file=results)
        for case, speed in measure(engine, work):
            print(json.dumps({"case": case, "speed": speed}), file=results)


def _end_with_parent() -> None:
    """End this process when the one that started it has: the pipe to standard input is closed then."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os._exit(1)


if __name__ == "__main__":
    own = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != own]  # it has a module of octile's that is named vllm
    main(sys.argv[1])
