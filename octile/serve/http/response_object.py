"""The answer of POST /v1/responses: a response whose output is items, whole or as events.

    a thought        an item of type reasoning
    text             an item of type message
    a call           an item of type function_call

Source: OpenAI's API reference, "The response object" and "Streaming events".
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from octile.serve.engine.request import FinishReason, Output, Request
from octile.serve.http.message import Delta, MessageParser
from octile.serve.http.response_body import ResponseBody
from octile.serve.http.responses import Answer, ApiError, TokenTexts, WeightsVersions, event
from octile.serve.http.tools.parser import ToolCall
from octile.tokenizer import Tokenizer

Event = dict[str, Any]


class ResponseObject(Answer):
    """A response.

    Args:
        body: the request.
        tokenizer: to show tokens, and to count those of a thought.
        request: the engine's request.
        parser: divides the text into a thought, content and calls; None: it is content.
    """

    def __init__(self, body: ResponseBody, tokenizer: Tokenizer, request: Request, parser: MessageParser | None):
        super().__init__(len(request.prompt))
        self._body, self._tokenizer, self._texts = body, tokenizer, TokenTexts(tokenizer)
        self._sampling = request.sampling
        self._cached_tokens = 0
        self._parser = parser
        self._items, self._versions = _Items(), WeightsVersions()
        self._finish_reason: FinishReason | None = None
        self._error: dict[str, str] | None = None
        self._created = int(time.time())
        self._completed: int | None = None
        self._n_events = 0

    def add(self, index: int, output: Output) -> None:  # noqa: D102
        for _ in self._take(output):
            pass

    def whole(self) -> dict[str, Any]:  # noqa: D102
        return self._response(self._status)

    def first_events(self) -> str:  # noqa: D102
        states = ("response.created", "response.in_progress")
        return self._written({"type": name, "response": self._response("in_progress")} for name in states)

    def events(self, new: Sequence[tuple[int, Output]]) -> str:  # noqa: D102
        return "".join(self._written(self._take(output)) for _, output in new)

    def last_events(self) -> str:  # noqa: D102
        return self._written([{"type": f"response.{self._status}", "response": self._response(self._status)}])

    def error_event(self, error: ApiError) -> str:
        """The last events of a response that has failed: its last item ends, and keeps its text."""
        self._error = {"code": "server_error", "message": error.message}
        last = list(self._items.end("incomplete")) if self._items.items else []
        return self._written([*last, {"type": "response.failed", "response": self._response("failed")}])

    def _written(self, events: Iterable[Event]) -> str:
        texts = []
        for one in events:
            texts.append(event({**one, "sequence_number": self._n_events}, one["type"]))
            self._n_events += 1
        return "".join(texts)

    def _take(self, output: Output) -> Iterator[Event]:
        """Take what is new, and yield the events for it."""
        self.n_new_tokens += len(output.tokens)
        self._cached_tokens = output.cached_tokens
        self._versions.add(output)
        logprobs = [self._texts.logprobs(entry) for entry in output.logprobs]
        has_ended = output.finish_reason is not None
        if self._parser is None:
            delta = Delta("", output.text)
        else:
            last = self._parser.end if has_ended else Delta
            delta = Delta.joined(self._parser.push(output.text), last())
        yield from self._items.extend(delta, logprobs)
        if has_ended:
            self._finish_reason, self._completed = output.finish_reason, int(time.time())
            yield from self._items.end(self._status)

    @property
    def _status(self) -> str:
        return "incomplete" if self._finish_reason is FinishReason.LENGTH else "completed"

    def _response(self, status: str) -> dict[str, Any]:
        """The response as it is now, with the settings that it was made with."""
        body = self._body
        form = {"type": "text"} if body.text is None or body.text.format is None else _plain(body.text.format)
        choice = "auto" if body.tool_choice is None else body.tool_choice
        return {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": self._created,
            "completed_at": self._completed if status == "completed" else None,
            "status": status,
            "background": False,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": [] if status == "in_progress" else self._items.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": self._sampling.temperature,
            "text": {"format": form, "verbosity": "medium"},
            "tool_choice": choice if isinstance(choice, str) else _plain(choice),
            "tools": [{"strict": False, "parameters": None, **_plain(tool)} for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self._sampling.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else self._usage(),
            "user": body.user,
            **self._versions.fields(),
        }

    def _usage(self) -> dict[str, Any]:
        thought = self._items.thought
        n_thought = len(self._tokenizer.encode(thought)) if thought else 0  # which may divide it in other tokens
        return {
            "input_tokens": self.n_prompt_tokens,
            "input_tokens_details": {"cached_tokens": self._cached_tokens},
            "output_tokens": self.n_new_tokens,
            "output_tokens_details": {"reasoning_tokens": min(n_thought, self.n_new_tokens)},
            "total_tokens": self.n_prompt_tokens + self.n_new_tokens,
        }


def _plain(body: Any) -> dict[str, Any]:
    return body.model_dump(by_alias=True, exclude_none=True)


class _Items:
    """The items of a response, and the events of those that are new.

    Blanks between a thought or a call and the text that follows are a part of this text; without text they are nothing.

    Attributes:
        items: the items so far.
        thought: the text of the thought.
    """

    def __init__(self) -> None:
        self.items = list[dict[str, Any]]()
        self.thought = ""
        self._part: dict[str, Any] | None = None  # the part of the last item that goes on
        self._blanks = ""

    def extend(self, delta: Delta, logprobs: Sequence[dict[str, Any]]) -> Iterator[Event]:
        """Add what is new about the message."""
        if delta.reasoning:
            yield from self._write("reasoning", delta.reasoning, ())
        text, self._blanks = self._blanks + delta.content, ""
        goes_on = self._part is not None and self.items[-1]["type"] == "message"
        if text.strip() or logprobs or (text and goes_on):
            yield from self._write("message", text, logprobs)
        else:
            self._blanks = text
        for call in delta.calls:
            self._blanks = ""
            yield from self._call(call)

    def end(self, status: str) -> Iterator[Event]:
        """End the last item; a response without any item has an empty text."""
        if not self.items:
            yield from self._write("message", self._blanks, ())
        yield from self._close(status)

    def _write(self, kind: str, text: str, logprobs: Sequence[dict[str, Any]]) -> Iterator[Event]:
        """Write a thought, or text, into the last item, or into a new one."""
        if self._part is None or self.items[-1]["type"] != kind:
            yield from self._close("completed")
            yield from self._open(kind)
        assert self._part is not None
        if not text and not logprobs:
            return
        self._part["text"] += text
        more: Event = {"delta": text}
        if kind == "message":
            self._part["logprobs"] += logprobs
            more["logprobs"] = logprobs
        else:
            self.thought += text
        yield {"type": f"response.{self._part['type']}.delta", **self._place(), "content_index": 0, **more}

    def _open(self, kind: str) -> Iterator[Event]:
        if kind == "message":
            item: Event = {"role": "assistant"}
            self._part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"summary": []}
            self._part = {"type": "reasoning_text", "text": ""}
        prefix = {"message": "msg", "reasoning": "rs"}[kind]
        self.items.append({"id": _new_id(prefix), "type": kind, "status": "in_progress", **item, "content": []})
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": {**self.items[-1]}}
        part = {**self._part}
        yield {"type": "response.content_part.added", **self._place(), "content_index": 0, "part": part}

    def _close(self, status: str) -> Iterator[Event]:
        """End the last item, if it goes on."""
        if self._part is None:
            return
        item, part = self.items[-1], self._part
        self._part = None
        item |= {"status": status, "content": [part]}
        given: Event = {key: part[key] for key in ("text", "logprobs") if key in part}
        yield {"type": f"response.{part['type']}.done", **self._place(), "content_index": 0, **given}
        yield {"type": "response.content_part.done", **self._place(), "content_index": 0, "part": part}
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _call(self, call: ToolCall) -> Iterator[Event]:
        """Write a call, which is complete."""
        yield from self._close("completed")
        item = {
            "id": _new_id("fc"),
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }
        self.items.append(item)
        begun = {**item, "status": "in_progress", "arguments": ""}
        yield {"type": "response.output_item.added", "output_index": len(self.items) - 1, "item": begun}
        event_type = "response.function_call_arguments"
        yield {"type": f"{event_type}.delta", **self._place(), "delta": call.arguments}
        yield {"type": f"{event_type}.done", **self._place(), "name": call.name, "arguments": call.arguments}
        yield {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
