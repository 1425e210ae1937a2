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

import time
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import NamedTuple, get_args

from octile.ops.sample_tokens import ALL_MASKED, NOT_A_NUMBER, POSITIVE_INFINITY
from octile.serve.engine.config import EngineConfig, InFlight
from octile.serve.engine.draft_count import DraftCount
from octile.serve.engine.drafts import check_can_draft
from octile.serve.engine.grammar import GrammarCompiler, GrammarError, Matcher
from octile.serve.engine.launched_steps import LaunchedSteps
from octile.serve.engine.pages import PageAllocator
from octile.serve.engine.request import (
    NOT_FINITE,
    FinishReason,
    Output,
    PromptLatents,
    Request,
    RequestFactory,
    Sampling,
    TokenLogprobs,
    check_id,
)
from octile.serve.engine.scheduler import Scheduled, Scheduler
from octile.serve.engine.stats import Stats
from octile.serve.engine.text import TextStream
from octile.serve.runner.batch import Runner
from octile.signals import held_interrupts
from octile.tokenizer import Tokenizer

COMPILE_SECONDS = 0.01  # for which a step waits if all requests wait for their grammar
NO_TOKEN_WORDS = {NOT_A_NUMBER: "NaN", POSITIVE_INFINITY: "+Inf", ALL_MASKED: "-Inf for all tokens"}


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
        steps: its launched steps, which ranks in lockstep agree on.

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
        self.steps = LaunchedSteps(runner, self._scheduler, self._end_tokens)
        self._outputs: list[Output] = []  # that no call has returned: an exception may have ended it
        self._adopted: list[tuple[Request, FirstToken]] = []  # since the last step
        self._grammars = GrammarCompiler(tokenizer, runner.vocab_size, self._end_tokens)
        self._compiling: dict[int, Future[Matcher]] = {}  # of requests that wait for their grammar
        self.compiles_in_background = True
        self._requests: dict[int, Request] = {}
        self._texts: dict[int, TextStream] = {}
        self._factory = RequestFactory(runner.vocab_size, runner.max_position)
        self._n_requests = self.weights_version = 0
        self._ended = Counter[FinishReason]()
        self._generated = self._drafted = self._accepted = 0

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
            request.draft_count = DraftCount(self.steps.step_costs)
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
        """Launch a step and the one after it, as far as they are not launched and can be, and collect the first."""
        self._take_firsts()
        self.steps.launch_steps()
        if self.steps.launched:
            self._collect()
            self.steps.draft()

    @property
    def can_launch(self) -> bool:
        """Whether `launch` can be the next step: no request needs a pass of any chunks first."""
        return not self._requests or self.steps.can_launch_decode

    def launch(self, n_drafts: int) -> list[Output]:
        """Launch a decode step of the running requests, if there are any, and collect the one launched before.

        Args:
            n_drafts: drafts that the step makes for each request: ranks that exchange rows make as many.
        """
        has_before = bool(self.steps.launched)
        if self._requests:
            self.steps.launch_decode(n_drafts)
        if has_before:
            self._collect()
        return self._take_outputs()

    def schedule(self) -> tuple[list[Output], list[Scheduled]]:
        """Collect the launched decode step, and choose the chunks of the next forward pass, which `run` runs."""
        if self._compiling:
            self._outputs += self._take_compiled()
        self._collect_all()
        return self._take_outputs(), self._scheduler.schedule()

    def run(self, scheduled: Sequence[Scheduled]) -> list[Output]:
        """Run a forward pass of chunks that were just scheduled, and collect what it has chosen.

        `steps.draft` follows.
        """
        if scheduled:
            self.steps.launch_pass(scheduled)
            self._collect()
        return self._take_outputs()

    def _collect_all(self) -> None:
        """Wait for all launched steps, and add what they add to their requests to the outputs."""
        while self.steps.launched:
            self.steps.complete_first()
            if self.steps.launched:
                self._collect()
            self.steps.draft()

    def _collect(self) -> None:
        """Wait for the first launched step, and add what it adds to its requests to the outputs."""
        self._outputs += self.steps.collect(self._extend)
        if not self._requests:
            self.steps.launched.clear()

    def stats(self) -> Stats:
        """Return the state of the queues and of the cache, and the counts since the engine was made."""
        scheduler, pages, ended = self._scheduler, self._pages, self._ended
        return Stats(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            n_pages=pages.n_pages,
            used_pages=pages.n_pages - pages.n_free,
            cached_pages=pages.n_cached,
            steps=self.steps.n_steps,
            steps_ahead=self.steps.n_ahead,
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
        self.steps.launched.clear()
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
        """Append the chosen tokens of a step to a request, as `Extend` says."""
        request.drafts = []
        self._drafted += n_drafts
        self._accepted += len(chosen) - 1
        tokens, stream, sampling = request.tokens, self._texts[request.id], request.sampling
        length, version, has_old_latents = len(tokens), self.weights_version, request.has_old_latents
        text = ""
        reason = error = None
        is_request_error = False
        stopped_by: str | int | None = None
        end_token: int | None = None
        end_logprobs: TokenLogprobs | None = None
        for i, token in enumerate(chosen):
            if token < 0:
                reason, error = FinishReason.ERROR, why or _describe_logits(token, request)
                is_request_error = _forbids_all(token, request)
                if not is_request_error:  # latents of NaN would be shared with who asks again
                    self._scheduler.unshare(request)
                break
            is_end = token in self._end_tokens and (not sampling.ignore_eos or request.matcher is not None)
            if is_end or token in sampling.stop_token_ids:
                reason, stopped_by, end_token = FinishReason.STOP, None if is_end else token, token
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
            request.draft_count.record(n_drafts, len(chosen) - 1, self.steps.step_costs)
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
            request.accepted_tokens, is_request_error, prefill_seconds, end_token,
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
