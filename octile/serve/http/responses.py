"""Responses in OpenAI's format: their bodies and errors, and how they are written.

A body has choices, log-probabilities and usage; a stream has it in chunks. A response is written as fast as its client
reads, and ends when the client is gone. A part is written when the system has taken the one before it
(`octile.serve.http.connection`), and a response has ended when the system has taken all of it.

Source: the HTML standard, "Server-sent events".
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from octile.serve.engine.request import Output, TokenLogprobs
from octile.tokenizer import Tokenizer

T = TypeVar("T")
DONE = "data: [DONE]\n\n"
PIECE_BYTES = 2**16
LEVELS = 4  # of an answer: the body, its choices, a choice, its log-probabilities; then come long lists
MEMBERS = 256  # of a long list, written at once
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


def event(value: object) -> str:
    """An event with a JSON value."""
    return f"data: {_json_text(value)}\n\n"


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


def _json_text(value: object) -> str:
    """Write a JSON value; ValueError if it has NaN or an infinity, which are no JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


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
        held: closed when all of it is written, or when the client is gone or its time is over.
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
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _pieces(content: bytes) -> AsyncIterator[bytes]:
    for i in range(0, len(content), PIECE_BYTES):
        yield content[i : i + PIECE_BYTES]


IMPOSSIBLE = -9999.0  # OpenAI's log-probability of very unlikely tokens: JSON has no -Inf


class Answer(ABC):
    """The response to one request, whole or as the chunks of a stream.

    Args:
        model: the name under which the model is served.
        tokenizer: to show tokens.
        prompts: the tokens of each prompt.
        n: choices of each prompt.
    """

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model: str, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], n: int):
        self._tokenizer = tokenizer
        self._prompt_tokens, self._new_tokens = sum(map(len, prompts)), 0
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._choices = [self.empty(i) for i in range(len(prompts) * n)]
        self._texts: list[list[str]] = [[] for _ in self._choices]  # of the whole response, joined at its end

    def add(self, index: int, output: Output) -> None:
        """Add what is new about a choice to the whole response."""
        self._count(output)
        self._texts[index].append(output.text)
        self.extend(self._choices[index], output)
        if output.finish_reason is not None:
            self._choices[index]["finish_reason"] = str(output.finish_reason)

    def whole(self) -> dict[str, Any]:
        """The body of the whole response."""
        for choice, texts in zip(self._choices, self._texts, strict=True):
            self.set_text(choice, "".join(texts))
        return {**self._head, "object": self.whole_object, "choices": self._choices, "usage": self.usage()}

    def chunk(self, index: int, output: Output) -> dict[str, Any] | None:
        """The chunk for what is new about a choice; None if nothing can be shown yet."""
        self._count(output)
        if not (output.text or output.logprobs or output.finish_reason):
            return None
        reason = None if output.finish_reason is None else str(output.finish_reason)
        return self._as_chunk([{**self.part(index, output), "finish_reason": reason}])

    def first_chunks(self) -> list[dict[str, Any]]:
        """The chunks before the first output."""
        return []

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream that is to have the usage."""
        return {**self._as_chunk([]), "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """The numbers of tokens so far."""
        total = self._prompt_tokens + self._new_tokens
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._new_tokens,
            "total_tokens": total,
        }

    def _as_chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head, "object": self.chunk_object, "choices": choices}

    def _count(self, output: Output) -> None:
        self._new_tokens += len(output.tokens)

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


class Completion(Answer):
    """The response of /v1/completions."""

    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], n: int):
        super().__init__(model, tokenizer, prompts, n)
        self._offsets = [0] * len(self._choices)

    def empty(self, index: int) -> dict[str, Any]:  # noqa: D102
        return {"index": index, "text": "", "logprobs": None, "finish_reason": None}

    def extend(self, choice: dict[str, Any], output: Output) -> None:  # noqa: D102
        if output.logprobs:
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

    def _logprobs(self, index: int, logprobs: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        texts = [self._token_text(entry.token) for entry in logprobs]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_in_json(entry.logprob) for entry in logprobs],
            "top_logprobs": [self._top(entry) for entry in logprobs],
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


class ChatCompletion(Answer):
    """The response of /v1/chat/completions."""

    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def empty(self, index: int) -> dict[str, Any]:  # noqa: D102
        message = {"role": "assistant", "content": "", "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": None}

    def extend(self, choice: dict[str, Any], output: Output) -> None:  # noqa: D102
        if output.logprobs:
            if choice["logprobs"] is None:
                choice["logprobs"] = {"content": [], "refusal": None}
            choice["logprobs"]["content"] += self._content(output.logprobs)

    def set_text(self, choice: dict[str, Any], text: str) -> None:  # noqa: D102
        choice["message"]["content"] = text

    def first_chunks(self) -> list[dict[str, Any]]:  # noqa: D102
        delta = {"role": "assistant", "content": "", "refusal": None}
        parts = [{"index": i, "delta": delta, "logprobs": None} for i in range(len(self._choices))]
        return [self._as_chunk([{**part, "finish_reason": None}]) for part in parts]

    def part(self, index: int, output: Output) -> dict[str, Any]:  # noqa: D102
        delta = {"content": output.text} if output.text else {}
        logprobs = {"content": self._content(output.logprobs), "refusal": None} if output.logprobs else None
        return {"index": index, "delta": delta, "logprobs": logprobs}

    def _content(self, logprobs: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        return [
            {**self._entry(entry.token, entry.logprob), "top_logprobs": [self._entry(*one) for one in entry.top]}
            for entry in logprobs
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._token_text(token)
        return {"token": text, "logprob": _in_json(logprob), "bytes": self._token_bytes(token, text)}

    def _token_bytes(self, token: int, text: str) -> list[int] | None:
        """The bytes of a token, which may be a part of a character; None if they are unknown."""
        table = self._tokenizer.token_bytes
        if table is not None and token < len(table):
            return list(table[token])
        return None if "\ufffd" in text else list(text.encode())


def _in_json(logprob: float) -> float:
    """A log-probability as JSON has it; that of a masked token, whose logit is -Inf, is IMPOSSIBLE."""
    return max(logprob, IMPOSSIBLE)
