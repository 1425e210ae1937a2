"""An engine without a model, which repeats the prompt: for tests of what is around an engine."""

import re
import threading
import time
from collections.abc import Sequence
from itertools import islice
from math import ceil
from multiprocessing import Pipe

from octile.serve.engine.request import FinishReason, Output, Request, Sampling, TokenLogprobs
from octile.serve.engine.stats import Stats
from octile.serve.engine.text import MARK
from octile.serve.process.client import EngineClient
from octile.serve.process.server import EngineServer, StepEngine
from octile.serve.process.updates import WeightsUpdates
from octile.tokenizer import Tokenizer

NAN = 99


class FakeEngine:
    """Generates the prompt's tokens again and again, one per request and step.

    Args:
        tokenizer: for texts.
        step_seconds: time of a step.
        max_position: the context.
        n_pages: pages of 64 positions.
        fails_after: the step that raises an exception; None if none does.
        answer: texts of the tokens that it generates instead, before it stops; names of tokens in it are these tokens.

    Attributes:
        may_step: steps wait until it is set, as it is at first.

    A request whose prompt ends with NAN fails alone, at its third token.
    """

    PREFILL_SECONDS = 1e-9  # that its outputs name
    idle_seconds: float | None = None

    def __init__(
        self,
        tokenizer: Tokenizer,
        step_seconds: float = 0.0,
        max_position: int = 4096,
        n_pages: int = 4096,
        fails_after: int | None = None,
        answer: Sequence[str] | None = None,
    ):
        self.tokenizer, self.max_position = tokenizer, max_position
        self.step_seconds, self.n_pages, self.fails_after = step_seconds, n_pages, fails_after
        self.answer = answer
        self.may_step = threading.Event()
        self.may_step.set()
        self.requests: dict[int, Request] = {}
        self.samplings: list[Sampling] = []  # of all requests
        self.added = self.finished = self.canceled = self.steps = self.generated = self.prompt_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def submit(self, request: Request) -> None:
        self.requests[request.id] = request
        self.samplings.append(request.sampling)
        self.added += 1
        self.prompt_tokens += len(request.prompt)

    def cancel(self, request_id: int) -> bool:
        was_there = self.requests.pop(request_id, None) is not None
        self.canceled += was_there
        return was_there

    def step(self) -> list[Output]:
        self.may_step.wait()
        time.sleep(self.step_seconds)
        if self.steps == self.fails_after:
            raise RuntimeError("a kernel has failed")
        self.steps += 1
        outputs = [self._next(request) for request in self.requests.values()]
        for output in outputs:
            if output.finish_reason:
                del self.requests[output.request_id]
                self.finished += 1
        return outputs

    def close(self) -> None:
        self.requests.clear()

    def stats(self) -> Stats:
        return Stats(
            running=len(self.requests),
            n_pages=self.n_pages,
            used_pages=sum(self.pages_of(len(request.tokens)) for request in self.requests.values()),
            steps=self.steps,
            requests=self.added,
            finished=self.finished,
            canceled=self.canceled,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated,
            drafted_tokens=2 * self.generated,
            accepted_tokens=self.generated,
        )

    def wake(self) -> None:
        pass

    @staticmethod
    def pages_of(positions: int) -> int:
        return ceil(positions / 64)

    def _next(self, request: Request) -> Output:
        sampling, index = request.sampling, request.n_generated
        token = request.prompt[index % len(request.prompt)]
        request.tokens.append(token)
        self.generated += 1
        text, logprobs = self.tokenizer.decode([token]), ()
        if sampling.logprobs is not None:
            logprobs = (TokenLogprobs(token, -0.5, ((token, -0.5),) * min(sampling.logprobs, 1), 1),)
        reason = FinishReason.LENGTH if index + 1 == sampling.max_new_tokens else None
        if request.prompt[-1] == NAN and index == 2:
            return Output(request.id, finish_reason=FinishReason.ERROR, error="the model's logits are NaN")
        if self.answer is not None:
            text = self._answer(sampling)[index]
            reason = FinishReason.STOP if index + 1 == len(self.answer) else reason
        if any(stop in text for stop in sampling.stop):
            text, reason = "", FinishReason.STOP
        return Output(request.id, (token,), text, logprobs, reason, prefill_seconds=self.PREFILL_SECONDS)

    def _answer(self, sampling: Sampling) -> list[str]:
        """The pieces of the answer, with a mark before the names of shown tokens, as `TextStream` has it."""
        text = "".join(self.answer)
        for token in sampling.shown_tokens:
            name = self.tokenizer.decode([token])
            text = text.replace(name, MARK + name)
        characters = iter(re.findall(f"{MARK}?.", text, re.DOTALL))
        return ["".join(islice(characters, len(piece))) for piece in self.answer]


class Pair:
    """An engine that a server steps in a thread, and its client, which an event loop of this process may start."""

    def __init__(self, engine: StepEngine, updates: WeightsUpdates | None = None):
        self.engine = engine
        connection, other = Pipe()
        self.server, self.client = EngineServer(engine, connection, updates), EngineClient(other, engine.stats())
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()

    def join(self) -> None:
        """Wait for the server's end, which the client's brings about."""
        self.thread.join(30)
        assert not self.thread.is_alive()
