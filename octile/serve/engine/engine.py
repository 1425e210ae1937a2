"""The engine: many requests generate text with one model.

    engine = Engine(runner, tokenizer)
    request = engine.add(tokenizer.encode("def "), Sampling(max_new_tokens=20))
    while engine.has_work:
        for output in engine.step():
            print(output.text, end="")

A step is one forward pass over the tokens that the scheduler has chosen, the choice of the next tokens, and, if the
engine drafts, a pass of the multi-token prediction layer. The engine has no threads: who calls it decides when.
"""

from __future__ import annotations

import math
import time
from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from octile.ops.sample_tokens import ALL_MASKED, NOT_A_NUMBER, POSITIVE_INFINITY
from octile.serve.engine.config import EngineConfig, InFlight
from octile.serve.engine.draft_count import DraftCount, shared_count
from octile.serve.engine.drafts import Computed, Drafter, check_can_draft, count_accepted, usable_drafts
from octile.serve.engine.grammar import GrammarCompiler, GrammarError, Matcher
from octile.serve.engine.pages import PageAllocator
from octile.serve.engine.request import (
    FinishReason,
    Output,
    PromptLatents,
    Request,
    RequestFactory,
    Sampling,
    TokenLogprobs,
    check_id,
)
from octile.serve.engine.sampler import ChosenTokens, Row, choose_tokens, token_logprobs
from octile.serve.engine.scheduler import Scheduled, Scheduler
from octile.serve.engine.stats import Stats
from octile.serve.engine.text import TextStream
from octile.serve.runner.batch import Batch, Chunk, Decoded, DecodedTokens, DecodeRequest, Results, Runner
from octile.signals import held_interrupts
from octile.tokenizer import Tokenizer

NOT_FINITE = "the model's logits are not finite"  # how the errors of such requests begin
COMPILE_SECONDS = 0.01  # for which a step waits if all requests wait for their grammar
SCORED_ROWS = 256  # of prompts, whose logits are in memory at once
ENDED = Row(Sampling(temperature=0.0), 0, 0)  # of a request that has ended; its token is ignored
NO_TOKEN_WORDS = {NOT_A_NUMBER: "NaN", POSITIVE_INFINITY: "+Inf", ALL_MASKED: "-Inf for all tokens"}


class _DecodeStep(NamedTuple):
    """A decode step that is launched.

    Attributes:
        requests: its requests.
        verified: how many drafts of each it verifies.
        n_drafts: how many it makes for each.
        tokens: what is chosen.
        choice: the choice of all rows, if the step was a `_LogitsStep`; None: it chooses its tokens itself.
    """

    requests: list[Request]
    verified: list[int]
    n_drafts: int
    tokens: DecodedTokens
    choice: ChosenTokens | None = None


class _LogitsStep(NamedTuple):
    """A decode step with drafts that is launched up to its logits.

    Its tokens are chosen once those of the step before are known: some depend on their text, or have log-probabilities.

    Attributes:
        requests, verified, n_drafts: as in `_DecodeStep`.
        logits: what the runner computes.
    """

    requests: list[Request]
    verified: list[int]
    n_drafts: int
    logits: Tensor


class _LogitsPass(NamedTuple):
    """A forward pass of chunks that is launched, and whose tokens are not chosen.

    They are chosen later if that depends on the tokens of the pass before, which the host does not know yet, or if the
    host waits for each pass: while a prompt is scored, with drafts, or without `runs_ahead`.

    Attributes:
        scheduled: its requests, and how many tokens of each it computes.
        n_logits: for how many tokens of each, the last ones, there are logits.
        results: what the runner computes.
    """

    scheduled: Sequence[Scheduled]
    n_logits: Sequence[int]
    results: Results


class _ChosenPass(NamedTuple):
    """A forward pass whose tokens are chosen, or a decode step after which one is launched.

    Each request has a placeholder for its token.

    Attributes:
        choosing: the requests that get a token, and its position.
        chosen: the tokens.
    """

    choosing: Sequence[tuple[Request, int]]
    chosen: ChosenTokens | DecodedTokens


_Launched = _DecodeStep | _LogitsStep | _LogitsPass | _ChosenPass


class FirstToken(NamedTuple):
    """The first token after a prompt, and what else is known of the prompt.

    Attributes:
        token: the token.
        logprobs, prompt_logprobs: log-probabilities of it and of the prompt, if they were asked for.
        cached_tokens, prefill_seconds: as in `Output`.
    """

    token: int
    logprobs: TokenLogprobs | None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0
    prefill_seconds: float = 0.0


class Engine:
    """Generates the texts of many requests, a step at a time.

    Args:
        runner: the model's forward passes over a paged cache.
        tokenizer: decodes tokens to text, and names an end-of-text token; the runner names those of the model.
        config: how much is done at once.
        end_tokens: further end-of-text tokens, those of `generation_config.json`.

    Attributes:
        weights_version: how often `update_weights` has updated the weights.
        compiles_in_background: whether other requests run while the grammar of a request is compiled. Engines that must
            schedule the same requests in each step compile at once.
        runs_ahead: whether a forward pass of chunks is launched before the tokens of the step before are collected, and
            a decode step before those of the pass before it.

    Raises:
        ValueError: config asks for drafts, and the model has no multi-token prediction layer.
    """

    idle_seconds: float | None = None  # see `octile.serve.process.server.StepEngine`

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer,
        config: EngineConfig | None = None,
        end_tokens: Collection[int] = (),
    ):
        self.config = config or EngineConfig()
        check_can_draft(self.config.n_drafts, runner.can_draft, "engine.n_drafts")
        self._runner, self._tokenizer = runner, tokenizer
        self._end_tokens = frozenset((tokenizer.end, *runner.end_tokens, *end_tokens))
        self._pages = PageAllocator(runner.n_pages)
        self._scheduler = Scheduler(self._pages, runner.page_size, self.config)
        self._drafter: Drafter | None = None
        if self.config.n_drafts:
            self._drafter = Drafter(runner, self._scheduler, self._end_tokens)
        # then the engine chooses the tokens of decode steps whose requests need their text, or log-probabilities
        self._divides_steps = runner.runs_ahead and self._drafter is not None
        self._to_draft: tuple[list[Computed], Tensor] | None = None  # after `run`: its requests and hidden states
        self._in_flight: list[_Launched] = []  # steps that are launched and not collected, the oldest first
        self._outputs: list[Output] = []  # that no call has returned: an exception may have ended it
        self._adopted: list[tuple[Request, FirstToken]] = []  # since the last step
        self._grammars = GrammarCompiler(tokenizer, runner.vocab_size, self._end_tokens)
        self._compiling: dict[int, Future[Matcher]] = {}  # of requests that wait for their grammar
        self.compiles_in_background = True
        self.runs_ahead = runner.runs_ahead
        self._requests: dict[int, Request] = {}
        self._texts: dict[int, TextStream] = {}
        self._factory = RequestFactory(runner.vocab_size, runner.max_position)
        self._n_requests = self.weights_version = 0
        self._ended = Counter[FinishReason]()
        self._steps = self._steps_ahead = self._generated = self._drafted = self._accepted = 0

    @property
    def has_work(self) -> bool:
        """Whether requests wait or run, or a step has outputs."""
        return bool(self._requests or self._outputs)

    def add(self, prompt: Sequence[int], sampling: Sampling) -> Request:
        """Take in a request, which takes part from the next step on, and return it.

        Args:
            prompt: its tokens, the begin-of-text token included.
            sampling: how to continue it.

        Raises:
            ValueError: the prompt is empty, has a token that the model does not know, or does not fit into the model's
                context or the cache together with the new tokens; or a submitted request has the id of this one.
        """
        (request,) = self._factory.make(prompt, sampling)
        self.submit(request)
        return request

    def prepare_grammars(self) -> None:
        """Have the first request with a grammar not stop all others; see `GrammarCompiler.prepare`."""
        self._grammars.prepare()

    def submit(self, request: Request) -> None:
        """Add a request that a `RequestFactory` has made of this model, here or in another process.

        Raises:
            ValueError: a request that waits or runs has its id.
        """
        check_id(request, self._requests)
        self._n_requests += 1
        self._requests[request.id] = request
        if self.config.n_drafts:
            request.draft_count = DraftCount(self._step_costs)
        sampling = request.sampling
        self._texts[request.id] = TextStream(
            self._tokenizer, sampling.stop, sampling.skip_special_tokens, sampling.shown_tokens
        )
        if not sampling.grammar:
            self._scheduler.add(request)
            return
        self._compiling[request.id] = self._grammars.start(sampling.grammar)
        if not self.compiles_in_background:
            wait([self._compiling[request.id]])

    def adopt(self, request: Request, first: FirstToken, latents: PromptLatents) -> None:
        """Add a request whose prompt another engine of the same model has prefilled.

        The next step's outputs have its first token. If it is preempted, this engine prefills its prompt anew.

        Args:
            request: as the other engine has had it.
            first: what the other engine has chosen.
            latents: the latents of the prompt, in pages of as many positions.

        Raises:
            ValueError: a request that waits or runs has its id.
        """
        self.submit(request)
        if request.id in self._compiling:  # the grammar begins with the first token
            wait([self._compiling[request.id]])
        request.latents, request.prompt_logprobs = latents, [*first.prompt_logprobs]
        request.n_cached, request.admitted = first.cached_tokens, time.perf_counter() - first.prefill_seconds
        self._adopted.append((request, first))

    def get(self, request_id: int) -> Request | None:
        """Return a request that waits or runs; None if it has ended."""
        return self._requests.get(request_id)

    def cancel(self, request_id: int) -> bool:
        """End a request now and free its pages; no output follows. Say whether it was there: it may have ended."""
        request = self._requests.get(request_id)
        if request is not None:
            self._remove(request, FinishReason.CANCELED)
            self._outputs = [output for output in self._outputs if output.request_id != request_id]
        return request is not None

    def step(self) -> list[Output]:
        """Run one forward pass, and return what it adds to each request that has new tokens or ends.

        If the runner can, the next pass is launched before this one's tokens are collected, so that a GPU does not wait
        for the host. That is if all requests decode (`Runner.decode`), and otherwise if no prompt is scored.
        Where tokens depend on the text before them, as with a grammar or a penalty, they are chosen once that is
        known, while the GPU computes the logits.

        A Ctrl-C in the main thread takes effect at the end of a step, whose outputs come with those of the next call; a
        second one takes effect at once, and the requests are to be canceled then.
        """
        self._step()
        return self._take_outputs()

    def _take_outputs(self) -> list[Output]:
        """Return what steps have added to requests, once."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def _take_compiled(self) -> list[Output]:
        """Let requests join whose grammar is compiled; what ends those whose grammar cannot be.

        If nothing else is to be done, wait a little for them.
        """
        if len(self._compiling) == len(self._requests):
            wait(self._compiling.values(), COMPILE_SECONDS, FIRST_COMPLETED)
        outputs = []
        for request_id, compiled in [item for item in self._compiling.items() if item[1].done()]:
            request = self._requests[request_id]
            try:
                matcher = compiled.result()
            except Exception as error:  # of any kind: no text is generated without its grammar
                self._remove(request, FinishReason.ERROR)
                is_explained, is_own = isinstance(error, GrammarError | ImportError), isinstance(error, GrammarError)
                why = f"grammar: {error}" if is_explained else f"grammar: {type(error).__name__}: {error}"
                outputs.append(Output(request_id, finish_reason=FinishReason.ERROR, error=why, is_request_error=is_own))
            else:
                del self._compiling[request_id]
                request.matcher = matcher
                self._scheduler.add(request)
        return outputs

    def update_weights(self, in_flight: InFlight = "finish") -> list[Output]:
        """Go on with new weights, and return what that adds to requests.

        The runner must be made of `LiveWeights`, the weights that the model in training has now, or of
        `ReplaceableWeights` that have new ones. Cached prefixes of old weights are dropped. Requests that have not run
        begin with the new weights. `Output.weights_version` and `Request.weights_versions` say which weights have
        chosen which tokens.

        Args:
            in_flight: what becomes of requests that run or were preempted:
                "finish": they end first, with the old weights: this call runs all steps that it takes.
                "recompute": they keep their tokens; latents are computed anew with the new weights, as after a
                preemption. Each further token has the probability that the new weights give it after these.
                "continue": they keep their latents, too, and none is computed twice. Further tokens are chosen by the
                new weights over latents of old ones, which is the policy of neither.
                In both cases a prompt whose log-probabilities are asked for and that is not all prefilled is computed
                anew, so that they are those of one version.

        Raises:
            ValueError: in_flight is another one, the runner has other weights, or the new ones cannot be served
                (`LiveWeights.check`, `ReplaceableWeights.check`); nothing has changed then.
        """
        if in_flight not in get_args(InFlight):
            raise ValueError(f"in_flight must be one of {', '.join(get_args(InFlight))}, not {in_flight!r}")
        self._runner.check_weights()
        if in_flight == "finish":
            self._finish()
        self._update_weights(in_flight == "recompute")
        return self._take_outputs()

    @held_interrupts()
    def _update_weights(self, recomputes_all: bool) -> None:
        self._take_firsts()
        self._collect_all()
        for request in self._requests.values():
            request.prompt_logprobs.clear()
        running = self._scheduler.running.values()
        self._scheduler.recompute([request for request in running if recomputes_all or request.needs_prompt_logprobs])
        self._scheduler.forget_latents()
        self._runner.update_weights()
        self.weights_version += 1

    def _finish(self) -> None:
        """Step until no request runs, and admit none that has not run."""
        self.admit_new(False)
        try:
            while self.has_in_flight:
                self._step()
        finally:
            self.admit_new(True)

    def admit_new(self, admits: bool) -> None:
        """Choose whether steps admit requests that have not run before; at first they do."""
        self._scheduler.admits_new = admits

    @property
    def has_in_flight(self) -> bool:
        """Whether a request runs or was preempted."""
        return self._scheduler.has_in_flight

    def wake(self) -> None:
        """Do nothing: no step waits for a command."""

    def _first_outputs(self) -> list[Output]:
        """What other engines have chosen for the requests that were adopted since the last step."""
        adopted, self._adopted = self._adopted, []
        outputs = []
        for request, first in adopted:
            if request.finish_reason is None:
                logprobs = [] if first.logprobs is None else [first.logprobs]
                outputs.append(self._extend(request, 0, [first.token], 0, logprobs))
        return outputs

    def _take_firsts(self) -> None:
        """Let requests join whose grammar is compiled, and then those that another engine has prefilled."""
        if self._compiling:
            self._outputs += self._take_compiled()
        self._outputs += self._first_outputs()

    @held_interrupts()
    def _step(self) -> None:
        """Launch a step and the one after it, as far as they are not in flight and can be, and collect the first."""
        self._take_firsts()
        if len(self._in_flight) < 2:  # otherwise an exception has ended the wait for the first
            self._launch_steps()
        if self._in_flight:
            self._collect()
            self.draft()

    def _launch_steps(self) -> None:
        """Launch the first step, if it is not in flight, and the one after it, if that can be."""
        if not self._in_flight:
            self._in_flight += self._launch_first()
        elif isinstance(first := self._in_flight[0], _LogitsPass):
            self._in_flight[0] = self._choose(first)
        self._complete_first()
        if self._in_flight:
            self._in_flight += self._launch_after(self._in_flight[0])

    def _launch_first(self) -> Sequence[_Launched]:
        """Launch a step while none is in flight, if there is one."""
        if self._can_launch(None):
            return self._launch(None, self.n_drafts)
        return self._schedule_pass(None)

    def _complete_first(self) -> None:
        """Launch the rest of the first step in flight, if only its logits were launched.

        If choosing its tokens raises an exception, a pass is launched instead, whose tokens can be chosen one by one.
        """
        first = self._in_flight[0] if self._in_flight else None
        if isinstance(first, _LogitsStep):
            requests, verified, n_drafts, logits = first
            try:
                chosen = ChosenTokens(logits, self._rows_of_step(first))
            except Exception:  # of one row or several
                self._in_flight[:1] = self._schedule_pass(None)
            else:
                tokens = self._runner.decode_chosen(chosen.on_device)
                self._in_flight[0] = _DecodeStep(requests, verified, n_drafts, tokens, chosen)

    def _launch_after(self, first: _Launched) -> Sequence[_Launched]:
        """Launch a step after one in flight, if there is one and it needs nothing that the host does not know yet."""
        if isinstance(first, _LogitsPass | _LogitsStep):
            return []
        if self._decodes_next():
            return self._launch(first, self.n_drafts) if self._has_room_after(first) else []
        if not self._may_pass_ahead():
            return []
        if isinstance(first, _DecodeStep):
            first = self._in_flight[0] = _make_pass(first)
        return self._schedule_pass(first.chosen.on_device)

    def _may_pass_ahead(self) -> bool:
        """Whether a pass of chunks may be launched before the tokens of the step before are known."""
        waiting = self._scheduler.waiting
        if waiting and waiting[0].tokens[-1] < 0:  # it was preempted: no pass reads its tokens before they are known
            return False
        scores_prompt = any(request.needs_prompt_logprobs for request in self._scheduler.running.values())
        return self._goes_ahead and not scores_prompt

    @property
    def _goes_ahead(self) -> bool:
        """Whether tokens of passes are chosen before they are computed."""
        return self.runs_ahead and self._drafter is None

    @property
    def n_running(self) -> int:
        """How many requests run: a decode step has no more."""
        return len(self._scheduler.running)

    @property
    def n_drafts(self) -> int:
        """How many drafts the next decode step should make for each of the running requests."""
        if not self.config.n_drafts:
            return 0
        counts = [r.draft_count for r in self._scheduler.running.values() if r.draft_count is not None]
        return shared_count(counts, self._step_costs)

    @property
    def _step_costs(self) -> Sequence[float]:
        """The costs of the next decode step's drafts, of as many requests as run, or of one."""
        return self._runner.step_costs(max(1, self.n_running), self.config.n_drafts)

    @property
    def can_launch(self) -> bool:
        """Whether `launch` can be the next step: no request needs a pass of any chunks first."""
        return not self._requests or self._can_launch(self._in_flight[-1] if self._in_flight else None)

    def launch(self, n_drafts: int) -> list[Output]:
        """Launch a decode step of the running requests, if there are any, and collect the one launched before.

        Args:
            n_drafts: drafts that the step makes for each request: ranks that exchange rows make as many.
        """
        before = self._in_flight[-1] if self._in_flight else None
        if self._requests and len(self._in_flight) < 2:  # as in `_step`
            self._in_flight += self._launch(before, n_drafts)
        if before is not None:
            self._collect()
        return self._take_outputs()

    def schedule(self) -> tuple[list[Output], list[Scheduled]]:
        """Collect the decode step in flight, and choose the chunks of the next forward pass, which `run` runs."""
        if self._compiling:
            self._outputs += self._take_compiled()
        self._collect_all()
        return self._take_outputs(), self._scheduler.schedule()

    def run(self, scheduled: Sequence[Scheduled]) -> list[Output]:
        """Run a forward pass of chunks that were just scheduled, and collect what it has chosen; `draft` follows."""
        if scheduled:
            self._in_flight.append(self._launch_pass(scheduled, None))
            self._collect()
        return self._take_outputs()

    def _schedule_pass(self, chosen_before: Tensor | None) -> Sequence[_Launched]:
        """Launch a forward pass of any chunks, if there are some; chosen_before as in `_launch_pass`."""
        scheduled = self._scheduler.schedule()
        return [self._launch_pass(scheduled, chosen_before)] if scheduled else []

    def _launch_pass(self, scheduled: Sequence[Scheduled], chosen_before: Tensor | None) -> _LogitsPass | _ChosenPass:
        """Launch a forward pass of chunks that were just scheduled.

        Args:
            scheduled: at least one.
            chosen_before: the tokens of the pass before, if that is not collected.
        """
        self._steps += 1
        self._steps_ahead += chosen_before is not None
        chunks = [_chunk(s) for s in scheduled]
        continued = [request for request, _ in scheduled if request.tokens[-1] < 0]
        results = self._runner.run(Batch(chunks, chosen_before if continued else None))
        launched = _LogitsPass(scheduled, [chunk.n_logits for chunk in chunks], results)
        needs_text = any(request.sampling.changes_logits for request in continued)
        return launched if needs_text else self._choose(launched)

    def _choose(self, launched: _LogitsPass) -> _LogitsPass | _ChosenPass:
        """Choose the tokens of a pass, whose logits a GPU may not have computed yet.

        The pass is returned unchanged if the host waits for each one, or if choosing raises an exception.
        """
        scheduled, n_logits, results = launched
        if not self._goes_ahead or any(request.needs_prompt_logprobs for request, _ in scheduled):
            return launched
        try:
            chosen = ChosenTokens(results.logits, self._rows(launched))
        except Exception:  # of one row or several: `choose_tokens` finds which
            return launched
        choosing: list[tuple[Request, int]] = []
        for (request, n_tokens), n in zip(scheduled, n_logits, strict=True):
            end = request.n_computed + n_tokens
            if n:
                choosing.append((request, end))
            if request.finish_reason is not None:
                continue  # it has ended since the pass was launched
            if n_tokens == 1 and n:
                request.n_computed = end  # its page is shared when the token in it is known
            else:
                self._scheduler.advance(request, end)
            if n:
                request.tokens.append(-len(choosing))
        return _ChosenPass(choosing, chosen)

    def _rows(self, launched: _LogitsPass) -> list[Row]:
        """How the token after each row of logits is chosen. Rows of ended requests are greedy, and ignored."""
        rows: list[Row] = []
        for (request, _), n in zip(launched.scheduled, launched.n_logits, strict=True):
            if request.finish_reason is not None:
                rows += [ENDED] * n
            elif n:
                rows += self._rows_of(request, request.drafts)
        return rows

    def _rows_of_step(self, launched: _LogitsStep) -> list[Row]:
        """How the token after each row of a decode step is chosen. Rows that do not count are greedy, and ignored."""
        rows: list[Row] = []
        for i, (request, verified) in enumerate(zip(launched.requests, launched.verified, strict=True), 1):
            if request.finish_reason is None:
                rows += self._rows_of(request, request.drafts[: _n_verified(request, verified)])
            rows += [ENDED] * (i * (1 + launched.n_drafts) - len(rows))
        return rows

    def _rows_of(self, request: Request, drafts: Sequence[int]) -> list[Row]:
        """How the tokens after a request's last one and after each of some drafts are chosen."""
        length, texts = len(request.tokens), request.histories(self._end_tokens, drafts)
        return [Row(request.sampling, request.seed, length + i, text) for i, text in enumerate(texts)]

    def _collect_all(self) -> None:
        """Wait for all steps in flight, and add what they add to their requests to the outputs."""
        while self._in_flight:
            self._complete_first()
            if self._in_flight:
                self._collect()
            self.draft()

    def _collect(self) -> None:
        """Wait for the first step in flight, and add what it adds to its requests to the outputs.

        It stays in flight if an exception ends the wait, such as KeyboardInterrupt.
        """
        launched = self._in_flight[0]
        if isinstance(launched, _DecodeStep):
            self._outputs += self._collect_decoded(launched)
        elif isinstance(launched, _ChosenPass):
            self._outputs += self._collect_chosen(launched)
        else:
            assert isinstance(launched, _LogitsPass)  # a `_LogitsStep` is completed before
            self._outputs += self._collect_logits(launched)
        if not self._requests:
            self._in_flight.clear()

    def _collect_chosen(self, launched: _ChosenPass) -> list[Output]:
        """Wait for the tokens of a pass, and return what they add to its requests.

        These may already have a placeholder for the token after it.
        """
        choosing, chosen = launched
        found = chosen.wait() if isinstance(chosen, ChosenTokens) else [*map(_chosen, chosen.wait())]
        del self._in_flight[0]
        outputs: list[Output] = []
        for (request, end), (token, logprobs) in zip(choosing, found, strict=True):
            if request.finish_reason is not None:
                continue  # it has ended since the pass was launched
            later = request.tokens[end + 1 :]
            del request.tokens[end:]
            if token >= 0 and request.n_computed >= end:  # otherwise it was preempted
                self._scheduler.share(request, end - 1, end)
            outputs.append(self._extend(request, 0, [token], 0, _wanted([(token, logprobs)], request)))
            if request.finish_reason is None:
                request.tokens.extend(later)
        return outputs

    def _collect_logits(self, launched: _LogitsPass) -> list[Output]:
        """Choose the tokens of a pass, and return what they add to its requests."""
        results = launched.results
        tokens, logprobs, errors = choose_tokens(results.logits, self._rows(launched))
        wrong = self._score_prompts(launched.scheduled, results.hidden)
        del self._in_flight[0]
        outputs: list[Output] = []
        computed: list[Computed] = []
        n_rows = first = 0
        for (request, n_tokens), n in zip(launched.scheduled, launched.n_logits, strict=True):
            start, row, own = request.n_computed, first, range(n_rows, n_rows + n)
            first, n_rows = first + n_tokens, n_rows + n
            if request.finish_reason is not None:
                continue  # it has ended since the pass was launched
            if request.id in wrong:
                request.prompt_logprobs.clear()
                outputs.append(self._extend(request, 0, [NOT_A_NUMBER], 0, why=wrong[request.id]))
            elif n:
                n_drafts, chosen = n - 1, tokens[own.start : own.stop]
                why = next((errors[i] for i in own if i in errors), None)
                n_accepted = count_accepted(request.drafts, chosen) if n_drafts else 0
                n_tokens -= n_drafts - n_accepted
                scored = [logprobs[i] for i in own if i in logprobs] if logprobs else []
                outputs.append(self._extend(request, n_tokens, chosen[: n_accepted + 1], n_drafts, scored, why))
            else:
                self._scheduler.advance(request, start + n_tokens)
            if self._drafter is not None and request.finish_reason is None:
                computed.append(Computed(request, start, n_tokens, row))
        if self._drafter is not None:
            self._to_draft = computed, results.hidden
        return outputs

    def _score_prompts(self, scheduled: Sequence[Scheduled], hidden_TD: Tensor) -> dict[int, str]:
        """Append what a forward pass has computed to the log-probabilities of prompts that are asked for.

        Args:
            scheduled: requests of the pass, before they advance.
            hidden_TD: hidden states of their chunks.

        Returns:
            what is wrong with the logits of a request, by its id.
        """
        scored: list[tuple[Request, int, int]] = []  # request, row of the hidden states, and token after it
        first = 0
        for request, n_tokens in scheduled:
            if request.needs_prompt_logprobs and request.finish_reason is None:
                start, prompt = request.n_computed, request.prompt
                positions = range(len(request.prompt_logprobs), min(start + n_tokens, len(prompt) - 1))
                scored += [(request, first + p - start, prompt[p + 1]) for p in positions]
            first += n_tokens
        for i in range(0, len(scored), SCORED_ROWS):
            requests, rows, tokens = zip(*scored[i : i + SCORED_ROWS], strict=True)
            logits = self._runner.logits(hidden_TD[torch.tensor(rows, device=hidden_TD.device)])
            counts = [request.sampling.prompt_logprobs or 0 for request in requests]
            for request, entry in zip(requests, token_logprobs(logits, tokens, counts), strict=True):
                request.prompt_logprobs.append(entry)
        return {
            request.id: f"{NOT_FINITE}, for the token at position {position} of the prompt"
            for request, _ in scheduled
            if (position := _first_nan(request.prompt_logprobs)) is not None
        }

    def draft(self) -> None:
        """Draft the tokens after those of the last `run`, if the engine drafts."""
        to_draft, self._to_draft = self._to_draft, None
        if self._drafter is not None and to_draft is not None:
            self._drafter.draft(*to_draft)

    @property
    def lacks_draft(self) -> bool:
        """Whether a draft of this engine could not be chosen since `drop_drafts`; another rank may have chosen it."""
        return self._drafter is not None and self._drafter.lacks_draft

    def drop_drafts(self) -> None:
        """Forget the drafts of the last `draft`, before the next step. No decode step is in flight then."""
        for request in self._scheduler.running.values():
            request.drafts = []
        if self._drafter is not None:
            self._drafter.lacks_draft = False

    def _can_launch(self, before: _Launched | None) -> bool:
        """Whether a decode step of all running requests can be launched, and no other can join them.

        Args:
            before: the step that is launched and not collected, if there is one.
        """
        return self._decodes_next() and self._has_room_after(before)

    def _decodes_next(self) -> bool:
        """Whether all running requests decode, decode steps honor their samplings, and no other can join them."""
        running = self._scheduler.running.values()
        return all(map(self._joins_decode_step, running)) and not self._scheduler.can_admit()

    def _has_room_after(self, before: _Launched | None) -> bool:
        """Whether a decode step after `before` has rows and pages for all running requests, and `before` their tokens.

        Args:
            before: as in `_can_launch`.
        """
        scheduler, running, most = self._scheduler, self._scheduler.running, self._runner.max_ahead
        if not 0 < len(running) <= most or self._runner.n_drafts != self.config.n_drafts:
            return False
        if isinstance(before, _LogitsPass):
            return False
        if isinstance(before, _ChosenPass):
            # the step would leave out a request whose token the pass does not choose: one of its prompt may be left
            has_all = all(request.tokens[-1] < 0 for request in running.values())
            if not has_all or len(before.choosing) > most:
                return False
        is_launched = before is not None
        missing = sum(scheduler.n_missing(request, self._reach(request, is_launched)) for request in running.values())
        return missing <= self._pages.n_free

    def _reach(self, request: Request, is_launched: bool) -> int:
        """The positions of a request's text up to the last that its next decode step can write.

        Args:
            request: a running one.
            is_launched: whether the step before is launched and not collected.
        """
        n_drafts = self.config.n_drafts
        reached = _n_known(request) + _beyond(n_drafts) + (1 + n_drafts if is_launched else 0)
        return min(reached, request.max_length - 1)  # the last token is not an input

    def _launch(self, before: _Launched | None, n_drafts: int) -> Sequence[_DecodeStep | _LogitsStep]:
        """Launch a decode step of the running requests but those that `before` surely ends, if others are left.

        Args:
            before: the step that is launched and not collected, if there is one.
            n_drafts: drafts that the step makes for each request.
        """
        continued: list[Request] = []
        chosen: Tensor | None = None
        n_before = 0
        if isinstance(before, _DecodeStep):
            continued, n_before = before.requests, before.n_drafts
        elif isinstance(before, _ChosenPass):
            continued, chosen = [request for request, _ in before.choosing], before.chosen.on_device
        sources = {request.id: i for i, request in enumerate(continued)}
        requests: list[Request] = []
        verified: list[int] = []
        rows: list[DecodeRequest] = []
        for request in self._scheduler.running.values():
            length, sampling = _n_known(request), request.sampling
            end = request.max_length - 1
            source = sources.get(request.id, -1)
            most = n_drafts if request.draft_count is None else min(n_drafts, request.draft_count.count)
            if before is None:
                tokens = [request.tokens[-1], *request.drafts[:most]]
                most = len(tokens) - 1
            elif source < 0 or length >= end:
                continue
            else:
                tokens, most = [], min(most, n_before)
            has_pages = self._scheduler.extend(request, self._reach(request, before is not None))
            assert has_pages  # `_can_launch` has counted them
            requests.append(request)
            verified.append(most)
            how = request.seed, sampling.top_k, most, sampling.temperature, sampling.top_p, sampling.min_p
            rows.append(DecodeRequest(source, length - 1, end, *how, tokens, request.pages))
        if not rows:
            return []
        self._steps += 1
        self._steps_ahead += before is not None
        if not all(map(self._is_chosen_in_step, requests)):
            return [_LogitsStep(requests, verified, n_drafts, self._runner.decode_logits(rows, n_drafts))]
        log_probs = any(request.sampling.logprobs is not None for request in requests)
        return [_DecodeStep(requests, verified, n_drafts, self._runner.decode(rows, n_drafts, log_probs, chosen))]

    def _joins_decode_step(self, request: Request) -> bool:
        """Whether a request decodes, and a decode step honors its sampling."""
        return request.n_pending == 1 and (self._divides_steps or self._is_chosen_in_step(request))

    def _is_chosen_in_step(self, request: Request) -> bool:
        """Whether a decode step that chooses its tokens itself honors a request's sampling."""
        sampling = request.sampling
        has_results = sampling.logprobs is None or not self.config.n_drafts  # with drafts a step returns tokens alone
        return sampling.joins_decode_steps and has_results

    def _collect_decoded(self, launched: _DecodeStep) -> list[Output]:
        """Wait for a decode step, and return what it adds to its requests."""
        found, k = launched.tokens.wait(), 1 + launched.n_drafts
        rows = [[_chosen(decoded)] for decoded in found]
        if launched.choice is not None:
            choice = launched.choice.wait()
            rows = [choice[i : i + k] for i in range(0, len(choice), k)]
        del self._in_flight[0]
        outputs: list[Output] = []
        for request, verified, decoded, own in zip(launched.requests, launched.verified, found, rows, strict=True):
            if request.finish_reason is not None:
                continue  # it has ended since the step was launched
            n_drafts = _n_verified(request, verified)
            n_accepted = min(decoded.accepted, n_drafts)
            chosen, scored = decoded.chosen[: n_accepted + 1], _wanted(own[: n_accepted + 1], request)
            outputs.append(self._extend(request, 1 + n_accepted, chosen, n_drafts, scored))
            if request.finish_reason is None:
                request.drafts = usable_drafts(decoded.drafts, request)
        return outputs

    def stats(self) -> Stats:
        """Return the state of the queues and of the cache, and the counts since the engine was made."""
        scheduler, pages, ended = self._scheduler, self._pages, self._ended
        return Stats(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            n_pages=pages.n_pages,
            used_pages=pages.n_pages - pages.n_free,
            cached_pages=pages.n_cached,
            steps=self._steps,
            steps_ahead=self._steps_ahead,
            requests=self._n_requests,
            finished=ended[FinishReason.STOP] + ended[FinishReason.LENGTH],
            canceled=ended[FinishReason.CANCELED],
            failed=ended[FinishReason.ERROR],
            preemptions=scheduler.preemptions,
            prompt_tokens=scheduler.prompt_tokens,
            shared_tokens=scheduler.shared_tokens,
            generated_tokens=self._generated,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
            expert_tokens=self._runner.expert_tokens,
            weights_version=self.weights_version,
        )

    def close(self) -> None:
        """Cancel all requests."""
        self._in_flight.clear()
        self._outputs.clear()
        for request_id in list(self._requests):
            self.cancel(request_id)
        self._grammars.close()

    def _extend(
        self,
        request: Request,
        n_tokens: int,
        chosen: list[int],
        n_drafts: int,
        logprobs: Sequence[TokenLogprobs] = (),
        why: str | None = None,
    ) -> Output:
        """Append the chosen tokens of a pass that has computed n_tokens positions, and verified n_drafts drafts.

        logprobs are those of the chosen tokens, up to one that is none, if they were asked for. `why` says what is
        wrong where no token was chosen, if it is not the logits.
        """
        request.drafts = []
        self._drafted += n_drafts
        self._accepted += len(chosen) - 1
        tokens, stream, sampling = request.tokens, self._texts[request.id], request.sampling
        length, version, has_old_latents = len(tokens), self.weights_version, request.has_old_latents
        text = ""
        reason = error = None
        is_request_error = False
        stopped_by: str | int | None = None
        end_logprobs: TokenLogprobs | None = None
        for i, token in enumerate(chosen):
            if token < 0:
                reason, error = FinishReason.ERROR, why or _describe_logits(token, request)
                is_request_error = _forbids_all(token, request)
                if not is_request_error:  # latents of NaN would be shared with who asks again
                    self._scheduler.unshare(request)
                break
            if (is_end := token in self._end_tokens and not sampling.ignore_eos) or token in sampling.stop_token_ids:
                reason, stopped_by = FinishReason.STOP, None if is_end else token
                end_logprobs = logprobs[i] if logprobs else None
                break
            if request.matcher is not None:
                try:
                    request.matcher.consume(token)
                except GrammarError as grammar_error:
                    reason, error, is_request_error = FinishReason.ERROR, f"grammar: {grammar_error}", True
                    break
            tokens.append(token)
            text += stream.add(token, may_stop=request.n_generated > sampling.min_tokens)
            stopped_by = stream.stopped_by
            if stream.is_stopped or (request.matcher is not None and request.matcher.has_ended):
                reason = FinishReason.STOP
                break
            if len(tokens) == request.max_length:
                reason = FinishReason.LENGTH
                break
        self._generated += len(tokens) - length
        request.drafted_tokens += n_drafts
        request.accepted_tokens += min(len(chosen) - 1, len(tokens) - length)
        if request.draft_count is not None:
            request.draft_count.record(n_drafts, len(chosen) - 1, self._step_costs)
        if len(tokens) > length and (not request.weights_versions or request.weights_versions[-1][1] != version):
            request.weights_versions.append((length, version))
        if error is None:
            self._scheduler.advance(request, min(request.n_computed + n_tokens, len(tokens)))
        if reason is not None:
            text += stream.end()
            self._remove(request, reason)
        prompt_logprobs = tuple(request.prompt_logprobs)
        request.prompt_logprobs.clear()
        prefill_seconds = time.perf_counter() - request.admitted if length == len(request.prompt) else 0.0
        return Output(
            request.id, tuple(tokens[length:]), text, tuple(logprobs[: len(tokens) - length]), reason, error, version,
            has_old_latents, prompt_logprobs, request.n_cached, stopped_by, end_logprobs, request.drafted_tokens,
            request.accepted_tokens, is_request_error, prefill_seconds,
        )  # fmt: skip

    def _remove(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        while request.tokens[-1] < 0:  # it is canceled, and no token follows
            request.tokens.pop()
        if request.latents is not None:
            request.latents.release()
            request.latents = None
        self._ended[reason] += 1
        if self._compiling.pop(request.id, None) is None:
            self._scheduler.remove(request)
        del self._requests[request.id], self._texts[request.id]


def exception_of(error: str) -> FloatingPointError | RuntimeError:
    """Return `Output.error` as an exception: a FloatingPointError where logits are not finite, else a RuntimeError."""
    return FloatingPointError(error) if error.startswith(NOT_FINITE) else RuntimeError(error)


def _first_nan(prompt_logprobs: Sequence[TokenLogprobs]) -> int | None:
    """The position of the first token of a prompt that has a log-probability of NaN; None: none has."""
    for position, entry in enumerate(prompt_logprobs, 1):
        if any(map(math.isnan, (entry.logprob, *(logprob for _, logprob in entry.top)))):
            return position
    return None


def _n_known(request: Request) -> int:
    """How many tokens of a request are known: all but one at most, which a step in flight chooses."""
    return len(request.tokens) - (request.tokens[-1] < 0)


def _n_verified(request: Request, n_drafts: int) -> int:
    """How many drafts of a request a decode step that was launched to verify so many verifies: those that it has."""
    return min(n_drafts, len(request.drafts), request.n_remaining - 1)


def _chosen(decoded: Decoded) -> tuple[int, TokenLogprobs | None]:
    """The token after the last one of a request, and its log-probability, if its decode step has computed it."""
    token = decoded.chosen[0]
    return token, None if decoded.log_prob is None else TokenLogprobs(token, decoded.log_prob)


def _wanted(chosen: Sequence[tuple[int, TokenLogprobs | None]], request: Request) -> list[TokenLogprobs]:
    """The log-probabilities of tokens, if the request has asked for them: some steps compute those of all requests."""
    return [] if request.sampling.logprobs is None else [entry for _, entry in chosen if entry is not None]


def _make_pass(launched: _DecodeStep) -> _ChosenPass:
    """Make a pass of a decode step in flight: its requests get a placeholder for the token that it chooses."""
    choosing: list[tuple[Request, int]] = []
    for i, request in enumerate(launched.requests):
        end = len(request.tokens)
        choosing.append((request, end))
        if request.finish_reason is None:
            request.n_computed = end  # its page is shared when the token is known
            request.tokens.append(-1 - i)
    return _ChosenPass(choosing, launched.tokens)


def _beyond(n_drafts: int) -> int:
    """The positions after a request's last token that a decode step writes: drafts, and drafts of accepted drafts."""
    return max(n_drafts, 2 * n_drafts - 1)


def _forbids_all(no_token: int, request: Request) -> bool:
    """Whether the request itself has left no token that may come next, rather than the model."""
    return no_token == ALL_MASKED and request.sampling.changes_logits


def _describe_logits(no_token: int, request: Request) -> str:
    """Say why the logits after a request's tokens choose none."""
    if _forbids_all(no_token, request):
        return (
            "no token may come next: the grammar, bad_words or min_tokens forbid all, for the token at position "
            f"{len(request.tokens)} of the text ({request.n_generated} generated before)"
        )
    return (
        f"{NOT_FINITE}: {NO_TOKEN_WORDS[no_token]}, for the token at position {len(request.tokens)} of the text "
        f"({request.n_generated} generated before): a weight is damaged, or its training diverged"
    )


def _chunk(scheduled: Scheduled) -> Chunk:
    """The chunk of a request."""
    request, n_tokens = scheduled
    start, tokens, drafts = request.n_computed, request.tokens, request.drafts
    if start + n_tokens < len(tokens):
        return Chunk(tokens[start : start + n_tokens], start, request.pages, 0)
    if not drafts:
        return Chunk(tokens[start:], start, request.pages, 1)
    return Chunk(tokens[start:] + array("q", drafts), start, request.pages, 1 + len(drafts))
