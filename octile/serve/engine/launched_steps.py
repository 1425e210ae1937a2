"""The steps that an engine has launched and not collected, and which steps may be launched ahead of them.

    launch        the next steps: passes of any chunks, or decode steps, where all running requests decode
    complete      a step of which only the logits are launched: its tokens depend on what the one before has chosen
    collect       the oldest step: wait for its tokens, and add them to the requests
    draft         after a pass, by the multi-token prediction layer

A step is launched ahead, before the tokens of the one before are known, if it needs nothing else of it. At most two are
launched at a time.

Shapes: T tokens of a pass, D model, V vocabulary.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from octile.ops.sample_tokens import NOT_A_NUMBER
from octile.serve.engine.draft_count import shared_count
from octile.serve.engine.drafts import Computed, Drafter, count_accepted, usable_drafts
from octile.serve.engine.request import NOT_FINITE, Output, Request, Sampling, TokenLogprobs
from octile.serve.engine.sampler import ChosenTokens, Row, choose_tokens, token_logprobs
from octile.serve.engine.scheduler import Scheduled, Scheduler
from octile.serve.runner.batch import Batch, Chunk, Decoded, DecodedTokens, DecodeRequest, Results, Runner

SCORED_ROWS = 256  # of prompts, whose logits are in memory at once
ENDED = Row(Sampling(temperature=0.0), 0, 0)  # of a request that has ended; its token is ignored


class DecodeStep(NamedTuple):
    """A decode step that is launched.

    Attributes:
        requests: its requests.
        verified: how many drafts of each it verifies.
        n_drafts: how many it makes for each.
        tokens: what is chosen.
        choice: the choice of all rows, if the step was a `LogitsStep`; None: it chooses its tokens itself.
    """

    requests: list[Request]
    verified: list[int]
    n_drafts: int
    tokens: DecodedTokens
    choice: ChosenTokens | None = None


class LogitsStep(NamedTuple):
    """A decode step with drafts that is launched up to its logits.

    Its tokens are chosen once those of the step before are known: some depend on their text, or have log-probabilities.

    Attributes:
        requests, verified, n_drafts: as in `DecodeStep`.
        logits: what the runner computes.
    """

    requests: list[Request]
    verified: list[int]
    n_drafts: int
    logits: Tensor


class LogitsPass(NamedTuple):
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


class ChosenPass(NamedTuple):
    """A forward pass whose tokens are chosen, or a decode step after which one is launched.

    Each request has a placeholder for its token.

    Attributes:
        choosing: the requests that get a token, and its position.
        chosen: the tokens.
    """

    choosing: Sequence[tuple[Request, int]]
    chosen: ChosenTokens | DecodedTokens


Launched = DecodeStep | LogitsStep | LogitsPass | ChosenPass


class Extend(Protocol):
    """What adds the chosen tokens of a step to a request: `octile.serve.engine.engine.Engine`."""

    def __call__(
        self,
        request: Request,
        n_tokens: int,
        chosen: list[int],
        n_drafts: int,
        logprobs: Sequence[TokenLogprobs] = (),
        why: str | None = None,
    ) -> Output:
        """Append the chosen tokens of a pass that has computed n_tokens positions, and verified n_drafts drafts.

        Args:
            request: the request.
            n_tokens, n_drafts: positions and drafts.
            chosen: at least one token; the last one may be a number of `octile.ops.sample_tokens` for none.
            logprobs: log-probabilities of these tokens up to one that is none, if they were asked for.
            why: what is wrong where no token was chosen, if it is not the logits.
        """
        ...


class LaunchedSteps:
    """The steps of an engine that are launched and not collected.

    Args:
        runner: forward passes and decode steps.
        scheduler: chooses the requests of each.
        end_tokens: end-of-text tokens.

    Attributes:
        launched: the steps, the oldest first.
        runs_ahead: whether a forward pass of chunks is launched before the tokens of the step before are collected, and
            a decode step before those of the pass before it.
        n_steps, n_ahead: `Stats.steps` and `Stats.steps_ahead`.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, end_tokens: Collection[int]):
        self._runner, self._scheduler, self._config = runner, scheduler, scheduler.config
        self._end_tokens = end_tokens
        self._drafter = Drafter(runner, scheduler, end_tokens) if self._config.n_drafts else None
        self._to_draft: tuple[list[Computed], Tensor] | None = None  # of the last pass: its requests and hidden states
        # then the engine chooses the tokens of decode steps whose requests need their text, or log-probabilities
        self._divides_steps = runner.runs_ahead and self._drafter is not None
        self.runs_ahead = runner.runs_ahead
        self.launched: list[Launched] = []
        self.n_steps = self.n_ahead = 0

    def launch_steps(self) -> None:
        """Launch the first step and the one after it, as far as they are not launched and can be."""
        if len(self.launched) > 1:
            return  # an exception has ended the wait for the first
        if not self.launched:
            self.launched += self._launch_first()
        elif isinstance(first := self.launched[0], LogitsPass):
            self.launched[0] = self._choose(first)
        self.complete_first()
        if self.launched:
            self.launched += self._launch_after(self.launched[0])

    def _launch_first(self) -> Sequence[Launched]:
        """Launch a step while none is launched, if there is one."""
        if self._can_launch(None):
            return self._launch_decode(None, self.n_drafts)
        return self._schedule_pass(None)

    def complete_first(self) -> None:
        """Launch the rest of the first step, if only its logits are launched.

        If choosing its tokens raises an exception, a pass is launched instead, whose tokens can be chosen one by one.
        """
        first = self.launched[0] if self.launched else None
        if isinstance(first, LogitsStep):
            requests, verified, n_drafts, logits = first
            try:
                chosen = ChosenTokens(logits, self._rows_of_step(first))
            except Exception:  # of one row or several
                self.launched[:1] = self._schedule_pass(None)
            else:
                tokens = self._runner.decode_chosen(chosen.on_device)
                self.launched[0] = DecodeStep(requests, verified, n_drafts, tokens, chosen)

    def _launch_after(self, first: Launched) -> Sequence[Launched]:
        """Launch a step after another one, if there is one and it needs nothing that the host does not know yet."""
        if isinstance(first, LogitsPass | LogitsStep):
            return []
        if self._decodes_next():
            return self._launch_decode(first, self.n_drafts) if self._has_room_after(first) else []
        if not self._may_pass_ahead():
            return []
        if isinstance(first, DecodeStep):
            first = self.launched[0] = _make_pass(first)
        return self._schedule_pass(first.chosen.on_device)

    def launch_decode(self, n_drafts: int) -> None:
        """Launch a decode step of the running requests, unless two steps are launched.

        Args:
            n_drafts: drafts that the step makes for each request.
        """
        if len(self.launched) < 2:
            self.launched += self._launch_decode(self._last, n_drafts)

    def launch_pass(self, scheduled: Sequence[Scheduled]) -> None:
        """Launch a forward pass of chunks that were just scheduled, at least one."""
        self.launched.append(self._launch_pass(scheduled, None))

    @property
    def can_launch_decode(self) -> bool:
        """Whether `launch_decode` can be the next launch, for some requests: none needs a pass of any chunks first."""
        return self._can_launch(self._last)

    @property
    def _last(self) -> Launched | None:
        return self.launched[-1] if self.launched else None

    def _can_launch(self, before: Launched | None) -> bool:
        """Whether a decode step of all running requests can be launched, and no other can join them.

        Args:
            before: the step that is launched and not collected, if there is one.
        """
        return self._decodes_next() and self._has_room_after(before)

    def _decodes_next(self) -> bool:
        """Whether all running requests decode, decode steps honor their samplings, and no other can join them."""
        running = self._scheduler.running.values()
        return all(map(self._joins_decode_step, running)) and not self._scheduler.can_admit()

    def _joins_decode_step(self, request: Request) -> bool:
        """Whether a request decodes, and a decode step honors its sampling."""
        return request.n_pending == 1 and (self._divides_steps or self._is_chosen_in_step(request))

    def _is_chosen_in_step(self, request: Request) -> bool:
        """Whether a decode step that chooses its tokens itself honors a request's sampling."""
        sampling = request.sampling
        has_results = sampling.logprobs is None or not self._config.n_drafts  # with drafts a step returns tokens alone
        return sampling.joins_decode_steps and has_results

    def _has_room_after(self, before: Launched | None) -> bool:
        """Whether a decode step after `before` has rows and pages for all running requests, and `before` their tokens.

        Args:
            before: as in `_can_launch`.
        """
        scheduler, running, most = self._scheduler, self._scheduler.running, self._runner.max_ahead
        if not 0 < len(running) <= most or self._runner.n_drafts != self._config.n_drafts:
            return False
        if isinstance(before, LogitsPass):
            return False
        if isinstance(before, ChosenPass):
            # the step would leave out a request whose token the pass does not choose: one of its prompt may be left
            has_all = all(request.tokens[-1] < 0 for request in running.values())
            if not has_all or len(before.choosing) > most:
                return False
        is_launched = before is not None
        missing = sum(scheduler.n_missing(request, self._reach(request, is_launched)) for request in running.values())
        return missing <= self._scheduler.pages.n_free

    def _reach(self, request: Request, is_launched: bool) -> int:
        """The positions of a request's text up to the last that its next decode step can write.

        Args:
            request: a running one.
            is_launched: whether the step before is launched and not collected.
        """
        n_drafts = self._config.n_drafts
        reached = _n_known(request) + _beyond(n_drafts) + (1 + n_drafts if is_launched else 0)
        return min(reached, request.max_length - 1)  # the last token is not an input

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

    def _schedule_pass(self, chosen_before: Tensor | None) -> Sequence[Launched]:
        """Launch a forward pass of any chunks, if there are some; chosen_before as in `_launch_pass`."""
        scheduled = self._scheduler.schedule()
        return [self._launch_pass(scheduled, chosen_before)] if scheduled else []

    def _launch_pass(self, scheduled: Sequence[Scheduled], chosen_before: Tensor | None) -> LogitsPass | ChosenPass:
        """Launch a forward pass of chunks that were just scheduled.

        Args:
            scheduled: at least one.
            chosen_before: the tokens of the pass before, if that is not collected.
        """
        self.n_steps += 1
        self.n_ahead += chosen_before is not None
        chunks = [_chunk(s) for s in scheduled]
        continued = [request for request, _ in scheduled if request.tokens[-1] < 0]
        results = self._runner.run(Batch(chunks, chosen_before if continued else None))
        launched = LogitsPass(scheduled, [chunk.n_logits for chunk in chunks], results)
        needs_text = any(request.sampling.changes_logits for request in continued)
        return launched if needs_text else self._choose(launched)

    def _launch_decode(self, before: Launched | None, n_drafts: int) -> Sequence[DecodeStep | LogitsStep]:
        """Launch a decode step of the running requests but those that `before` surely ends, if others are left.

        Args:
            before: the step that is launched and not collected, if there is one.
            n_drafts: drafts that the step makes for each request.
        """
        continued: list[Request] = []
        chosen: Tensor | None = None
        n_before = 0
        if isinstance(before, DecodeStep):
            continued, n_before = before.requests, before.n_drafts
        elif isinstance(before, ChosenPass):
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
        self.n_steps += 1
        self.n_ahead += before is not None
        if not all(map(self._is_chosen_in_step, requests)):
            return [LogitsStep(requests, verified, n_drafts, self._runner.decode_logits(rows, n_drafts))]
        log_probs = any(request.sampling.logprobs is not None for request in requests)
        return [DecodeStep(requests, verified, n_drafts, self._runner.decode(rows, n_drafts, log_probs, chosen))]

    def _choose(self, launched: LogitsPass) -> LogitsPass | ChosenPass:
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
        return ChosenPass(choosing, chosen)

    def _rows(self, launched: LogitsPass) -> list[Row]:
        """How the token after each row of logits is chosen. Rows of ended requests are greedy, and ignored."""
        rows: list[Row] = []
        for (request, _), n in zip(launched.scheduled, launched.n_logits, strict=True):
            if request.finish_reason is not None:
                rows += [ENDED] * n
            elif n:
                rows += self._rows_of(request, request.drafts)
        return rows

    def _rows_of_step(self, launched: LogitsStep) -> list[Row]:
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

    def collect(self, extend: Extend) -> list[Output]:
        """Wait for the first step, and return what it adds to its requests.

        It stays launched if an exception ends the wait, such as KeyboardInterrupt.

        Args:
            extend: adds the chosen tokens to a request.
        """
        first = self.launched[0]
        if isinstance(first, DecodeStep):
            return self._collect_decoded(first, extend)
        if isinstance(first, ChosenPass):
            return self._collect_chosen(first, extend)
        assert isinstance(first, LogitsPass)  # a `LogitsStep` is completed before
        return self._collect_logits(first, extend)

    def _collect_decoded(self, launched: DecodeStep, extend: Extend) -> list[Output]:
        """Wait for a decode step, and return what it adds to its requests."""
        found, k = launched.tokens.wait(), 1 + launched.n_drafts
        rows = [[_chosen(decoded)] for decoded in found]
        if launched.choice is not None:
            choice = launched.choice.wait()
            rows = [choice[i : i + k] for i in range(0, len(choice), k)]
        del self.launched[0]
        outputs: list[Output] = []
        for request, verified, decoded, own in zip(launched.requests, launched.verified, found, rows, strict=True):
            if request.finish_reason is not None:
                continue  # it has ended since the step was launched
            n_drafts = _n_verified(request, verified)
            n_accepted = min(decoded.accepted, n_drafts)
            chosen, scored = decoded.chosen[: n_accepted + 1], _wanted(own[: n_accepted + 1], request)
            outputs.append(extend(request, 1 + n_accepted, chosen, n_drafts, scored))
            if request.finish_reason is None:
                request.drafts = usable_drafts(decoded.drafts, request)
        return outputs

    def _collect_chosen(self, launched: ChosenPass, extend: Extend) -> list[Output]:
        """Wait for the tokens of a pass, and return what they add to its requests.

        These may already have a placeholder for the token after it.
        """
        choosing, chosen = launched
        found = chosen.wait() if isinstance(chosen, ChosenTokens) else [*map(_chosen, chosen.wait())]
        del self.launched[0]
        outputs: list[Output] = []
        for (request, end), (token, logprobs) in zip(choosing, found, strict=True):
            if request.finish_reason is not None:
                continue  # it has ended since the pass was launched
            later = request.tokens[end + 1 :]
            del request.tokens[end:]
            if token >= 0 and request.n_computed >= end:  # otherwise it was preempted
                self._scheduler.share(request, end - 1, end)
            outputs.append(extend(request, 0, [token], 0, _wanted([(token, logprobs)], request)))
            if request.finish_reason is None:
                request.tokens.extend(later)
        return outputs

    def _collect_logits(self, launched: LogitsPass, extend: Extend) -> list[Output]:
        """Choose the tokens of a pass, and return what they add to its requests."""
        results = launched.results
        tokens, logprobs, errors = choose_tokens(results.logits, self._rows(launched))
        wrong = self._score_prompts(launched.scheduled, results.hidden)
        del self.launched[0]
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
                outputs.append(extend(request, 0, [NOT_A_NUMBER], 0, why=wrong[request.id]))
            elif n:
                n_drafts, chosen = n - 1, tokens[own.start : own.stop]
                why = next((errors[i] for i in own if i in errors), None)
                n_accepted = count_accepted(request.drafts, chosen) if n_drafts else 0
                n_tokens -= n_drafts - n_accepted
                scored = [logprobs[i] for i in own if i in logprobs] if logprobs else []
                outputs.append(extend(request, n_tokens, chosen[: n_accepted + 1], n_drafts, scored, why))
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
        """Forget the drafts of the last `draft`, before the next step. No decode step is launched then."""
        for request in self._scheduler.running.values():
            request.drafts = []
        if self._drafter is not None:
            self._drafter.lacks_draft = False

    @property
    def n_running(self) -> int:
        """How many requests run: a decode step has no more."""
        return len(self._scheduler.running)

    @property
    def n_drafts(self) -> int:
        """How many drafts the next decode step should make for each of the running requests."""
        if not self._config.n_drafts:
            return 0
        counts = [r.draft_count for r in self._scheduler.running.values() if r.draft_count is not None]
        return shared_count(counts, self.step_costs)

    @property
    def step_costs(self) -> Sequence[float]:
        """The costs of the next decode step's drafts, of as many requests as run, or of one."""
        return self._runner.step_costs(max(1, self.n_running), self._config.n_drafts)


def _chunk(scheduled: Scheduled) -> Chunk:
    """The chunk of a request."""
    request, n_tokens = scheduled
    start, tokens, drafts = request.n_computed, request.tokens, request.drafts
    if start + n_tokens < len(tokens):
        return Chunk(tokens[start : start + n_tokens], start, request.pages, 0)
    if not drafts:
        return Chunk(tokens[start:], start, request.pages, 1)
    return Chunk(tokens[start:] + array("q", drafts), start, request.pages, 1 + len(drafts))


def _make_pass(launched: DecodeStep) -> ChosenPass:
    """Make a pass of a launched decode step: its requests get a placeholder for the token that it chooses."""
    choosing: list[tuple[Request, int]] = []
    for i, request in enumerate(launched.requests):
        end = len(request.tokens)
        choosing.append((request, end))
        if request.finish_reason is None:
            request.n_computed = end  # its page is shared when the token is known
            request.tokens.append(-1 - i)
    return ChosenPass(choosing, launched.tokens)


def _n_known(request: Request) -> int:
    """How many tokens of a request are known: all but one at most, which a launched step chooses."""
    return len(request.tokens) - (request.tokens[-1] < 0)


def _n_verified(request: Request, n_drafts: int) -> int:
    """How many drafts of a request a decode step that was launched to verify so many verifies: those that it has."""
    return min(n_drafts, len(request.drafts), request.n_remaining - 1)


def _beyond(n_drafts: int) -> int:
    """The positions after a request's last token that a decode step writes: drafts, and drafts of accepted drafts."""
    return max(n_drafts, 2 * n_drafts - 1)


def _chosen(decoded: Decoded) -> tuple[int, TokenLogprobs | None]:
    """The token after the last one of a request, and its log-probability, if its decode step has computed it."""
    token = decoded.chosen[0]
    return token, None if decoded.log_prob is None else TokenLogprobs(token, decoded.log_prob)


def _wanted(chosen: Sequence[tuple[int, TokenLogprobs | None]], request: Request) -> list[TokenLogprobs]:
    """The log-probabilities of tokens, if the request has asked for them: some steps compute those of all requests."""
    return [] if request.sampling.logprobs is None else [entry for _, entry in chosen if entry is not None]


def _first_nan(prompt_logprobs: Sequence[TokenLogprobs]) -> int | None:
    """The position of the first token of a prompt that has a log-probability of NaN; None: none has."""
    for position, entry in enumerate(prompt_logprobs, 1):
        if any(map(math.isnan, (entry.logprob, *(logprob for _, logprob in entry.top)))):
            return position
    return None
