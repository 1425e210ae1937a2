"""Responses in OpenAI's format: their bodies and errors, and how they are written.

A body has choices, log-probabilities and usage; a stream has it in chunks. A response is written as fast as its client
reads, and ends when the client is gone. A part is written when the system has taken the one before it
(`octile.serve.http.connection`), and a response has ended when the system has taken all of it.

Source: the HTML standard, "Server-sent events".
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, NamedTuple, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from octile.serve.engine.request import FinishReason, Output, TokenLogprobs
from octile.serve.http.message import Delta, MessageParser
from octile.tokenizer import Tokenizer

T = TypeVar("T")
DONE = "data: [DONE]\n\n"
PIECE_BYTES = 2**16
LEVELS = 4  # of an answer: the body, its choices, a choice, its log-probabilities; then come long lists
MEMBERS = 256  # of a long list, written at once
ANY_TEXT = "\0"  # in the place of a chunk's text; the id and the name of the model come before it
NEVER_RETRY = {"x-should-retry": "false"}  # to OpenAI's clients, which retry every status from 500 on


class ApiError(Exception):
    """A request that is not answered.

    Args:
        status: the HTTP status.
        message: what came and what is needed.
        param: the field of the body that is wrong.
        code: the word by which a program knows the error.
        headers: headers of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The object that represents the error, in a response or in an event of a stream."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The response with the error's status."""
        return JSONResponse(self.body(), self.status, self.headers)


def event(value: object, name: str = "") -> str:
    """An event with a JSON value, and a name, if it has one."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {_json_text(value)}\n\n"


async def json_bytes(value: object) -> bytes:
    """Write a JSON value, and let the event loop go on meanwhile: an answer may have a hundred megabytes."""
    content, written = bytearray(), 0
    for piece in json_pieces(value):
        content += piece.encode()
        if len(content) > written + PIECE_BYTES:
            written = len(content)
            await asyncio.sleep(0)
    return bytes(content)


def json_pieces(value: object, levels: int = LEVELS) -> Iterator[str]:
    """Yield a JSON value in pieces: the members of its first levels one by one, those of a list below in slices."""
    if isinstance(value, dict) and levels:
        for i, (key, member) in enumerate(value.items()):
            yield f"{',' if i else '{'}{_json_text(key)}:"
            yield from json_pieces(member, levels - 1)
        yield "}" if value else "{}"
    elif isinstance(value, list) and levels:
        for i, member in enumerate(value):
            yield "," if i else "["
            yield from json_pieces(member, levels - 1)
        yield "]" if value else "[]"
    elif isinstance(value, list):
        for i in range(0, len(value), MEMBERS):
            yield f"{',' if i else '['}{_json_text(value[i : i + MEMBERS])[1:-1]}"
        yield "]" if value else "[]"
    else:
        yield _json_text(value)


# ValueError for NaN and infinities, which are no JSON
_json_text = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


async def while_connected(receive: Callable[[], Awaitable[Any]], work: Coroutine[Any, Any, T]) -> T:
    """Do work, and cancel it when the client closes the connection. The request's body must have been read.

    Raises:
        ApiError: 499, the client has closed the connection; nobody reads the response.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_disconnected(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ApiError(499, "the client has closed the connection")
    finally:
        for task in (working, gone):
            task.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await working  # it cancels its choices


async def _until_disconnected(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class PacedResponse(Response):
    """A response that is written as fast as its client reads.

    Args:
        parts: parts of the body, as they come.
        held: closed when the system has taken all parts, or when the client is gone or its time is over. Whoever has
            read the last part finds it closed: nothing else runs in between.
        headers: headers of the response.
    """

    def __init__(self, parts: AsyncIterator[bytes], held: AsyncExitStack, headers: dict[str, str]):
        super().__init__(headers=headers)
        if "content-length" not in headers:
            del self.headers["content-length"]
        self._parts, self._held = parts, held

    @classmethod
    def of_events(cls, events: AsyncIterator[str], held: AsyncExitStack) -> PacedResponse:
        """Make a response of server-sent events, already written."""
        headers = {"content-type": "text/event-stream", "cache-control": "no-cache", "x-accel-buffering": "no"}
        return cls((text.encode() async for text in events), held, headers)

    @classmethod
    def of_json(cls, content: bytes, held: AsyncExitStack) -> PacedResponse:
        """Make a response of one JSON value, already written."""
        headers = {"content-type": "application/json", "content-length": str(len(content))}
        return cls(_pieces(content), held, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, as ASGI has it."""
        async with self._held:
            with suppress(ApiError):  # the client is gone
                await while_connected(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for part in self._parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": True})  # waits for the system
        await self._held.aclose()
        await send({"type": "http.response.body", "body": b"", "more_body": False})  # begins the next request


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    for i in range(0, len(content), PIECE_BYTES):
        yield content[i : i + PIECE_BYTES]


class WeightsVersions:
    """The versions of the weights that have chosen the tokens of a choice."""

    def __init__(self) -> None:
        self._parts: list[dict[str, int]] = []
        self._n_tokens, self._has_old_latents = 0, False

    def add(self, output: Output) -> None:
        """Record the version of an output."""
        if not self._parts or self._parts[-1]["version"] != output.weights_version:
            self._parts.append({"version": output.weights_version, "first_token": self._n_tokens})
        self._n_tokens += len(output.tokens)
        self._has_old_latents |= output.has_old_latents

    def fields(self) -> dict[str, Any]:
        """The last version; a list if there are several; and a mark if tokens were chosen over older latents."""
        fields: dict[str, Any] = {"weights_version": self._parts[-1]["version"]} if self._parts else {}
        if len(self._parts) > 1:
            fields["weights_versions"] = self._parts
        return fields | ({"old_latents": True} if self._has_old_latents else {})


IMPOSSIBLE = -9999.0  # OpenAI's log-probability of very unlikely tokens: JSON has no -Inf


class Answer(ABC):
    """The response to one request, whole or as the events of a stream.

    Args:
        n_prompt_tokens: tokens of all prompts.

    Attributes:
        request_id: the id of the request, with which the response's own ends.
        n_new_tokens: tokens that were generated so far.
        error_status: the HTTP status of the error that has ended a stream which had begun; None: none has.
    """

    def __init__(self, n_prompt_tokens: int):
        self.request_id = ""
        self.error_status: int | None = None
        self.n_prompt_tokens, self.n_new_tokens = n_prompt_tokens, 0

    @abstractmethod
    def add(self, index: int, output: Output) -> None:
        """Add what is new about a choice to the whole response."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The body of the whole response."""

    @abstractmethod
    def first_events(self) -> str:
        """The events before the first output."""

    @abstractmethod
    def events(self, new: Sequence[tuple[int, Output]]) -> str:
        """The events for what is new about choices, by their numbers."""

    @abstractmethod
    def last_events(self) -> str:
        """The events after the last output."""

    def error_event(self, error: ApiError) -> str:
        """The last event of a stream that has begun and cannot go on."""
        return event(error.body())


class TokenTexts:
    """Shows tokens and their log-probabilities as chats and responses have them.

    Args:
        tokenizer: the tokenizer.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def logprobs(self, entry: TokenLogprobs) -> dict[str, Any]:
        """The log-probabilities of a token and of the most likely ones."""
        return {**self._entry(entry.token, entry.logprob), "top_logprobs": [self._entry(*one) for one in entry.top]}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token])
        return {"token": text, "logprob": _in_json(logprob), "bytes": self._token_bytes(token, text)}

    def _token_bytes(self, token: int, text: str) -> list[int] | None:
        """The bytes of a token, which may be a part of a character; None if they are unknown."""
        table = self._tokenizer.token_bytes
        if table is not None and token < len(table):
            return list(table[token])
        return None if "\ufffd" in text else list(text.encode())


class Shown(NamedTuple):
    """What a response shows besides its choices.

    Attributes:
        scores: log-probabilities of prompts, in whole responses alone.
        tokens: the tokens of prompts and of choices.
        usage: the field usage of chunks, which is null in all but the last.
        counts: the numbers of tokens so far in its place.
        logprobs: log-probabilities of the choices' tokens, whose lists are empty in a whole choice that has none.
    """

    scores: bool = False
    tokens: bool = False
    usage: bool = False
    counts: bool = False
    logprobs: bool = False


class ChoicesAnswer(Answer):
    """A response that has choices, or chunks of them.

    Args:
        model: the name under which the model is served.
        tokenizer: to show tokens.
        prompts: the tokens of each prompt.
        n: choices of each prompt.
        shown: what is shown besides.
    """

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        n: int,
        shown: Shown = Shown(),  # noqa: B008 - it is immutable
    ):
        super().__init__(sum(map(len, prompts)))
        self._tokenizer, self._prompts, self._n = tokenizer, prompts, n
        self._shown = shown
        self._cached_tokens = [0] * len(prompts)
        self._drafted = [(0, 0)] * len(prompts) * n  # of each choice, draft tokens that were verified and accepted
        self._created, self._model = int(time.time()), model
        self._choices = [self.empty(i) for i in range(len(prompts) * n)]
        self._texts: list[list[str]] = [[] for _ in self._choices]  # of the whole response, joined at its end
        self._tokens: list[list[int]] = [[] for _ in self._choices]  # of the whole response, if they are shown
        self._scores: list[tuple[TokenLogprobs, ...]] = [() for _ in self._choices]  # of its prompt
        self._versions = [WeightsVersions() for _ in self._choices]
        # whether chunks without log-probabilities or a finish reason differ in their text alone
        self._has_constant_fields = not (shown.tokens or shown.counts)
        self._constant_fields: dict[tuple[int, int], list[str]] = {}  # before the text, after it: by choice and version

    def add(self, index: int, output: Output) -> None:  # noqa: D102
        self._count(index, output)
        output = self._with_end(output)
        self._texts[index].append(output.text)
        self._scores[index] += output.prompt_logprobs
        if self._shown.tokens:
            self._tokens[index] += output.tokens
        self.extend(self._choices[index], output)
        if output.finish_reason is not None:
            reasons = {"finish_reason": str(output.finish_reason), "stop_reason": output.stopped_by}
            self._choices[index].update(reasons)

    def whole(self) -> dict[str, Any]:  # noqa: D102
        for i, choice in enumerate(self._choices):
            self.set_text(choice, "".join(self._texts[i]))
            choice |= self._versions[i].fields()
            if self._shown.tokens:
                choice["token_ids"] = self._tokens[i]
        body = {**self._head(), "object": self.whole_object, "choices": self._choices, "usage": self.usage()}
        self.add_prompts(body)
        return body

    def first_events(self) -> str:  # noqa: D102
        return "".join(map(event, self.first_chunks()))

    def events(self, new: Sequence[tuple[int, Output]]) -> str:  # noqa: D102
        return "".join(self._event(index, output) for index, output in new)

    def _event(self, index: int, output: Output) -> str:
        """The event for what is new about a choice. Those that differ in their text alone are serialized once."""
        if not self._has_constant_fields or output.logprobs or output.finish_reason is not None:
            chunk = self.chunk(index, output)
            return "" if chunk is None else event(chunk)
        key = index, output.weights_version
        if key not in self._constant_fields:
            chunk = self.chunk(index, output._replace(text=ANY_TEXT, tokens=()))
            self._constant_fields[key] = event(chunk).rsplit(_json_text(ANY_TEXT), 1)
        before, after = self._constant_fields[key]
        self._count(index, output)
        return f"{before}{_json_text(output.text)}{after}" if output.text else ""

    def last_events(self) -> str:  # noqa: D102
        usage = event({**self._as_chunk([]), "usage": self.usage()}) if self._shown.usage else ""
        return usage + DONE

    def chunk(self, index: int, output: Output) -> dict[str, Any] | None:
        """The chunk for what is new about a choice; None if nothing can be shown yet."""
        self._count(index, output)
        output = self._with_end(output)
        shown = {"token_ids": [*output.tokens]} if self._shown.tokens else {}
        if not (output.text or output.logprobs or output.finish_reason or shown.get("token_ids")):
            return None
        reason = None if output.finish_reason is None else str(output.finish_reason)
        reasons = {"finish_reason": reason, "stop_reason": output.stopped_by}
        marks = {"weights_version": output.weights_version} if reason is None else self._versions[index].fields()
        return self._as_chunk([{**self.part(index, output), **reasons, **marks, **shown}])

    def first_chunks(self) -> list[dict[str, Any]]:
        """The chunks before the first output."""
        return []

    def usage(self) -> dict[str, Any]:
        """The numbers of tokens so far."""
        total = self.n_prompt_tokens + self.n_new_tokens
        verified, accepted = map(sum, zip(*self._drafted, strict=True))
        return {
            "prompt_tokens": self.n_prompt_tokens,
            "completion_tokens": self.n_new_tokens,
            "total_tokens": total,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens)},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": verified - accepted,
            },
        }

    def _head(self) -> dict[str, Any]:
        return {"id": f"{self.prefix}-{self.request_id}", "created": self._created, "model": self._model}

    def _as_chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage = {"usage": self.usage() if self._shown.counts else None} if self._shown.usage else {}
        return {**self._head(), "object": self.chunk_object, "choices": choices, **usage}

    def prompt_tokens(self, index: int) -> dict[str, Any]:
        """The field with the tokens of a choice's prompt, if tokens are shown."""
        return {"prompt_token_ids": [*self._prompts[index // self._n]]} if self._shown.tokens else {}

    def prompt_fields(self, index: int) -> dict[str, Any]:
        """The fields of a choice's prompt, as far as they are shown; its first token has no log-probability."""
        fields = self.prompt_tokens(index)
        if self._shown.scores:
            fields["prompt_logprobs"] = [None, *map(self._scored, self._scores[index])]
        return fields

    def _scored(self, entry: TokenLogprobs) -> dict[str, Any]:
        """The log-probabilities at a position of a prompt as vLLM shows them: by token, its own first."""
        ranked = [(entry.token, entry.logprob, entry.rank)]
        ranked += [(token, value, rank) for rank, (token, value) in enumerate(entry.top, 1) if token != entry.token]
        return {
            str(token): {"logprob": _in_json(value), "rank": rank, "decoded_token": self._token_text(token)}
            for token, value, rank in ranked
        }

    def _count(self, index: int, output: Output) -> None:
        self.n_new_tokens += len(output.tokens)
        if index % self._n == 0:  # the other choices of a prompt find what the first one has computed
            self._cached_tokens[index // self._n] = output.cached_tokens
        self._drafted[index] = output.drafted_tokens, output.accepted_tokens
        self._versions[index].add(output)

    def _with_end(self, output: Output) -> Output:
        """An output with the token that has ended its text, if tokens are shown: trainers learn from it, too."""
        if not self._shown.tokens or output.end_token is None:
            return output
        logprobs = output.logprobs if output.end_logprobs is None else (*output.logprobs, output.end_logprobs)
        return output._replace(tokens=(*output.tokens, output.end_token), logprobs=logprobs)

    def _token_text(self, token: int) -> str:
        return self._tokenizer.decode([token])

    @abstractmethod
    def empty(self, index: int) -> dict[str, Any]:
        """A choice of the whole response, without text."""

    @abstractmethod
    def extend(self, choice: dict[str, Any], output: Output) -> None:
        """Add log-probabilities to a choice of the whole response, without a copy of those that it has."""

    @abstractmethod
    def set_text(self, choice: dict[str, Any], text: str) -> None:
        """Set the text of a choice of the whole response."""

    @abstractmethod
    def part(self, index: int, output: Output) -> dict[str, Any]:
        """A choice of a chunk."""

    @abstractmethod
    def add_prompts(self, body: dict[str, Any]) -> None:
        """Add the fields of prompts to the body of the whole response, where vLLM has them."""


class Echo(NamedTuple):
    """What a completion repeats of its prompts.

    Attributes:
        texts: the text of each prompt.
        begins: how many tokens before its text each has.
        logprobs: how many most likely tokens the log-probabilities of the prompts' tokens have; None: they have none.
        is_all: whether the prompts are all that is shown, without what was generated.
    """

    texts: Sequence[str]
    begins: Sequence[int]
    logprobs: int | None
    is_all: bool


class Completion(ChoicesAnswer):
    """The response of /v1/completions.

    Args:
        model, tokenizer, prompts, n, shown: arguments of `ChoicesAnswer`.
        echo: what is repeated of the prompts; None: nothing.
    """

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        n: int,
        shown: Shown = Shown(),  # noqa: B008 - it is immutable
        echo: Echo | None = None,
    ):
        super().__init__(model, tokenizer, prompts, n, shown)
        self._offsets = [0] * len(self._choices)
        self._echo, self._to_echo = echo, {*range(len(self._choices))} if echo is not None else set[int]()
        self._has_constant_fields &= echo is None

    def add(self, index: int, output: Output) -> None:  # noqa: D102
        super().add(index, self._with_prompt(index, output))

    def chunk(self, index: int, output: Output) -> dict[str, Any] | None:  # noqa: D102
        return super().chunk(index, self._with_prompt(index, output))

    def _with_prompt(self, index: int, output: Output) -> Output:
        """A choice's output with what is repeated of its prompt, which comes before the first one.

        With log-probabilities of the prompt a token that has ended the text has them, too: OpenAI's clients that
        score prompts, such as lm-eval, leave out the last entry.
        """
        echo, number = self._echo, index // self._n
        if echo is None:
            return output
        if echo.is_all:
            reason = output.finish_reason and FinishReason.LENGTH
            output = Output(
                output.request_id,
                finish_reason=reason,
                weights_version=output.weights_version,
                has_old_latents=output.has_old_latents,
                prompt_logprobs=output.prompt_logprobs,
                cached_tokens=output.cached_tokens,
            )
        if output.end_logprobs is not None:
            output = output._replace(logprobs=(*output.logprobs, output.end_logprobs), end_logprobs=None)
        if index not in self._to_echo:
            return output
        self._to_echo.remove(index)
        scored: tuple[TokenLogprobs, ...] = ()
        if echo.logprobs is not None:
            first = TokenLogprobs(self._prompts[number][0], math.nan)  # nothing is before it
            scored = tuple(entry._replace(top=entry.top[: echo.logprobs]) for entry in (first, *output.prompt_logprobs))
        logprobs = (*scored[echo.begins[number] :], *output.logprobs)
        return output._replace(text=echo.texts[number] + output.text, logprobs=logprobs)

    def empty(self, index: int) -> dict[str, Any]:  # noqa: D102
        return {"index": index, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}

    def extend(self, choice: dict[str, Any], output: Output) -> None:  # noqa: D102
        if output.logprobs or self._shown.logprobs:
            new = self._logprobs(choice["index"], output.logprobs)
            if choice["logprobs"] is None:
                choice["logprobs"] = new
            else:
                for key, values in new.items():
                    choice["logprobs"][key] += values

    def set_text(self, choice: dict[str, Any], text: str) -> None:  # noqa: D102
        choice["text"] = text

    def part(self, index: int, output: Output) -> dict[str, Any]:  # noqa: D102
        logprobs = self._logprobs(index, output.logprobs) if output.logprobs else None
        return {"index": index, "text": output.text, "logprobs": logprobs}

    def first_chunks(self) -> list[dict[str, Any]]:  # noqa: D102
        if not self._shown.tokens:
            return []
        return [self._as_chunk([{**self.empty(i), **self.prompt_tokens(i)} for i in range(len(self._choices))])]

    def add_prompts(self, body: dict[str, Any]) -> None:  # noqa: D102
        for i, choice in enumerate(body["choices"]):
            choice |= self.prompt_fields(i)

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        texts = [self._token_text(entry.token) for entry in logprobs]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [None if math.isnan(entry.logprob) else _in_json(entry.logprob) for entry in logprobs],
            "top_logprobs": [None if math.isnan(entry.logprob) else self._top(entry) for entry in logprobs],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """Text: log-probability, the most likely first, and of the token itself.

        Of tokens that are the same text, such as halves of characters, the most likely counts.
        """
        top: dict[str, float] = {}
        for token, value in (*entry.top, (entry.token, entry.logprob)):
            top.setdefault(self._token_text(token), _in_json(value))
        return top


class ChatCompletion(ChoicesAnswer):
    """The response of /v1/chat/completions.

    Args:
        model, tokenizer, prompts, n, shown: arguments of `ChoicesAnswer`.
        make_parser: makes the parser of a choice's text; None: the text is the message's content.
    """

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        prompts: Sequence[Sequence[int]],
        n: int,
        shown: Shown = Shown(),  # noqa: B008 - it is immutable
        make_parser: Callable[[], MessageParser] | None = None,
    ):
        super().__init__(model, tokenizer, prompts, n, shown)
        self._token_texts = TokenTexts(tokenizer)
        self._parsers = [make_parser() for _ in self._choices] if make_parser is not None else None
        self._has_constant_fields &= make_parser is None

    def empty(self, index: int) -> dict[str, Any]:  # noqa: D102
        message = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": None, "stop_reason": None}

    def extend(self, choice: dict[str, Any], output: Output) -> None:  # noqa: D102
        if output.logprobs or self._shown.logprobs:
            if choice["logprobs"] is None:
                choice["logprobs"] = {"content": [], "refusal": None}
            choice["logprobs"]["content"] += self._content(output.logprobs)

    def set_text(self, choice: dict[str, Any], text: str) -> None:  # noqa: D102
        if self._parsers is None:
            choice["message"]["content"] = text
        else:
            choice["message"] |= self._parsers[choice["index"]].whole(text)
            self._set_reason(choice)

    def _set_reason(self, choice: dict[str, Any]) -> None:
        """Give a choice that has called tools, and then stopped, OpenAI's reason."""
        if self._parsers is not None and choice["finish_reason"] == "stop" and self._parsers[choice["index"]].has_calls:
            choice["finish_reason"] = "tool_calls"

    def chunk(self, index: int, output: Output) -> dict[str, Any] | None:  # noqa: D102
        chunk = super().chunk(index, output)
        if chunk is None:
            return None
        (choice,) = chunk["choices"]
        self._set_reason(choice)
        if not (choice["delta"] or choice["logprobs"] or choice["finish_reason"] or choice.get("token_ids")):
            return None  # the parser holds the text back
        return chunk

    def first_chunks(self) -> list[dict[str, Any]]:  # noqa: D102
        delta = {"role": "assistant", "content": "", "refusal": None}
        parts = [{"index": i, "delta": delta, "logprobs": None} for i in range(len(self._choices))]
        first, *others = (self._as_chunk([{**part, "finish_reason": None}]) for part in parts)
        return [{**first, **self.prompt_tokens(0)}, *others]

    def add_prompts(self, body: dict[str, Any]) -> None:  # noqa: D102
        body |= self.prompt_fields(0)

    def part(self, index: int, output: Output) -> dict[str, Any]:  # noqa: D102
        delta = self._delta(index, output)
        logprobs = {"content": self._content(output.logprobs), "refusal": None} if output.logprobs else None
        return {"index": index, "delta": delta, "logprobs": logprobs}

    def _delta(self, index: int, output: Output) -> dict[str, Any]:
        """What is new about a choice's message."""
        if self._parsers is None:
            return {"content": output.text} if output.text else {}
        parser = self._parsers[index]
        return Delta.joined(parser.push(output.text), parser.end() if output.finish_reason else Delta()).fields()

    def _content(self, logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        return [self._token_texts.logprobs(entry) for entry in logprobs]


def _in_json(logprob: float) -> float:
    """A log-probability as JSON has it; that of a masked token, whose logit is -Inf, is IMPOSSIBLE."""
    return max(logprob, IMPOSSIBLE)
