"""What a request asks for and what it gets."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from itertools import count
from numbers import Real
from typing import NamedTuple, Protocol

from octile.serve.engine.draft_count import DraftCount
from octile.serve.engine.grammar import Matcher
from octile.serve.engine.history import History, TokenCounts
from octile.text import format_count
from octile.validation import MAX_SEED, Seed, check

MIN_TEMPERATURE, MAX_TEMPERATURE = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # normal numbers of FP32
MAX_TOP_K = 2**31 - 1
MAX_LOGPROBS = 20  # alternatives per token
MAX_STOPS = 32
MAX_TOKENS_NAMED = 1024  # of logit_bias, stop_token_ids or bad_words
WHOLE_NUMBERS = ("max_new_tokens", "top_k", "min_tokens")  # fields of `Sampling`
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
NOT_FINITE = "the model's logits are not finite"  # how the errors of such requests begin

# Fields of `Sampling` by who honors them. A field that is in none of these sets is honored by nobody: unless it has its
# default, its requests take no part in decode steps (`Runner.decode`).
OF_OPERATOR = frozenset({"temperature", "seed", "top_k", "top_p", "min_p"})  # `octile.ops.sample_tokens`
OF_ENGINE = frozenset(  # the engine, once a token is chosen
    {"max_new_tokens", "stop", "ignore_eos", "stop_token_ids", "skip_special_tokens", "shown_tokens"}
)
OF_LOGITS = frozenset({"logprobs"})  # whoever has the logits, once a token is chosen; 0: also decode steps
OF_PROMPT = frozenset({"prompt_logprobs"})  # the engine, while it prefills: decode steps have nothing to do for them
OF_TEXT = frozenset(  # `penalties.logit_changes`, before a token is chosen
    {
        "grammar", "bad_words", "min_tokens", "logit_bias", "repetition_penalty", "frequency_penalty",
        "presence_penalty",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen, and when a text ends.

    Logits are changed in this order: grammar, bad_words, min_tokens, logit_bias, repetition_penalty, frequency_penalty
    and presence_penalty, temperature. Then tokens are left out in this order: min_p, top_k, top_p.

    Attributes:
        max_new_tokens: maximum number of tokens to generate; an end-of-text token ends the text earlier.
        temperature: 0 is greedy; 1 samples from the model's distribution; above 1 the distribution is flatter.
        top_p: sample only from the most likely tokens that together have this probability.
        seed: seed of the sampling; with None each request draws one.
        top_k: sample only from this many most likely tokens; 0 is all of them.
        stop: strings that end the text before them.
        logprobs: report the log-probability of each token and of this many most likely tokens; None reports none.
        ignore_eos: go on after an end-of-text token, for measurements.
        prompt_logprobs: report the log-probability of each token of the prompt but the first, and of this many most
            likely tokens at its position; None reports none. The whole prompt is computed then: no prefix of it is
            taken from the cache.
        min_p: sample only from the tokens that have this share of the most likely one's probability; 0 is all of them.
        repetition_penalty: divides positive logits of all tokens of the prompt and the text, and multiplies negative
            ones; 1 changes nothing.
        frequency_penalty: is subtracted from a token's logit as often as it was generated.
        presence_penalty: is subtracted once from the logit of a token that was generated.
        logit_bias: (token, number that is added to its logit), each token once.
        stop_token_ids: tokens that end the text, as an end-of-text token does, also with ignore_eos.
        min_tokens: no end-of-text token, token of stop_token_ids or stop string ends the text before so many tokens.
        bad_words: sequences of tokens that the generated text may not have.
        skip_special_tokens: whether special tokens add nothing to the text; otherwise they appear as their names.
        shown_tokens: special tokens that are not skipped.
        grammar: a grammar that the text follows, from its first token on, as `octile.serve.engine.grammar` makes it.
            The text ends where the grammar does, also with ignore_eos.

    Raises:
        TypeError: a field has another type, such as a fraction where it is a whole number.
        ValueError: a field is outside its range.
    """

    max_new_tokens: int = 200
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = 0
    top_k: int = 0
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False
    prompt_logprobs: int | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    skip_special_tokens: bool = False
    shown_tokens: tuple[int, ...] = ()
    grammar: str = ""

    def __post_init__(self) -> None:
        for name in WHOLE_NUMBERS:
            check(name, getattr(self, name), int)
        for name in NUMBERS:
            if not isinstance(number := getattr(self, name), Real):
                raise TypeError(f"{name} must be a number, not {number!r}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}")
        if self.temperature and not MIN_TEMPERATURE <= self.temperature <= MAX_TEMPERATURE:
            raise ValueError(
                f"temperature must be 0, or from {MIN_TEMPERATURE:.2g} to {MAX_TEMPERATURE:.2g}, not {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, not {self.top_p}")
        if self.seed is not None:
            check("seed", self.seed, Seed | None)
        if not 0 <= self.top_k <= MAX_TOP_K:
            raise ValueError(f"top_k must be from 0 to {MAX_TOP_K}, not {self.top_k}")
        if not isinstance(self.stop, tuple) or not all(isinstance(text, str) for text in self.stop):
            raise TypeError(f"stop must be a tuple of strings, not {self.stop!r}")
        if len(self.stop) > MAX_STOPS or not all(self.stop):
            raise ValueError(f"stop must have at most {MAX_STOPS} strings, none of them empty, not {self.stop!r}")
        for name, number in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            check(name, number, int | None)
            if number is not None and not 0 <= number <= MAX_LOGPROBS:
                raise ValueError(f"{name} must be from 0 to {MAX_LOGPROBS}, not {number}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be from 0 to 1, not {self.min_p}")
        if not MIN_TEMPERATURE <= self.repetition_penalty <= MAX_TEMPERATURE:
            limits = f"{MIN_TEMPERATURE:.2g} to {MAX_TEMPERATURE:.2g}"
            raise ValueError(f"repetition_penalty must be from {limits}, not {self.repetition_penalty}")
        for name in ("frequency_penalty", "presence_penalty"):
            if not -2 <= (penalty := getattr(self, name)) <= 2:
                raise ValueError(f"{name} must be from -2 to 2, not {penalty}")
        if any(not -100 <= bias <= 100 for _, bias in self.logit_bias):
            raise ValueError(f"logit_bias must have numbers from -100 to 100, not {self.logit_bias!r}")
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise ValueError(f"logit_bias must have each token once, not {self.logit_bias!r}")
        if not 0 <= self.min_tokens <= self.max_new_tokens:
            limit = f"max_new_tokens, {self.max_new_tokens}"
            raise ValueError(f"min_tokens must be from 0 to {limit}, not {self.min_tokens}")
        if self.grammar and self.min_tokens:
            raise ValueError(f"min_tokens must be 0 for a text that follows a grammar, not {self.min_tokens}")
        if not all(self.bad_words):
            raise ValueError("bad_words must have sequences of at least one token")
        for name, tokens in self.named_tokens.items():
            if len(tokens) > MAX_TOKENS_NAMED:
                raise ValueError(f"{name} must have at most {MAX_TOKENS_NAMED} tokens, not {len(tokens)}")

    @property
    def named_tokens(self) -> dict[str, list[int]]:
        """The tokens that fields name, which the model must know."""
        return {
            "logit_bias": [token for token, _ in self.logit_bias],
            "stop_token_ids": [*self.stop_token_ids],
            "bad_words": [token for word in self.bad_words for token in word],
        }

    @cached_property
    def changes_logits(self) -> bool:
        """Whether logits are changed by the text before them: the sampler needs it."""
        return not self._has_defaults_besides(frozenset(f.name for f in fields(self)) - OF_TEXT)

    @cached_property
    def joins_decode_steps(self) -> bool:
        """Whether decode steps (`Runner.decode`) honor all fields.

        They return tokens, and without drafts the log-probabilities of these, but no other tokens'.
        """
        return not self.logprobs and self._has_defaults_besides(OF_OPERATOR | OF_ENGINE | OF_LOGITS | OF_PROMPT)

    def _has_defaults_besides(self, honored: frozenset[str]) -> bool:
        """Whether each field has its default, but for those that are honored."""
        return all(getattr(self, f.name) == f.default for f in fields(self) if f.name not in honored)


class FinishReason(StrEnum):
    """Why a request has ended."""

    STOP = "stop"  # an end-of-text token or a stop string
    LENGTH = "length"  # max_new_tokens
    CANCELED = "canceled"
    ERROR = "error"  # Output.error says which


class TokenLogprobs(NamedTuple):
    """The log-probability of a token in the model's own distribution, before temperature, top_k and top_p.

    Attributes:
        token: the token, generated or of the prompt.
        logprob: its log-probability in nats.
        top: (token, log-probability) of the most likely tokens, the most likely first, as many as were asked for.
        rank: how many tokens are as likely as this one or more so: 1 for the most likely. None: it is not counted, for
            a generated token without `top`.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


class Output(NamedTuple):
    """What one step adds to one request.

    Attributes:
        request_id: `Request.id`.
        tokens: the new tokens, without an end-of-text token.
        text: the piece of text that is complete now: characters whose bytes are all there, and that no stop string can
            take back. The pieces of a request concatenate to its text.
        logprobs: log-probabilities of each new token, if they were asked for.
        finish_reason: None while the request goes on; the output that has it is the request's last one.
        error: what went wrong, with FinishReason.ERROR.
        weights_version: version of the weights that have chosen the tokens; see `Engine.update_weights`.
        has_old_latents: whether these weights have chosen them over latents of older ones.
        prompt_logprobs: log-probabilities of each token of the prompt but the first, if they were asked for, in the
            request's first output; they are those of the weights that have chosen its first token.
        cached_tokens: tokens of its prompt whose latents were in the cache when it began.
        stopped_by: the stop string, or the token of stop_token_ids, that has ended it; None: something else.
        end_logprobs: log-probabilities of `end_token`, if they were asked for.
        drafted_tokens, accepted_tokens: draft tokens that were verified for the request so far, and those of them that
            were accepted and are among its tokens.
        is_request_error: whether the error is that of the request, as of a grammar that no token can follow.
        prefill_seconds: time since the request was first admitted, in the output that has its first token.
        end_token: the token that has ended it: an end-of-text token, or one of stop_token_ids; None: something else.
    """

    request_id: int
    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    weights_version: int = 0
    has_old_latents: bool = False
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    cached_tokens: int = 0
    stopped_by: str | int | None = None
    end_logprobs: TokenLogprobs | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    is_request_error: bool = False
    prefill_seconds: float = 0.0
    end_token: int | None = None


class PromptLatents(Protocol):
    """The latents of a prompt that another process has prefilled; `octile.serve.disaggregated.page_pool` has them."""

    def write(self, pages: Sequence[int], first: int) -> None:
        """Copy the pages from number `first` on to pages of the cache, and release all."""
        ...

    def release(self) -> None:
        """Release the pages unread."""
        ...


@dataclass(eq=False, slots=True)
class Request:
    """A prompt, how to continue it, and how far the engine is with it.

    `RequestFactory` makes it where it is taken in; engines behind take it as it is. Another process gets it as it was
    made: how far an engine is with it stays there.

    Attributes:
        id: unique among the requests of its factory, and among those that wait or run in an engine; later requests of a
            factory have larger ones.
        prompt: the tokens of the prompt.
        sampling: how to continue it.
        seed: the sampling's seed, or the one that was drawn for this request.
        tokens: array("q") of the tokens of the prompt and those generated so far. While it runs, a negative number
            at the end stands for the one that a launched pass chooses: as in `octile.serve.runner.batch.Batch`.
        max_length: tokens at which it ends at the latest.
        finish_reason: None while the request waits or runs.
        n_computed: the first tokens, as many, have their latents in the pages.
        pages: array("i") of the pages that the request holds, in the order of positions.
        page_keys: keys of its full pages, as far as they were needed.
        drafts: draft tokens that follow `tokens`, to be verified by the next forward pass.
        draft_count: how many it has in its next step; None: the engine does not draft.
        drafted_tokens, accepted_tokens: as in `Output`.
        was_admitted: whether it has run before.
        admitted: when it was first admitted, by `time.perf_counter`.
        n_cached: tokens of its prompt whose latents were in the cache when it first ran.
        latents: latents of its prompt, until it is admitted, if another process has prefilled it.
        weights_versions: which weights have chosen its tokens: (position in `tokens`, version of the weights from there
            on), one entry, or one more for each update of the weights in flight.
        has_old_latents: whether some of its latents are those of weights before an update, so that nobody shares them.
        prompt_logprobs: log-probabilities of the tokens of its prompt from the second on, as far as they are computed,
            until its first output has them.
        counts: how often it has each token, once its sampling has asked for that.
        matcher: how far it has come in its grammar, once that is compiled.
    """

    id: int
    prompt: Sequence[int]
    sampling: Sampling
    seed: int
    tokens: array[int] = field(init=False)
    max_length: int = field(init=False)
    finish_reason: FinishReason | None = field(init=False, default=None)
    n_computed: int = field(init=False, default=0)
    pages: array[int] = field(init=False, default_factory=lambda: array("i"))
    page_keys: list[bytes] = field(init=False, default_factory=list)
    drafts: list[int] = field(init=False, default_factory=list)
    draft_count: DraftCount | None = field(init=False, default=None)
    drafted_tokens: int = field(init=False, default=0)
    accepted_tokens: int = field(init=False, default=0)
    was_admitted: bool = field(init=False, default=False)
    admitted: float = field(init=False, default=0.0)
    n_cached: int = field(init=False, default=0)
    latents: PromptLatents | None = field(init=False, default=None)
    weights_versions: list[tuple[int, int]] = field(init=False, default_factory=list)
    has_old_latents: bool = field(init=False, default=False)
    prompt_logprobs: list[TokenLogprobs] = field(init=False, default_factory=list)
    counts: TokenCounts | None = field(init=False, default=None)
    matcher: Matcher | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.tokens = array("q", self.prompt)
        self.max_length = len(self.prompt) + self.sampling.max_new_tokens

    def __reduce__(self) -> tuple[type[Request], tuple[int, Sequence[int], Sampling, int]]:
        return Request, (self.id, self.prompt, self.sampling, self.seed)

    @property
    def n_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def n_remaining(self) -> int:
        """Tokens that may still be generated."""
        return self.max_length - len(self.tokens)

    def histories(self, end_tokens: Collection[int], drafts: Sequence[int] = ()) -> list[History | None]:
        """Return what is before its next token, and before the token after each of some drafts.

        None: its sampling does not depend on it. end_tokens are those of the engine.
        """
        if not self.sampling.changes_logits:
            return [None] * (1 + len(drafts))
        if self.counts is None:
            self.counts = TokenCounts(self.prompt)
        self.counts.read(self.tokens)
        generated = self.tokens[len(self.prompt) :]
        masks = [None] * (1 + len(drafts)) if self.matcher is None else self.matcher.masks(drafts)
        return [History(self.counts, generated, drafts[:i], end_tokens, mask) for i, mask in enumerate(masks)]

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are asked for, and some are not computed."""
        is_asked = self.sampling.prompt_logprobs is not None and not self.n_generated
        return is_asked and len(self.prompt_logprobs) < len(self.prompt) - 1

    @property
    def n_pending(self) -> int:
        """Tokens whose latents are not in the pages: 1 while it decodes, more while its prompt is prefilled."""
        return len(self.tokens) - self.n_computed


class RequestFactory:
    """Makes the requests of a model where they are taken in: checks them, and gives each an id and a seed.

    Any thread may use it.

    Args:
        vocab_size: tokens of the model.
        max_position: positions of a request at most.
    """

    def __init__(self, vocab_size: int, max_position: int):
        self._vocab_size, self._max_position, self._ids = vocab_size, max_position, count()

    def make(self, prompt: Sequence[int], *samplings: Sampling) -> list[Request]:
        """Make requests that continue one prompt, the begin-of-text token included; a seed is drawn if none is given.

        Raises:
            ValueError: as `check_prompt` and `check_tokens`.
        """
        most = max(sampling.max_new_tokens for sampling in samplings)
        check_prompt(prompt, most, self._vocab_size, self._max_position)
        for sampling in samplings:
            check_tokens(sampling, self._vocab_size)
        tokens = tuple(prompt)
        return [Request(next(self._ids), tokens, sampling, _seed_of(sampling)) for sampling in samplings]


def _seed_of(sampling: Sampling) -> int:
    return secrets.randbelow(MAX_SEED) if sampling.seed is None else sampling.seed


def check_id(request: Request, ids: Container[int]) -> None:
    """Refuse a request with the id of another one: outputs name requests by their ids.

    Args:
        request: the request that is submitted.
        ids: ids of the requests that wait or run.

    Raises:
        ValueError: one of them has its id.
    """
    if request.id in ids:
        raise ValueError(
            f"request.id must differ from the ids of all requests that wait or run, not {request.id}, which one of "
            "them has: make all requests of an engine by one RequestFactory (Engine.add has its own)"
        )


def check_prompt(prompt: Sequence[int], max_new_tokens: int, vocab_size: int, context: int) -> None:
    """Refuse a prompt that a model cannot continue.

    Raises:
        ValueError: the prompt is empty, has a token that the model does not know, or exceeds its context together with
            the new tokens.
    """
    if not prompt:
        raise ValueError("prompt must have at least one token")
    for token in (min(prompt), max(prompt)):
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"prompt has the token {token}, but the model's vocabulary has {vocab_size}, from 0 to {vocab_size - 1}"
            )
    if len(prompt) + max_new_tokens > context:
        raise ValueError(
            f"prompt has {format_count(len(prompt), 'token')} and max_new_tokens is {max_new_tokens}: "
            f"together they must not exceed the context of {context} (the model's, or less if the cache is smaller)"
        )


def check_tokens(sampling: Sampling, vocab_size: int) -> None:
    """Refuse a sampling that names tokens which a model does not know.

    Raises:
        ValueError: it does.
    """
    for name, tokens in sampling.named_tokens.items():
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"{name} has the token {token}, but the model's vocabulary has {vocab_size}, from 0 to "
                    f"{vocab_size - 1}"
                )


def exception_of(error: str) -> FloatingPointError | RuntimeError:
    """Return `Output.error` as an exception: a FloatingPointError where logits are not finite, else a RuntimeError."""
    return FloatingPointError(error) if error.startswith(NOT_FINITE) else RuntimeError(error)
